"""`experimental.custom_import`, and names of code, load modules in `titan check` and on each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runner import ROOT

# Each process that imports this module creates a file next to it.
CODE = """
import os, pathlib
(pathlib.Path(__file__).parent / f"imported-by-rank-{os.environ.get('RANK')}").touch()

def constant(step, total_steps, settings):
    return 1.0
"""
CUSTOM_IMPORT = '[experimental]\ncustom_import = "{}"'

TOML = """
extends = "debug_model.toml"
{setting}
[model.args]
dim = 32
n_layers = 2
n_heads = 4
[training]
seq_len = 32
steps = 1
[validation]
enable = false
[checkpoint]
enable = false
"""


def titan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command like the installed program: the current folder is not on Python's path."""
    env = {name: value for name, value in os.environ.items() if name != "NGPU"}
    python_path = os.pathsep.join([str(ROOT), str(folder.parent / "path")])
    env |= {"PYTHONPATH": python_path, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torchtitan_like", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


# A model with a function that imports another module at its call.
LAZY_CODE = """
import dataclasses
from torchtitan_like.models import get_spec, register

def check(args):
    import my_checks
    return my_checks.problems(args)

register(dataclasses.replace(get_spec("llama3"), name="lazy", check=check))
"""


@pytest.mark.parametrize(
    ("setting", "current"),
    [
        pytest.param(CUSTOM_IMPORT.format("my_code.py"), "elsewhere", id="a file next to the TOML"),
        pytest.param(
            CUSTOM_IMPORT.format("my_code"),
            "configs",
            id="a module of the current folder",
            marks=pytest.mark.nightly,
        ),
        pytest.param('[lr_scheduler]\nname = "my_code:constant"', "configs", id="a name"),
    ],
)
def test_check_and_all_ranks_import_the_module(tmp_path: Path, setting: str, current: str) -> None:
    for folder in ("configs", "elsewhere", "path"):
        (tmp_path / folder).mkdir()
    (tmp_path / "configs/my_code.py").write_text(CODE)
    # The current folder has priority.
    (tmp_path / "path/my_code.py").write_text("raise ImportError('from PYTHONPATH')")
    (tmp_path / "configs/run.toml").write_text(TOML.format(setting=setting))
    for arguments in (["check"], ["train", "--nproc", "2"]):
        process = titan(tmp_path / current, arguments[0], "../configs/run.toml", *arguments[1:])
        assert process.returncode == 0, process.stderr[-3000:]
    imported = {path.name for path in (tmp_path / "configs").glob("imported-by-*")}
    assert imported == {"imported-by-rank-None", "imported-by-rank-0", "imported-by-rank-1"}


def test_missing_file_is_reported_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML.format(setting=CUSTOM_IMPORT.format("absent.py")))
    process = titan(tmp_path, "check", "run.toml")
    assert process.returncode == 78 and str(tmp_path / "absent.py") in process.stderr


@pytest.mark.nightly
def test_module_functions_can_import_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML.format(setting=CUSTOM_IMPORT.format("my_code")))
    (tmp_path / "my_code.py").write_text(LAZY_CODE)
    (tmp_path / "my_checks.py").write_text("def problems(args):\n    return []\n")
    for command in ("check", "train"):
        process = titan(tmp_path, command, "run.toml", "--model.name", "lazy")
        assert process.returncode == 0, process.stderr[-3000:]
