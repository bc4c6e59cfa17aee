"""`titan completion`: print a script that completes `titan` commands in a shell."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_like.cli import Command

SHELLS = ("bash", "zsh")
EXAMPLE = "titan completion bash"

# It completes file names if a command has no fixed words (`-o default`).
SCRIPT = """\
# {shell} completion of titan
_titan() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" path="" words="" options=""
  if [ "$COMP_CWORD" -gt 1 ]; then path="${{COMP_WORDS[1]}}"; fi
  if [ "$COMP_CWORD" -gt 2 ]; then
    case "$path ${{COMP_WORDS[2]}}" in
      {verbs}) path="$path ${{COMP_WORDS[2]}}" ;;
    esac
  fi
  case "$path" in
{cases}
  esac
  case "$current" in
    -*) words="$options" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _titan titan
"""
ZSH_START = "autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.epilog = (
        "To complete commands, options and settings in every new shell:\n"
        "  titan completion bash >> ~/.bashrc\n"
        "  titan completion zsh >> ~/.zshrc\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the script. Returns the exit code."""
    from torchtitan_like.cli import COMMANDS

    verbs = "|".join(f'"{verb.name}"' for command in COMMANDS for verb in command.verbs)
    cases = "\n".join(_cases("", COMMANDS))
    if arguments.shell == "zsh":
        sys.stdout.write(ZSH_START)
    sys.stdout.write(SCRIPT.format(shell=arguments.shell, verbs=verbs, cases=cases))
    return 0


def _cases(path: str, commands: Sequence[Command]) -> Iterator[str]:
    """Yield the shell's case of a path of words, and of all paths that start with it."""
    options = "--help --version" if not path else "--help"
    yield f'    "{path}") words="{_last_words(commands)}"; options="{options}" ;;'
    for command in commands:
        if not command.module:
            yield from _cases(command.name, command.verbs)
            continue
        words, options = _vocabulary(command)
        words = f"{_last_words(command.verbs)} {words}".strip()
        yield f'    "{command.name}") words="{words}"; options="{options}" ;;'
        if command.verbs:
            yield from list(_cases(command.name, command.verbs))[1:]


def _last_words(commands: Sequence[Command]) -> str:
    return " ".join(command.name.split()[-1] for command in commands)


def _vocabulary(command: Command) -> tuple[str, str]:
    """Return the fixed words and the options of a command, each separated by blanks."""
    from torchtitan_like.cli import build_parser

    module = importlib.import_module(f"torchtitan_like.cli.{command.module}")
    parser = build_parser(command)
    module.configure(parser)
    words: list[str] = []
    options: list[str] = []
    parsers = [parser]
    for one in parsers:  # grows by the parsers of kinds
        for action in one._actions:
            options += [option for option in action.option_strings if _is_offered(option)]
            if not action.option_strings and action.choices:
                words += map(str, action.choices)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    if command.takes_settings:
        from torchtitan_like.config.fields import all_settings

        keys = (setting.key for setting in all_settings())
        options += [f"--{key}" for key in keys if "<" not in key]
    return " ".join(words), " ".join(dict.fromkeys(options))


def _is_offered(option: str) -> bool:
    """Return True for a long option, except the spellings of TorchTitan with underscores."""
    return option.startswith("--") and "_" not in option.partition(".")[0]
