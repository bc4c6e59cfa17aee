"""The start of a rank's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_like.process_start import ALLOCATOR, EXPANDABLE, has_expandable_segments

# Modules in the order in which `python -m torchtitan_like.train` imports them.
IMPORT_THE_TRAINER = """
import gc
from torchtitan_like.process_start import begin_rank

begin_rank(["--job.dump_folder", "nowhere"])
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
import torchtitan_like.train

print(len(collections))
"""


def test_no_garbage_is_collected_while_the_trainer_is_imported() -> None:
    command = [sys.executable, "-c", IMPORT_THE_TRAINER]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "0\n"), result.stderr


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_of_openmp_sleep_while_they_wait(given: str | None) -> None:
    code = """
import os, torchtitan_like.process_start as start
start.begin_rank([])
os.system("echo $OMP_WAIT_POLICY")
"""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": given} if given else {}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stdout.strip() == (given or "PASSIVE"), result.stderr


@pytest.mark.parametrize(
    ("given", "is_expandable"),
    [
        ({}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, False),
        ({"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}, False),
    ],
)
def test_the_allocator_has_expandable_segments_unless_it_has_other_settings(
    given: dict[str, str], is_expandable: bool, tmp_path: Path
) -> None:
    assert has_expandable_segments(given) == is_expandable
    code = """
import os, pathlib, torchtitan_like.process_start as start
start.NVIDIA_DRIVER = pathlib.Path(os.environ["DRIVER"])
start.begin_rank([])
print({name: os.environ[name] for name in start.ALLOCATOR if name in os.environ})
"""
    others = {key: value for key, value in os.environ.items() if key not in ALLOCATOR}
    for driver in (tmp_path, tmp_path / "none"):
        environment = {**others, **given, "DRIVER": str(driver)}
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        added = {ALLOCATOR[0]: EXPANDABLE} if driver == tmp_path and not given else {}
        assert result.stdout.strip() == str(given or added), result.stderr


# Ctrl-C while a module is imported.
INTERRUPT_THE_IMPORT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module(PROGRAM, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("torchtitan_like", "torchtitan_like.cli.ckpt_commands"),
        ("torchtitan_like.train", "platform"),
        ("torchtitan_like.train", "torchtitan_like.config"),
        ("torchtitan_like.torchrun", "torch"),
    ],
)
def test_an_interrupt_during_the_imports_ends_without_a_traceback(
    program: str, module: str
) -> None:
    code = f"MODULE, PROGRAM = {module!r}, {program!r}\n{INTERRUPT_THE_IMPORT}"
    command = [sys.executable, "-c", code, "ckpt", "ls"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 130 and "Traceback" not in result.stderr, result.stderr
