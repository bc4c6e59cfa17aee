"""Validation reads the same samples on every layout, in equally many batches per rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchtitan_like.config.sections_training import Data, DataSource, Validation
from torchtitan_like.data.batches.batch import Batch
from torchtitan_like.data.batches.iterators import ValidationBatches
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.text.tokenizer import Tokenizer

from .conftest import write_jsonl
from .reference import stream

LOCAL = 3
BuildRanks = Callable[..., list[ValidationBatches]]


@pytest.fixture
def build_ranks(corpus_file: Path, tokenizer: Tokenizer, tmp_path: Path) -> BuildRanks:
    def build(
        dp_size: int, steps: int = -1, mask: bool = False, with_positions: bool = False
    ) -> list[ValidationBatches]:
        validation = Validation(
            enable=True,
            seq_len=16,
            local_batch_size=LOCAL,
            steps=steps,
            sources={"own": DataSource(path=str(corpus_file))},
        )
        return [
            DataBuilder(
                Data(mask_document_starts=mask),
                tokenizer=tokenizer,
                dump_folder=str(tmp_path),
                dp_rank=rank,
                dp_size=dp_size,
                with_positions=with_positions,
            ).validation_sets(validation)[""]
            for rank in range(dp_size)
        ]

    return build


def rows(ranks: list[ValidationBatches]) -> list[tuple[list[int], list[int]]]:
    """Return all samples in order, without samples that consist of padding."""
    batches: list[Batch] = [share for shares in zip(*ranks, strict=True) for share in shares]
    pairs = [
        pair
        for batch in batches
        for pair in zip(batch.tokens[0].tolist(), batch.labels[0].tolist(), strict=True)
    ]
    return [pair for pair in pairs if set(pair[1]) != {-100}]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 16, 200])
@pytest.mark.parametrize("steps", [-1, 1, 4, 7, 10**6])
def test_every_layout_reads_the_same_samples(
    build_ranks: BuildRanks, corpus_file: Path, tokenizer: Tokenizer, dp_size: int, steps: int
) -> None:
    ranks = build_ranks(dp_size, steps)
    reference = stream(corpus_file, tokenizer, 16, None, False)
    num_samples = build_ranks(1)[0].num_samples
    if steps > 0:
        num_samples = min(num_samples, steps * LOCAL)
    expected = [next(reference) for _ in range(num_samples)]
    assert rows(ranks) == [(row.tokens, row.labels) for row in expected]
    assert len({len(rank) for rank in ranks}) == 1 and all(
        len(list(rank)) == len(rank) for rank in ranks
    )
    if steps > 0:
        assert len(ranks[0]) <= steps
    for rank in ranks:
        for batch in rank:
            assert batch.tokens.shape == batch.labels.shape == (1, LOCAL, 16)
            assert batch.num_valid_tokens == int((batch.labels != -100).sum())
    digest = sum(batch.digest for rank in ranks for batch in rank) % 2**64
    assert digest == sum(row.digest for row in expected) % 2**64


def test_validation_covers_all_tokens_unless_steps_limit_it(
    build_ranks: BuildRanks, corpus_file: Path, tokenizer: Tokenizer
) -> None:
    (all_batches,), (limited,) = build_ranks(1), build_ranks(1, steps=4)
    reference = stream(corpus_file, tokenizer, 16, None, False)
    num_labels = sum(
        sum(label != -100 for label in next(reference).labels)
        for _ in range(all_batches.num_samples)
    )
    assert sum(batch.num_valid_tokens for batch in all_batches) == num_labels
    assert len(limited) == 4 and limited.num_samples == 4 * LOCAL < all_batches.num_samples


def test_every_validation_pass_reads_the_same_batches(build_ranks: BuildRanks) -> None:
    (batches,) = build_ranks(1)
    interrupted = iter(batches)
    next(interrupted)
    for first, second in zip(batches, batches, strict=True):
        assert torch.equal(first.tokens, second.tokens) and torch.equal(first.labels, second.labels)


def test_document_starts_are_masked_as_in_training(
    build_ranks: BuildRanks, tokenizer: Tokenizer
) -> None:
    (plain,), (masked,) = build_ranks(1), build_ranks(1, mask=True)
    num_starts = sum(int((batch.labels == tokenizer.bos_id).sum()) for batch in plain)
    counts = [sum(batch.num_valid_tokens for batch in batches) for batches in (plain, masked)]
    assert counts[0] - counts[1] == num_starts > 10


def test_positions_equal_the_positions_in_the_samples(
    build_ranks: BuildRanks, corpus_file: Path, tokenizer: Tokenizer
) -> None:
    ranks = build_ranks(2, with_positions=True)
    reference = stream(corpus_file, tokenizer, 16, None, False)
    for shares in zip(*ranks, strict=True):
        for batch in shares:
            assert batch.positions is not None and batch.positions.shape == batch.tokens.shape
            for labels, positions in zip(
                batch.labels[0].tolist(), batch.positions[0].tolist(), strict=True
            ):
                if set(labels) != {-100}:
                    assert positions == next(reference).positions
    assert all(batch.positions is None for batch in build_ranks(1)[0])


def test_each_validation_source_is_a_separate_set(
    tokenizer: Tokenizer, corpus_file: Path, tmp_path: Path
) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", ["Now is the winter of our discontent"])
    sources = {
        name: DataSource(path=str(file))
        for name, file in (("plays", corpus_file), ("histories", other))
    }
    builder = DataBuilder(Data(), tokenizer, str(tmp_path))
    sets = builder.validation_sets(Validation(enable=True, seq_len=16, sources=sources))
    assert list(sets) == ["plays", "histories"]
    assert sets["plays"].num_samples > sets["histories"].num_samples > 0
    assert builder.validation_sets(Validation(seq_len=16, sources=sources)) == {}
