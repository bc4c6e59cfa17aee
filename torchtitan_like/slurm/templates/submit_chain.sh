#!/usr/bin/env bash
# Train in a chain of jobs: each starts when the previous job has ended, in whatever way, and continues the run.
#
#   DIR/submit_chain.sh COUNT [--after JOB] [sbatch's options] DIR/train.slurm [its arguments]
#
#   COUNT         jobs to submit
#   --after JOB   the first job waits for this one, which is queued or running
#   DRY_RUN=1     print the commands instead of submitting
#
# For clusters that forbid requeueing, and to add time to a running job. No job of a chain queues itself again. Jobs after
# the last step, or with the kill switch present, end in seconds. Prints the ids of the jobs, one per line.
set -euo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "$0"; exit ;;
esac
if ! [[ "${1:-}" =~ ^[1-9][0-9]*$ ]] || [ $# -lt 2 ]; then
  echo "Usage: $0 COUNT [--after JOB] [sbatch's options] SCRIPT [arguments]; COUNT is a positive integer." >&2
  exit 78
fi
count=$1 before=
shift
if [ "$1" = --after ]; then
  before=${2:?--after needs the id of a job}
  shift 2
fi
export REQUEUE=0
for ((number = 1; number <= count; number++)); do
  command=(sbatch --parsable --no-requeue ${before:+--dependency="afterany:$before"} "$@")
  if [ -n "${DRY_RUN:-}" ]; then
    printf 'REQUEUE=0'
    printf ' %q' "${command[@]}"
    printf '\n'
    before="<job $number>"
  else
    before=$("${command[@]}")
    before=${before%%;*} # on a federation: JOB;CLUSTER
    echo "$before"
  fi
done
