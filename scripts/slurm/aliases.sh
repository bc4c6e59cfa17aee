# shellcheck shell=bash
# Short words for what is typed all day with Slurm; for ~/.bashrc:
#
#   source /path/to/scripts/slurm/aliases.sh
#
#   myjobs            my jobs: state, time, time left, nodes, why they wait
#   groupjobs [NAME]  those of an account (default: mine)
#   pending           what waits, the next to start first, with the start that Slurm expects, and why
#   idle_nodes        idle nodes of each partition
#   bad_nodes         nodes that are down or drained, since when and why
#   jobinfo JOB       all that Slurm knows of a job, its nodes one by one; after its end, what it used

myjobs() { squeue --me --format='%.18i %.9P %.30j %.8T %.12M %.12L %.5D %R' "$@"; }
groupjobs() {
  squeue --account="${1:-$(sacctmgr --noheader --parsable2 show user "$USER" format=DefaultAccount)}" \
    --sort=T,u --format='%.18i %.10u %.9P %.30j %.8T %.12M %.12L %.5D %R'
}
pending() { squeue --states=PENDING --sort=S,-p --format='%.18i %.10u %.9P %.30j %.5D %.20S %.10Q %r' "$@"; }
idle_nodes() { sinfo --states=idle --format='%.15P %.6D %.11T %N' "$@"; }
bad_nodes() { sinfo --list-reasons --Node --format='%.20N %.12T %.20H %E' "$@"; }
jobinfo() {
  scontrol show --details job "${1:?a job}" 2>/dev/null ||
    sacct --jobs="$1" --format=JobID,JobName,State,ExitCode,Elapsed,NNodes,MaxRSS,NodeList%40
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then # not sourced
  sed -n '3,/^$/{/^# \{0,1\}/s///p}' "$0"
fi
