"""The mixture's formula equals a plain loop, keeps its weights, and reads every sample once."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data.conftest import write_jsonl
from tests.unit.data.reference import digest_of
from torchtitan_like.config.sections_training import Data, Training
from torchtitan_like.data import builder as data_build
from torchtitan_like.data.batches.batch import Batch, count_valid_by_source
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.data_errors import DataError, DataMismatch
from torchtitan_like.data.samples import order as sample_order
from torchtitan_like.data.samples.order import Origin, SampleOrder, Supply
from torchtitan_like.data.text.tokenizer import Tokenizer

Build = Callable[..., TrainBatches]
PATTERN = 64  # small, so that the tests of formulas cover many patterns


@pytest.fixture
def short_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_order, "PATTERN", PATTERN)


def picks(
    supplies: Sequence[Supply], changes: Sequence[tuple[int, Mapping[str, float]]]
) -> Iterator[tuple[int, int]]:
    """Yield for each position its source and the number of earlier samples of that source."""
    weights = [supply.weight for supply in supplies]
    counts = [0] * len(supplies)
    pattern: list[int] = []
    for position in itertools.count():
        needs_pattern = not pattern
        for change_position, changed in changes:
            if change_position == position:
                weights = [
                    changed.get(supply.key, old)
                    for supply, old in zip(supplies, weights, strict=True)
                ]
                needs_pattern = True
        for index, supply in enumerate(supplies):
            if (
                weights[index]
                and supply.max_epochs
                and counts[index] == supply.max_epochs * supply.num_samples
            ):
                weights[index], needs_pattern = 0.0, True
        if not any(weights):
            return
        if needs_pattern:
            exact = [
                weight / supply.labels_per_sample
                for weight, supply in zip(weights, supplies, strict=True)
            ]
            exact = [PATTERN * share / sum(exact) for share in exact]
            numbers = [int(share) for share in exact]
            by_remainder = sorted(
                range(len(exact)), key=lambda index: numbers[index] - exact[index]
            )
            for index in by_remainder[: PATTERN - sum(numbers)]:
                numbers[index] += 1
            pattern = chairman_assignment(numbers)
        source = pattern.pop(0)
        yield source, counts[source]
        counts[source] += 1


def chairman_assignment(numbers: Sequence[int]) -> list[int]:
    """Tijdeman's schedule as stated in the paper, position by position in exact fractions."""
    total, counts = sum(numbers), [0] * len(numbers)
    shares = [Fraction(number, total) for number in numbers]
    slack = Fraction(1, 2 * max(2, sum(number > 0 for number in numbers)) - 2)
    schedule = []
    for position in range(1, total + 1):
        deficits = [share * position - count for share, count in zip(shares, counts, strict=True)]
        eligible = [
            index for index, number in enumerate(numbers) if number and deficits[index] >= slack
        ]
        chosen = min(eligible, key=lambda index: (1 - slack - deficits[index]) / shares[index])
        counts[chosen] += 1
        schedule.append(chosen)
    return schedule


supplies_of = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([0.5, 1.0, 2.0, 3.5]), st.integers(0, 3), st.sampled_from([16.0, 15.5])),
    min_size=1,
    max_size=4,
)  # fmt: skip


@given(
    rows=supplies_of,
    changes=st.dictionaries(
        st.integers(1, 150), st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, 4.0]))
    ),
    window=st.tuples(st.integers(0, 300), st.integers(1, 50)),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_closed_form_equals_a_loop(
    short_pattern: None,
    rows: list[tuple[int, float, int, float]],
    changes: dict[int, tuple[int, float]],
    window: tuple[int, int],
) -> None:
    supplies = [
        Supply(str(index), size, labels, weight, max_epochs)
        for index, (size, weight, max_epochs, labels) in enumerate(rows)
    ]
    weight_changes = [
        (position, {str(index): weight})
        for position, (index, weight) in sorted(changes.items())
        if index < len(rows)
    ]
    # An exhausted source stays exhausted. The loop would read it again after a weight change.
    limited = {str(index) for index, supply in enumerate(supplies) if supply.max_epochs}
    weight_changes = [
        (position, changed)
        for position, changed in weight_changes
        if not limited.intersection(changed)
    ]
    order = SampleOrder(supplies, seed=None, changes=weight_changes)
    expected = list(itertools.islice(picks(supplies, weight_changes), 400))
    if order.end is not None and order.end <= 400:
        assert len(expected) == order.end
    starts = np.cumsum([0, *(supply.num_samples for supply in supplies)])
    first, length = window
    actual = order.samples_at(np.arange(first, first + length)).tolist()
    expected_samples = [
        int(starts[source]) + count % supplies[source].num_samples for source, count in expected
    ]
    assert actual == (expected_samples[first : first + length] + [-1] * length)[:length]
    before = Counter(str(source) for source, _ in expected[:first])
    assert order.counts_at(first) == {supply.key: before[supply.key] for supply in supplies}


@pytest.mark.parametrize("num", [10, 100, 2000, 70_000, 200_000])
def test_weights_hold_from_the_first_samples(num: int) -> None:
    supplies = [
        Supply("a", 991, 16.0, 5.0),
        Supply("b", 7919, 16.0, 3.0),
        Supply("c", 13, 16.0, 2.0),
    ]
    counts = SampleOrder(supplies, seed=3).counts_at(num)
    for key, share in {"a": 0.5, "b": 0.3, "c": 0.2}.items():
        assert abs(counts[key] - share * num) <= 1 + num / 2**16


@pytest.mark.parametrize(
    "weights",
    [
        (3.7, 0.01, 0.01, 0.01),
        (1.0, 1.0, 1.0),
        (8.0, 2.0, 1.0),
        (5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e-3),
    ],
)
def test_a_source_deviates_from_its_weight_by_less_than_one_sample(
    weights: tuple[float, ...],
) -> None:
    order = SampleOrder(
        [Supply(str(n), 1000, 16.0, weight) for n, weight in enumerate(weights)], seed=3
    )
    ((_, shares),) = order.segments()
    num_positions = 2 * sample_order.PATTERN
    sources, _ = order.locate(np.arange(num_positions))
    positions = np.arange(1, num_positions + 1)
    for index, weight in enumerate(weights):
        share = shares[str(index)]
        assert abs(share - weight / sum(weights)) < 1 / sample_order.PATTERN
        assert np.abs(np.cumsum(sources == index) - share * positions).max() < 1


def test_weights_are_fractions_of_tokens() -> None:
    """A source whose samples are half padding is read twice as often for the same weight."""
    order = SampleOrder([Supply("full", 1000, 16.0), Supply("half", 1000, 8.0)], seed=3)
    assert order.counts_at(30_000) == {"full": 10_000, "half": 20_000}


def test_every_epoch_of_every_source_is_complete() -> None:
    supplies = [Supply("a", 100, 16.0, 5.0), Supply("b", 70, 16.0, 3.0), Supply("c", 30, 16.0, 2.0)]
    order = SampleOrder(supplies, seed=3)
    samples = order.samples_at(np.arange(3000))
    for first, supply in zip((0, 100, 170), supplies, strict=True):
        in_source = (samples >= first) & (samples < first + supply.num_samples)
        source_samples = samples[in_source] - first
        for epoch in range(len(source_samples) // supply.num_samples):
            start = epoch * supply.num_samples
            epoch_samples = source_samples[start : start + supply.num_samples]
            assert sorted(epoch_samples.tolist()) == list(range(supply.num_samples))


def test_other_sources_replace_an_exhausted_one() -> None:
    supplies = [
        Supply("a", 1000, 16.0, 2.0),
        Supply("b", 1000, 16.0, 1.0),
        Supply("few", 10, 16.0, 1.0, max_epochs=3),
    ]
    order = SampleOrder(supplies, seed=3)
    (_, before), (position, after) = order.segments()
    assert before == {"a": 0.5, "b": 0.25, "few": 0.25} and set(after) == {"a", "b"}
    assert after["a"] == pytest.approx(2 / 3, abs=1e-4)
    assert order.counts_at(position - 1)["few"] == 29 and order.counts_at(10**6)["few"] == 30
    assert order.end is None


def test_the_stream_ends_when_all_sources_do() -> None:
    supplies = [Supply("a", 7, 16.0, 2.0, max_epochs=2), Supply("b", 50, 16.0, 1.0, max_epochs=1)]
    order = SampleOrder(supplies, seed=3)
    assert order.end == 2 * 7 + 50
    counts = Counter(order.samples_at(np.arange(order.end)).tolist())
    assert counts == Counter({**dict.fromkeys(range(7), 2), **dict.fromkeys(range(7, 57), 1)})


def test_samples_at_a_distant_position_are_computed_directly() -> None:
    supplies = [Supply("a", 10**9, 16.0, 5.0), Supply("b", 10**8, 16.0, 3.0)]
    order = SampleOrder(supplies, seed=3)
    samples = order.samples_at(np.arange(10**12, 10**12 + 1000))
    assert len(set(samples.tolist())) == 1000
    assert samples.min() >= 0 and samples.max() < 11 * 10**8


def test_a_weight_that_would_never_be_read_is_refused() -> None:
    with pytest.raises(
        DataError, match="the weight 1e-07 of source 'b' gives less than one sample in 65,536"
    ):
        SampleOrder([Supply("a", 10, 16.0), Supply("b", 10, 16.0, 1e-7)], seed=3)


def test_other_sources_do_not_change_the_order_of_a_source() -> None:
    single = SampleOrder([Supply("a", 100, 16.0)], seed=3).samples_at(np.arange(100))
    mixture_order = SampleOrder([Supply("b", 9, 16.0), Supply("a", 100, 16.0)], seed=3)
    mixed_samples = mixture_order.samples_at(np.arange(400))
    assert [sample - 9 for sample in mixed_samples.tolist() if sample >= 9][:100] == single.tolist()


def test_the_pattern_restarts_at_an_origin() -> None:
    supplies = [Supply("a", 100, 16.0), Supply("b", 100, 16.0)]
    order = SampleOrder(supplies, seed=None)
    order.start_at(Origin(10, {"a": 7, "b": 103}))
    assert order.samples_at(np.arange(10, 14)).tolist() == [7, 103, 8, 104]
    assert order.counts_at(12) == {"a": 8, "b": 104}


# ---- from files to batches


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    """Write three sources; no two documents have the same tokens."""
    return {
        name: write_jsonl(
            tmp_path / name / "part.jsonl", [f"{word} {number}" for number in range(size)]
        )
        for name, word, size in (
            ("plays", "hamlet", 400),
            ("verse", "sonnet", 300),
            ("prose", "letters", 200),
        )
    }


def mixed(
    tokenizer: Tokenizer,
    texts: Mapping[str, Path],
    weights: Mapping[str, Any],
    *,
    layout: tuple[int, int, int, int] = (0, 1, 1, 8),
    skip_steps: Sequence[Sequence[int]] = (),
    **data: Any,
) -> TrainBatches:
    """Build batches. layout: (dp_rank, dp_size, accumulation, local batch), 8 samples a step."""
    dp_rank, dp_size, num_accumulation, local_batch = layout
    sources = {name: {"path": str(texts[name]), **options} for name, options in weights.items()}
    return DataBuilder(
        Data(**{"sources": sources, **data}),
        tokenizer=tokenizer,
        dump_folder="unused",
        dp_rank=dp_rank,
        dp_size=dp_size,
    ).train_batches(
        Training(
            seq_len=16,
            local_batch_size=local_batch,
            skip_steps=[list(pair) for pair in skip_steps],
            dataset_path=None if weights else str(texts["plays"]),
        ),
        seed=7,
        global_batch_size=num_accumulation * dp_size * local_batch,
    )


WEIGHTS = {"plays": {"weight": 5.0}, "verse": {"weight": 3.0}, "prose": {"weight": 2.0}}


def rows(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batch.tokens.flatten(0, 1).tolist()]


def test_a_mixture_reads_the_samples_of_its_sources(
    tokenizer: Tokenizer, texts: dict[str, Path]
) -> None:
    """Compare rows, labels and digests with a loop over the separate sources."""
    batches = mixed(tokenizer, texts, WEIGHTS)
    pieces = {name: list(_source_samples(tokenizer, texts[name], name)) for name in WEIGHTS}
    supplies = [
        Supply(name, len(pieces[name]), supply.labels_per_sample, supply.weight)
        for name, supply in zip(WEIGHTS, batches.order.supplies, strict=True)
    ]
    all_samples = [real for name in WEIGHTS for real in pieces[name]]
    sample_indices = batches.order.samples_at(np.arange(800)).reshape(-1, 8)
    assert batches.order.supplies == tuple(supplies)
    for step, indices in enumerate(sample_indices.tolist()):
        batch = next(batches)
        expected = [all_samples[index] for index in indices]
        assert rows(batch) == [tuple((real + [0] * 17)[:16]) for real in expected]
        assert (
            batch.digest
            == sum(digest_of(real, 8 * step + row) for row, real in enumerate(expected)) % 2**64
        )
        assert batch.num_valid_tokens == sum(len(real) - 1 for real in expected)
        sources = np.searchsorted(
            np.cumsum([len(pieces[name]) for name in WEIGHTS]), indices, side="right"
        )
        assert batch.sources.flatten().tolist() == sources.tolist()
        counts = [
            sum(
                len(real) - 1
                for real, row_source in zip(expected, sources, strict=True)
                if row_source == source
            )
            for source in range(3)
        ]
        assert count_valid_by_source(batch.labels, batch.sources, 3) == counts


def _source_samples(tokenizer: Tokenizer, file: Path, name: str) -> Iterator[list[int]]:
    word = {"plays": "hamlet", "verse": "sonnet", "prose": "letters"}[name]
    tokens: list[int] = []
    for number in range(len(file.read_text().splitlines())):
        tokens += [tokenizer.bos_id, *tokenizer.encode(f"{word} {number}"), tokenizer.eos_id]
    for start in range(0, len(tokens) - 1, 16):
        yield tokens[start : start + 17]


LAYOUTS = [(1, 1, 8), (2, 1, 4), (4, 2, 1), (1, 4, 2)]  # dp, accumulation, local batch


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_every_layout_reads_the_same_mixture(
    tokenizer: Tokenizer, texts: dict[str, Path], layout: tuple[int, int, int]
) -> None:
    dp_size, num_accumulation, local_batch = layout
    single_rank = mixed(tokenizer, texts, WEIGHTS)
    ranks = [
        mixed(tokenizer, texts, WEIGHTS, layout=(rank, dp_size, num_accumulation, local_batch))
        for rank in range(dp_size)
    ]
    for _ in range(60):
        batch, shares = next(single_rank), [next(rank) for rank in ranks]
        assert Counter(rows(batch)) == Counter(itertools.chain.from_iterable(map(rows, shares)))
        assert batch.digest == sum(share.digest for share in shares) % 2**64


def test_a_mixture_continues_after_a_restart(tokenizer: Tokenizer, texts: dict[str, Path]) -> None:
    uninterrupted = mixed(tokenizer, texts, WEIGHTS)
    expected = [next(uninterrupted).digest for _ in range(50)]
    stopped = mixed(tokenizer, texts, WEIGHTS)
    digests = [next(stopped).digest for _ in range(20)]
    resumed = mixed(tokenizer, texts, WEIGHTS, layout=(0, 1, 4, 2))
    resumed.load_state_dict(stopped.state_dict())
    assert digests + [next(resumed).digest for _ in range(30)] == expected
    assert resumed.changes == []


def test_weights_change_at_their_step(tokenizer: Tokenizer, texts: dict[str, Path]) -> None:
    weights = {
        "plays": {"weight": 1.0, "weight_from": [[11, 0]]},
        "verse": {"weight": 0.0, "weight_from": [[11, 1.0]]},
    }
    batches = mixed(tokenizer, texts, weights)
    word = {
        name: tuple(tokenizer.encode(text))[:2]
        for name, text in (("plays", "hamlet"), ("verse", "sonnet"))
    }

    def has(batch: Batch, name: str) -> bool:
        return all(word[name] in itertools.pairwise(row) for row in rows(batch))

    steps = [next(batches) for _ in range(20)]
    assert all(has(batch, "plays") for batch in steps[:10]) and all(
        has(batch, "verse") for batch in steps[10:]
    )


def test_weights_change_at_their_step_despite_skipped_steps(
    tokenizer: Tokenizer, texts: dict[str, Path]
) -> None:
    weights = {
        "plays": {"weight": 1.0, "weight_from": [[11, 0]]},
        "verse": {"weight": 0.0, "weight_from": [[11, 1.0]]},
    }
    batches = mixed(tokenizer, texts, weights, skip_steps=[(3, 5), (11, 12)])
    word = tokenizer.encode("hamlet")
    assert len(word) > 1
    has = [
        any(tuple(word) == row[i : i + len(word)] for row in rows(next(batches)) for i in range(16))
        for _ in range(14)
    ]
    assert has == [True] * 10 + [False] * 4


def test_the_log_names_the_dataset_that_is_read(
    tokenizer: Tokenizer, texts: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A path or [data.sources] tables replace the `dataset` of an inherited config."""
    caplog.set_level("INFO")
    for weights, name in (({}, str(texts["plays"])), ({"verse": {"weight": 1.0}}, "verse")):
        mixed(tokenizer, texts, weights)
        assert [line for line in caplog.messages if line.startswith(f"training data {name} ")], (
            caplog.messages
        )
        caplog.clear()


def test_the_log_reports_when_weights_change_and_sources_end(
    tokenizer: Tokenizer, texts: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    weights = {"plays": {"weight": 1.0, "max_epochs": 1}, "verse": {"weight": 1.0, "max_epochs": 1}}
    batches = mixed(tokenizer, texts, weights, skip_steps=[(2, 4)])
    logged = [
        line
        for line in caplog.messages
        if line.startswith(("Mixture from step", "The training data end"))
    ]
    steps = list(batches)
    last = steps[-1]
    # A source's last sample is shorter, so fractions of samples differ slightly from weights.
    assert re.fullmatch(
        r"Mixture from step 1 \(sample 0\): plays 50\.0\d%, verse 49\.9\d% of the samples",
        logged[0],
    )
    assert logged[1].endswith("plays 100.00% of the samples")
    assert logged[2] == f"The training data end in step {len(steps)}, with sample {last.position}"
    (number,) = re.findall(r"from step (\d+)", logged[1])
    sonnets = [any(tokenizer.encode("sonnet")[0] in row for row in rows(batch)) for batch in steps]
    assert sonnets.index(False) in (int(number), int(number) - 1)


def test_a_source_without_labels_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = {"empty": write_jsonl(tmp_path / "a.jsonl", ["a", "b"])}
    settings_ = {"mask_document_starts": True, "add_bos": False, "add_eos": False}
    with pytest.raises(
        DataError, match="source empty .*: 2 documents, .* has no labels: each document"
    ):
        mixed(tokenizer, texts, {"empty": {}}, **settings_)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"plays": {"weight": 1.0}, "verse": {"weight": 3.0}, "prose": {"weight": 2.0}}, ["sources.plays.weight"]),
        (
            {"plays": {"weight": 5.0}, "verse": {"weight": 3.0}},
            [
                "sources", "sources.prose.bos", "sources.prose.eos", "sources.prose.num_documents",
                "sources.prose.num_tokens", "sources.prose.text", "sources.prose.text_field", "sources.prose.weight",
            ],
        ),
    ],
)  # fmt: skip
def test_a_changed_mixture_is_refused_or_continues_without_repeats(
    tokenizer: Tokenizer,
    texts: dict[str, Path],
    changed: dict[str, Any],
    names: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = mixed(tokenizer, texts, WEIGHTS)
    row_counts = Counter(itertools.chain.from_iterable(rows(next(run)) for _ in range(20)))
    state = run.state_dict()
    with pytest.raises(DataMismatch) as refused:
        mixed(tokenizer, texts, changed).load_state_dict(state)
    differences = [
        line.strip().split(":")[0]
        for line in str(refused.value).splitlines()
        if line.startswith("  ")
    ]
    assert differences == names and "data.allow_change = [" in str(refused.value)

    other = mixed(tokenizer, texts, changed, allow_change=names)
    other.load_state_dict(state)
    assert (
        other.changes == names
        and "Each source continues after the samples that were read" in caplog.text
    )
    row_counts += Counter(itertools.chain.from_iterable(rows(next(other)) for _ in range(10)))
    assert max(row_counts.values()) == 1, "a sample was read twice in the first epoch"
    # A restart of the changed run needs no permission.
    third = mixed(tokenizer, texts, changed)
    third.load_state_dict(other.state_dict())
    assert next(third).digest == next(other).digest
    assert other.order.counts_at(other.position).keys() == changed.keys()


def test_a_run_of_the_earlier_schedule_resumes_at_each_sources_position(
    tokenizer: Tokenizer, texts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sequential_schedule(counts: sample_order.Indices) -> sample_order.Indices:
        return np.repeat(np.arange(len(counts)), counts)

    with monkeypatch.context() as earlier:
        earlier.setattr(sample_order, "_schedule", sequential_schedule)
        earlier.setattr(data_build, "MIXTURE_VERSION", 1)
        run = mixed(tokenizer, texts, WEIGHTS)
    for _ in range(3):
        next(run)
    state = run.state_dict()
    with pytest.raises(DataMismatch, match=r"mixture: saved .* version 1', now .* version 2'"):
        mixed(tokenizer, texts, WEIGHTS).load_state_dict(state)
    resumed = mixed(tokenizer, texts, WEIGHTS, allow_change=["mixture"])
    resumed.load_state_dict(state)
    assert resumed.order.counts_at(resumed.position) == {"plays": 24, "verse": 0, "prose": 0}


def test_more_epochs_of_an_exhausted_source_are_refused(
    tokenizer: Tokenizer, texts: dict[str, Path]
) -> None:
    """After a source ends, the other sources fill its positions; more epochs cannot undo that."""
    one_epoch = {**WEIGHTS, "prose": {"weight": 2.0, "max_epochs": 1}}
    run = mixed(tokenizer, texts, one_epoch)
    for _ in range(100):
        next(run)
    assert run.order.counts_at(run.position)["prose"] == run.order.supplies[2].num_samples
    two_epochs = {**WEIGHTS, "prose": {"weight": 2.0, "max_epochs": 2}}
    with pytest.raises(DataMismatch, match=r"samples read: saved \{'plays'"):
        mixed(tokenizer, texts, two_epochs).load_state_dict(run.state_dict())
    allowed = mixed(tokenizer, texts, two_epochs, allow_change=["samples read"])
    allowed.load_state_dict(run.state_dict())
    assert allowed.order.counts_at(allowed.position) == run.order.counts_at(run.position)


# ---- skipped samples


def test_skipped_steps_are_never_read_and_the_others_are_unchanged(
    tokenizer: Tokenizer, texts: dict[str, Path]
) -> None:
    plain = mixed(tokenizer, texts, WEIGHTS)
    digests = [next(plain).digest for _ in range(40)]
    # The second pair counts steps after the first pair is removed: 20 is the plain run's step 25.
    skipping = mixed(tokenizer, texts, WEIGHTS, skip_steps=[(11, 15), (20, 20)])
    batches = [next(skipping) for _ in range(30)]
    assert {batch.num_samples for batch in batches} == {8}, "skipped samples were counted"
    # Digests include the position, so each step reads the plain run's samples and positions.
    assert [batch.digest for batch in batches] == [*digests[:10], *digests[15:24], *digests[25:36]]

    stopped = mixed(tokenizer, texts, WEIGHTS)
    for _ in range(10):
        next(stopped)
    for layout in ((0, 1, 4, 2), (0, 1, 1, 8)):
        resumed = mixed(tokenizer, texts, WEIGHTS, layout=layout, skip_steps=[(11, 15)])
        resumed.load_state_dict(stopped.state_dict())
        assert next(resumed).digest == digests[15]


def test_a_step_continues_after_skipped_samples_in_its_middle(
    tokenizer: Tokenizer, texts: dict[str, Path]
) -> None:
    batches = mixed(tokenizer, texts, WEIGHTS)
    batches.steps._skipped = [range(4, 10), range(13, 1000)]
    order = batches.order.samples_at(np.array([0, 1, 2, 3, 10, 11, 12, 1000]))
    batch = next(batches)
    assert batch.num_samples == 8
    expected, _ = batches._batches._samples.read(order)
    assert rows(batch) == [tuple(row) for row in expected[:, :-1].tolist()]
    assert batch.position == 1001
