#!/usr/bin/env bash
# Check and test everything: ruff, shellcheck, mypy, then pytest (unit, distributed, integration, faults, slurm). Arguments go
# to pytest.
#
#   ./run_tests.sh                       all
#   ./run_tests.sh tests/unit -k loader  the static checks and these tests
#   ./run_tests.sh --lint                the static checks alone
#   ./run_tests.sh --quick               the unit tests of the folders that changed (3 minutes at most)
#   ./run_tests.sh --nightly             the long tests instead (marker "nightly"; installs "interop", "browser" and "ft")
#   ./run_tests.sh --null-gpu            the CUDA paths on devices that compute nothing (45 minutes; see below)
#   ./run_tests.sh --faults              100 drills and 200 kills of real runs instead (40 minutes); arguments: --help
#
# --null-gpu needs no GPU but a CUDA build of torch. It uses the Python in NULL_GPU_PYTHON; without that variable it
# creates .venv-null-gpu and installs torch with its CUDA libraries there, about 5 GB.
#
# Ends with a table of what ran, the time it took and the CPU seconds. Returns pytest's code, or 1 when only a static check
# has failed.
set -uo pipefail

started=$SECONDS
ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NULL_GPU_TORCH=2.14.1 # the release that tests/gpu_null/counts.json has counts of

# Set NULL_GPU_PYTHON to a Python whose torch is a CUDA build.
find_null_gpu_python() {
  local folder="$ROOT/.venv-null-gpu"
  if [ -z "${NULL_GPU_PYTHON:-}" ]; then
    NULL_GPU_PYTHON=$folder/bin/python
    if [ ! -e "$folder/complete" ]; then
      echo "Creating $folder with torch $NULL_GPU_TORCH and its CUDA libraries (about 5 GB)."
      "${PYTHON:-python3}" -m venv "$folder" &&
        "$NULL_GPU_PYTHON" -m pip install "torch==$NULL_GPU_TORCH" -e "${ROOT}[dev]" &&
        touch "$folder/complete" || return 1
    fi
  fi
  "$NULL_GPU_PYTHON" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || {
    echo "$NULL_GPU_PYTHON has no CUDA build of torch." >&2
    echo "Expected torch with CUDA libraries: set NULL_GPU_PYTHON to such a Python, or unset it." >&2
    return 1
  }
}

if [ "${1:-}" = --null-gpu ]; then
  find_null_gpu_python || exit 1
  cd "$ROOT" || exit 1
  OMP_NUM_THREADS=1 exec "$NULL_GPU_PYTHON" -m pytest tests/gpu_null "${@:2}"
fi
# shellcheck source=scripts/setup_env.sh
source "$ROOT/scripts/setup_env.sh"
extras="dev docs"
[ "${1:-}" != --nightly ] || extras="dev docs interop browser ft"
setup_env "$extras" || exit 1
cd "$ROOT" || exit 1
# One thread for each process: the tests run several ranks on few cores, and compare sums to the last bit.
export OMP_NUM_THREADS=1
# Where this is set, each of some hundred processes would compile the package for itself.
unset PYTHONDONTWRITEBYTECODE

case "${1:-}" in
  --faults) exec "$PYTHON" -m tests.faults.campaign "${@:2}" ;;
  --nightly) exec "$PYTHON" -m pytest -m nightly "${@:2}" ;;
esac

# Print the unit tests of folders with uncommitted changes, or else of folders that the last commit changed.
changed_unit_tests() {
  local changed
  changed=$(git diff --name-only HEAD; git ls-files --others --exclude-standard)
  [ -n "$changed" ] || changed=$(git diff --name-only HEAD~1)
  # Each line: the files that changed, and their tests. The first matching line applies.
  sed -nE '
    s#^torchtitan_like/report/.*#tests/unit/cli#p; t
    s#^torchtitan_like/train_configs/.*#tests/unit/config#p; t
    s#^torchtitan_like/train\.py$#tests/unit/test_run.py#p; t
    s#^(torchtitan_like|tests/unit)/([a-z_]+)/.*#tests/unit/\2#p; t
    s#^torchtitan_like/([a-z_]+)\.py$#tests/unit/test_\1.py#p; t
    s#^tests/unit/(test_[a-z_]+\.py)$#tests/unit/\1#p; t
    s#^run_train\.sh$#tests/unit/launcher#p; t
    s#^(scripts/.*|run_tests\.sh)#tests/unit/scripts#p; t
    s#^(docs/.*|mkdocs\.yml|[A-Z]+\.md)$#tests/unit/test_site.py\ntests/unit/cli/test_document.py\ntests/unit/config/test_document.py#p
  ' <<<"$changed" | sort -u | while read -r path; do [ ! -e "$path" ] || echo "$path"; done
  [[ $changed == *tests/unit/test_house.py* ]] || echo tests/unit/test_house.py
}

if [ "${1:-}" = --quick ]; then
  mapfile -t folders < <(changed_unit_tests)
  set -- "${folders[@]}" "${@:2}"
fi

failed=()
check() {
  echo "+ $*"
  "$@" || failed+=("$*")
}
types=$(mktemp)
TEST_RESULTS=$(mktemp -d)
export TEST_RESULTS
trap 'rm -rf "$types" "$TEST_RESULTS"' EXIT

PATH="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"
check "$PYTHON" -m ruff check .
check shellcheck -x run_train.sh run_tests.sh .ci/run scripts/*.sh \
  torchtitan_like/slurm/templates/*.sh torchtitan_like/slurm/templates/*.slurm
"$PYTHON" -m mypy >"$types" 2>&1 &
type_check=$!

# Run pytest, and keep its first code that is not 0.
code=0
run_pytest() {
  echo "+ $PYTHON -m pytest $*"
  "$PYTHON" -m pytest -p tests.harness.results "$@" && return
  local result=$?
  [ "$code" -ne 0 ] || code=$result
}

if [ "${1:-}" = --lint ]; then
  : # no tests
elif [ $# -eq 0 ]; then
  # Unit tests use one core each. The others start several ranks and need the machine for themselves.
  run_pytest --numprocesses auto --maxprocesses 4 --dist loadfile tests/unit
  run_pytest tests/distributed tests/integration tests/faults tests/slurm
else
  run_pytest "$@"
fi

echo "+ $PYTHON -m mypy"
wait "$type_check" || failed+=("$PYTHON -m mypy")
cat "$types"
[ "${1:-}" = --lint ] || "$PYTHON" -m tests.harness.results
echo "Total time: $((SECONDS - started)) s. CPU time of this shell, then of all that it started (user, system):"
times
for name in ${failed[@]+"${failed[@]}"}; do
  echo "FAILED: $name" >&2
  [ "$code" -ne 0 ] || code=1
done
exit "$code"
