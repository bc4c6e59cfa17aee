"""Hold a run at given steps until it receives a signal. Load with `experimental.custom_import`.

HOLD_AT lists one step for each start of the run; later starts do not wait. All starts wait until
the file WAIT_FOR exists. Tests can therefore signal a run in the middle on machines of any speed.
"""

import os
import signal
import sys
import time

STEPS = [int(step) for step in os.environ.get("HOLD_AT", "").split()]
# The number of this start from 0, counting Slurm array tasks, requeues and torchrun restarts.
START = sum(
    int(os.environ.get(name, "0")) for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
)
START += int(os.environ.get("SLURM_ARRAY_TASK_ID", "1")) - 1


def hold(hold_step: int) -> None:
    from torchtitan_like.optim.schedule import Schedule

    stop_signals = []

    def held_factor(schedule: Schedule, step: int) -> float:
        if step == hold_step and not stop_signals:
            handler = signal.getsignal(signal.SIGTERM)
            signal.signal(
                signal.SIGTERM, lambda *arguments: (stop_signals.append(1), handler(*arguments))
            )  # type: ignore[operator]
            print(f"Holding at step {step}", flush=True)
            deadline = time.monotonic() + 250
            while not stop_signals and time.monotonic() < deadline:
                time.sleep(0.05)
        if stop_signals:
            time.sleep(0.3)  # wait until all copies of the signal have arrived
        return factor(schedule, step)

    factor = Schedule.factor
    Schedule.factor = held_factor  # type: ignore[method-assign]


if "train.py" in sys.argv[0]:
    while not os.path.exists(os.environ.get("WAIT_FOR", "/")):
        print("Waiting to start", flush=True)
        time.sleep(0.1)
    if START < len(STEPS):
        hold(STEPS[START])
