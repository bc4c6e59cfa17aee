#!/usr/bin/env bash
# train.slurm starts this script once per node. It runs `titan train` with the same arguments and passes signals on.
#
#   srun --ntasks-per-node=1 DIR/node.sh [--section.key value ...]
#
# Slurm signals every process of a step. A USR1 would kill torchrun and its ranks. So all processes below this script ignore
# USR1, and this script sends SIGTERM to `titan train` instead.
# Returns 0 for every end that the ranks have agreed on, because exit.json has its code; else the code of `titan train`.
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
trap : TERM INT HUP # Slurm sends them to titan train too
(
  trap '' USR1
  NGPU=${NGPU:-auto} exec titan train "$@" # auto: all GPUs of the node
) &
run=$!
[ -z "$asked" ] || stop # the signal came while the run was starting
while kill -0 "$run" 2>/dev/null; do
  wait "$run" || true
done
code=0
wait "$run" || code=$?
case $code in
  65 | 70 | 74 | 75 | 130) exit 0 ;;
esac
exit "$code"
