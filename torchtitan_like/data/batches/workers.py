"""Batches read ahead by worker processes: the same batches, in the same order, whatever their number.

A worker holds no state: it is handed a `Plan` and returns what it says. Which plan comes next is decided in the main
process, and how far a run has come follows from the batch that it trained on (`Batch.position`), not from the loader, which
is ahead of it; so the loader's own state is never asked for.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from torch.utils.data import Dataset

from torchtitan_like.data.batches.batch import Batch, Plan, assemble
from torchtitan_like.data.samples.packing import JoinedSamples

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import DataLoader

# What a terminal or a batch system sends to every process: the main process decides, and its workers end with it.
_LEFT_TO_THE_MAIN_PROCESS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class PlannedBatches(Dataset[Batch]):
    """From a plan to its batch; ``with_positions`` as in `assemble`."""

    def __init__(self, samples: JoinedSamples, local_batch_size: int, *, with_positions: bool) -> None:
        self._samples, self._local_batch_size, self._with_positions = samples, local_batch_size, with_positions

    def __getitem__(self, plan: Plan) -> Batch:
        return assemble(self._samples, plan, self._local_batch_size, with_positions=self._with_positions)


def reader(
    batches: PlannedBatches, make_plans: Callable[[], Iterator[Plan]], section: DataLoader
) -> Callable[[], Iterator[Batch]]:
    """What reads the batches of ``make_plans()`` from their beginning: in this process, or with ``section.num_workers`` others
    that are ahead of it.
    """
    if section.num_workers == 0:
        return lambda: map(batches.__getitem__, make_plans())
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
        loader: Iterable[Batch] = StatefulDataLoader(
            batches,
            sampler=_Plans(make_plans),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=section.num_workers,
            prefetch_factor=section.prefetch_factor,
            persistent_workers=section.persistent_workers,
            worker_init_fn=_ignore_signals,
            # A memory-mapped file is shared by fork; spawned workers would get a copy of what it holds.
            multiprocessing_context="fork",
            snapshot_every_n_steps=2**31,
        )
    return lambda: _start(loader)


def few_cores(num_workers: int, num_ranks: int, num_cores: int) -> str | None:
    """What to warn of before a machine starts ``num_ranks`` ranks, each with so many workers; None: nothing."""
    if num_cores == 1:
        return (
            f"This process may use 1 CPU core: training, data and saves of {num_ranks} ranks share it. In a Slurm job pass "
            "--cpus-per-task to srun too, not to sbatch alone"
        )
    wanted = num_ranks * (num_workers + 1) + 4
    if num_workers == 0 or num_cores >= wanted:
        return None
    return (
        f"training.dataloader.num_workers = {num_workers}: {num_ranks} ranks on this machine and their workers have "
        f"{num_cores} cores, expected ranks x (workers + 1) + 4 = {wanted} or more, or they wait for one another; ask for more "
        "cores, or set fewer workers (0 is enough for files on a local disk)"
    )


def _start(loader: Iterable[Batch]) -> Iterator[Batch]:
    batches = iter(loader)
    # Registered anew, so that it runs before what the loader has registered for its workers: that waits.
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)
    return batches


def _kill_workers() -> None:
    """At the end of this process: an iteration that an error has left behind holds workers that ignore SIGTERM, and Python
    would wait for them for ever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker is killed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


class _Plans:
    """What is to be read, anew in each iteration: how the loader wants it."""

    def __init__(self, make: Callable[[], Iterator[Plan]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Plan]:
        return self._make()


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _ignore_signals(worker: int) -> None:
    for number in _LEFT_TO_THE_MAIN_PROCESS:
        signal.signal(number, signal.SIG_IGN)
