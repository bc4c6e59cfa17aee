#!/usr/bin/env bash
# Resume nodes that Slurm has drained because a job could not be killed, if no user's process is left on them.
#
#   DIR/undrain_good_nodes.sh          print which nodes these are
#   DIR/undrain_good_nodes.sh --do     resume them
#
# "Kill task failed" means that a process outlived its job, often on a slow file system; the node itself is healthy. This
# script inspects only nodes with that reason, by ssh. A node stays drained if it does not answer, or if a process of a user
# (uid 1000 and above) is left; then its processes are shown. Needs the right to change nodes and to see all processes.
#
# Returns 0 if no node stays drained, else 1.
set -uo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "$0"; exit ;;
  --do | '') ;;
  *) echo "Usage: $0 [--do]" >&2; exit 78 ;;
esac
# The ssh connection itself is a few processes of this user.
# shellcheck disable=SC2016 # to be expanded on the node
look='ps -eo uid=,user=,pid=,comm= | awk -v me="$(id -un)" "
  \$1 >= 1000 && \$1 != 65534 && !(\$2 == me && \$4 ~ /^(sshd|sshd-session|systemd|.sd-pam.|ps|awk|sh|bash)\$/)"'

code=0
nodes=$(sinfo --noheader --Node --states=drain --format='%N|%E' | sort -u | sed -n 's/|Kill task failed *$//p') || exit 1
for node in $nodes; do
  if ! left=$(ssh -n -o BatchMode=yes -o ConnectTimeout=10 "$node" "$look"); then
    echo "$node does not answer: it stays drained" >&2
    code=1
  elif [ -n "$left" ]; then
    printf '%s stays drained, as there are still:\n%s\n' "$node" "$left" >&2
    code=1
  elif [ "${1:-}" = --do ]; then
    scontrol update NodeName="$node" State=RESUME && echo "$node is resumed" || code=1
  else
    echo "scontrol update NodeName=$node State=RESUME"
  fi
done
exit "$code"
