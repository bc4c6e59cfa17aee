"""Assemble the batch of one rank for one step from packed samples."""

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
