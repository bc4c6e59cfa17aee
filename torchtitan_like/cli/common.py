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
from typing import TypeVar

from torchtitan_like.util.bundle import find_config
from torchtitan_like.util.exit_codes import WRONG_INPUT
from torchtitan_like.util.output import show_error, show_problem
from torchtitan_like.util.run_directory import MANIFEST, find_run, numbered_folders

DAMAGED = 1

T = TypeVar("T")


def add_json_flag(parser: argparse._ActionsContainer) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def positive_int(text: str) -> int:
    """Parse an integer from 1 to 10^18. Raises argparse.ArgumentTypeError."""
    return parse_value(text, int, lambda n: 0 < n <= 10**18, "an integer from 1 to 10^18")


def non_negative_int(text: str) -> int:
    """Parse an integer from 0 to 10^18. Raises argparse.ArgumentTypeError."""
    return parse_value(text, int, lambda n: 0 <= n <= 10**18, "an integer from 0 to 10^18")


def positive_number(text: str) -> float:
    """Parse a finite number above 0. Raises argparse.ArgumentTypeError."""
    return parse_value(text, float, lambda x: 0 < x < math.inf, "a number above 0")


def non_negative_number(text: str) -> float:
    """Parse a finite number, 0 or more. Raises argparse.ArgumentTypeError."""
    return parse_value(text, float, lambda x: 0 <= x < math.inf, "a number, 0 or more")


def fraction(text: str) -> float:
    """Parse a number above 0, at most 1. Raises argparse.ArgumentTypeError."""
    return parse_value(text, float, lambda x: 0 < x <= 1, "a number above 0, at most 1")


def parse_value(
    text: str, parse: Callable[[str], T], is_valid: Callable[[T], bool], expected: str
) -> T:
    """Return the value of an argument. Raises argparse.ArgumentTypeError, a usage error."""
    with suppress(ValueError):
        value = parse(text)
        if is_valid(value):
            return value
    raise argparse.ArgumentTypeError(f"it is {text[:40]!r}. Expected {expected}: correct it")


def step_path(text: str) -> Path:
    """Parse the path of a checkpoint. A run or its checkpoint folder means the newest step.

    Under torchrun, where each rank might see another newest step, the path does not change.
    """
    path = Path(text)
    newest = None if launched_ranks() > 1 else _newest_step(path)
    if newest is None:
        return path
    show_error(f"Using {newest}, the newest step")
    return newest


def steps_path(text: str) -> Path:
    """Parse the path of a step or of a folder of steps. A run means its checkpoint folder."""
    from torchtitan_like.checkpoint.step_folders import HF_EXPORTS

    path = Path(text)
    newest = _newest_step(path)
    return path if newest is None or newest.parent.name == HF_EXPORTS else newest.parent


def run_path(text: str) -> Path:
    """Parse the path of a run. A checkpoint folder or a step means its run."""
    path = Path(text)
    is_in_run = (path / MANIFEST).exists() or bool(numbered_folders(path))
    return (find_run(path) if is_in_run else None) or path


# Types of arguments that shells complete with file names.
PATH_TYPES = (Path, step_path, steps_path, run_path)


def _newest_step(path: Path) -> Path | None:
    """Return the newest step below a path; None if there is none, or if the path is a step."""
    from torchtitan_like.checkpoint.step_folders import newest_below

    return None if (path / MANIFEST).exists() else newest_below(path)


def names_config(arguments: argparse.Namespace) -> bool:
    """Return True if the user names a config file, as CONFIG or as a setting."""
    from torchtitan_like.config.arguments import last_value
    from torchtitan_like.config.loader import CONFIG_FILE

    return arguments.config is not None or last_value(arguments.settings, CONFIG_FILE) is not None


def settings_of(arguments: argparse.Namespace) -> list[str]:
    """Return the settings, with CONFIG as the first of them if the user names one.

    Prints the path of a configuration of the package: in another folder, the user's own file of
    that name would be read.
    """
    from torchtitan_like.config.arguments import last_value
    from torchtitan_like.config.loader import CONFIG_FILE

    config = [] if arguments.config is None else ["--job.config_file", arguments.config]
    settings = [*config, *arguments.settings]
    name = last_value(settings, CONFIG_FILE) or ""
    if (path := find_config(name)) != Path(name).expanduser():
        show_error(f"Using the configuration {path} of the package")
    return settings


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
        "the checkpoint's model or sections, or whose package has its extensions. Modules that "
        "only the checkpoint's own config names are never imported",
    )


def run_checked(
    action: Callable[[], int],
    *others: type[Exception],
    damage_code: int = DAMAGED,
    is_leader: bool = True,
) -> int:
    """Call `action` and return its code. Print expected errors, and return `WRONG_INPUT`.

    others: expected errors in addition to OSError and `RunFailure`.
    damage_code: returned for a damaged checkpoint instead.
    is_leader: False on ranks that print nothing, because another rank prints the same error.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    try:
        return action()
    except Exception as error:
        from torchtitan_like.checkpoint.errors import DamagedError
        from torchtitan_like.util.exit_codes import RunFailure

        if not isinstance(error, (RunFailure, OSError, *others)):
            raise
        if is_leader:
            show_problem(error)
        return damage_code if isinstance(error, DamagedError) else WRONG_INPUT


def print_json(value: object) -> None:
    """Print JSON for programs. Non-finite numbers are the strings "nan", "inf" and "-inf"."""
    from torchtitan_like.util.jsonl import to_json_value

    print(json.dumps(to_json_value(value), indent=2, allow_nan=False))


def launched_ranks() -> int:
    """Return the number of ranks that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def end_rank(code: int) -> int:
    """Return `code`. Under torchrun with several ranks, end this rank with it instead.

    The threads of a destroyed gloo group may crash the interpreter during its shutdown.
    """
    if launched_ranks() > 1:
        from torchtitan_like.resilience.end import end_process

        sys.stdout.flush()  # raises OutputError if it fails; end_process ignores that
        end_process(code)
    return code
