"""`titan help`: explain settings."""

from __future__ import annotations

import argparse

from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.output import show_error

# ---- titan help


def configure_help(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="a section, such as checkpoint; a key, such as optimizer.lr; or the last part of keys, "
        "such as steps",
    )
    parser.add_argument(
        "--experimental.custom_import",
        dest="custom_import",
        metavar="MODULE",
        default="",
        help="module or .py file to import first, which registers names or sections",
    )
    parser.epilog = (
        "Prints type, choices, default and meaning. Returns 2 if no setting has that name.\n\n"
        "example: titan help optimizer.lr compile"
    )


def run_help(arguments: argparse.Namespace) -> int:
    """Print the settings. Returns the exit code."""
    from torchtitan_like.config.arguments import suggest_key
    from torchtitan_like.config.document import settings_help
    from torchtitan_like.config.loader import import_module

    if (problem := import_module(arguments.custom_import)) is not None:
        show_error(str(problem))
        return int(ExitCode.BAD_CONFIG)
    texts = [settings_help(name) for name in arguments.names]
    for name, text in zip(arguments.names, texts, strict=True):
        if not text:
            remedy = suggest_key(name) or "titan train --help shows the common settings"
            show_error(f'There is no setting or section "{name}": {remedy}')
            return 2
    print("\n\n".join(texts))
    return 0
