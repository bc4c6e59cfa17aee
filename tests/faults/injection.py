"""Inject faults into a rank at the n-th call of a function of the trainer.

`python -m tests.faults.injection ...` runs the trainer with the faults of FAULT_INJECTIONS, for
torchrun. fork_server.py injects them into its forked ranks.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_like.data.data_errors import CacheWriteError

# Location -> the function that is called directly after the fault. All ranks call each of them.
LOCATIONS = {
    "next batch": "torchtitan_like.data.batches.iterators:TrainBatches.__next__",
    "start": "torchtitan_like.train:build_model",
    # between backward and update
    "step": "torchtitan_like.optim.optimizer:Optimizer.clip_gradients",
    # on the checkpoint thread
    "save": "torchtitan_like.checkpoint.dcp_storage:ExtentWriter.write_data",
    "validation": "torchtitan_like.validation:count_bytes",  # after a batch's loss
    "end of a step": "torchtitan_like.monitor.metrics:Metrics.record",
}


class InjectedError(RuntimeError):
    """The error of the fault "raise"."""


class Injection(NamedTuple):
    """A fault at the `call`-th call at a location, on one rank or (None) on all."""

    location: str
    # "raise", "full disk", "hang", "NaN in a weight", "NaN in a gradient", "touch NAME", or a
    # signal that the rank sends to itself
    fault: str
    rank: int | None = None
    call: int = 1


def install_injections(injections: Sequence[Injection], settings: dict[str, Any]) -> None:
    """Install this rank's faults. `settings` maps "module:attribute" to a new value."""
    for path, value in settings.items():
        owner, name = _owner(path)
        is_time = isinstance(getattr(owner, name), timedelta)
        setattr(owner, name, timedelta(seconds=value) if is_time else value)
    rank = int(os.environ.get("RANK", 0))
    for injection in injections:
        if injection.rank in (None, rank):
            owner, name = _owner(LOCATIONS[injection.location])
            setattr(owner, name, _with(injection, getattr(owner, name)))


def _owner(path: str) -> tuple[Any, str]:
    module, _, attribute = path.partition(":")
    *classes, name = attribute.split(".")
    return functools.reduce(getattr, classes, importlib.import_module(module)), name


def _with(injection: Injection, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    def call_with_fault(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == injection.call:
            trigger_fault(injection, args)
        return function(*args, **kwargs)

    return call_with_fault


def trigger_fault(injection: Injection, args: tuple[Any, ...]) -> None:
    """Print the fault on a separate line, then cause it."""
    rank = os.environ.get("RANK", 0)
    line = (
        f"INJECTED on rank {rank} at {time.time():.3f}: {injection.fault}, {injection.location}\n"
    )
    os.write(1, line.encode())
    if injection.fault == "raise":
        raise InjectedError(f"injected into the {injection.location}")
    if injection.fault == "full disk":
        raise CacheWriteError(f"cannot write, injected into the {injection.location}")
    if injection.fault == "hang":
        time.sleep(3600)
    elif injection.fault.startswith("NaN"):
        weight = args[0].parameters[-1]  # the head's weight, which every token uses
        corrupted = weight.data if injection.fault == "NaN in a weight" else weight.grad
        getattr(corrupted, "_local_tensor", corrupted).view(-1)[0] = float("nan")
    elif injection.fault.startswith("touch "):
        run = Path(sys.argv[sys.argv.index("--job.dump_folder") + 1])
        (run / injection.fault.removeprefix("touch ")).touch()
    else:
        os.kill(os.getpid(), signal.Signals[injection.fault])


def main() -> None:
    """Run the trainer's command with injected faults."""
    from torchtitan_like.resilience.end import end_process
    from torchtitan_like.run import main as train

    request = json.loads(os.environ["FAULT_INJECTIONS"])
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # only in the first start
        install_injections(
            [Injection(*fields) for fields in request["injections"]], request["settings"]
        )
    end_process(train(sys.argv[1:]))


if __name__ == "__main__":
    main()
