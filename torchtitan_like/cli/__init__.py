"""The `titan` command: one table of sub-commands, and one module for each group of them.

For a sub-command such as `titan ckpt ls`, its module has `configure_ls(parser)`, which adds the
arguments, and `run_ls(arguments)`, which returns the exit code. Only the module of the chosen
sub-command is imported. This package only parses arguments and prints output.
"""

from __future__ import annotations

import argparse
import importlib
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_like.util.exit_codes import WRONG_INPUT, ExitCode
from torchtitan_like.util.output import OutputError, checked_stdout, open_closed_streams, show_error
from torchtitan_like.util.suggestions import did_you_mean, nearest

HELP = ("--help", "-h")
# Shell function that completes file names: `shtab.FILE`.
SHTAB_FILE = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}


class Command(NamedTuple):
    """A sub-command. ``name`` has all of its words; ``module`` is X for X_commands.py.

    The next word after a command with ``verbs`` selects a verb. If the command has a module too,
    any other word belongs to its own arguments.
    """

    name: str
    group: str
    summary: str
    module: str = ""
    takes_settings: bool = False  # accepts --section.key value; see `_parse_with_settings`
    verbs: tuple[Command, ...] = ()

    @property
    def verb(self) -> str:
        """The last word of the name."""
        return self.name.split()[-1]

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        self._function("configure")(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the sub-command. Returns the exit code."""
        code: int = self._function("run")(arguments)
        return code

    def _function(self, prefix: str) -> Callable[..., Any]:
        module = importlib.import_module(f"{__name__}.{self.module}_commands")
        function: Callable[..., Any] = getattr(module, f"{prefix}_{self.verb.replace('-', '_')}")
        return function


CONFIG = (
    Command("config ls", "Files", "list the configurations of the package", "config"),
    Command("config show", "Files", "print a configuration with its comments", "config"),
    Command("config copy", "Files", "copy a configuration, to edit it", "config"),
)

CKPT = (
    Command("ckpt ls", "Inspect", "list the checkpoints of a run", "ckpt"),
    Command("ckpt show", "Inspect", "print the manifest and the tensors of a checkpoint", "ckpt"),
    Command("ckpt verify", "Inspect", "compare every byte with the stored hashes", "ckpt"),
    Command("ckpt diff", "Inspect", "compare two checkpoints", "ckpt"),
    Command(
        "ckpt export",
        "Convert",
        "write a checkpoint as a Hugging Face directory, or in another format",
        "ckpt",
    ),
)

DATA = (
    Command(
        "data tokenize", "Prepare", "tokenize a corpus into a folder that runs train on", "data"
    ),
    Command("data train-tokenizer", "Prepare", "train a byte-level BPE tokenizer", "data"),
    Command(
        "data tiny",
        "Prepare",
        "make a small tokenizer, dataset or model from a large one",
        "data",
        takes_settings=True,
    ),
    Command(
        "data show",
        "Inspect",
        "print the samples that a step has read, or will read",
        "data",
        takes_settings=True,
    ),
)

RUN = (
    Command("run ls", "Inspect", "list runs, their state and progress", "run"),
    Command(
        "run watch", "Inspect", "show the progress of a run and the position of its ranks", "run"
    ),
    Command("run compare", "Inspect", "compare two runs, or a run with its plan", "run"),
    Command(
        "run report", "Inspect", "write a page about one or several runs, or draw curves", "run"
    ),
    Command(
        "run replay",
        "Inspect",
        "run a non-finite step again, in one process",
        "run",
        takes_settings=True,
    ),
    Command("run save", "Control", "let a run save a checkpoint now, and continue", "run"),
    Command("run stop", "Control", "save and end a run", "run"),
)

NODE = (
    Command("node check", "Nodes", "check this machine, or all ranks of a job", "node"),
    Command(
        "node bench",
        "Nodes",
        "measure how fast ranks all-reduce, or a machine for titan plan",
        "node",
    ),
)

SLURM = (Command("slurm init", "Scripts", "write batch scripts into a folder, to edit", "slurm"),)

PLAN = (
    Command(
        "plan search",
        "Layouts",
        "find the fastest layouts of a configuration that fit",
        "plan",
        takes_settings=True,
    ),
)

# In the order of `titan --help`.
COMMANDS = (
    Command("train", "Start", "train a model", "train", takes_settings=True),
    Command(
        "check", "Start", "check a configuration without training", "train", takes_settings=True
    ),
    Command(
        "bench", "Start", "train with varied settings, and compare", "train", takes_settings=True
    ),
    Command("ladder", "Start", "predict the loss of a larger model", "train", takes_settings=True),
    Command(
        "config", "Start", "list, show or copy the configurations of the package", verbs=CONFIG
    ),
    Command("help", "Start", "explain settings: a section, or a key", "config"),
    Command("data", "Start", "tokenize, show or shrink data, train a tokenizer", verbs=DATA),
    Command("download", "Start", "download a model from the Hugging Face Hub", "use"),
    Command("ckpt", "Use", "list, verify, compare or export checkpoints", verbs=CKPT),
    Command("generate", "Use", "continue prompts with the model of a checkpoint", "use"),
    Command("eval", "Use", "score a checkpoint on tasks of lm-eval", "use"),
    Command("run", "Watch", "list, watch, report, compare, replay, save or stop runs", verbs=RUN),
    Command(
        "plan",
        "Scale",
        "find the memory of a configuration, and its best layout, without GPUs",
        "plan",
        takes_settings=True,
        verbs=PLAN,
    ),
    Command("node", "Scale", "check machines and measure their network", verbs=NODE),
    Command("slurm", "Scale", "write batch scripts", verbs=SLURM),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command that `argv` names. Returns its exit code.

    Returns 128 + SIGPIPE if the reader of the output, such as `head`, has ended,
    `ExitCode.STORAGE` if the output cannot be written for another reason, and
    `ExitCode.INTERRUPTED` after Ctrl-C.
    """
    open_closed_streams()
    try:
        with checked_stdout():
            return _run(list(sys.argv[1:] if argv is None else argv))
    except OutputError as error:
        if error.is_closed_pipe:
            return 128 + signal.SIGPIPE
        show_error(str(error))
        return int(ExitCode.STORAGE)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        from torchtitan_like.util.version import describe_version

        print(describe_version())
        return 0
    prog = "titan"
    commands: Sequence[Command] = COMMANDS
    while True:
        if not words:
            show_error(help_text(prog, commands), end="")
            return WRONG_INPUT
        if words[0] in HELP or words == ["help"]:
            print(help_text(prog, commands), end="")
            return 0
        name = words.pop(0)
        command = next((one for one in commands if one.verb == name), None)
        if command is None:
            show_error(_unknown(prog, commands, name))
            return WRONG_INPUT
        verbs = {each.verb for each in command.verbs}
        if command.module and not (words and words[0] in verbs):
            break
        prog = f"titan {command.name}"
        commands = command.verbs
    return command.run(parse(command, words))


def parse(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words after the name of a command. Exits with code 2 if they are wrong."""
    parser = build_parser(command)
    if command.takes_settings:
        return _parse_with_settings(parser, list(words))
    return parser.parse_args(words)


def executable_commands(commands: Sequence[Command] = COMMANDS) -> list[Command]:
    """Return all commands that have a module, verbs included."""
    executable: list[Command] = []
    for command in commands:
        executable += [command] if command.module else []
        executable += executable_commands(command.verbs)
    return executable


def build_parser(command: Command) -> argparse.ArgumentParser:
    """Return the parser of a sub-command."""
    parser = argparse.ArgumentParser(
        prog=f"titan {command.name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command.takes_settings:
        parser.usage = "%(prog)s [CONFIG] [OPTIONS] [--section.key VALUE ...]"
    command.configure(parser)
    return parser


def full_parser() -> argparse.ArgumentParser:
    """Return one parser of all commands and settings, for shtab's scripts of shell completion."""
    parser = argparse.ArgumentParser(prog="titan")
    parser.add_argument("--version", action="store_true")
    _add_commands(parser, COMMANDS)
    return parser


def _add_commands(parser: argparse.ArgumentParser, commands: Sequence[Command]) -> None:
    from torchtitan_like.cli.common import PATH_TYPES
    from torchtitan_like.config.fields import all_settings

    subparsers = parser.add_subparsers()
    for command in commands:
        child = subparsers.add_parser(
            command.verb,
            help=command.summary,
            conflict_handler="resolve",
        )
        if command.verbs:
            _add_commands(child, command.verbs)
        if command.takes_settings:
            for setting in all_settings():
                if "<" not in setting.key:
                    child.add_argument(f"--{setting.key}")
        if command.module:
            command.configure(child)
        for action in child._actions:
            if action.type in PATH_TYPES or action.dest == "config":
                action.complete = SHTAB_FILE  # type: ignore[attr-defined]


def help_text(prog: str = "titan", commands: Sequence[Command] = COMMANDS) -> str:
    """Return what `titan --help` prints: the table of commands, grouped by task."""
    lines = [f"usage: {prog} COMMAND [ARGUMENTS]", ""]
    width = max(len(command.name) for command in commands) + 2
    for group in dict.fromkeys(command.group for command in commands):
        lines.append(f"{group}:")
        lines += [f"  {c.name:<{width}}{c.summary}" for c in commands if c.group == group]
    lines += ["", "titan COMMAND --help describes one command and shows an example."]
    return "\n".join(lines) + "\n"


def _unknown(prog: str, commands: Sequence[Command], name: str) -> str:
    names = [*(command.verb for command in commands), "--help"]
    if commands is COMMANDS:
        names.append("--version")
    similar = nearest(name, names)
    remedy = f"Run `{prog} --help` for the list."
    if similar:
        remedy = f"Did you mean `{prog} {similar}`?"
    return f"{prog}: there is no command {name!r}. {remedy}"


def _parse_with_settings(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parse the options of a sub-command. All other options become `arguments.settings`, in order.

    `arguments.words` has all words that the user typed. The words after a setting, up to the next
    option, are its values. `key=value` is no CONFIG: the settings report how to write it.
    """
    options = _option_names(parser)
    with_value = {
        name for name, action in parser._option_string_actions.items() if action.nargs != 0
    }
    own: list[str] = []
    settings: list[str] = []
    target = own
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            option = name.replace("_", "-")
            target = own if option in options else settings
            if target is own:
                word = option + equals + value
            elif "." not in name:
                parser.error(f"there is no option {name}: {_remedy(name, options)}")
        elif re.fullmatch("-[a-z]", word):  # a short option such as -h or -o; -1 is a value
            target = own
        is_assignment = equals and name.replace(".", "").isidentifier() and not Path(word).exists()
        is_value = bool(own) and own[-1] in with_value  # such as of --vary KEY=VALUE,VALUE
        (settings if target is own and is_assignment and not is_value else target).append(word)
    arguments = parser.parse_args(own)
    arguments.settings = settings
    arguments.words = words
    return arguments


def _remedy(name: str, options: set[str]) -> str:
    from torchtitan_like.config.arguments import flags_named, suggest_key

    if remedy := did_you_mean(name, options):
        return remedy
    key = name.removeprefix("--")
    if flags := flags_named(f"{key}=VALUE"):
        return f"write {flags}"
    return suggest_key(key) or "--help lists the options"


def _option_names(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a parser and of its sub-parsers."""
    names = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names = names.union(*map(_option_names, action.choices.values()))
    return names
