"""`titan config` and `titan help`: the configurations of the package, and their settings."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from torchtitan_like.cli.common import run_checked
from torchtitan_like.util.bundle import TRAIN_CONFIGS, config_names
from torchtitan_like.util.exit_codes import WRONG_INPUT
from torchtitan_like.util.output import show_error

# ---- titan config ls


def configure_ls(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "Commands that take a CONFIG accept these names. Columns: name, purpose, and the hardware\n"
        "that the file was made for; its comments say more.\n\n"
        "example: titan config ls"
    )


def run_ls(_arguments: argparse.Namespace) -> int:
    """Print the list. Returns the exit code."""
    from torchtitan_like.config.layers import parse_toml

    for name in config_names():
        text = (TRAIN_CONFIGS / name).read_text()
        hardware = re.findall(r"^# Hardware: ([^.;(]*)", text, re.MULTILINE)
        description = parse_toml(text)["job"]["description"]
        print(f"{name:<28}{description:<48}{' '.join(hardware).strip()}")
    return 0


# ---- titan config show


def configure_show(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    _add_name(parser)
    parser.epilog = (
        "Prints the file with its comments. `titan check NAME > FILE` writes all settings instead,\n"
        "with their defaults. Returns 2 if there is no configuration of that name.\n\n"
        "example: titan config show llama3_8b"
    )


def run_show(arguments: argparse.Namespace) -> int:
    """Print the file. Returns the exit code."""

    def action() -> int:
        print(_bundled(arguments.name).read_text(), end="")
        return 0

    return run_checked(action, ValueError)


# ---- titan config copy


def configure_copy(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    _add_name(parser)
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to create")
    parser.epilog = (
        "Returns 2 if the file exists, or if there is no configuration of that name.\n\n"
        "example: titan config copy llama3_8b my.toml"
    )


def run_copy(arguments: argparse.Namespace) -> int:
    """Copy the file. Returns the exit code."""

    def action() -> int:
        text = _bundled(arguments.name).read_text()
        with arguments.file.open("x") as file:
            file.write(text)
        print(f"Wrote {arguments.file}. Train with it: titan train {arguments.file}")
        return 0

    return run_checked(action, ValueError)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a name that `titan config ls` prints")


def _bundled(name: str) -> Path:
    """Return the path of a configuration, with or without .toml. Raises ValueError."""
    from torchtitan_like.util.suggestions import did_you_mean

    names = config_names()
    file_name = f"{name.removesuffix('.toml')}.toml"
    if file_name in names:
        return TRAIN_CONFIGS / file_name
    remedy = did_you_mean(file_name, names) or "`titan config ls` lists all"
    raise ValueError(f"The package has no configuration {name!r}: {remedy}")


# ---- titan help


def configure_help(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="a section, such as checkpoint; a key, such as optimizer.lr; or the last part of "
        "keys, such as steps",
    )
    parser.add_argument(
        "--experimental.custom_import",
        dest="custom_import",
        metavar="MODULE",
        default="",
        help="module or .py file to import first, which registers sections",
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
        return WRONG_INPUT
    texts = [settings_help(name) for name in arguments.names]
    for name, text in zip(arguments.names, texts, strict=True):
        if not text:
            remedy = suggest_key(name) or "titan train --help shows the common settings"
            show_error(f'There is no setting or section "{name}": {remedy}')
            return WRONG_INPUT
    print("\n\n".join(texts))
    return 0
