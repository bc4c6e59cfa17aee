#!/usr/bin/env bash
# Train: `titan train` with the Python of this repository. With nothing set: the debug model, on all GPUs or else on
# 2 CPU ranks.
#
#   NGPU=8 LOG_RANK=0,1 CONFIG_FILE=train_configs/llama3_8b.toml ./run_train.sh --section.key value ...
#
# PYTHON names the Python to use if it meets pyproject.toml, or else to make .venv from (default: python3).
# `./run_train.sh --help` lists the other variables, the options and all settings.
set -euo pipefail

# Until the run is started, a signal ends this script with its code, after the current command has ended.
trap 'echo "Stopped: nothing was started." >&2; exit 130' INT
trap 'echo "Stopped: nothing was started." >&2; exit 75' TERM HUP

ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_env.sh
source "$ROOT/scripts/setup_env.sh"
setup_env "" report || exit 1
# Use this repository's package, even if the current folder has a copy, which Python 3.10 searches first.
export PYTHONSAFEPATH=1 PYTHONPATH="$ROOT:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
NGPU=${NGPU:-auto} TITAN_PROGRAM=$0 TITAN_PYTHON=$PYTHON exec "$PYTHON" -m torchtitan_like train "$@"
