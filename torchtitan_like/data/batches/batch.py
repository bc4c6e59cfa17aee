"""Assemble the batch of one rank for one step, in this process or ahead in worker processes.

The number of workers changes neither the batches nor their order. A worker has no state: it
receives a `Plan` and returns its batch. The main process chooses the next plan. The position of a
run comes from the batch that it trained on (`Batch.position`), because the workers read ahead.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from torchtitan_like.data.data_errors import ReadInterrupted
from torchtitan_like.data.samples.packing import JoinedSamples
from torchtitan_like.util.exit_codes import SIGNAL_CODES
from torchtitan_like.util.labels import IGNORED_LABEL
from torchtitan_like.util.splitmix import mix64

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import DataLoader as DataLoaderSection

POLL_SECONDS = 2  # between two looks for a request to stop, while the next batch is late
MAX_SECONDS = 300.0  # of waiting for one batch

# Iterators with a silent worker. Their destructors would wait for it; `_kill_workers` ends it.
_abandoned: list[Iterator[Batch]] = []

_TENSORS = ("tokens", "labels", "sources", "positions")  # of a batch


@dataclass(frozen=True)
class Batch:
    """One rank's part of the global batch of one step.

    tokens, labels: int64 (num_micro, local_batch, seq_len). Ignored labels are -100.
    sources: int64 (num_micro, local_batch), the number of each row's source.
    num_valid_tokens: number of labels that are not ignored.
    digest: this rank's term of the step's digest, which is the sum over all ranks modulo 2**64.
    first_samples: position in the stream of each micro-batch's first sample.
    position: position of the stream after the step.
    num_samples: number of samples of the step over all ranks of the replica group, without padding.
    positions: int64, index of each token in its document, in the shape of tokens; None if not
        requested.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    sources: torch.Tensor
    num_valid_tokens: int
    digest: int
    first_samples: list[int]
    position: int
    num_samples: int
    positions: torch.Tensor | None = None


class Plan(NamedTuple):
    """The samples (rows,) that a rank reads, at ``positions`` (rows,) of the stream.

    position, num_samples: as in `Batch`.
    """

    samples: NDArray[np.int64]
    positions: NDArray[np.int64]
    position: int
    num_samples: int


def count_valid(labels: torch.Tensor) -> int:
    """Return the number of labels (host tensor) that are not ignored."""
    return int(np.count_nonzero(labels.numpy() != IGNORED_LABEL))


def count_valid_by_source(
    labels: torch.Tensor, sources: torch.Tensor, num_sources: int
) -> list[int]:
    """Return the number of labels (..., seq) that are not ignored, for each source.

    sources: (...), the source of each row.
    """
    per_row = np.count_nonzero(labels.numpy() != IGNORED_LABEL, axis=-1)
    counts = np.bincount(sources.numpy().ravel(), per_row.ravel(), num_sources)
    return [int(count) for count in counts[:num_sources]]


def count_bytes(labels: torch.Tensor, bytes_of_token: torch.Tensor) -> torch.Tensor:
    """Return the UTF-8 bytes of each label (host tensor), 0 if it is ignored, in the same shape.

    bytes_of_token: (vocab_size,).
    """
    is_valid = labels != IGNORED_LABEL
    return bytes_of_token[labels * is_valid] * is_valid


def chain_digest(previous: int, digest: int) -> int:
    """Return the digest of all steps until now, in [0, 2**64).

    previous: the digest of all earlier steps (0 at the start). digest: the digest of this step.
    """
    both_digests = previous.to_bytes(8, "little") + digest.to_bytes(8, "little")
    return int(xxhash.xxh3_64_intdigest(both_digests))


def assemble(
    packed: JoinedSamples, plan: Plan, local_batch_size: int, *, with_positions: bool
) -> Batch:
    """Read the samples of ``plan`` (a multiple of ``local_batch_size``) into a batch.

    with_positions: also compute the index of each token in its document.
    """
    samples, stream_positions = plan.samples, plan.positions
    rows, lengths = packed.read(samples)
    # Tokens and labels share one allocation, because they are copied to the device together.
    shape = len(samples) // local_batch_size, local_batch_size, packed.seq_len
    buffer = torch.empty((2, *shape), dtype=torch.int64)
    tokens, labels = buffer.numpy().reshape(2, len(samples), packed.seq_len)
    tokens[:] = rows[:, :-1]
    labels[:] = rows[:, 1:]
    num_valid = np.maximum(lengths - 1, 0)
    for row in np.flatnonzero(num_valid < packed.seq_len):
        labels[row, num_valid[row] :] = IGNORED_LABEL
    ignored = packed.ignored_labels(samples)
    labels[ignored] = IGNORED_LABEL
    positions = None
    if with_positions:
        positions = torch.from_numpy(packed.positions(samples)).view(shape)
    return Batch(
        tokens=buffer[0],
        labels=buffer[1],
        sources=torch.from_numpy(packed.sources_of(samples)).view(shape[:2]),
        num_valid_tokens=int(num_valid.sum()) - len(ignored[0]),
        digest=_digest(rows, lengths, stream_positions),
        first_samples=stream_positions[::local_batch_size].tolist(),
        position=plan.position,
        num_samples=plan.num_samples,
        positions=positions,
    )


def _digest(rows: NDArray[Any], lengths: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
    """Return the sum over rows, modulo 2**64, of xxh3_64(tokens, seed = mix64(position)).

    The tokens are hashed as little-endian uint32, without padding.
    """
    seeds = mix64(positions.astype(np.uint64)).tolist()
    words = rows.astype("<u4", copy=False)
    total = 0
    for row, length, seed in zip(words, lengths.tolist(), seeds, strict=True):
        if length:
            total += xxhash.xxh3_64_intdigest(row[:length].data, seed)
    return total % 2**64


# ---- reading ahead


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
    section: DataLoaderSection,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Callable[[], Iterator[Batch]]:
    """Return a function that starts an iterator over the batches of ``make_plans()``.

    It reads in this process, or ahead in ``section.num_workers`` worker processes. The iterator
    raises ReadInterrupted if a batch is late and ``is_interrupted()``, and RuntimeError if the
    workers send nothing for `MAX_SECONDS`.
    """
    if section.num_workers == 0:
        return lambda: map(batches.__getitem__, make_plans())
    loader = DataLoader(
        batches,
        sampler=_Plans(make_plans),
        batch_size=None,
        collate_fn=_to_arrays,  # type: ignore[arg-type]  # with batch_size=None of one batch
        num_workers=section.num_workers,
        prefetch_factor=section.prefetch_factor,
        persistent_workers=section.persistent_workers,
        worker_init_fn=partial(_start_worker, os.getpid()),
        # Forked workers share what this process has opened; spawned workers would open it again.
        multiprocessing_context="fork",
        timeout=POLL_SECONDS,
    )
    return lambda: _receive(_start(loader), is_interrupted)


def _start(loader: DataLoader[Batch]) -> Iterator[Batch]:
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
