# shellcheck shell=bash
# Sourced by run_train.sh and run_tests.sh: finds a Python that meets pyproject.toml, or makes one in .venv.
#
#   setup_env [EXTRAS [OPTIONAL]]   sets PYTHON to the interpreter to use; prints the reason and returns 1 if there is none
#                                   EXTRAS: one word, names of extras separated by blanks ("dev interop")
#                                   OPTIONAL: extras that an installation adds, and that no interpreter must have
# It tries, in this order: $PYTHON (or python3), .venv, and .venv after an installation. It installs nothing outside .venv. It
# checks the installed packages each time and stores no marker file.

TESTED_TORCH=2.13.0 # the release our tests run on, installed where there is no torch yet
SETUP_ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SETUP_VENV="$SETUP_ROOT/.venv"

setup_env() {
  local extra=${1:-} optional=${2:-} named=${PYTHON:-} base=${PYTHON:-python3} python
  for python in "$base" "$SETUP_VENV/bin/python"; do
    if _setup_unmet "$python" "$extra" >/dev/null 2>&1; then
      [ -z "$named" ] || [ "$python" = "$named" ] || _setup_report_named "$named" "$extra" "$python"
      PYTHON=$(_setup_absolute "$python")
      return 0
    fi
  done
  # Two scripts started together must not install into the same .venv. The lock belongs to this file
  # descriptor: it stays after the Python that acquires it has ended, and the kernel releases it when this shell ends.
  exec 9>"$SETUP_VENV.lock" || return 1
  local rc=0
  _setup_lock "$base" && _setup_install "$base" "$extra" "$optional" || rc=$?
  exec 9>&-
  PYTHON="$SETUP_VENV/bin/python"
  return "$rc"
}

# Print the missing packages of the Python in $PYTHON before another one is used instead.
_setup_report_named() {
  {
    echo "PYTHON=$1 does not meet pyproject.toml${2:+ (with the extra $2)}:"
    _setup_unmet "$1" "$2" | sed 's/^/  /'
    echo "Using $3 instead. To use $1, install what it lacks."
  } >&2
}

_setup_absolute() {
  case "$1" in
    /*) echo "$1" ;;
    */*) echo "$PWD/$1" ;;
    *) command -v "$1" ;;
  esac
}

# Print the requirements that a Python does not meet, one per line. Fails if there are any.
_setup_unmet() {
  _setup_python_is_new_enough "$1" || return 1
  # shellcheck disable=SC2086 # one argument for each extra
  "$1" "$SETUP_ROOT/scripts/check_requirements.py" $2
}

_setup_python_is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

_setup_lock() {
  if ! _setup_python_is_new_enough "$1"; then
    echo "torchtitan_like needs Python 3.10 or newer, but '$1' is $("$1" --version 2>&1 | head -n 1)." >&2
    echo "Name a newer one, for example: PYTHON=python3.12 $0" >&2
    return 1
  fi
  "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null && return 0
  echo "Another script is installing into $SETUP_VENV; waiting for it." >&2
  "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

_setup_install() {
  local base=$1 extra=$2 python="$SETUP_VENV/bin/python" installed="$2${2:+${3:+ }}$3"
  _setup_unmet "$python" "$extra" >/dev/null 2>&1 && return 0 # another script has just done it
  {
    echo "'$base' lacks requirements of pyproject.toml${extra:+ (with the extra $extra)}:"
    _setup_unmet "$base" "$extra" | sed 's/^/  /'
    echo "Installing into $SETUP_VENV (once; takes some minutes)."
  } >&2
  if _setup_make_venv "$base" && _setup_pip_install "$python" "$installed" && _setup_unmet "$python" "$extra" >&2; then
    return 0
  fi
  cat >&2 <<TEXT

The installation failed (the reason is above). To continue:
  try again                  $0      (what is installed already is kept)
  use another package index  PIP_INDEX_URL=https://... $0
  start from nothing         rm -rf $(printf '%q' "$SETUP_VENV") && $0
  use a Python of your own   PYTHON=/path/to/python $0
                             what it lacks is listed by: /path/to/python scripts/check_requirements.py $extra
TEXT
  return 1
}

_setup_make_venv() {
  "$SETUP_VENV/bin/python" -m pip --version >/dev/null 2>&1 && return 0
  _setup_run "$1" -m venv "$SETUP_VENV" && return 0
  echo "On Debian and Ubuntu the module venv is a package of its own: apt-get install python3-venv" >&2
  return 1
}

_setup_pip_install() {
  local pip=("$1" -m pip install --disable-pip-version-check)
  [ -t 2 ] || pip+=(--progress-bar off)
  # torch first and by version: a fresh machine gets the release that we test. The newest release,
  # which pip would choose by itself, may be a build of several gigabytes.
  local unmet
  unmet=$(_setup_unmet "$1" "$2") || true
  if [[ $'\n'$unmet == *$'\ntorch: '* ]]; then
    _setup_run "${pip[@]}" "torch==$TESTED_TORCH" || return 1
  fi
  _setup_run "${pip[@]}" -e "$SETUP_ROOT${2:+[${2// /,}]}"
}

_setup_run() {
  printf '+' >&2
  printf ' %q' "$@" >&2
  printf '\n' >&2
  "$@" >&2
}
