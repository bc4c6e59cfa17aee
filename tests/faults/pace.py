"""For `experimental.custom_import`: a run whose starts wait until they get a signal, the first one at the first of the
steps HOLD_AT, and so on; a start beyond these does not wait. None begins before the file WAIT_FOR is there.

So a test needs no luck to signal it in the middle, however fast or slow the machine is.
"""

import os
import signal
import sys
import time

STEPS = [int(step) for step in os.environ.get("HOLD_AT", "").split()]
# Which start this is, from 0: of the tasks of an array, of a job that was queued again, of torchrun's own.
START = sum(int(os.environ.get(name, "0")) for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
START += int(os.environ.get("SLURM_ARRAY_TASK_ID", "1")) - 1


def hold(at: int) -> None:
    from torchtitan_like.optim.schedule import Schedule

    stop_signals = []

    def held_factor(schedule: Schedule, step: int) -> float:
        if step == at and not stop_signals:
            run = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *signalled: (stop_signals.append(1), run(*signalled)))  # type: ignore[operator]
            print(f"Holding at step {step}", flush=True)
            give_up = time.monotonic() + 250
            while not stop_signals and time.monotonic() < give_up:
                time.sleep(0.05)
        if stop_signals:
            time.sleep(0.3)  # a step takes longer than all copies of the signal
        return factor(schedule, step)

    factor = Schedule.factor
    Schedule.factor = held_factor  # type: ignore[method-assign]


if "train.py" in sys.argv[0]:
    while not os.path.exists(os.environ.get("WAIT_FOR", "/")):
        print("Waiting to begin", flush=True)
        time.sleep(0.1)
    if START < len(STEPS):
        hold(STEPS[START])
