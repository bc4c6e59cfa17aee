"""One rank of the trainer on a null CUDA device: `python -m tests.gpu_null.rank TRAINER_ARGUMENTS`.

The environment names the library (NULL_CUDA_LIBRARY), the folder for recordings (NULL_CUDA_FOLDER)
and the step whose calls are recorded one by one (NULL_CUDA_DETAILED_STEP).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.gpu_null.recording import Recording, rank_from_environment, recording_path
from torchtitan_like import launch, train
from torchtitan_like.resilience.end import end_process

recording = Recording(os.environ["NULL_CUDA_LIBRARY"], int(os.environ["NULL_CUDA_DETAILED_STEP"]))


class RecordedTrainer(train.Trainer):
    """The trainer, with its steps counted. Each turn of the loop begins by fetching the next step's
    batch."""

    def fetch(self, step: int) -> Any:
        recording.start_step(step - 1)
        return super().fetch(step)

    def _finish(self, *args: Any) -> Any:
        recording.end_step()
        return super()._finish(*args)


# Every flag read from a null device is False, "all values are finite" too: no checkpoint would pass.
train.nonfinite_names = lambda named: []

if __name__ == "__main__":
    launch.Trainer = RecordedTrainer
    code = launch.main(sys.argv[1:])
    if code == 0:
        recording.write(
            recording_path(Path(os.environ["NULL_CUDA_FOLDER"]), rank_from_environment())
        )
    end_process(code)
