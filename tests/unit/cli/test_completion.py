"""shtab's script of `full_parser` completes commands, options, settings and files."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from torchtitan_like.cli import COMMANDS, executable_commands, full_parser

PRINT_REPLIES = 'printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the completion script for bash. Return its path."""
    shtab = pytest.importorskip("shtab")
    file = tmp_path_factory.mktemp("completion") / "titan.bash"
    file.write_text(shtab.complete(full_parser(), shell="bash"))
    return file


def complete(script: Path, folder: Path, *words: str) -> set[str]:
    """Return bash's completions of the last word in a folder."""
    line = " ".join(map(shlex.quote, words))
    current = shlex.quote(words[-1])
    commands = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        f"_shtab_titan titan {current} {shlex.quote(words[-2])}; {PRINT_REPLIES}"
    )
    done = subprocess.run(["bash", "-c", commands], cwd=folder, capture_output=True, text=True)
    return set(done.stdout.split())


def test_every_command_is_in_the_full_parser() -> None:
    root = full_parser()
    for command in executable_commands():
        parser = root
        for word in command.name.split():
            (subparsers,) = [action for action in parser._actions if action.nargs == "A..."]
            parser = subparsers.choices[word]
        names = set(parser._option_string_actions)
        assert ("--training.steps" in names) == command.takes_settings, command.name


def test_commands_options_and_settings_are_completed(script: Path, tmp_path: Path) -> None:
    (tmp_path / "my.toml").touch()
    assert complete(script, tmp_path, "titan", "") >= {command.name for command in COMMANDS}
    assert complete(script, tmp_path, "titan", "che") == {"check"}
    assert complete(script, tmp_path, "titan", "ckpt", "ver") == {"verify"}
    assert complete(script, tmp_path, "titan", "ckpt", "ls", "--j") == {"--json"}
    assert complete(script, tmp_path, "titan", "train", "--training.st") == {"--training.steps"}
    assert complete(script, tmp_path, "titan", "train", "m") == {"my.toml"}
    assert complete(script, tmp_path, "titan", "node", "check", "--training.st") == set()
