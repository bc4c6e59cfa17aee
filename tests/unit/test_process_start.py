"""The start of a rank's process."""

from __future__ import annotations

import subprocess
import sys

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
