#!/usr/bin/env bash
# What train.slurm starts once on each node: run_train.sh with the same arguments, so that signals reach it well.
#
#   srun --ntasks-per-node=1 scripts/slurm/node.sh [--section.key value ...]
#
# Slurm signals every process of a step. A USR1 would kill torchrun, and its ranks with it. So all processes below this
# script ignore USR1, and only run_train.sh is signaled.
# Returns 0 for every end that the ranks have agreed on, as exit.json tells which; else run_train.sh's code.
set -uo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "$0"; exit ;;
esac
run=
# shellcheck disable=SC2329 # called by the trap
stop() {
  [ -z "$run" ] || kill -s TERM "$run" 2>/dev/null || true
}
asked=
trap 'asked=1; stop' USR1
trap : TERM INT HUP # Slurm's own: run_train.sh has them too
(
  trap '' USR1
  exec "$(dirname "$0")/../../run_train.sh" "$@"
) &
run=$!
[ -z "$asked" ] || stop # it came while the run was being started
while kill -0 "$run" 2>/dev/null; do
  wait "$run" || true
done
code=0
wait "$run" || code=$?
case $code in
  65 | 70 | 74 | 75 | 130) exit 0 ;;
esac
exit "$code"
