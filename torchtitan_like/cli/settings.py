"""What `titan train` and `titan check` have in common: a config file and settings on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


class HelpWithSettings(argparse.Action):
    """``--help``: the options of the command, and then every setting of a configuration."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_unused: object) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show this help and all settings, and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_unused: object) -> None:
        from torchtitan_like.config.document import help_text

        sys.stdout.write(f"{parser.format_help()}\n{help_text()}")
        parser.exit()
