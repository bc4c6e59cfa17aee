#!/usr/bin/env bash
# Build the files of a release from the current commit.
#
#   scripts/build_release.sh [--tag] [FOLDER]
#
#   --tag    tag the commit with v and the version, after everything worked
#   FOLDER   for the files (default: dist); must be empty or missing
#   PYTHON   interpreter for all environments (default: python3)
#   TORCH    release of torch that the wheel is tested with (default: the tested one)
#
# Writes the source distribution, the wheel built from it, a bill of materials (CycloneDX JSON) and SHA256SUMS. The wheel is
# installed with its requirements into an empty environment, where it trains two steps; the script prints how long that took.
# The bill of materials lists that environment. Publishes nothing: `twine upload FOLDER/*.whl FOLDER/*.tar.gz` and
# `git push --tags` would.
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
has_tag=''
if [ "${1:-}" = --tag ]; then
  has_tag=1
  shift
fi
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$ROOT/torchtitan_like/__init__.py")
if [ -n "$has_tag" ]; then
  ! git -C "$ROOT" rev-parse --quiet --verify "refs/tags/v$version" >/dev/null ||
    fail "The tag v$version exists. Expected a new version: change __version__ in torchtitan_like/__init__.py."
  grep -Eq "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" "$ROOT/CHANGELOG.md" ||
    fail "CHANGELOG.md has no section \"## $version (YYYY-MM-DD)\". Expected the day of the release in its heading: write it."
fi
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

started=$SECONDS
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
echo "From an empty environment to two steps: $((SECONDS - started)) s"
sed "s/^dynamic = .*/version = \"$version\"/" "$ROOT/pyproject.toml" >"$work/pyproject.toml" # names the main component
"$work/tools/bin/cyclonedx-py" environment "$programs/python" --pyproject "$work/pyproject.toml" --mc-type application \
  --output-reproducible --output-format JSON --output-file "$out/torchtitan_like-$version.cdx.json"
cd "$out"
sha256sum -- * >"$work/SHA256SUMS"
mv "$work/SHA256SUMS" .
ls -l
if [ -n "$has_tag" ]; then
  git -C "$ROOT" tag --annotate --message "torchtitan_like $version" "v$version"
  echo "Tagged $(git -C "$ROOT" rev-parse HEAD) as v$version"
fi
