"""The `titan` command: one table of sub-commands, and one module for each of them in this folder.

A module has `configure(parser)`, which adds its arguments, and `run(arguments)`, which returns the exit code.
Only the module of the chosen sub-command is imported. This package parses arguments; the work is in the other rooms.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

USAGE_ERROR = 2


class Command(NamedTuple):
    """A sub-command: ``module`` names a file of this folder."""

    name: str
    group: str
    summary: str
    module: str
    takes_settings: bool = False  # accepts --section.key value, in `arguments.settings`


# In the order of `titan --help`.
COMMANDS = (
    Command("check", "Train", "check a configuration without training", "check", takes_settings=True),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command that `argv` names. Returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(help_text(), end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else USAGE_ERROR
    if words[0] == "--version":
        from torchtitan_like import __version__

        print(__version__)
        return 0
    command = next((command for command in COMMANDS if command.name == words[0]), None)
    if command is None:
        print(_unknown(words[0]), file=sys.stderr)
        return USAGE_ERROR
    module = importlib.import_module(f"{__name__}.{command.module}")
    parser = build_parser(command)
    module.configure(parser)
    if command.takes_settings:
        arguments = _parse_with_settings(parser, words[1:])
    else:
        arguments = parser.parse_args(words[1:])
    code: int = module.run(arguments)
    return code


def build_parser(command: Command) -> argparse.ArgumentParser:
    """Return the parser of a sub-command, without its arguments."""
    usage = "%(prog)s [CONFIG] [OPTIONS] [--section.key VALUE ...]" if command.takes_settings else None
    return argparse.ArgumentParser(
        prog=f"titan {command.name}",
        usage=usage,
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=not command.takes_settings,
    )


def help_text() -> str:
    """Return what `titan --help` prints: the table of commands, grouped by task."""
    lines = ["usage: titan COMMAND [ARGUMENTS]", ""]
    width = max(len(command.name) for command in COMMANDS) + 2
    for group in dict.fromkeys(command.group for command in COMMANDS):
        lines.append(f"{group}:")
        lines += [f"  {c.name:<{width}}{c.summary}" for c in COMMANDS if c.group == group]
    lines += ["", "titan COMMAND --help describes one command and shows an example."]
    return "\n".join(lines) + "\n"


def _unknown(name: str) -> str:
    similar = difflib.get_close_matches(name, [command.name for command in COMMANDS], n=1)
    remedy = f"Did you mean `titan {similar[0]}`?" if similar else "Run `titan --help` for the list."
    return f"titan: there is no command {name!r}. {remedy}"


def _parse_with_settings(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parse a sub-command's own options. All other options become `arguments.settings`, in their order.

    A word with a dot in its name starts a setting, and the words up to the next option are its values.
    """
    own: list[str] = []
    settings: list[str] = []
    target = own
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            is_setting = "." in name
            target = settings if is_setting else own
            if not is_setting:
                word = name.replace("_", "-") + equals + value
        elif word == "-h":
            target = own
        target.append(word)
    arguments, unknown = parser.parse_known_args(own)
    arguments.settings = [*settings, *unknown]
    return arguments
