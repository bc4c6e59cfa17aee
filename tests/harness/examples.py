"""The examples in the help of `titan` commands."""

from __future__ import annotations

import shlex

from torchtitan_like.cli import build_parser, executable_commands


def example_of(name: str) -> str:
    """Return the example in the help of a command, as one line of a shell."""
    (command,) = (command for command in executable_commands() if command.name == name)
    _, _, example = (build_parser(command).epilog or "").partition("example: ")
    return example.strip()


def example_words(name: str) -> list[str]:
    """Return the words after `titan` of the example in the help of a command."""
    return shlex.split(example_of(name))[1:]
