#!/usr/bin/env bash
# Expand a Slurm host list: one host per line, or a hostfile for mpirun and DeepSpeed.
#
#   DIR/hosts.sh 'node-[42,49-51]'         node-42, node-49, node-50, node-51
#   DIR/hosts.sh                           the hosts of this job ($SLURM_JOB_NODELIST)
#   SLOTS=8 DIR/hosts.sh --hostfile [LIST] node-42 slots=8 ...   (default of SLOTS: GPUs of the job, else 8)
#
# Works without Slurm too.
set -euo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "$0"; exit ;;
esac
slots=
if [ "${1:-}" = --hostfile ]; then
  slots=" slots=${SLOTS:-${SLURM_GPUS_ON_NODE:-8}}"
  shift
fi
list=${1:-${SLURM_JOB_NODELIST:?a host list, or a job}}

expand() { # one word of the list: its first bracket opened, then the rest of it
  local word=$1 head numbers tail part first last
  if [[ "$word" != *\[*\]* ]]; then
    echo "$word"
    return
  fi
  head=${word%%\[*} numbers=${word#*\[} tail=
  tail=${numbers#*\]} numbers=${numbers%%\]*}
  for part in ${numbers//,/ }; do
    first=${part%-*} last=${part#*-}
    for number in $(seq -f "%0${#first}.0f" "$((10#$first))" "$((10#$last))"); do
      expand "$head$number$tail"
    done
  done
}

if ! hosts=$(scontrol show hostnames "$list" 2>/dev/null); then
  # Commas within brackets belong to their word.
  words=$(awk '{ n = 0; for (i = 1; i <= length($0); i++) { c = substr($0, i, 1); n += (c == "[") - (c == "]")
    printf "%s", (c == "," && n == 0) ? "\n" : c } print "" }' <<<"$list")
  hosts=$(while read -r word; do expand "$word"; done <<<"$words")
fi
while read -r host; do
  echo "$host$slots"
done <<<"$hosts"
