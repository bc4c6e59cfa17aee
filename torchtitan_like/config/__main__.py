"""Check a configuration without training.

    python -m torchtitan_like.config X.toml [--section.key value ...] [--world-size N] [--training]
                                            [--device-type cpu|cuda]

Prints the resolved configuration as TOML on stdout and warnings on stderr and returns 0, or every problem on stderr and
returns 78. ``--world-size`` checks the layout against N ranks; ``--training`` checks as training does: files must exist
and features must be available.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, redirect_stdout
from typing import Any

from torchtitan_like.config import ConfigError, Problem, dump_toml
from torchtitan_like.config.cli import wants_help
from torchtitan_like.config.problems import report
from torchtitan_like.preflight import load_checked


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        arguments, options = _split(argv)
        # What a module of the user's prints when it is imported is no part of the configuration.
        with nullcontext() if wants_help(arguments) else redirect_stdout(sys.stderr):
            config, warnings = load_checked(arguments, **options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return os.EX_CONFIG
    if warnings:
        print(report(warnings), file=sys.stderr)
    sys.stdout.write(dump_toml(config))
    return os.EX_OK


def _split(argv: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate this command's own options from settings. Raises ConfigError."""
    words, arguments = list(argv), []
    options: dict[str, Any] = {"world_size": None, "training": False, "device_type": None}
    problems = []
    while words:
        word = words.pop(0)
        name, attached, text = word.partition("=")
        name = name.replace("_", "-")
        if name == "--training" and not attached:
            options["training"] = True
        elif name in ("--world-size", "--device-type"):
            text = text if attached else (words.pop(0) if words else "")
            key = name.removeprefix("--").replace("-", "_")
            options[key] = int(text) if text.isdecimal() else text
        else:
            arguments.append(word)
    if arguments and not arguments[0].startswith("-"):
        arguments[:1] = ["--job.config_file", arguments[0]]
    size, device = options["world_size"], options["device_type"]
    if size is not None and not (isinstance(size, int) and size > 0):
        problems.append(Problem("--world-size", size, "an integer > 0", origin="command line"))
    if device not in (None, "cpu", "cuda"):
        problems.append(Problem("--device-type", device, '"cpu" or "cuda"', origin="command line"))
    if problems:
        raise ConfigError(problems)
    return arguments, options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
