"""The `titan` command: its table of sub-commands, their help, and what it imports."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.harness.outputs import closed_pipe, full_disk
from tests.harness.runner import ROOT
from torchtitan_like import cli

SCREEN = (24, 100)  # lines, columns
MAX_COMMANDS = 32


def test_help_fits_on_one_screen_and_names_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= SCREEN[0] and max(map(len, lines)) <= SCREEN[1]
    rows = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    assert rows == [[command.name, command.summary] for command in cli.COMMANDS]


def test_commands_of_a_group_are_listed_together() -> None:
    groups = [command.group for command in cli.COMMANDS]
    changes = [
        group for group, previous in zip(groups, [None, *groups], strict=False) if group != previous
    ]
    assert len(changes) == len(set(groups))
    names = [command.name for command in cli.executable_commands()]
    assert len(names) == len(set(names)) and len(names) <= MAX_COMMANDS


@pytest.mark.parametrize("command", cli.executable_commands(), ids=lambda command: command.name)
def test_the_help_of_a_command_has_an_example(
    command: cli.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*command.name.split(), "--help"])
    assert end.value.code == 0
    assert f"titan {command.name}" in capsys.readouterr().out
    assert f"example: titan {command.name}" in cli.build_parser(command).format_help()


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("usage: titan")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("chekc", "Did you mean `titan check`?"),
        ("--verison", "Did you mean `titan --version`?"),
        ("--hepl", "Did you mean `titan --help`?"),
        ("xyzzy", "Run `titan --help` for the list."),
    ],
)
def test_an_unknown_command_is_refused(
    name: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name]) == 2
    assert capsys.readouterr().err == f"titan: there is no command {name!r}. {remedy}\n"


def test_the_word_help_alone_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for word in ("help", "--help"):
        assert cli.main([word]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("xyzzy", "titan train --help"),
        ("training.step", 'did you mean "training.steps"?'),
    ],
)
def test_help_of_an_unknown_setting_is_refused(
    name: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["help", "compile", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f'There is no setting or section "{name}": {remedy}')


def test_help_reports_a_module_that_cannot_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["help", "compile", "--experimental.custom_import"]
    (tmp_path / "broken.py").write_text("raise ValueError('broken')")
    assert cli.main([*words, str(tmp_path / "broken.py")]) == 2
    assert "ValueError: broken" in capsys.readouterr().err


def test_options_and_settings_may_be_in_any_order() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?")
    parser.add_argument("--world-size")
    parser.add_argument("-o", dest="output")
    words = (
        "--world_size 2 --training.list a,b c,d X.toml --world-size=4 --stray.y 1 --x.y -1 -o out"
    )
    parsed = cli._parse_with_settings(parser, ["my.toml", *words.split()])
    assert (parsed.config, parsed.world_size, parsed.output) == ("my.toml", "4", "out")
    expected = ["--training.list", "a,b", "c,d", "X.toml", "--stray.y", "1", "--x.y", "-1"]
    assert parsed.settings == expected


CHECK = "train_configs/debug_model.toml --world-size 2"
WITHOUT_TORCH = [
    "--help",
    "check --help",
    "--version",
    f"check {CHECK}",
    "plan search --help",
    "run compare --help",
    "data tiny model --help",
    "ckpt ls tests/assets/checkpoints/v3",
    "ckpt show tests/assets/checkpoints/v3/step-3",
    "ckpt export --help",
]


@pytest.mark.parametrize("line", WITHOUT_TORCH)
def test_commands_start_without_torch(line: str) -> None:
    code = (
        f"import sys, runpy; sys.argv[1:] = {shlex.split(line)}\n"
        "try: runpy.run_module('torchtitan_like', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "sys.exit(bool({'torch', 'numpy', 'datasets', 'pyarrow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert any(
        text in done.stdout
        for text in ("usage:", "torch 2.", "[training]", "step-3", "steps", "tensors")
    )


def test_no_help_imports_torch() -> None:
    """One process shows the help of every command, in turn."""
    code = """
import sys
from torchtitan_like import cli
for name in [*(command.name for command in cli.executable_commands()), "data", "ckpt"]:
    try:
        cli.main([*name.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0, name
    slow = {"torch", "numpy", "datasets", "pyarrow"} & sys.modules.keys()
    assert not slow, f"titan {name} --help imports {slow}"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: titan") > len(cli.executable_commands())


def test_a_command_with_verbs_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ckpt", "--help"]) == 0
    captured = capsys.readouterr().out
    assert captured.startswith("usage: titan ckpt COMMAND") and "  ckpt verify" in captured
    assert cli.main(["ckpt"]) == 2
    assert cli.main(["ckpt", "verfy"]) == 2
    assert (
        "titan ckpt: there is no command 'verfy'. Did you mean `titan ckpt verify`?"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        (closed_pipe, 128 + signal.SIGPIPE, ""),
        (full_disk, 74, "Cannot write to stdout: No space left on device."),
    ],
    ids=["closed pipe", "full disk"],
)
def test_an_output_that_cannot_be_written_ends_a_process(
    words: list[str],
    output: Callable[[], AbstractContextManager[int]],
    code: int,
    message: str,
    tmp_path: Path,
) -> None:
    """As in `titan train --help | head`. `test_examples.py` runs all commands in one process."""
    command = [sys.executable, "-m", "torchtitan_like", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with output() as stdout:
        done = subprocess.run(
            command, cwd=tmp_path, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == code
    assert done.stderr.startswith(message) and done.stderr.count("\n") == bool(message)


@pytest.mark.parametrize("output", [closed_pipe, full_disk])
def test_a_broken_configuration_returns_78_without_stderr(
    output: Callable[[], AbstractContextManager[int]],
) -> None:
    command = [
        sys.executable,
        "-m",
        "torchtitan_like",
        "check",
        "debug_model.toml",
        "--no.key",
        "1",
    ]
    with output() as stderr:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr)
    assert (done.returncode, done.stdout) == (78, b"")
