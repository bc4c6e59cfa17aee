#!/usr/bin/env bash
# Dump the Python stacks of every rank of a Slurm job: runs pyspy_all.sh on each of its nodes, next to the run.
#
#   DIR/pyspy_srun.sh JOB [FOLDER] [py-spy's options]
#
#   FOLDER      for the stacks, one file per rank (default: stacks-JOB); all nodes must see it
#   DRY_RUN=1   print the command
set -euo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "$0"; exit ;;
esac
job=${1:?the id of a running job}
shift
folder=stacks-$job
if [ $# -gt 0 ] && [[ "$1" != -* ]]; then
  folder=$1
  shift
fi
nodes=$(squeue --noheader --jobs "$job" --states=RUNNING --format %D)
[ -n "$nodes" ] || { echo "Job $job does not run" >&2; exit 1; }
# --overlap: on the cores of the run. --gres=none: without its GPUs.
command=(srun --jobid="$job" --overlap --gres=none --nodes="${nodes// /}" --ntasks="${nodes// /}" --ntasks-per-node=1 --label
  "$(CDPATH='' cd "$(dirname "$0")" && pwd)/pyspy_all.sh" "$folder" "$@")
if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi
exec "${command[@]}"
