"""One rank of the trainer on a null CUDA device: `python -m tests.gpu_null.rank TRAINER_ARGUMENTS`.

The environment names the library (NULL_CUDA_LIBRARY), the folder for recordings (NULL_CUDA_FOLDER)
and the step whose calls are recorded one by one (NULL_CUDA_DETAILED_STEP).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu_null.recording import Recording, rank_from_environment, recording_path
from torchtitan_like import train
from torchtitan_like.launch import launch, run_as

recording = Recording(os.environ["NULL_CUDA_LIBRARY"], int(os.environ["NULL_CUDA_DETAILED_STEP"]))


class RecordedTrainer(train.Trainer):
    """The trainer, with its steps counted. Each turn of the loop begins by fetching the next step's
    batch."""

    def _fetch(self, step: int) -> Any:
        recording.start_step(step - 1)
        return super()._fetch(step)

    def _finish(self, *args: Any) -> Any:
        recording.end_step()
        return super()._finish(*args)


# Every flag read from a null device is False, "all values are finite" too: no checkpoint would pass.
train.nonfinite_names = lambda named: []

if __name__ == "__main__":
    code = launch(sys.argv[1:], partial(run_as, RecordedTrainer))
    if code == 0:
        recording.write(
            recording_path(Path(os.environ["NULL_CUDA_FOLDER"]), rank_from_environment())
        )
    train.end_process(code)
