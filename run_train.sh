#!/usr/bin/env bash
# Train. With nothing set: the debug model, on all GPUs or else on 2 CPU ranks.
#
#   NGPU=8 LOG_RANK=0,1 CONFIG_FILE=train_configs/llama3_8b.toml ./run_train.sh --section.key value ...
#
#   NGPU         ranks on this machine (default: the number of GPUs; 2 without any)
#   LOG_RANK     local ranks whose output is shown, as 0,1 (default: 0)
#   LOG_PREFIX   what stands before each line: rank, host (name and rank) or digits (those of the host's name, and rank).
#                Default: rank on one machine, host on several
#   CONFIG_FILE  default: train_configs/debug_model.toml, run in this repository's folder
#   PYTHON       the Python to use if it has what is needed, or else to make .venv from (default: python3)
#   NNODES, MASTER_ADDR, MASTER_PORT, RDZV_ID, NODE_RANK
#                several machines: set the first three to the same values on all; NODE_RANK fixes the order of the machines.
#                NNODES=2:4 starts with 2 to 4 of them, and again with as many as there are when one is lost or comes back
#   MAX_RESTARTS how often torchrun starts all ranks again, from the newest checkpoint, when one has died (default: 0)
#   NUMA_BINDING node, socket, exclusive or core-complex: keep each rank on the cores near its GPU (torchrun's --numa-binding)
#   NCCL_DEBUG_TO
#                folder for what NCCL tells, a file for each process (NCCL_DEBUG, default INFO; NCCL_DEBUG_SUBSYS)
#   TRACE_TO     folder for every line that each rank executes (slow; scripts/trace_lines.py)
#   KNOWN_BAD_GPUS
#                file of GPUs' UUIDs, one a line: a machine that has one of them starts nothing
#
# Returns 0 when the run is done, 78 for a config that cannot work (nothing is started), 1 after a crash, and otherwise
# the code in the run folder's exit.json.
set -euo pipefail

# Until the run is started, a signal ends this script with its code, once the command under way has ended.
trap 'echo "Stopped: nothing was started." >&2; exit 130' INT
trap 'echo "Stopped: nothing was started." >&2; exit 75' TERM HUP

ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_env.sh
source "$ROOT/scripts/setup_env.sh"
setup_env || exit 1
# This repository's package, also where one stands in another one (with Python 3.10 that one comes first).
export PYTHONSAFEPATH=1 PYTHONPATH="$ROOT:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

typed=${TYPED:-} # what a person would type to run this again; scripts/emulate_multinode.sh says it itself
if [ -z "$typed" ]; then
  for name in NGPU ${NNODES:+NNODES MASTER_ADDR MASTER_PORT RDZV_ID NODE_RANK} MAX_RESTARTS CONFIG_FILE; do
    [ -z "${!name:-}" ] || typed+=$(printf '%s=%q ' "$name" "${!name}")
  done
  typed+=$(printf '%q ' "$0" "$@")
  typed=${typed% }
fi
typed_in=$PWD

listed=$(nvidia-smi -L 2>/dev/null | grep '^GPU ') || true # with their UUIDs
gpus=$(grep -c . <<<"$listed") || true
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^ *[[:alnum:]]') || true # -1: none
fi
NGPU=${NGPU:-$((gpus > 0 ? gpus : 2))}
NNODES=${NNODES:-1}
for number in "$NGPU" "${NNODES%%:*}" "${NNODES#*:}"; do
  [[ "$number" =~ ^[1-9][0-9]*$ ]] || { echo "NGPU and NNODES must be positive integers, got '$number'" >&2; exit 78; }
done
LOG_RANK=${LOG_RANK:-0}
for rank in ${LOG_RANK//,/ }; do
  [[ "$LOG_RANK" =~ ^[0-9]+(,[0-9]+)*$ ]] && [ "$rank" -lt "$NGPU" ] || {
    echo "LOG_RANK must be ranks of this machine, 0 to $((NGPU - 1)), with commas between them, got '$LOG_RANK'" >&2
    exit 78
  }
done
least_nodes=${NNODES%%:*} most_nodes=${NNODES#*:}
[ "$least_nodes" -le "$most_nodes" ] || { echo "NNODES=MIN:MAX needs MIN <= MAX, got $NNODES" >&2; exit 78; }
MAX_RESTARTS=${MAX_RESTARTS:-0}
[[ "$MAX_RESTARTS" =~ ^[0-9]+$ ]] || { echo "MAX_RESTARTS must be 0 or more, got '$MAX_RESTARTS'" >&2; exit 78; }

config=()
case " $* " in
  *" --job.config_file"[\ =]* | *" --job.config-file"[\ =]*) ;;
  *)
    # The debug config names its files relative to the repository.
    [ -n "${CONFIG_FILE:-}" ] || cd "$ROOT"
    config=(--job.config_file "${CONFIG_FILE:-train_configs/debug_model.toml}")
    ;;
esac
config+=("$@")
case " $* " in
  *" --help "* | *" -h "*) exec "$PYTHON" -m torchtitan_like.config "${config[@]}" ;;
esac

started=$(date +%s)
# Every mistake that can be found without ranks is found here, before any is started.
check=(--training)
[ "$gpus" -gt 0 ] || [ -e /dev/kfd ] || check+=(--device-type cpu) # /dev/kfd: AMD's GPUs
for ((nodes = least_nodes; nodes <= most_nodes; nodes++)); do
  resolved=$(trap '' INT; "$PYTHON" -m torchtitan_like.config "${check[@]}" --world-size $((NGPU * nodes)) "${config[@]}") || exit $?
done
run_folder=$("$PYTHON" "$ROOT/scripts/run_folder.py" clear "$most_nodes" <<<"$resolved") || exit $?

cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}
[ "$gpus" -eq 0 ] || export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

host=$(uname -n) host=${host%%.*}
prefix=${LOG_PREFIX:-$([ "$most_nodes" -eq 1 ] && echo rank || echo host)}
case "$prefix" in
  rank) role=rank ;;
  host) role="$host:" ;;
  digits) role="$(tr -dc '0-9' <<<"$host"):" ;;
  *) echo "LOG_PREFIX must be rank, host or digits, got '$prefix'" >&2; exit 78 ;;
esac

[ -z "$listed" ] || echo "$host: ${listed//$'\n'/, }"
if [ -n "${KNOWN_BAD_GPUS:-}" ]; then
  [ -r "$KNOWN_BAD_GPUS" ] || { echo "KNOWN_BAD_GPUS: there is no file $KNOWN_BAD_GPUS" >&2; exit 78; }
  if bad=$(grep -F -f <(grep '[^[:space:]]' "$KNOWN_BAD_GPUS") <<<"$listed"); then
    echo "$host has GPUs that $KNOWN_BAD_GPUS lists, so nothing is started: $bad" >&2
    exit 1
  fi
fi
if [ -n "${NUMA_BINDING:-}" ] && [ "$gpus" -eq 0 ] && [ ! -e /dev/kfd ]; then
  echo "NUMA_BINDING=$NUMA_BINDING keeps ranks near their GPUs, and here are none" >&2
  exit 78
fi
if [ -n "${NCCL_DEBUG_TO:-}" ]; then
  mkdir -p "$NCCL_DEBUG_TO"
  export NCCL_DEBUG=${NCCL_DEBUG:-INFO} NCCL_DEBUG_FILE="$NCCL_DEBUG_TO/nccl-%h-%p.log" # %h: host, %p: process
fi

rendezvous=(--nnodes=1)
if [ "$most_nodes" -gt 1 ]; then
  [ -n "${MASTER_ADDR:-}" ] || { echo "NNODES=$NNODES needs one machine's address in MASTER_ADDR" >&2; exit 78; }
  rendezvous=(--nnodes="$NNODES" --rdzv_backend c10d --rdzv_endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}"
    --rdzv_id="${RDZV_ID:-torchtitan_like}")
  if [ -n "${NODE_RANK:-}" ]; then
    [ "$least_nodes" -eq "$most_nodes" ] || { echo "NODE_RANK needs one number of machines, not NNODES=$NNODES" >&2; exit 78; }
    rendezvous=(--nnodes="$NNODES" --node_rank="$NODE_RANK"
      --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
  fi
fi
rendezvous+=(--max-restarts="$MAX_RESTARTS")

unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE TORCHELASTIC_RUN_ID # another launcher's: this run has its own, or none
program=(-m torchtitan_like.train)
[ -z "${TRACE_TO:-}" ] || program=("$ROOT/scripts/trace_lines.py" -m torchtitan_like.train)
command=("$PYTHON" "${program[@]}" "${config[@]}")
if [ $((NGPU * most_nodes)) -gt 1 ] || [ "$MAX_RESTARTS" -gt 0 ] || [ -n "${NUMA_BINDING:-}" ]; then
  command=("$PYTHON" -m torchtitan_like.torchrun --nproc_per_node="$NGPU" "${rendezvous[@]}"
    ${NUMA_BINDING:+--numa-binding="$NUMA_BINDING"}
    --local-ranks-filter "$LOG_RANK" --role "$role" --tee 3 --log-dir "$run_folder/torchrun"
    "${program[@]}" "${config[@]}")
fi
# After a signal torchrun kills workers that are not gone after 30 seconds: a last save may take longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-1800}"
printf '+ OMP_NUM_THREADS=%s' "$OMP_NUM_THREADS"
printf ' %q' "${command[@]}"
printf '\n'

# The run gets a process group of its own, so that a Ctrl-C reaches it once, from here; a signal sent to this script alone
# (a scheduler's, or a closed terminal's) is passed on too. The script then waits: the run saves before it ends.
run=
signalled=
# shellcheck disable=SC2329 # called by the traps
pass_on() {
  signalled=$1
  echo "Passing SIG$1 on to the run, which saves and ends." >&2
  [ -z "$run" ] || kill -s "$1" "$run" 2>/dev/null || true
}
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM HUP
export TORCHTITAN_LIKE_LAUNCHER=$$ # the run saves and ends when this script is killed
# A run that cannot write to its own folder, because of a full disk, leaves exit.json here.
if launcher_folder=$(mktemp -d); then
  export TORCHTITAN_LIKE_LAUNCHER_FOLDER=$launcher_folder
  trap 'rm -rf "$launcher_folder"' EXIT
fi
set -m
"${command[@]}" </dev/null &
run=$!
set +m
[ -z "$signalled" ] || pass_on "$signalled" # it came while the run was being started
while kill -0 "$run" 2>/dev/null; do
  wait "$run" || true
done
code=0
wait "$run" || code=$?
trap '' INT TERM HUP
"$PYTHON" "$ROOT/scripts/run_folder.py" end "$code" "$signalled" "$started" "$most_nodes" "$typed" "$typed_in" <<<"$resolved"
