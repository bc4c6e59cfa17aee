"""A second implementation of docs/guides/data.md in plain Python.

It shares no code with torchtitan_like/data and is simple, not fast: lists, exact integers, one
loop for each rule. `Source` holds the documents of a source in the order of its files. `steps`
returns the rows that each step of a run must read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import xxhash

IGNORED = -100
NUM_PATTERN = 65_536  # positions of a mixture's pattern
MASK64 = 2**64 - 1


# ---- inputs


@dataclass
class Source:
    """A source as a user configures it.

    blocks: documents as lists of token ids, including BOS and EOS. A cached source has one block;
    the files of a streamed source are divided into several.
    """

    name: str
    blocks: list[list[list[int]]]
    weight: float = 1.0
    weight_from: list[tuple[int, float]] = field(default_factory=list)
    max_epochs: int = 0
    is_stream: bool = False
    blocks_per_window: int = 1


@dataclass
class Run:
    """The settings that decide which samples each step reads.

    step_sizes: pairs (first step, samples per step), starting with step 1.
    skip_steps: the value of training.skip_steps.
    """

    sources: list[Source]
    seq_len: int
    seed: int
    step_sizes: list[tuple[int, int]]
    skip_steps: list[tuple[int, int]] = field(default_factory=list)
    shuffle: bool = True
    best_fit: bool = False
    mask_document_starts: bool = False


@dataclass
class Row:
    """One sample as a rank must receive it; ``tokens`` and ``labels`` have seq_len entries."""

    source: int
    tokens: list[int]
    labels: list[int]
    positions: list[int]
    real: list[int]

    def digest(self, position: int) -> int:
        """Hash the real tokens, with the position in the stream as the seed."""
        token_bytes = np.array(self.real, "<u4").tobytes()
        return int(xxhash.xxh3_64_intdigest(token_bytes, splitmix(position)))


# ---- the keyed permutation of an epoch


def splitmix(value: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): step by the golden ratio, then the output function."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def feistel(value: int, bits: int, key: int) -> int:
    """Run eight half rounds between the low ``bits // 2`` bits and the high bits."""
    low_bits = bits // 2
    low, high = value & ((1 << low_bits) - 1), value >> low_bits
    for half_round in range(0, 8, 2):
        first = splitmix(((key + half_round) & MASK64) ^ ((low << 32) & MASK64))
        high ^= first & ((1 << (bits - low_bits)) - 1)
        second = splitmix(((key + half_round + 1) & MASK64) ^ ((high << 32) & MASK64))
        low ^= second & ((1 << low_bits) - 1)
    return (high << low_bits) | low


def permute(value: int, size: int, key: int) -> int:
    """Apply the network on the next power of two until the value is below ``size``."""
    bits = (size - 1).bit_length()
    value = feistel(value, bits, key)
    while value >= size:
        value = feistel(value, bits, key)
    return value


def shuffled(index: int, size: int, seed: int, epoch: int) -> int:
    """Return the sample at ``index`` of an epoch.

    Two permutations: blocks of 64 samples, then the samples in windows of 256 blocks.
    """
    block, window_size = 64, 64 * 256
    epoch_key = splitmix(splitmix(seed & MASK64) ^ epoch)
    window, offset = divmod(index, window_size)
    num_in_window = min(window_size, size - window * window_size)
    offset = permute(offset, num_in_window, splitmix(splitmix(epoch_key ^ 3) ^ window))
    slot = window * 256 + offset // block
    if slot < size // block:
        slot = permute(slot, size // block, splitmix(epoch_key ^ 2))
    rotation = splitmix(epoch_key ^ 1) % size
    return (slot * block + offset % block + rotation) % size


def key_of(name: str, seed: int) -> int:
    """Derive the shuffle key of a source; an unnamed source uses the seed itself."""
    return int(xxhash.xxh3_64_intdigest(name.encode(), seed & MASK64)) if name else seed


# ---- from documents to samples


class PackedDocuments:
    """The samples of a list of documents: an epoch of a cached source or a window of a stream."""

    def __init__(self, documents: Sequence[list[int]], run: Run, source: int) -> None:
        self.run = run
        self.source = source
        self.documents = [document for document in documents if document]
        self.flat = [token for document in self.documents for token in document]
        ends = np.cumsum([len(document) for document in self.documents]).tolist()
        self.starts = {0, *ends[:-1]}
        self.samples = self._best_fit() if run.best_fit else self._concat()

    @property
    def num_labels(self) -> int:
        """The number of labels in all samples that contribute to the loss."""
        return sum(label != IGNORED for row in self.samples for label in row.labels)

    def _row(self, real: list[int], ignored: set[int], restarts: set[int]) -> Row:
        """Build a row from ``real`` tokens.

        ignored: indices in ``real`` that are masked as labels.
        restarts: indices in ``real`` whose position is 0.
        """
        seq_len = self.run.seq_len
        labels = [IGNORED if i in ignored else real[i] for i in range(1, len(real))]
        positions = [0]
        for i in range(1, seq_len):
            positions.append(0 if i in restarts else positions[-1] + 1)
        tokens = (real + [0] * seq_len)[:seq_len]
        labels += [IGNORED] * (seq_len - len(labels))
        return Row(self.source, tokens, labels, positions, real)

    def _concat(self) -> list[Row]:
        seq_len, rows = self.run.seq_len, []
        for offset in range(0, len(self.flat) - 1, seq_len):
            real = self.flat[offset : offset + seq_len + 1]
            starts = {i for i in range(seq_len + 1) if offset + i in self.starts}
            rows.append(self._row(real, starts if self.run.mask_document_starts else set(), starts))
        return rows

    def _best_fit(self) -> list[Row]:
        seq_len = self.run.seq_len
        pieces = []  # in the order of the documents
        for document in self.documents:
            for offset in range(0, len(document) - 1, seq_len):
                pieces.append(document[offset : offset + seq_len + 1])
        room: list[int] = []
        content: list[list[int]] = []  # piece numbers of each sample
        for number in sorted(range(len(pieces)), key=lambda number: -len(pieces[number])):
            size = len(pieces[number])
            fitting = [sample for sample in range(len(room)) if room[sample] >= size]
            if fitting:
                sample = min(fitting, key=lambda sample: (room[sample], sample))
            else:
                sample = len(room)
                room.append(seq_len + 1)
                content.append([])
            room[sample] -= size
            content[sample].append(number)
        rows = []
        # Each sample lists the number of its longest piece first.
        for numbers in sorted(content, key=lambda numbers: numbers[0]):
            real: list[int] = []
            starts = set()
            for number in sorted(numbers):
                starts.add(len(real))
                real += pieces[number]
            rows.append(self._row(real, starts, starts))
        return rows


class Reader:
    """The samples of one source in order, for ``max_epochs`` epochs (0: endless)."""

    def __init__(self, run: Run, index: int) -> None:
        self.run = run
        self.index = index
        self.source = run.sources[index]
        self.key = key_of(self.source.name, run.seed)
        if not self.source.is_stream:
            self.packed = PackedDocuments(self.source.blocks[0], run, index)
            self.num_samples = len(self.packed.samples)
            self.labels_per_sample = self.packed.num_labels / self.num_samples
            self.limit = self.source.max_epochs * self.num_samples or None
        else:
            self.labels_per_sample = float(run.seq_len)
            self.limit = None
            self._windows = self._all_windows()
            self._read: list[Row] = []

    def sample(self, count: int) -> Row | None:
        """Return the sample with index ``count``, or None after the end of a stream."""
        if self.source.is_stream:
            while len(self._read) <= count:
                window = next(self._windows, None)
                if window is None:
                    return None
                self._read += window
            return self._read[count]
        epoch, within = divmod(count, self.num_samples)
        if self.run.shuffle:
            within = shuffled(within, self.num_samples, self.key, epoch)
        return self.packed.samples[within]

    def _all_windows(self) -> Iterator[list[Row]]:
        source, blocks = self.source, self.source.blocks
        size = source.blocks_per_window
        per_epoch = -(-len(blocks) // size)
        keys = {level: key_of(level, self.key) for level in ("blocks", "documents", "samples")}
        number = 0
        while not source.max_epochs or number < source.max_epochs * per_epoch:
            epoch, window = divmod(number, per_epoch)
            chosen = list(range(window * size, min((window + 1) * size, len(blocks))))
            if self.run.shuffle:
                chosen = sorted(shuffled(i, len(blocks), keys["blocks"], epoch) for i in chosen)
            documents = [document for block in chosen for document in blocks[block] if document]
            if self.run.shuffle and documents:
                order = [
                    shuffled(i, len(documents), keys["documents"], number)
                    for i in range(len(documents))
                ]
                documents = [documents[i] for i in order]
            rows = PackedDocuments(documents, self.run, self.index).samples if documents else []
            if not any(label != IGNORED for row in rows for label in row.labels):
                rows = []  # a window without valid labels has no samples
            if self.run.shuffle:
                rows = [
                    rows[shuffled(i, len(rows), keys["samples"], number)] for i in range(len(rows))
                ]
            yield rows
            number += 1


# ---- from samples to the stream


def pattern_of(shares: Sequence[float]) -> Iterator[int]:
    """Yield the source of each position of a pattern.

    The shares are rounded by largest remainder and then spread by Tijdeman's rule.
    """
    total = sum(shares)
    exact_counts = [share / total * NUM_PATTERN for share in shares]
    counts = [int(number) for number in exact_counts]
    by_remainder = sorted(range(len(exact_counts)), key=lambda i: counts[i] - exact_counts[i])
    for i in by_remainder[: NUM_PATTERN - sum(counts)]:
        counts[i] += 1
    k = max(2, sum(count > 0 for count in counts))
    slack = Fraction(1, 2 * k - 2)
    share_of = [Fraction(count, NUM_PATTERN) for count in counts]
    placed = [0] * len(counts)
    for position in range(1, NUM_PATTERN + 1):
        candidates = [
            i for i in range(len(counts))
            if counts[i] and share_of[i] * position - placed[i] >= slack
        ]  # fmt: skip
        chosen = min(candidates, key=lambda i: ((placed[i] + 1 - slack) / share_of[i], i))
        placed[chosen] += 1
        yield chosen


def stream(run: Run, change_at: dict[int, dict[int, float]]) -> Iterator[Row]:
    """Yield the rows of the training stream.

    change_at: for a position, the new weights of some sources from that position on.
    """
    readers = [Reader(run, index) for index in range(len(run.sources))]
    weights = [source.weight for source in run.sources]
    counts = [0] * len(readers)
    pattern: Iterator[int] | None = None
    position = 0
    while True:
        if position in change_at:
            for index, weight in change_at[position].items():
                weights[index] = weight
            pattern = None
        if any(reader.limit == count for reader, count in zip(readers, counts, strict=True)):
            done = [reader.limit == count for reader, count in zip(readers, counts, strict=True)]
            if any(is_done and weights[i] for i, is_done in enumerate(done)):
                pattern = None
            weights = [
                0.0 if is_done else weight for is_done, weight in zip(done, weights, strict=True)
            ]
        if not any(weights):
            return
        if pattern is None:
            shares = [
                weight / reader.labels_per_sample
                for weight, reader in zip(weights, readers, strict=True)
            ]
            pattern = pattern_of(shares)
        index = next(pattern, None)
        if index is None:  # end of the pattern: restart it
            pattern = None
            continue
        row = readers[index].sample(counts[index])
        if row is None:
            return
        counts[index] += 1
        position += 1
        yield row


def step_positions(run: Run, num_steps: int) -> list[range]:
    """Return the positions of the first ``num_steps`` steps, after removing skipped steps."""
    num_skipped = sum(last - first + 1 for first, last in run.skip_steps)
    grid, position = [], 0
    for step in range(1, num_steps + num_skipped + 1):
        size = [size for first, size in run.step_sizes if first <= step][-1]
        grid.append(range(position, position + size))
        position += size
    for first, last in run.skip_steps:
        del grid[first - 1 : last]
    return grid[:num_steps]


def steps(run: Run, num_steps: int) -> Iterator[dict[int, Row]]:
    """Yield each step's rows by position; at the end of the data, a step may be shorter."""
    horizon = step_positions(
        run, max([num_steps, *(s for source in run.sources for s, _ in source.weight_from)])
    )
    change_at: dict[int, dict[int, float]] = {}
    for index, source in enumerate(run.sources):
        for step, weight in source.weight_from:
            change_at.setdefault(horizon[step - 1].start, {})[index] = weight
    rows: list[Row] = []
    row_stream = stream(run, change_at)
    for positions in horizon[:num_steps]:
        while len(rows) < positions.stop:
            row = next(row_stream, None)
            if row is None:
                break
            rows.append(row)
        if len(rows) <= positions.start:
            return
        yield {position: rows[position] for position in positions if position < len(rows)}
