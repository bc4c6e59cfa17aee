"""The start of a rank's process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
