#!/usr/bin/env bash
# Run a command on every node of a job, next to the job, or on any hosts.
#
#   DIR/on_nodes.sh JOB COMMAND [arguments]              by srun, once on each node, without its GPUs
#   DIR/on_nodes.sh 'node-[1-4]' COMMAND [arguments]     by pdsh, or else ssh, one host after the other
#
# Each line of the output starts with its node. Show your processes left after a crash, then end them:
#
#   DIR/on_nodes.sh 'node-[1-4]' pgrep -u "$USER" -af torchtitan_like.train
#   DIR/on_nodes.sh 'node-[1-4]' pkill -u "$USER" -f torchtitan_like.train
#
# DRY_RUN=1 prints the commands.
set -uo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "$0"; exit ;;
esac
where=${1:?a job or a list of hosts} here=$(CDPATH='' cd "$(dirname "$0")" && pwd)
shift
[ $# -gt 0 ] || { echo "Which command?" >&2; exit 78; }
do_() {
  [ -z "${DRY_RUN:-}" ] || { printf '%q ' "$@"; echo; return 0; }
  "$@"
}

if [[ "$where" =~ ^[0-9_]+$ ]]; then
  nodes=$(squeue --noheader --jobs "$where" --states=RUNNING --format %D)
  [ -n "$nodes" ] || { echo "Job $where does not run" >&2; exit 1; }
  do_ srun --jobid="$where" --overlap --gres=none --nodes="${nodes// /}" --ntasks="${nodes// /}" --ntasks-per-node=1 \
    --label "$@"
elif command -v pdsh >/dev/null; then
  do_ pdsh -w "$("$here/hosts.sh" "$where" | paste -sd,)" "$(printf '%q ' "$@")"
else
  code=0
  for host in $("$here/hosts.sh" "$where"); do
    do_ ssh -n "$host" "$(printf '%q ' "$@")" 2>&1 | sed "s/^/$host: /"
    [ "${PIPESTATUS[0]}" -eq 0 ] || code=1
  done
  exit "$code"
fi
