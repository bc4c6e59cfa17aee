#!/usr/bin/env bash
# Train on several emulated nodes on this machine: one run_train.sh, and so one torchrun, for each. This tests what differs on
# several machines: the rendezvous, ranks that are not local ranks, and one run folder that all nodes write to.
#
#   scripts/emulate_multinode.sh NNODES PER_NODE [--section.key value ...]
#
#   NNODES       torchruns to start; the run has NNODES x PER_NODE ranks
#   PER_NODE     ranks of each
#   CONFIG_FILE, LOG_RANK, PYTHON
#                as for run_train.sh; LOG_RANK counts within a node
#   GRACE_SECONDS
#                seconds for the other nodes to end by themselves after a node has failed (default: 15)
#
# With GPUs, node i uses the i-th PER_NODE GPUs (of CUDA_VISIBLE_DEVICES, if it is set) and numbers them from 0, like a machine.
# CUDA_VISIBLE_DEVICES= (empty) trains on CPU. Each rank needs its own GPU: NCCL supports neither two ranks on one GPU nor MIG
# slices of one GPU.
#
# Each line of the output starts with its node. The rendezvous decides which node has rank 0. If a node fails, the script ends
# the others. A Ctrl-C or SIGTERM reaches all nodes, and the run saves before it ends. Returns the first exit code of
# run_train.sh that is not 0.
set -euo pipefail

ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
GRACE_SECONDS=${GRACE_SECONDS:-15}

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "$0"; exit ;;
esac
if ! [[ "${1:-}" =~ ^[1-9][0-9]*$ && "${2:-}" =~ ^[1-9][0-9]*$ ]]; then
  echo "Usage: $0 NNODES PER_NODE [--section.key value ...]; both are positive integers." >&2
  exit 78
fi
# The command to run this again, which run_train.sh prints.
TYPED=$(printf '%q ' ${CONFIG_FILE:+CONFIG_FILE="$CONFIG_FILE"} "$0" "$@")
export TYPED=${TYPED% } NNODES=$1 NGPU=$2
shift 2
case " $* " in
  *" --help "* | *" -h "*) exec "$ROOT/run_train.sh" "$@" ;;
esac

# shellcheck source=scripts/setup_env.sh
source "$ROOT/scripts/setup_env.sh"
setup_env || exit 1 # once, not on every node
export PYTHON

devices=()
read -r -a devices <<<"$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | tr '\n' ' ' || true)"
if [ "${#devices[@]}" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  IFS=', ' read -r -a devices <<<"${CUDA_VISIBLE_DEVICES/#-1/}" # -1: none
fi
num_devices=${#devices[@]}
if [ "$num_devices" -gt 0 ] && [ "$num_devices" -lt $((NNODES * NGPU)) ]; then
  echo "$NNODES nodes of $NGPU need $((NNODES * NGPU)) GPUs, here are $num_devices; CUDA_VISIBLE_DEVICES= trains on CPU." >&2
  exit 78
fi

free_port='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
MASTER_PORT=$("$PYTHON" -c "$free_port")
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
ranks=$((NNODES * NGPU))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
export MASTER_PORT MASTER_ADDR=127.0.0.1 RDZV_ID=emulated-$$
export PET_LOCAL_ADDR=127.0.0.1 # else ranks look each other up by this machine's name, which may not resolve
# After a failure, a rank may wait forever for a dead rank: torchrun kills it after this time.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-60}
unset NODE_RANK # the rendezvous decides

pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT

prefix() { # before each line of a node's output; it ends when the node and all its ranks have
  trap '' INT TERM HUP
  while IFS= read -r line || [ -n "$line" ]; do
    printf '[node%d] %s\n' "$1" "$line"
  done
}

nodes=() readers=()
# shellcheck disable=SC2329 # called by the traps
pass_on() {
  local node
  for node in ${nodes[@]+"${nodes[@]}"}; do
    kill -s "$1" "$node" 2>/dev/null || true
  done
}
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM HUP

set -m # each node in a process group of its own: a Ctrl-C reaches it once, from here
for ((node = 0; node < NNODES; node++)); do
  mkfifo "$pipes/$node"
  prefix "$node" <"$pipes/$node" &
  readers+=($!)
  if [ "$num_devices" -gt 0 ]; then
    slice=("${devices[@]:node * NGPU:NGPU}")
    CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${slice[*]}")
    export CUDA_VISIBLE_DEVICES
  fi
  "$ROOT/run_train.sh" "$@" </dev/null >"$pipes/$node" 2>&1 &
  nodes+=($!)
done
set +m

code=0
failed_at=
while [ "${#nodes[@]}" -gt 0 ]; do
  running=()
  for node in "${nodes[@]}"; do
    if kill -0 "$node" 2>/dev/null; then
      running+=("$node")
      continue
    fi
    ended=0
    wait "$node" || ended=$?
    if [ "$code" -eq 0 ] && [ "$ended" -ne 0 ]; then
      code=$ended failed_at=$SECONDS
    fi
  done
  nodes=(${running[@]+"${running[@]}"})
  if [ -n "$failed_at" ] && [ "${#nodes[@]}" -gt 0 ] && [ $((SECONDS - failed_at)) -ge "$GRACE_SECONDS" ]; then
    echo "A node has ended with $code; ending the others." >&2
    pass_on TERM
    failed_at=
  fi
  sleep 0.2 || true # which a Ctrl-C ends
done
for reader in "${readers[@]}"; do
  while kill -0 "$reader" 2>/dev/null; do
    wait "$reader" || true
  done
done
exit "$code"
