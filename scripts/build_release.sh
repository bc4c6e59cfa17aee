#!/usr/bin/env bash
# Build the files of a release from the current commit.
#
#   scripts/build_release.sh [FOLDER]
#
#   FOLDER   for the files (default: dist); must be empty or missing
#   PYTHON   interpreter for all environments (default: python3)
#   TORCH    release of torch that the wheel is tested with (default: the tested one)
#
# Writes the source distribution, the wheel built from it, a bill of materials (CycloneDX JSON) and SHA256SUMS. The wheel is
# installed with its requirements into an empty environment, where it trains two steps. The bill of materials lists that
# environment. Publishes nothing: `twine upload FOLDER/*.whl FOLDER/*.tar.gz` would.
set -euo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "$0"; exit ;;
esac
ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/setup_env.sh
source "$ROOT/scripts/setup_env.sh"
TORCH=${TORCH:-$TESTED_TORCH}
PYTHON=${PYTHON:-python3}
TOOLS=(build==1.6.1 twine==7.0.0 cyclonedx-bom==7.5.0)

fail() {
  echo "$1" >&2
  exit 1
}
changes=$(git -C "$ROOT" status --porcelain)
[ -z "$changes" ] || fail "The checkout has changes: $(head -n 3 <<<"$changes"). Expected the files of a commit. Commit or remove them."
mkdir -p "${1:-dist}"
out=$(CDPATH='' cd "${1:-dist}" && pwd)
[ -z "$(ls -A "$out")" ] || fail "$out contains files. Expected an empty folder. Remove them, or name another folder."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH # pip would find an installation there, and not install the wheel

"$PYTHON" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet "${TOOLS[@]}"
# From a clone: a build leaves folders in its source.
git clone --quiet "$ROOT" "$work/source"
"$work/tools/bin/python" -m build --outdir "$out" "$work/source"
"$work/tools/bin/twine" check --strict "$out"/*

"$PYTHON" -m venv "$work/environment"
programs=$work/environment/bin
"$programs/pip" install --quiet "torch==$TORCH"
"$programs/pip" install --quiet "$out"/*.whl
"$programs/pip" check
mkdir "$work/run"
(
  cd "$work/run"
  "$programs/titan" --version
  CUDA_VISIBLE_DEVICES='' "$programs/titan" train debug_model.toml --training.steps 2 --validation.no-enable
)
version=$("$programs/python" -c 'import torchtitan_like; print(torchtitan_like.__version__)')
sed "s/^dynamic = .*/version = \"$version\"/" "$ROOT/pyproject.toml" >"$work/pyproject.toml" # names the main component
"$work/tools/bin/cyclonedx-py" environment "$programs/python" --pyproject "$work/pyproject.toml" --mc-type application \
  --output-reproducible --output-format JSON --output-file "$out/torchtitan_like-$version.cdx.json"
cd "$out"
sha256sum -- * >"$work/SHA256SUMS"
mv "$work/SHA256SUMS" .
ls -l
