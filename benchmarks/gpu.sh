#!/usr/bin/env bash
# Run every GPU test and benchmark of this repository and write one file, in at most 8 minutes.
#
#   benchmarks/gpu.sh [FILE]      FILE: gpu-<host>-<date>.txt if not given
#
# PYTHON names the interpreter (python3); its torch must see a GPU. Needs no network. Each part has a time limit of its
# own; a part that fails or runs out of time is reported in the file, and the next one starts. Returns the number of
# parts that failed.
set -uo pipefail

ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
FILE=$(realpath -m "${1:-gpu-$(hostname -s)-$(date +%Y-%m-%d).txt}")
cd "$ROOT" || exit 1
export PYTHONPATH=$ROOT OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} HF_HUB_OFFLINE=1

NGPU=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || exit 1
if [ "$NGPU" -eq 0 ]; then
  echo "torch sees no GPU. Expected at least one: check nvidia-smi, CUDA_VISIBLE_DEVICES and torch.version.cuda" >&2
  exit 1
fi
OUT=$(mktemp -d)
trap 'rm -rf "$OUT"' EXIT
failed=0

# part SECONDS TITLE COMMAND...: run a command with a time limit, its output into the file
part() {
  local limit=$1 title=$2 start=$SECONDS code
  shift 2
  printf '\n## %s\n$ %s\n' "$title" "$*"
  timeout --kill-after 10 "$limit" "$@" 2>&1
  code=$?
  printf '# exit code %d after %d s (limit %d s)\n' "$code" "$((SECONDS - start))" "$limit"
  [ "$code" -eq 0 ] || failed=$((failed + 1))
}

# train SECONDS NAME RANKS ARGUMENTS...: 30 steps of the trainer; then its rows of metrics.jsonl
train() {
  local limit=$1 name=$2 ranks=$3 folder="$OUT/$2"
  shift 3
  part "$limit" "train: $name" "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$ranks" \
    -m torchtitan_like.train --job.config_file train_configs/debug_model.toml --job.dump_folder "$folder" \
    --training.steps 30 --lr_scheduler.warmup_steps 2 --training.mixed_precision_param bfloat16 --metrics.log_freq 10 \
    --metrics.no-enable_tensorboard --validation.no-enable --checkpoint.no-enable "$@" >"$OUT/$name.log"
  grep -vF INFO "$OUT/$name.log"
  "$PYTHON" - "$folder/metrics.jsonl" <<'PY'
import json, sys

try:
    rows = [json.loads(line) for line in open(sys.argv[1])]
except OSError as error:
    raise SystemExit(f"no metrics: {error}")
for row in rows:
    if "tps" in row:
        names = ("step", "loss", "grad_norm", "tps", "tflops", "mfu", "memory_gib")
        print({name: row[name] for name in names if name in row})
PY
}

large="--model.flavor 1B --training.seq_len 8192 --training.local_batch_size 1"

{
  echo "torchtitan_like $(git rev-parse --short HEAD 2>/dev/null) on $(hostname), $(date -u +%Y-%m-%dT%H:%MZ), $NGPU GPUs"
  part 10 "versions" "$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.nccl.version())'
  part 10 "nvidia-smi" nvidia-smi
  part 20 "node check" "$PYTHON" -m torchtitan_like node check --gpus "$NGPU"
  part 120 "tests that need a GPU" "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider --durations=0 tests/unit tests/distributed
  train 30 one-gpu 1 --training.local_batch_size 8 --training.seq_len 2048
  # shellcheck disable=SC2086 # several arguments
  train 40 one-gpu-1b 1 $large
  # shellcheck disable=SC2086
  train 80 one-gpu-1b-compiled 1 $large --compile.enable
  # shellcheck disable=SC2086
  train 40 one-gpu-1b-saved 1 $large --checkpoint.enable --checkpoint.interval 10 \
    --checkpoint.async_mode async_with_pinned_mem
  if [ "$NGPU" -gt 1 ]; then
    part 25 "all-reduce" "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$NGPU" \
      -m torchtitan_like node bench --sizes 1MB,32MB,1GB
    # shellcheck disable=SC2086
    train 40 fsdp-1b "$NGPU" $large
    train 30 tensor-parallel 2 --parallelism.tensor_parallel_degree 2
    train 30 pipeline 2 --parallelism.pipeline_parallel_degree 2
  fi
  echo
  echo "# $failed parts failed; $SECONDS s in all"
} | tee "$FILE"
echo "Written to $FILE" >&2
exit "$(sed -n 's/^# \([0-9]*\) parts failed.*/\1/p' "$FILE" | tail -n 1)"
