"""For `experimental.custom_import`: a run that waits at step HOLD_AT, in the first start alone, until it is told to end.

So a test needs no luck to signal it in the middle, however fast or slow the machine is.
"""

import os
import signal
import sys
import time

HOLD_AT = int(os.environ.get("HOLD_AT", "0"))
IS_FIRST = os.environ.get("SLURM_ARRAY_TASK_ID", "1") == "1" and "SLURM_RESTART_COUNT" not in os.environ


def hold() -> None:
    from torchtitan_like.optim.schedule import Schedule

    told = []

    def held_factor(schedule: Schedule, step: int) -> float:
        if step == HOLD_AT and not told:
            run = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *signalled: (told.append(1), run(*signalled)))  # type: ignore[operator]
            print(f"Holding at step {step}", flush=True)
            give_up = time.monotonic() + 100
            while not told and time.monotonic() < give_up:
                time.sleep(0.05)
        if told:
            time.sleep(0.3)  # a step takes longer than all copies of the signal
        return factor(schedule, step)

    factor = Schedule.factor
    Schedule.factor = held_factor  # type: ignore[method-assign]


if HOLD_AT and IS_FIRST and "train.py" in sys.argv[0]:
    hold()
