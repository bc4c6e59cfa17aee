"""Why a run ended, as codes a scheduler can act on (numbers follow BSD's sysexits where it has the case).

torchrun turns any worker's code into 1, so an agreed stop ends every worker with 0 and leaves the code in the run
directory's `exit.json`; `run_train.sh` returns it. A 1 without that file is a crash.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The table; a name in lower case is the `reason` in exit.json."""

    DONE = 0  # the last step is done, or all data is read
    BAD_DATA = 65  # data is malformed, or differs from what the checkpoint was trained on
    LOST_PEER = 69  # a rank was killed or hung and could leave no word, and the others lost it; start again to continue
    BAD_NUMBERS = 70  # a non-finite loss or gradient; the weights are those before it
    STORAGE = 74  # a checkpoint could not be written or read, or another file of the run could not be written
    REQUEUE = 75  # stopped by the scheduler (SIGTERM), a deadline or for want of memory; start again to continue
    BAD_CONFIG = 78  # the config must be changed first
    INTERRUPTED = 130  # stopped by a person (Ctrl-C, kill switch)

    @property
    def reason(self) -> str:
        return self.name.lower()
