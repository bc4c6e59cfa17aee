#!/usr/bin/env bash
# Run the GPU tests and benchmarks of this repository and write one file, in at most 8 minutes on one GPU.
#
#   benchmarks/gpu.sh [--only PART,...] [--wheels FOLDER] [FILE]
#
# PART     what it runs (tests,jobs,compare if not given)
#   tests    every test that needs a GPU
#   jobs     9 trainings beside TorchTitan 0.2.2, where it is installed, a bare loop, and `titan plan`: speed, memory,
#            errors of the plans, steps during a save (benchmarks/gpu_jobs.py); with several GPUs 3 layouts too
#   compare  30 runs on the GPU and on the CPU (benchmarks/cpu_gpu.py)
#   spikes   20 equal runs of a mixture of experts, eager and compiled: gradient norms (benchmarks/gradient_spikes.py),
#            6 minutes
#   storage  an export of STORAGE_GB (16) by 8 ranks and by one, which needs 16 cores and no GPU (benchmarks/hf_export.py)
# FOLDER   wheels of the packages that a machine with nothing but torch lacks, and of TorchTitan
# FILE     gpu-<host>-<date>.txt if not given
#
# PYTHON names the interpreter (python3); its torch must see a GPU. Needs no network. Each command has a time limit of its
# own; one that fails or runs out of time is reported in the file, and the next one starts. Returns the number that failed.
# WORK=tiny makes the jobs tiny; with it, or for `storage` alone, no GPU is needed.
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
  [[ $name =~ ^(tests|jobs|compare|spikes|storage)$ ]] || {
    echo "--only $name: no such part. Expected some of tests,jobs,compare,spikes,storage" >&2
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
if [ "$NGPU" -eq 0 ] && [ "${WORK:-}" != tiny ] && [ "$parts" != storage ]; then
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
  local limit=$1 name=$2 ranks=$3 config=$4 folder="$OUT/$2" code
  shift 4
  part "$limit" "train: $name" "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$ranks" \
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

# The card alone: what it shows is speed and memory. All of it ends 8 minutes after the start of this script.
run_jobs() {
  local large="debug_model --model.flavor 1B --training.seq_len 8192 --training.local_batch_size 1"
  part $((475 - SECONDS)) "jobs" "$PYTHON" -m benchmarks.gpu_jobs run "$OUT/jobs" --seconds $((425 - SECONDS))
  if [ "$NGPU" -gt 1 ]; then
    part 25 "all-reduce" "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$NGPU" \
      -m torchtitan_like node bench --sizes 1MB,32MB,1GB
    # shellcheck disable=SC2086 # several arguments
    train 40 fsdp-1b "$NGPU" $large
    train 30 tensor-parallel 2 debug_model --parallelism.tensor_parallel_degree 2
    train 30 pipeline 2 debug_model --parallelism.pipeline_parallel_degree 2
  fi
}

find_spikes() {
  local mode script=benchmarks/gradient_spikes.py
  for mode in eager compiled; do
    part 180 "spikes, $mode" "$PYTHON" $script runs "$OUT/spikes-$mode" --runs 20 --steps 100 -- \
      "--compile.$([ $mode = eager ] && echo no-)enable"
  done
}

{
  echo "torchtitan_like $(git rev-parse --short HEAD 2>/dev/null) on $(hostname), $(date -u +%Y-%m-%dT%H:%MZ), $NGPU GPUs"
  part 10 "versions" "$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda)'
  [ "$NGPU" -eq 0 ] || part 10 "nvidia-smi" nvidia-smi
  part 20 "node check" "$PYTHON" -m torchtitan_like node check --gpus "$NGPU"
  if is_wanted tests; then
    start tests part 180 "tests" "$PYTHON" -m pytest -q -m gpu -n 4 -p no:cacheprovider --durations=0 tests/unit tests/distributed
  fi
  if is_wanted compare; then
    start compare part 180 "compare with the CPU" "$PYTHON" -m benchmarks.cpu_gpu
  fi
  is_wanted jobs && start plans part 180 "plans" "$PYTHON" -m benchmarks.gpu_jobs plan "$OUT/jobs"
  finish
  is_wanted jobs && run_jobs
  is_wanted spikes && find_spikes
  if is_wanted storage; then
    part 400 "storage" "$PYTHON" benchmarks/hf_export.py --rounds 1 --gigabytes "${STORAGE_GB:-16}" --ranks 8 1 \
      --cases "direct, 4;native" --folder "$OUT"
  fi
  echo
  echo "# $failed parts failed; $SECONDS s in all"
} | tee "$FILE"
echo "Written to $FILE" >&2
exit "$(sed -n 's/^# \([0-9]*\) parts failed.*/\1/p' "$FILE" | tail -n 1)"
