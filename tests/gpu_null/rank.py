"""One rank of the trainer on a null CUDA device: `python -m tests.gpu_null.rank TRAINER_ARGUMENTS`.

Environment variables: NULL_CUDA_LIBRARY is the device library, NULL_CUDA_FOLDER the folder for
recordings, NULL_CUDA_DETAILED_STEP the step whose calls are recorded individually.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.gpu_null.recording import Recording, rank_from_environment, recording_path
from torchtitan_like import run, train
from torchtitan_like.resilience.end import end_process

recording = Recording(os.environ["NULL_CUDA_LIBRARY"], int(os.environ["NULL_CUDA_DETAILED_STEP"]))


class RecordedTrainer(train.Trainer):
    """A trainer that records its steps. Each iteration starts by fetching the next step's batch."""

    def fetch(self, step: int) -> Any:
        recording.start_step(step - 1)
        return super().fetch(step)

    def _finish(self, *args: Any) -> Any:
        recording.end_step()
        return super()._finish(*args)


# All flags read from a null device are False, including "all values are finite". Without this line
# every checkpoint would be rejected.
train.nonfinite_state = lambda states, group: []

if __name__ == "__main__":
    run.Trainer = RecordedTrainer
    code = run.main(sys.argv[1:])
    if code == 0:
        recording.write(
            recording_path(Path(os.environ["NULL_CUDA_FOLDER"]), rank_from_environment())
        )
    end_process(code)
