"""What a rank is fed in one step, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from torchtitan_like.data.samples.packing import JoinedSamples
from torchtitan_like.util.labels import IGNORED_LABEL
from torchtitan_like.util.splitmix import mix64


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step.

    tokens, labels: int64 (num_micro, local_batch, seq_len); labels are -100 where they are not to be learned. sources:
    int64 (num_micro, local_batch), the number of each row's source.
    num_valid_tokens: labels that count, in this share. digest: this share's part of the step's digest; the parts of
    all ranks add up modulo 2**64. first_samples: position of each micro-batch's first sample. position: where the
    stream is when the step is done. num_samples: those of the step over all ranks, without what fills it up. positions:
    int64, of each token in its document, as tokens; None where that is not asked for.
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
    """What a rank is to read: ``samples`` (rows,), which stand at ``positions`` (rows,) of the stream.

    position, num_samples: those of the `Batch`.
    """

    samples: NDArray[np.int64]
    positions: NDArray[np.int64]
    position: int
    num_samples: int


def count_valid(labels: torch.Tensor) -> int:
    """How many of some labels on the host are to be learned."""
    return int(np.count_nonzero(labels.numpy() != IGNORED_LABEL))


def count_valid_by_source(
    labels: torch.Tensor, sources: torch.Tensor, num_sources: int
) -> list[int]:
    """Count the labels (..., seq) of each source that are to be learned, by the sources (...) of
    their rows."""
    per_row = np.count_nonzero(labels.numpy() != IGNORED_LABEL, axis=-1)
    counts = np.bincount(sources.numpy().ravel(), per_row.ravel(), num_sources)
    return [int(count) for count in counts[:num_sources]]


def count_bytes(labels: torch.Tensor, bytes_of_token: torch.Tensor) -> int:
    """UTF-8 bytes of some labels on the host that are to be learned; bytes_of_token: (vocab_size,)."""
    return int(bytes_of_token[labels[labels != IGNORED_LABEL]].sum())


def chain(previous: int, digest: int) -> int:
    """The digest of all steps so far, from that of the steps before (0 at the start) and this step's; in [0, 2**64)."""
    return int(xxhash.xxh3_64_intdigest(previous.to_bytes(8, "little") + digest.to_bytes(8, "little")))


def assemble(packed: JoinedSamples, plan: Plan, local_batch_size: int, *, with_positions: bool) -> Batch:
    """Read what is planned, a multiple of ``local_batch_size`` samples. with_positions: tell also where each token stands in
    its document.
    """
    samples, positions = plan.samples, plan.positions
    rows, lengths = packed.read(samples)
    # One allocation for both: they go to the device together.
    shape = len(samples) // local_batch_size, local_batch_size, packed.seq_len
    both = torch.empty((2, *shape), dtype=torch.int64)
    tokens, labels = both.numpy().reshape(2, len(samples), packed.seq_len)
    tokens[:] = rows[:, :-1]
    labels[:] = rows[:, 1:]
    num_valid = np.maximum(lengths - 1, 0)
    for row in np.flatnonzero(num_valid < packed.seq_len):
        labels[row, num_valid[row] :] = IGNORED_LABEL
    ignored = packed.ignored_labels(samples)
    labels[ignored] = IGNORED_LABEL
    first_samples: list[int] = positions[::local_batch_size].tolist()
    num_valid_tokens = int(num_valid.sum()) - len(ignored[0])
    digest = _digest(rows, lengths, positions)
    in_documents = torch.from_numpy(packed.positions(samples)).view(both[0].shape) if with_positions else None
    ends = plan.position, plan.num_samples
    sources = torch.from_numpy(packed.sources_of(samples)).view(shape[:2])
    return Batch(both[0], both[1], sources, num_valid_tokens, digest, first_samples, *ends, in_documents)


def _digest(rows: NDArray[Any], lengths: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
    """Sum over rows, modulo 2**64, of xxh3_64(real tokens as little-endian uint32, seed = mix64(position))."""
    seeds = mix64(positions.astype(np.uint64)).tolist()
    words = rows.astype("<u4", copy=False)
    total = 0
    for row, length, seed in zip(words, lengths.tolist(), seeds, strict=True):
        if length:
            total += xxhash.xxh3_64_intdigest(row[:length].data, seed)
    return total % 2**64
