"""Exit codes: the reasons why a run ended, for schedulers (BSD's sysexits where they apply).

torchrun turns every worker's code into 1. An agreed stop therefore exits 0 from each worker, and
rank 0 writes the code into the run directory's exit.json. `run_train.sh` returns that code. A code
of 1 without exit.json is a crash.
"""

from __future__ import annotations

import signal
from enum import IntEnum
from typing import ClassVar

KILLED = 128 + 9  # a shell's code of a process that SIGKILL has ended; the system kills so, too
WRONG_INPUT = 2  # of a command line or of a file that it names; argparse returns it too
CRASH = 1  # any error that the ranks did not agree on; without an exit.json


class ExitCode(IntEnum):
    """Each name in lower case is the `reason` in exit.json."""

    DONE = 0  # the last step is done, or all data is read
    BAD_DATA = 65  # data is malformed, or differs from what the checkpoint was trained on
    LOST_PEER = 69  # a rank was killed or hung without an error record; start again to continue
    BAD_NUMBERS = 70  # a non-finite loss or gradient; the saved weights are from before it
    STORAGE = 74  # a checkpoint could not be written or read, or another file could not be written
    REQUEUE = 75  # stopped by SIGTERM, by a deadline or because memory ran low; start again
    BAD_CONFIG = 78  # the config must be changed first
    INTERRUPTED = 130  # stopped by a person (Ctrl-C, kill switch)

    @property
    def reason(self) -> str:
        return self.name.lower()


class RunFailure(Exception):
    """An error that ends a run with an exit code of its own. Any other error is a crash."""

    exit_code: ClassVar[ExitCode]


# Signals that end a run, with the code of a process that they end before the first step.
SIGNAL_CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.REQUEUE,
    signal.SIGHUP: ExitCode.REQUEUE,
    signal.SIGUSR1: ExitCode.REQUEUE,
}
# Slurm sends SIGUSR1 before a job ends. Without torchrun only, because it kills torchrun.
RANK_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# A terminal that is closed sends SIGHUP.
LAUNCHER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signal_for_ranks(signum: int) -> signal.Signals:
    """Return the signal that a launcher sends to its ranks when it has received `signum`."""
    return signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM


# Codes of ranks that end before the first step, most important first. The launcher stops the other
# ranks with SIGTERM, and they return REQUEUE.
_EARLY_CODES = (ExitCode.BAD_CONFIG, ExitCode.STORAGE, ExitCode.INTERRUPTED, ExitCode.REQUEUE)


def early_code(codes: set[int]) -> ExitCode | None:
    """Return the common code of ranks that ended with `codes`; None if a rank has crashed."""
    if not codes <= set(_EARLY_CODES):
        return None
    return next(code for code in _EARLY_CODES if code in codes)


# Ends after which a scheduler starts the same command again by itself.
WORTH_A_RETRY = (CRASH, ExitCode.LOST_PEER, ExitCode.STORAGE, ExitCode.REQUEUE)
# Ends after which a person may repeat the same command without a change. It continues the run.
REPEATABLE = (ExitCode.LOST_PEER, ExitCode.STORAGE, ExitCode.REQUEUE, ExitCode.INTERRUPTED)
