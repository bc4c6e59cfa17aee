"""Config file and settings on the command line, for `titan train` and `titan check`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from torchtitan_like.util.bundle import find_config


class HelpWithSettings(argparse.Action):
    """``--help``: print the options of the command, then all settings of a configuration.

    A config file in front of it, where the command takes one, may import a module that registers
    names and sections.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **_unused: object) -> None:
        super().__init__(
            option_strings, dest, nargs=0, help="show this help and all settings, and exit"
        )

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_unused: object
    ) -> None:
        from torchtitan_like.config.document import help_text
        from torchtitan_like.config.loader import CommandLine
        from torchtitan_like.util.modules import searching_modules_in
        from torchtitan_like.util.output import show_error

        argv = with_config(getattr(namespace, "config", None), [], show_error)
        with searching_modules_in(Path.cwd()), redirect_stdout(sys.stderr):
            for problem in CommandLine(argv).import_extensions():
                show_error(str(problem))
        sys.stdout.write(f"{parser.format_help()}\n{help_text()}")
        parser.exit()


def with_config(
    config: str | None, settings: Sequence[str], log: Callable[[str], None]
) -> list[str]:
    """Return the settings with --job.config_file in front.

    The name of a bundled config becomes its path: ``log`` receives a line with that path.
    """
    words = list(settings)
    if config is not None:
        words[:0] = ["--job.config_file", config]
    for index, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name.replace("-", "_") != "__job.config_file":
            continue
        if not has_value:
            value = words[index + 1] if index + 1 < len(words) else ""
        path = find_config(value)
        if path == Path(value).expanduser():
            continue
        log(f"Using the bundled configuration {path}")
        if has_value:
            words[index] = f"{name}={path}"
        else:
            words[index + 1] = str(path)
    return words
