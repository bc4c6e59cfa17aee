"""Reference for the data pipeline: one plain loop over text and Python lists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from torchtitan_like.data.samples.order import shuffled
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.util.splitmix import mix64


@dataclass
class Row:
    tokens: list[int]
    labels: list[int]
    digest: int
    positions: list[int]
    real: list[int]

    def at_position(self, position: int) -> Row:
        """Return the same sample at another position of the stream."""
        return replace(self, digest=digest_of(self.real, position))


def digest_of(real: list[int], position: int) -> int:
    """Hash a sample's tokens, with its position in the stream as the seed."""
    return xxhash.xxh3_64_intdigest(
        np.array(real, "<u4").tobytes(), int(mix64(np.array([position], np.uint64))[0])
    )


def stream(
    file: Path,
    tokenizer: Tokenizer,
    seq_len: int,
    seed: int | None,
    mask_starts: bool,
    name: str = "own",
) -> Iterator[Row]:
    """Yield the samples of endless epochs over a JSON-lines file. name: the source's name."""
    key = None if seed is None else xxhash.xxh3_64_intdigest(name.encode(), seed)
    tokens, starts = [], set()
    for line in file.read_text(encoding="utf-8").split("\n"):
        ids = tokenizer.encode(json.loads(line)["text"]) if line else []
        if ids:
            starts.add(len(tokens))
            tokens += [tokenizer.bos_id, *ids, tokenizer.eos_id]
    yield from samples_of(tokens, starts, seq_len, key, mask_starts)


def samples_of(
    tokens: list[int], starts: set[int], seq_len: int, key: int | None, mask_starts: bool
) -> Iterator[Row]:
    """Yield the samples of endless epochs over ``tokens``.

    starts: offsets of document starts. key: the shuffle key, or None to read in file order.
    """
    num_samples = -(-(len(tokens) - 1) // seq_len)
    position = 0
    while True:
        epoch, within = divmod(position, num_samples)
        sample = (
            within if key is None else int(shuffled(np.array([within]), num_samples, key, epoch)[0])
        )
        start = sample * seq_len
        real = tokens[start : start + seq_len + 1]
        labels = [
            -100 if mask_starts and start + 1 + column in starts else label
            for column, label in enumerate(real[1:])
        ]
        digest = digest_of(real, position)
        padding = seq_len + 1 - len(real)
        positions = [0]
        for offset in range(start + 1, start + seq_len):
            positions.append(0 if offset in starts else positions[-1] + 1)
        yield Row(
            (real + [0] * padding)[:seq_len], labels + [-100] * padding, digest, positions, real
        )
        position += 1
