"""Faults that a rank brings upon itself at a chosen place: at the n-th call of a function of the trainer.

`python -m tests.faults.plants ...` is the trainer with the plants of FAULT_PLANTS, for torchrun; warm.py plants them in
the ranks that it forks.
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

from torchtitan_like.data.errors import CacheWriteError

# Where all ranks pass: what is about to be called when it happens.
PLACES = {
    "next batch": "torchtitan_like.data.batches.training:TrainBatches.__next__",
    "start": "torchtitan_like.train:build_model",
    "step": "torchtitan_like.optim.optimizer:Optimizer.clip_gradients",  # between backward and update
    "save": "torchtitan_like.checkpoint.dcp_storage:ExtentWriter.write_data",  # on the checkpoint thread
    "validation": "torchtitan_like.validation:count_bytes",  # after a batch's loss
    "end of a step": "torchtitan_like.monitor.metrics:Metrics.record",
}


class Planted(RuntimeError):
    """The error that a plant raises."""


class Plant(NamedTuple):
    """What happens at the `call`-th passing of a place, on one rank or (None) on all."""

    place: str
    # "raise", "full disk", "hang", "NaN in a weight", "NaN in a gradient", "touch NAME", or the
    # signal that the rank sends to itself
    what: str
    rank: int | None = None
    call: int = 1


def grow(plants: Sequence[Plant], settings: dict[str, Any]) -> None:
    """Put the plants of this rank in place. settings: "module:attribute" -> a constant's value here, of its own type."""
    for path, value in settings.items():
        owner, name = _owner(path)
        is_time = isinstance(getattr(owner, name), timedelta)
        setattr(owner, name, timedelta(seconds=value) if is_time else value)
    rank = int(os.environ.get("RANK", 0))
    for plant in plants:
        if plant.rank in (None, rank):
            owner, name = _owner(PLACES[plant.place])
            setattr(owner, name, _with(plant, getattr(owner, name)))


def _owner(path: str) -> tuple[Any, str]:
    module, _, attribute = path.partition(":")
    *classes, name = attribute.split(".")
    return functools.reduce(getattr, classes, importlib.import_module(module)), name


def _with(plant: Plant, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == plant.call:
            happen(plant, args)
        return function(*args, **kwargs)

    return planted


def happen(plant: Plant, args: tuple[Any, ...]) -> None:
    """Cause the fault, and print it on a separate line."""
    rank = os.environ.get("RANK", 0)
    os.write(1, f"PLANTED on rank {rank} at {time.time():.3f}: {plant.what}, {plant.place}\n".encode())
    if plant.what == "raise":
        raise Planted(f"planted in the {plant.place}")
    if plant.what == "full disk":
        raise CacheWriteError(f"cannot write, planted in the {plant.place}")
    if plant.what == "hang":
        time.sleep(3600)
    elif plant.what.startswith("NaN"):
        weight = args[0].parameters[-1]  # of the optimizer: the head's, which every token meets
        spoilt = weight.data if plant.what == "NaN in a weight" else weight.grad
        getattr(spoilt, "_local_tensor", spoilt).view(-1)[0] = float("nan")
    elif plant.what.startswith("touch "):
        run = Path(sys.argv[sys.argv.index("--job.dump_folder") + 1])
        (run / plant.what.removeprefix("touch ")).touch()
    else:
        os.kill(os.getpid(), signal.Signals[plant.what])


def main() -> None:
    """The trainer's command, planted."""
    from torchtitan_like.launch import main as train
    from torchtitan_like.resilience.end import end_process

    wanted = json.loads(os.environ["FAULT_PLANTS"])
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # each comes once
        grow([Plant(*fields) for fields in wanted["plants"]], wanted["settings"])
    end_process(train(sys.argv[1:]))


if __name__ == "__main__":
    main()
