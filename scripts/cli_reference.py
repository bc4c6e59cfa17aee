"""Write docs/reference/cli.md, with the arguments of every sub-command of `titan`.

python scripts/cli_reference.py > docs/reference/cli.md
"""

from __future__ import annotations

import argparse

from torchtitan_like.cli import COMMANDS, Command, build_parser, executable_commands

INTRODUCTION = """\
<!-- Written by `python scripts/cli_reference.py > docs/reference/cli.md`; a test compares the two. -->

# The `titan` command

`titan COMMAND --help` shows the same on the terminal. `python -m torchtitan_like` is the same program.
`titan train`, `titan check` and `titan bench` also take every [setting](config.md) as `--section.key VALUE`. The codes that a
run returns are in [exit codes](exit_codes.md). Other commands return 0, or 2 for wrong input, where nothing else is stated.
"""


def markdown() -> str:
    """Return the text of docs/reference/cli.md."""
    parts = [INTRODUCTION]
    for group in dict.fromkeys(command.group for command in COMMANDS):
        parts.append(f"\n## {group}\n")
        commands = [command for command in COMMANDS if command.group == group]
        parts += [_section(command) for command in executable_commands(commands)]
    return "".join(parts)


def _section(command: Command) -> str:
    parser = build_parser(command)
    text, _, example = (parser.epilog or "").partition("example: ")
    lines = [f"\n### titan {command.name}\n", f"{parser.description}\n"]
    rows = [_row(action) for action in parser._actions if action.dest != "help"]
    if rows:
        lines += ["| argument | meaning |", "| --- | --- |", *rows, ""]
    if text:
        lines += ["```text", text.strip(), "```", ""]
    return "\n".join([*lines, "```bash", example.strip(), "```", ""])


def _row(action: argparse.Action) -> str:
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = str(action.metavar or action.dest.upper())
    takes_value = action.nargs != 0
    names = [f"{name} {value}" if takes_value else name for name in action.option_strings]
    meaning = (action.help or "") % {"default": action.default}
    cells = (", ".join(f"`{name}`" for name in names or [value]), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    """Print the page."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(markdown(), end="")


if __name__ == "__main__":
    main()
