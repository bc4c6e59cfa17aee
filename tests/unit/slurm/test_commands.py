"""`titan slurm init` and the program that train.slurm calls: their files, and their examples."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.examples import example_words
from tests.harness.runner import ROOT
from torchtitan_like.cli import main
from torchtitan_like.slurm import job, watchdog
from torchtitan_like.slurm.templates import (
    FOLDER_OF_SCRIPTS,
    FOLDER_OF_TITAN,
    PYTHON_OF_TITAN,
    TEMPLATES,
)

CONFIG = """[job]
dump_folder = "outputs"
[checkpoint]
enable = true
folder = "checkpoint"
[training]
steps = 10
[resilience]
kill_switch_path = "KILL"
"""


def test_init_writes_all_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(example_words("slurm init")) == 0
    folder = tmp_path / "slurm"
    names = {path.name for path in TEMPLATES.iterdir() if path.is_file()} - {"__init__.py"}
    assert {path.name for path in folder.iterdir()} == names
    assert capsys.readouterr().out.split() == [f"slurm/{name}" for name in sorted(names)]
    for path in folder.iterdir():
        text = path.read_text()
        for word in (FOLDER_OF_SCRIPTS, FOLDER_OF_TITAN, PYTHON_OF_TITAN):
            assert word not in text
        assert "scripts/slurm" not in text and "run_train.sh" not in text, (
            "expected no path of the repository"
        )
        assert os.access(path, os.X_OK) == text.startswith("#!")


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.slurm").write_text("a script of the user")
    assert main(["slurm", "init", str(tmp_path)]) == 2
    assert f"{tmp_path} already contains train.slurm" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.slurm"]
    assert main(["slurm", "init", str(tmp_path / "train.slurm")]) == 2


def test_scripts_find_their_folder_and_titan(tmp_path: Path) -> None:
    """Slurm runs a copy of a batch script in another folder."""
    folder = tmp_path / "a folder"
    assert main(["slurm", "init", str(folder)]) == 0
    (tmp_path / "bin").mkdir()
    titan = tmp_path / "bin/titan"
    titan.write_text(f'#!/bin/sh\nexec {sys.executable} -m torchtitan_like "$@"\n')
    titan.chmod(0o755)
    with (folder / "env.sh").open("a") as file:
        file.write(f"export PATH={tmp_path}/bin:$PATH PYTHONPATH={ROOT}\n")
    for name in ("train.slurm", "train_array.slurm"):
        (tmp_path / name).write_text((folder / name).read_text())
        arguments = ["--job.config_file", "debug_model.toml", "--job.dump_folder", "outputs"]
        done = run_script(tmp_path / name, *arguments, DRY_RUN="1")
        assert done.returncode == 0, done.stderr
        line = done.stdout.splitlines()[-1]
        assert shlex.split(line)[-5:] == [f"{folder}/node.sh", *arguments]
    (tmp_path / "cron.slurm").write_text((folder / "cron.slurm").read_text())
    done = run_script(tmp_path / "cron.slurm", "1day", str(tmp_path / "jobs"), DRY_RUN="1")
    assert shlex.split(done.stdout.splitlines()[0])[-3:-1] == [f"{folder}/cron.slurm", "1day"]


def test_a_job_without_titan_starts_nothing(tmp_path: Path) -> None:
    assert main(["slurm", "init", str(tmp_path)]) == 0
    (tmp_path / "env.sh").write_text("export PATH=/usr/bin:/bin\n")
    done = run_script(tmp_path / "train.slurm", "--job.config_file", "x.toml", DRY_RUN="1")
    assert done.returncode == 78 and "There is no titan command in PATH" in done.stderr


def run_script(path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env.pop("SCRIPTS", None)
    return subprocess.run(
        ["bash", str(path), *arguments],
        cwd=path.parent,
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def example(verb: str) -> list[str]:
    """Return the arguments of the example of `before` or `after`."""
    [line] = [line for line in str(job.__doc__).splitlines() if f"slurm.job {verb}" in line]
    arguments, _, source = line.partition(" < ")
    assert source == "outputs/config.toml"
    return arguments.split()[3:]


@pytest.mark.parametrize(("verb", "code", "output"), [("before", 0, "0\n"), ("after", 75, "1\n")])
def test_examples_of_before_and_after_work(
    verb: str,
    code: int,
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without exit.json, `after` reports a crash."""
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "REQUEUE", "MAX_STALLED_STARTS", "DRY_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(CONFIG))
    assert job.main(example(verb)) == code
    assert capsys.readouterr().out == output


@pytest.mark.parametrize("verb", ["before", "after"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "job.dump_folder is missing"),
        ("[training\n", "Expected ']'"),
        (CONFIG.replace('[job]\ndump_folder = "outputs"', ""), "job.dump_folder is missing"),
        (CONFIG.replace("[training]\nsteps = 10", ""), "training.steps is missing"),
        (CONFIG.replace("= 10", '= "ten"'), "training.steps is 'ten', not an integer"),
        ("job = 3\n" + CONFIG.replace("[job]", "[other]"), "job is '3', not a table"),
    ],
)
def test_other_input_than_a_configuration_is_refused(
    verb: str,
    text: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert job.main(example(verb)) == 78
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("The standard input is not a resolved configuration: ")
    assert problem in captured.err and "Expected the output of titan check" in captured.err


@pytest.mark.parametrize("verb", ["before", "after"])
def test_a_limit_of_starts_that_is_not_a_number_is_refused(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAX_STALLED_STARTS", "many")
    monkeypatch.setattr(sys, "stdin", io.StringIO(CONFIG))
    assert job.main(example(verb)) == 78
    assert capsys.readouterr().err.startswith(
        "MAX_STALLED_STARTS is 'many'. Expected a number of starts"
    )


def test_the_example_of_the_watchdog_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/attempts/1").mkdir(parents=True)
    [line] = [line for line in str(watchdog.__doc__).splitlines() if "python -m" in line]
    assert watchdog.main(line.split()[3:]) == 0
