"""Arguments that several sub-commands have, and exit codes of expected errors."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchtitan_like.util.output import show_error

DAMAGED = 1
FAILED = 2


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def positive_int(text: str) -> int:
    """Parse an integer of 1 or more. Raises argparse.ArgumentTypeError."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"it is {text!r}. Expected an integer above 0: correct it")
    return int(text)


def positive_number(text: str) -> float:
    """Parse a number above 0. Raises argparse.ArgumentTypeError."""
    with suppress(ValueError):
        number = float(text)
        if 0 < number < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"it is {text!r}. Expected a number above 0: correct it")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that may need the checkpoint's model."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="TOML",
        help="config of a run with this model, for a checkpoint without a config.toml",
    )
    add_import_flag(parser)


def add_import_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--experimental.custom_import MODULE`, which may also be a .py file."""
    parser.add_argument(
        "--experimental.custom_import",
        dest="custom_import",
        metavar="MODULE",
        default="",
        help="module (found through PYTHONPATH) or .py file to import first, which registers "
        "the checkpoint's "
        "model. The module that the checkpoint's own config names is never imported",
    )


def run_checked(action: Callable[[], int]) -> int:
    """Call `action` and return its code. Print expected errors, and return 1 for damage, else 2."""
    from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
    from torchtitan_like.config import ConfigError
    from torchtitan_like.data.errors import TokenizerError

    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    try:
        return action()
    except (CheckpointError, ConfigError, TokenizerError, OSError) as error:
        show_error(str(error))
        return DAMAGED if isinstance(error, DamagedError) else FAILED


def run_report(action: Callable[[], int]) -> int:
    """Call `action`, which only reads files of runs, and return its code; 2 for expected errors."""
    try:
        return action()
    except (OSError, ValueError) as error:
        show_error(str(error))
        return FAILED


def print_json(value: object) -> None:
    """Print JSON for programs. Non-finite numbers are the strings "nan", "inf" and "-inf"."""
    from torchtitan_like.util.jsonl import to_json_value

    print(json.dumps(to_json_value(value), indent=2, allow_nan=False))


def end_rank(code: int) -> int:
    """Return `code`. Under torchrun with several ranks, end this rank with it instead.

    The threads of a destroyed gloo group may crash the interpreter during its shutdown.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        from torchtitan_like.resilience.end import end_process

        sys.stdout.flush()  # raises OutputError if it fails; end_process ignores that
        end_process(code)
    return code
