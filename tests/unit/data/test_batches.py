"""Training batches equal a plain loop over the corpus on every layout and after every restart."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtitan_like.data.batches.batch import Batch, chain_digest
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.data_errors import DataError, DataMismatch
from torchtitan_like.data.text.tokenizer import Tokenizer

from .conftest import write_jsonl
from .reference import Row, stream

Build = Callable[..., TrainBatches]
# (data-parallel size, accumulation, local batch): each layout reads 8 samples per step
LAYOUTS = [
    (1, 1, 8),
    (1, 8, 1),
    (1, 2, 4),
    (2, 1, 4),
    (2, 4, 1),
    (2, 2, 2),
    (4, 1, 2),
    (4, 2, 1),
    (8, 1, 1),
]


def ranks_of(
    build: Build, file: Path, layout: tuple[int, int, int], **settings_: Any
) -> list[TrainBatches]:
    dp_size, num_accumulation, local = layout
    return [
        build(
            file,
            dp=(rank, dp_size),
            num_accumulation=num_accumulation,
            local_batch_size=local,
            **settings_,
        )
        for rank in range(dp_size)
    ]


def rows_of(shares: list[Batch]) -> list[tuple[list[int], list[int]]]:
    """Return the samples of a step in position order: by micro-batch, then rank, then row."""
    tokens, labels = (
        torch.stack([getattr(share, name) for share in shares], 1).flatten(0, 2)
        for name in ("tokens", "labels")
    )
    return list(zip(tokens.tolist(), labels.tolist(), strict=True))


def check_step(shares: list[Batch], expected: list[Row]) -> None:
    assert rows_of(shares) == [(row.tokens, row.labels) for row in expected]
    assert (
        sum(share.digest for share in shares) % 2**64 == sum(row.digest for row in expected) % 2**64
    )
    for share in shares:
        assert share.num_valid_tokens == int((share.labels != -100).sum())
        assert share.tokens.dtype == share.labels.dtype == torch.int64
        assert share.tokens.is_contiguous() and share.labels.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mask", [False, True])
def test_every_layout_reads_the_samples_of_a_plain_loop(
    build: Build, corpus_file: Path, tokenizer: Tokenizer, layout: tuple[int, int, int], mask: bool
) -> None:
    ranks = ranks_of(build, corpus_file, layout, data={"mask_document_starts": mask})
    expected = stream(corpus_file, tokenizer, 16, 7, mask)
    num_steps = 2 * ranks[0].order.supplies[0].num_samples // 8 + 2  # more than two epochs
    for step in range(num_steps):
        shares = [next(rank) for rank in ranks]
        check_step(shares, list(itertools.islice(expected, 8)))
        assert {share.position for share in shares} == {8 * step + 8}
        # Every micro-batch of every rank starts at a different sample, so its random seed differs.
        dp_size, num_micro, local_batch = (
            len(shares),
            shares[0].tokens.shape[0],
            shares[0].tokens.shape[1],
        )
        firsts = [
            [8 * step + (m * dp_size + r) * local_batch for m in range(num_micro)]
            for r in range(dp_size)
        ]
        assert [share.first_samples for share in shares] == firsts


@pytest.mark.parametrize(
    ("seq_len", "layout"),
    [
        (1, (2, 2, 2)),
        (16, (1, 1, 8)),
        (16, (2, 2, 2)),
        (16, (4, 1, 2)),
        (700, (1, 1, 8)),
        (700, (4, 1, 2)),
    ],
    ids=str,
)
def test_positions_count_from_each_documents_start_in_the_sample(
    build: Build,
    corpus_file: Path,
    tokenizer: Tokenizer,
    layout: tuple[int, int, int],
    seq_len: int,
) -> None:
    ranks = ranks_of(build, corpus_file, layout, seq_len=seq_len, with_positions=True, max_epochs=2)
    plain = ranks_of(build, corpus_file, layout, seq_len=seq_len, max_epochs=2)
    expected = stream(corpus_file, tokenizer, seq_len, 7, False)
    num_remaining = 2 * ranks[0].order.supplies[0].num_samples
    for shares, others in zip(zip(*ranks, strict=True), zip(*plain, strict=True), strict=True):
        positions = torch.stack(
            [share.positions for share in shares if share.positions is not None], 1
        ).flatten(0, 2)
        rows = list(itertools.islice(expected, min(8, num_remaining)))
        num_remaining -= len(rows)
        assert positions[: len(rows)].tolist() == [row.positions for row in rows]
        # In padding, too, positions increase by one or restart at 0.
        steps = positions.diff(dim=-1)
        assert (positions[:, 0] == 0).all() and ((steps == 1) | (positions[:, 1:] == 0)).all()
        for share, other in zip(shares, others, strict=True):
            assert share.positions is not None and other.positions is None
            assert (
                share.positions.dtype == torch.int64 and share.positions.shape == share.tokens.shape
            )
            assert share.positions.is_contiguous() and share.digest == other.digest
    assert num_remaining == 0


@given(
    seq_len=st.integers(1, 200),
    mask=st.booleans(),
    shuffle=st.booleans(),
    restarts=st.lists(
        st.tuples(st.sampled_from(LAYOUTS), st.integers(0, 4)), min_size=1, max_size=4
    ),
)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_restarts_on_other_layouts_continue_at_the_same_sample(
    build: Build,
    corpus_file: Path,
    tokenizer: Tokenizer,
    seq_len: int,
    mask: bool,
    shuffle: bool,
    restarts: list[tuple[tuple[int, int, int], int]],
) -> None:
    expected = stream(corpus_file, tokenizer, seq_len, 7 if shuffle else None, mask)
    state: dict[str, Any] | None = None
    for layout, num_steps in restarts:
        settings_ = {"mask_document_starts": mask, "shuffle": shuffle}
        ranks = ranks_of(build, corpus_file, layout, seq_len=seq_len, data=settings_)
        for rank in ranks if state else []:
            rank.load_state_dict(state)
        for _ in range(num_steps):
            check_step([next(rank) for rank in ranks], list(itertools.islice(expected, 8)))
        states = [rank.state_dict() for rank in ranks]
        state = states[0]
        assert all(other == state for other in states)


def test_the_state_counts_consumed_not_prefetched_batches(build: Build, corpus_file: Path) -> None:
    batches = build(corpus_file)
    consumed = next(batches)
    prefetched = next(batches)
    resumed = build(corpus_file)
    resumed.load_state_dict(batches.state_dict(consumed.position))
    assert torch.equal(next(resumed).tokens, prefetched.tokens)


def test_a_distant_position_is_reached_immediately(build: Build, corpus_file: Path) -> None:
    batches = build(corpus_file)
    state = batches.state_dict(10**15)
    batches.load_state_dict(state)
    batch = next(batches)
    assert batch.first_samples == [10**15] and batch.num_valid_tokens > 0


def test_rewinding_repeats_the_same_batches(build: Build, corpus_file: Path) -> None:
    batches = build(corpus_file)
    batches.load_state_dict(batches.state_dict(1000))
    next(batches)
    batches.load_state_dict(batches.state_dict(999))
    fresh = build(corpus_file)
    fresh.load_state_dict(batches.state_dict())
    repeated, expected = next(batches), next(fresh)
    assert (repeated.position, repeated.digest) == (1001, expected.digest) and torch.equal(
        repeated.tokens, expected.tokens
    )


def test_one_large_step_equals_many_small_ones(build: Build, corpus_file: Path) -> None:
    large, small = (
        build(corpus_file, local_batch_size=10_000),
        build(corpus_file, local_batch_size=1000),
    )
    for _ in range(2):
        small_batches = [next(small) for _ in range(10)]
        large_batch = next(large)
        assert torch.equal(
            large_batch.tokens[0],
            torch.cat([small_batch.tokens[0] for small_batch in small_batches]),
        )
        assert (
            large_batch.digest == sum(small_batch.digest for small_batch in small_batches) % 2**64
        )


@pytest.mark.parametrize("layout", [(1, 1, 8), (2, 2, 2), (4, 2, 1)], ids=str)
@pytest.mark.parametrize("max_epochs", [1, 3])
def test_all_ranks_end_the_last_epoch_together_after_every_token(
    build: Build,
    corpus_file: Path,
    tokenizer: Tokenizer,
    layout: tuple[int, int, int],
    max_epochs: int,
) -> None:
    ranks = ranks_of(build, corpus_file, layout, max_epochs=max_epochs)
    num_samples = ranks[0].order.supplies[0].num_samples
    assert num_samples % 8, "the last step must be incomplete for this test"
    steps = [list(rank) for rank in ranks]
    assert {len(batches) for batches in steps} == {-(-num_samples * max_epochs // 8)}

    *_, last = zip(*steps, strict=True)
    assert {share.position for share in last} == {num_samples * max_epochs}
    padding = rows_of(list(last))[num_samples * max_epochs % 8 :]
    assert padding and all(
        tokens == [0] * 16 and labels == [-100] * 16 for tokens, labels in padding
    )

    label_counts = Counter(
        label for batches in steps for batch in batches for label in batch.labels.flatten().tolist()
    )
    one_epoch = stream(corpus_file, tokenizer, 16, None, False)
    expected_counts = Counter(
        label for row in itertools.islice(one_epoch, num_samples) for label in row.labels
    )
    del label_counts[-100], expected_counts[-100]
    assert label_counts == Counter(
        {label: count * max_epochs for label, count in expected_counts.items()}
    )
    digest = sum(batch.digest for batches in steps for batch in batches) % 2**64
    all_rows = itertools.islice(
        stream(corpus_file, tokenizer, 16, 7, False), num_samples * max_epochs
    )
    assert digest == sum(row.digest for row in all_rows) % 2**64

    for rank in ranks:
        with pytest.raises(StopIteration):
            next(rank)
    resumed = ranks_of(build, corpus_file, layout, max_epochs=max_epochs)[0]
    resumed.load_state_dict(ranks[0].state_dict())
    with pytest.raises(StopIteration):
        next(resumed)


def test_epochs_have_different_orders_of_the_same_samples(build: Build, corpus_file: Path) -> None:
    batches = build(corpus_file, local_batch_size=1)
    epochs = [
        [
            tuple(next(batches).labels.flatten().tolist())
            for _ in range(batches.order.supplies[0].num_samples)
        ]
        for _ in range(3)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(epochs[2])


def test_masking_document_starts_varies_the_number_of_valid_tokens(
    build: Build, corpus_file: Path, tokenizer: Tokenizer
) -> None:
    masked, plain = (
        build(corpus_file, data={"mask_document_starts": True}, max_epochs=1),
        build(corpus_file, max_epochs=1),
    )
    counts = []
    for masked_batch, plain_batch in zip(masked, plain, strict=True):
        is_start = plain_batch.labels == tokenizer.bos_id
        assert torch.equal(masked_batch.labels, plain_batch.labels.masked_fill(is_start, -100))
        assert torch.equal(masked_batch.tokens, plain_batch.tokens)
        counts.append(masked_batch.num_valid_tokens)
    assert len(set(counts)) > 2


@pytest.mark.parametrize(("add_bos", "add_eos"), [*itertools.product([False, True], repeat=2)])
def test_bos_and_eos_are_inserted_where_requested(
    build: Build, tmp_path: Path, tokenizer: Tokenizer, add_bos: bool, add_eos: bool
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    batches = build(
        file, seq_len=100, local_batch_size=1, data={"add_bos": add_bos, "add_eos": add_eos}
    )
    batch = next(batches)
    expected = []
    for text in ("one", "two"):
        expected += (
            [tokenizer.bos_id] * add_bos + tokenizer.encode(text) + [tokenizer.eos_id] * add_eos
        )
    assert batch.tokens[0, 0, : len(expected)].tolist() == expected
    assert batch.labels[0, 0, : len(expected) - 1].tolist() == expected[1:]
    assert batch.num_valid_tokens == len(expected) - 1


def test_the_digest_depends_on_order_and_content(build: Build, corpus_file: Path) -> None:
    digests = {
        next(build(corpus_file, local_batch_size=8, seed=seed, data={"shuffle": shuffle})).digest
        for seed, shuffle in [(1, True), (2, True), (1, False)]
    }
    assert len(digests) == 3


def test_the_digest_chain_depends_on_every_step_and_their_order() -> None:
    ends = {
        chain_digest(chain_digest(chain_digest(0, a), b), c)
        for a, b, c in itertools.permutations([1, 2, 2**64 - 1])
    }
    assert len(ends) == 6 and all(0 <= end < 2**64 for end in ends)


DIFFERENCES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "seq_len": ({"seq_len": 32}, {"seq_len"}),
    "seed": ({"seed": 8}, {"seed"}),
    "order": ({"data": {"shuffle": False}}, {"order", "seed"}),
    "mask": ({"data": {"mask_document_starts": True}}, {"mask_document_starts"}),
    "bos": ({"data": {"add_bos": False}}, {"sources.own.bos", "sources.own.num_tokens"}),
    "eos": ({"data": {"add_eos": False}}, {"sources.own.eos", "sources.own.num_tokens"}),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_resume_refuses_another_stream_and_lists_the_differences(
    build: Build, corpus_file: Path, difference: str
) -> None:
    changed, names = DIFFERENCES[difference]
    state, batches = build(corpus_file).state_dict(), build(corpus_file, **changed)
    with pytest.raises(DataMismatch) as caught:
        batches.load_state_dict(state)
    lines = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert {line.split(":")[0] for line in lines} == names
    for line in lines:
        name = line.split(":")[0]
        assert (
            line
            == f"{name}: saved {state['fingerprint'][name]!r}, now {batches.fingerprint[name]!r}"
        )
    assert batches.position == 0


def test_resume_refuses_another_corpus(build: Build, tmp_path: Path) -> None:
    one, other = (
        write_jsonl(tmp_path / name / "a.jsonl", [text])
        for name, text in [("1", "abc def"), ("2", "abc deg")]
    )
    with pytest.raises(DataMismatch, match=r"sources\.own\.text: saved '[0-9a-f]{16}', now"):
        build(other).load_state_dict(build(one).state_dict())


def test_resume_refuses_another_tokenizer(build: Build, corpus_file: Path, tmp_path: Path) -> None:
    batches = build(corpus_file)
    state = batches.state_dict()
    state["fingerprint"]["tokenizer"] = "another"
    with pytest.raises(DataMismatch, match="tokenizer: saved 'another', now"):
        batches.load_state_dict(state)


def test_resume_accepts_the_same_corpus_in_other_files_and_layouts(
    build: Build, corpus_file: Path, tmp_path: Path
) -> None:
    lines = corpus_file.read_text(encoding="utf-8").splitlines(keepends=True)
    folder = tmp_path / "moved"
    folder.mkdir()
    for part in range(3):
        (folder / f"{part}.jsonl").write_text(
            "".join(lines[part * 10 : part * 10 + 10]), encoding="utf-8"
        )
    original = build(corpus_file)
    first, second = next(original), next(original)
    resumed = build(folder, dp=(0, 2), local_batch_size=1, num_accumulation=1)
    resumed.load_state_dict(original.state_dict(first.position))
    assert torch.equal(next(resumed).tokens[0, 0], second.tokens[0, 0])


def test_a_corpus_shorter_than_one_sample_is_padded(build: Build, tmp_path: Path) -> None:
    batches = build(
        write_jsonl(tmp_path / "a.jsonl", ["hi"]), seq_len=2048, local_batch_size=3, max_epochs=1
    )
    assert batches.order.supplies[0].num_samples == 1
    (batch,) = batches
    assert batch.tokens.shape == (1, 3, 2048) and 0 < batch.num_valid_tokens < 10


def test_a_corpus_of_one_token_is_refused(build: Build, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(DataError, match="Expected 2 or more"):
        build(file, data={"add_bos": False, "add_eos": False})


def test_ranks_with_the_same_corpus_exchange_few_bytes(build: Build, corpus_file: Path) -> None:
    """Full descriptions of 20 sources from 16,384 ranks would be hundreds of megabytes per rank."""
    sent: list[str] = []

    def gather(message: str) -> list[str]:
        sent.append(message)
        return [message, message]

    build(corpus_file).check_ranks(gather, {})
    assert [len(message) for message in sent] == [32]


@pytest.mark.parametrize(("dp_size", "accumulation", "local"), [(1, 1, 4), (1, 2, 2), (2, 2, 1)])
def test_a_replica_group_reads_its_part_of_each_step_on_any_layout(
    build: Build, corpus_file: Path, dp_size: int, accumulation: int, local: int
) -> None:
    plain = build(corpus_file, local_batch_size=8)
    groups = [
        [
            build(corpus_file, dp=(rank, dp_size), local_batch_size=local,
                  num_accumulation=accumulation, replica_group=(group, 2))
            for rank in range(dp_size)
        ]
        for group in range(2)
    ]  # fmt: skip
    for _ in range(3):
        expected = next(plain)
        parts = expected.tokens.flatten(0, 1).split(4)
        for ranks, part in zip(groups, parts, strict=True):
            batches = [next(rank) for rank in ranks]
            tokens = torch.stack([batch.tokens for batch in batches], dim=1)
            assert torch.equal(tokens.reshape(part.shape), part)
            assert {(batch.position, batch.num_samples) for batch in batches} == {
                (expected.position, 4)
            }


def test_a_replica_group_reads_a_lost_batch_again(build: Build, corpus_file: Path) -> None:
    batches = build(corpus_file, replica_group=(1, 2))
    first, second = next(batches), next(batches)
    batches.seek(first.position)
    assert torch.equal(next(batches).tokens, second.tokens)
