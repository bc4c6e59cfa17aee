#!/usr/bin/env bash
# Run the GPU tests and benchmarks of this repository and write one file, in at most 8 minutes on one GPU.
#
#   benchmarks/gpu.sh [--only PART,...] [--wheels FOLDER] [FILE]
#
# PART     what it runs (all but spikes if not given)
#   tests    every test that needs a GPU
#   jobs     13 trainings of 30 steps, more with several GPUs: seconds to start, tokens/s, MFU, memory (of the 8 large ones)
#   compare  30 runs on the GPU and on the CPU (benchmarks/cpu_gpu.py)
#   spikes   equal runs of a mixture of experts, gradient norms compared (benchmarks/gradient_spikes.py), 2 minutes
# FOLDER   wheels of the packages that a machine with nothing but torch lacks
# FILE     gpu-<host>-<date>.txt if not given
#
# PYTHON names the interpreter (python3); its torch must see a GPU. Needs no network. Each command has a time limit of its
# own; one that fails or runs out of time is reported in the file, and the next one starts. Returns the number that failed.
set -uo pipefail

ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
parts=tests,jobs,compare
wheels=
while [[ ${1:-} == --* ]]; do
  case $1 in
    --only) parts=${2:-} ;;
    --wheels) wheels=${2:-} ;;
    *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; [ "$1" = --help ]; exit ;;
  esac
  shift 2 || { echo "$1 needs a value" >&2; exit 2; }
done
for name in ${parts//,/ }; do
  [[ $name =~ ^(tests|jobs|compare|spikes)$ ]] || {
    echo "--only $name: no such part. Expected some of tests,jobs,compare,spikes" >&2
    exit 2
  }
done
FILE=$(realpath -m "${1:-gpu-$(hostname -s)-$(date +%Y-%m-%d).txt}")
[ -z "$wheels" ] || wheels=$(realpath "$wheels") || exit 2
cd "$ROOT" || exit 1
OUT=$(mktemp -d)
trap 'rm -rf "$OUT"' EXIT
export PYTHONPATH=$ROOT:$OUT/site${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} HF_HUB_OFFLINE=1

if [ -n "$wheels" ]; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$OUT/site" "$wheels"/*.whl || exit 1
fi
NGPU=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || exit 1
if [ "$NGPU" -eq 0 ]; then
  echo "torch sees no GPU. Expected at least one: check nvidia-smi, CUDA_VISIBLE_DEVICES and torch.version.cuda" >&2
  exit 1
fi
failed=0

is_wanted() { [[ ,$parts, == *,$1,* ]]; }

# part SECONDS TITLE COMMAND...: run a command with a time limit, its output into the file
part() {
  local limit=$1 title=$2 start=$SECONDS code
  shift 2
  printf '\n## %s\n$ %s\n' "$title" "$*"
  timeout --kill-after 10 "$limit" "$@" 2>&1
  code=$?
  printf '# exit code %d after %d s (limit %d s)\n' "$code" "$((SECONDS - start))" "$limit"
  [ "$code" -eq 0 ] || failed=$((failed + 1))
  return "$code"
}

# start NAME COMMAND...: run it in the background; `finish` waits for all of them, and prints and counts each
declare -A started
start() {
  local name=$1
  shift
  "$@" >"$OUT/$name.txt" &
  started[$name]=$!
}
finish() {
  local name
  for name in "${!started[@]}"; do
    wait "${started[$name]}" || failed=$((failed + 1))
    cat "$OUT/$name.txt"
  done
  started=()
}

# train SECONDS NAME RANKS CONFIG ARGUMENTS...: 30 steps of the trainer; then its rows of metrics.jsonl
train() {
  local limit=$1 name=$2 ranks=$3 config=$4 folder="$OUT/$2" launcher=() code
  shift 4
  [ "$ranks" -eq 1 ] || launcher=(-m torch.distributed.run --standalone --nproc_per_node="$ranks")
  part "$limit" "train: $name" "$PYTHON" "${launcher[@]}" \
    -m torchtitan_like.train --job.config_file "train_configs/$config.toml" --job.dump_folder "$folder" \
    --training.steps 30 --lr_scheduler.warmup_steps 2 --training.mixed_precision_param bfloat16 --metrics.log_freq 10 \
    --metrics.no-enable_tensorboard --validation.no-enable --checkpoint.no-enable "$@" >"$OUT/$name.log"
  code=$?
  sed -n -e '/INFO - Done in/p' -e '/INFO/!p' "$OUT/$name.log"
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
  return "$code"
}

# Small models show that they work: they share the machine with the tests and comparisons.
start_small_jobs() {
  start qwen3-moe train 180 qwen3-moe 1 qwen3_moe_debug
  start qwen3-moe-compiled train 180 qwen3-moe-compiled 1 qwen3_moe_debug --compile.enable
  start deepseek-compiled train 180 deepseek-compiled 1 deepseek_v3_debug --compile.enable
  start gpt-oss-compiled train 180 gpt-oss-compiled 1 gpt_oss_debug --compile.enable
  start llama4 train 180 llama4 1 llama4_debug
}

# These have the GPU for themselves: what they show is speed and memory.
run_large_jobs() {
  local large="debug_model --model.flavor 1B --training.seq_len 8192 --training.local_batch_size 1"
  local op="--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op"
  local float8="--model.converters quantize.linear.float8 --quantize.linear.float8.recipe_name rowwise"
  float8+=" --quantize.linear.float8.filter_fqns output"
  local half="--training.dtype bfloat16 --optimizer.state_dtype bfloat16"
  local save="--checkpoint.enable --checkpoint.interval 20 --checkpoint.last_save_model_only"
  # shellcheck disable=SC2086 # several arguments
  {
    train 30 debug 1 debug_model --training.local_batch_size 8 --training.seq_len 2048
    train 30 debug-graphs 1 debug_model --training.local_batch_size 8 --training.seq_len 2048 --compile.cuda_graphs
    train 40 1b 1 $large
    train 60 1b-compiled 1 $large --compile.enable
    train 40 1b-op 1 $large $op
    train 60 1b-full-compiled 1 $large --compile.enable --activation_checkpoint.mode full
    train 80 1b-float8-compiled 1 $large --compile.enable $float8
    train 60 1b-saved 1 $large $save --checkpoint.async_mode async_with_pinned_mem
    train 80 8b-full-compiled 1 $large $half --model.flavor 8B --compile.enable --activation_checkpoint.mode full
    if [ "$NGPU" -gt 1 ]; then
      part 25 "all-reduce" "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$NGPU" \
        -m torchtitan_like node bench --sizes 1MB,32MB,1GB
      train 40 fsdp-1b "$NGPU" $large
      train 30 tensor-parallel 2 debug_model --parallelism.tensor_parallel_degree 2
      train 30 pipeline 2 debug_model --parallelism.pipeline_parallel_degree 2
    fi
  }
}

{
  echo "torchtitan_like $(git rev-parse --short HEAD 2>/dev/null) on $(hostname), $(date -u +%Y-%m-%dT%H:%MZ), $NGPU GPUs"
  part 10 "versions" "$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.nccl.version())'
  part 10 "nvidia-smi" nvidia-smi
  part 20 "node check" "$PYTHON" -m torchtitan_like node check --gpus "$NGPU"
  if is_wanted tests; then
    start tests part 180 "tests" "$PYTHON" -m pytest -q -m gpu -n 4 -p no:cacheprovider --durations=0 tests/unit tests/distributed
  fi
  if is_wanted compare; then
    start compare part 180 "compare with the CPU" "$PYTHON" -m benchmarks.cpu_gpu
  fi
  is_wanted jobs && start_small_jobs
  finish
  is_wanted jobs && run_large_jobs
  if is_wanted spikes; then
    part 120 "spikes" "$PYTHON" benchmarks/gradient_spikes.py runs "$OUT/spikes" --seconds 90
  fi
  echo
  echo "# $failed parts failed; $SECONDS s in all"
} | tee "$FILE"
echo "Written to $FILE" >&2
exit "$(sed -n 's/^# \([0-9]*\) parts failed.*/\1/p' "$FILE" | tail -n 1)"
