"""Read batches ahead in worker processes. Their number changes neither the batches nor the order.

A worker has no state: it receives a `Plan` and returns its batch. The main process chooses the next
plan. The position of a run comes from the batch that it trained on (`Batch.position`), because the
loader reads ahead. The loader's own state is not used.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from torchtitan_like.data.batches.batch import Batch, Plan, assemble
from torchtitan_like.data.errors import ReadInterrupted
from torchtitan_like.data.samples.packing import JoinedSamples
from torchtitan_like.util.exit_codes import SIGNAL_CODES

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import DataLoader

POLL_SECONDS = 2  # between two looks for a request to stop, while the next batch is late
MAX_SECONDS = 300.0  # of waiting for one batch

# Iterators with a silent worker. Their destructors would wait for it; `_kill_workers` ends it.
_abandoned: list[Iterator[Batch]] = []

_TENSORS = ("tokens", "labels", "sources", "positions")  # of a batch


class PlannedBatches(Dataset[Batch]):
    """Maps a plan to its batch. with_positions: see `assemble`."""

    def __init__(
        self, samples: JoinedSamples, local_batch_size: int, *, with_positions: bool
    ) -> None:
        self._samples = samples
        self._local_batch_size = local_batch_size
        self._with_positions = with_positions

    def __getitem__(self, plan: Plan) -> Batch:
        return assemble(
            self._samples, plan, self._local_batch_size, with_positions=self._with_positions
        )


def make_reader(
    batches: PlannedBatches,
    make_plans: Callable[[], Iterator[Plan]],
    section: DataLoader,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Callable[[], Iterator[Batch]]:
    """Return a function that starts an iterator over the batches of ``make_plans()``.

    It reads in this process, or ahead in ``section.num_workers`` worker processes. The iterator
    raises ReadInterrupted if a batch is late and ``is_interrupted()``, and RuntimeError if the
    workers send nothing for `MAX_SECONDS`.
    """
    if section.num_workers == 0:
        return lambda: map(batches.__getitem__, make_plans())
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        # torchdata 0.11 on torch 2.13 warns
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        loader: Iterable[Batch] = StatefulDataLoader(
            batches,
            sampler=_Plans(make_plans),
            batch_size=None,
            collate_fn=_to_arrays,
            num_workers=section.num_workers,
            prefetch_factor=section.prefetch_factor,
            persistent_workers=section.persistent_workers,
            worker_init_fn=partial(_start_worker, os.getpid()),
            # Forked workers share a memory-mapped file; spawned workers would copy its content.
            multiprocessing_context="fork",
            snapshot_every_n_steps=2**31,
            timeout=POLL_SECONDS,
        )
    return lambda: _receive(_start(loader), is_interrupted)


def describe_core_shortage(num_workers: int, num_ranks: int, num_cores: int) -> str | None:
    """Return a warning if a machine has too few CPU cores for its ranks and workers, else None.

    num_workers: per rank.
    """
    if num_cores == 1:
        return (
            f"Only 1 CPU core is available for training, data and checkpoints of {num_ranks} "
            "ranks. In a Slurm job, pass --cpus-per-task to srun too, not only to sbatch"
        )
    num_required = num_ranks * (num_workers + 1) + 4
    if num_workers == 0 or num_cores >= num_required:
        return None
    return (
        f"{num_cores} CPU cores are too few for {num_ranks} ranks on this machine with "
        f"training.dataloader.num_workers = {num_workers}. Expected ranks x (workers + 1) + 4 = "
        f"{num_required} or more: request more cores, or set fewer workers (0 is enough for files "
        "on a local disk)"
    )


def _start(loader: Iterable[Batch]) -> Iterator[Batch]:
    batches = iter(loader)
    # Register it again to run before the loader's own exit handler, which waits for the workers.
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)
    return batches


def _receive(batches: Iterator[Batch], is_interrupted: Callable[[], bool]) -> Iterator[Batch]:
    """Yield the batches of the workers. A worker may live and never send its batch."""
    started = time.monotonic()
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
            if is_interrupted():
                _abandoned.append(batches)
                raise ReadInterrupted from None
            if time.monotonic() - started > MAX_SECONDS:
                _abandoned.append(batches)
                raise RuntimeError(
                    f"The data loader's workers have sent no batch for {MAX_SECONDS:.0f} seconds. "
                    "Expected the next batch: look for their errors above, check the storage of the "
                    "data, or set training.dataloader.num_workers = 0"
                ) from None
            continue
        yield _to_tensors(batch)
        started = time.monotonic()


def _kill_workers() -> None:
    """Kill the workers of an iteration that an error interrupted, at the exit of this process.

    They ignore SIGTERM, and Python would wait for them forever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker is killed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


class _Plans:
    """A sampler for the loader: makes new plans in each iteration."""

    def __init__(self, make: Callable[[], Iterator[Plan]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Plan]:
        return self._make()


def _to_arrays(batch: Batch) -> Batch:
    """Replace the tensors by arrays, which travel in the worker's pipe.

    Tensors need shared memory and a socket, whose path has at most 107 characters.
    """
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in _values(batch)}
    return replace(batch, **arrays)


def _to_tensors(batch: Batch) -> Batch:
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in _values(batch)}
    return replace(batch, **tensors)


def _values(batch: Batch) -> list[tuple[str, Any]]:
    """Return the tensors of a batch, or the arrays in their place, by field."""
    values = [(name, getattr(batch, name)) for name in _TENSORS]
    return [(name, value) for name, value in values if value is not None]


def _start_worker(main_process: int, worker: int) -> None:
    """Leave signals to the main process, and end with it even if it is killed."""
    # A terminal or batch system sends them to every process. Workers end with the main process.
    for number in SIGNAL_CODES:
        signal.signal(number, signal.SIG_IGN)
    # Runs before multiprocessing's own finalizer, which would wait until a full pipe is read. The
    # other workers hold its read end, so without the main process they would wait forever.
    Finalize(None, _exit_without, args=(main_process,), exitpriority=0)


def _exit_without(main_process: int) -> None:
    if os.getppid() != main_process:
        os._exit(1)
