"""Streamed sources equal a plain loop over the corpus on every layout and after every restart."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data.conftest import TEXTS, write_jsonl
from tests.unit.data.reference import Row, samples_of
from tests.unit.data.test_batches import check_step, rows_of
from torchtitan_like.config.sections_training import (
    Data,
    DataLoader,
    DataSource,
    Training,
    Validation,
)
from torchtitan_like.data.batches.batch import Batch
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.data_errors import DataError, DataMismatch
from torchtitan_like.data.samples import streaming
from torchtitan_like.data.samples.order import shuffled
from torchtitan_like.data.text import documents
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens import token_cache
from torchtitan_like.data.tokens.token_file import TokenFile

ROOT = Path(__file__).parents[3]
Build = Callable[..., TrainBatches]
SEQ_LEN, SEED, BLOCK, WINDOW = 16, 7, 1000, 2000
# (data-parallel size, accumulation, local batch): each layout reads 8 samples per step
LAYOUTS = [(1, 1, 8), (2, 2, 2), (4, 1, 2)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(streaming, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(streaming, "MIN_SAMPLES", 1)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write four files: one is empty, another has blocks without tokens."""
    folder = tmp_path / "corpus"
    write_jsonl(
        folder / "a.jsonl",
        [f"{number} {text}" * bool(text) for number in range(4) for text in TEXTS],
    )
    write_jsonl(folder / "b.jsonl", [])
    write_jsonl(folder / "d.jsonl", [""] * 160)
    write_jsonl(folder / "c.jsonl", [f"verse {number}" * (number % 9) for number in range(90)])
    return folder


@pytest.fixture
def build(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Build]:
    """Return ``build(layout, rank, {name: source}, ...)``."""
    loaders: list[TrainBatches] = []
    before = multiprocessing.active_children()

    def build_batches(
        layout: tuple[int, int, int],
        rank: int,
        sources: dict[str, Any],
        num_workers: int = 0,
        **options: Any,
    ) -> TrainBatches:
        dp_size, num_accumulation, local = layout
        skip = {"skip_steps": options.pop("skip_steps")} if "skip_steps" in options else {}
        seq_len = options.pop("seq_len", SEQ_LEN)
        loader = DataLoader(num_workers=num_workers)
        loaders.append(
            DataBuilder(
                Data(
                    sources={name: DataSource(**source) for name, source in sources.items()},
                    **options,
                ),
                tokenizer=tokenizer,
                dump_folder=str(tmp_path / "run"),
                dp_rank=rank,
                dp_size=dp_size,
                with_positions=True,
            ).train_batches(
                Training(seq_len=seq_len, local_batch_size=local, dataloader=loader, **skip),
                seed=SEED,
                global_batch_size=num_accumulation * dp_size * local,
            )
        )
        return loaders[-1]

    yield build_batches
    # Deleting a loader waits five seconds for each of its workers.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in set(multiprocessing.active_children()) - set(before):
        worker.kill()


def streamed_source(path: Path, **settings_: Any) -> dict[str, Any]:
    return {"own": {"path": str(path), "streaming": True, **settings_}}


def ranks_of(
    build: Build, layout: tuple[int, int, int], sources: dict[str, Any], **options: Any
) -> list[TrainBatches]:
    return [build(layout, rank, sources, **options) for rank in range(layout[0])]


def key_of(name: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(name.encode(), seed)


def windows_of(
    folder: Path, tokenizer: Tokenizer, shuffle: bool, name: str = "own"
) -> Iterator[tuple[list[int], set[int]]]:
    """Yield the tokens and document starts of endless windows.

    A line belongs to the block that contains its first byte.
    """
    blocks: list[list[list[int]]] = []
    size = 0
    for file in sorted(folder.glob("*.jsonl")):
        raw = file.read_bytes()
        size += len(raw)
        own_blocks: list[list[list[int]]] = [[] for _ in range(-(-len(raw) // BLOCK))]
        offset = 0
        for line in raw.splitlines(keepends=True):
            ids = tokenizer.encode(json.loads(line)["text"])
            if ids:
                document = [tokenizer.bos_id, *ids, tokenizer.eos_id]
                own_blocks[offset // BLOCK].append(document)  # type: ignore[arg-type]
            offset += len(line)
        blocks += own_blocks
    blocks_per_window = round(max(WINDOW, 4 * SEQ_LEN) * len(blocks) / size)
    seed = key_of(name, SEED)
    for epoch in itertools.count():
        for window, first in enumerate(range(0, len(blocks), blocks_per_window)):
            chosen = list(range(first, min(first + blocks_per_window, len(blocks))))
            number = epoch * -(-len(blocks) // blocks_per_window) + window
            if shuffle:
                chosen = sorted(
                    shuffled(np.array(chosen), len(blocks), key_of("blocks", seed), epoch).tolist()
                )
            window_documents = [document for block in chosen for document in blocks[block]]
            if shuffle and window_documents:
                order = shuffled(
                    np.arange(len(window_documents)),
                    len(window_documents),
                    key_of("documents", seed),
                    number,
                )
                window_documents = [window_documents[index] for index in order.tolist()]
            tokens, starts = [], set()
            for document in window_documents:
                starts.add(len(tokens))
                tokens += document
            yield tokens, starts


def stream(
    folder: Path, tokenizer: Tokenizer, mask: bool = False, shuffle: bool = True
) -> Iterator[Row]:
    """Yield the samples of endless epochs in order."""
    position = 0
    for number, (tokens, starts) in enumerate(windows_of(folder, tokenizer, shuffle)):
        num_samples = -(-(len(tokens) - 1) // SEQ_LEN)
        key = key_of("samples", key_of("own", SEED))
        order = np.arange(num_samples)
        order = shuffled(order, num_samples, key, number) if shuffle and num_samples else order
        window_rows = list(
            itertools.islice(samples_of(tokens, starts, SEQ_LEN, None, mask), num_samples)
        )
        for index in order.tolist():
            yield window_rows[index].at_position(position)
            position += 1


@pytest.mark.parametrize(
    ("layout", "mask"), [(LAYOUTS[0], True), (LAYOUTS[1], False), (LAYOUTS[2], True)], ids=str
)
def test_every_layout_reads_the_samples_of_a_plain_loop(
    build: Build, corpus: Path, tokenizer: Tokenizer, layout: tuple[int, int, int], mask: bool
) -> None:
    ranks = ranks_of(build, layout, streamed_source(corpus), mask_document_starts=mask)
    expected = stream(corpus, tokenizer, mask)
    for step in range(70):  # more than two epochs
        shares, rows = [next(rank) for rank in ranks], list(itertools.islice(expected, 8))
        check_step(shares, rows)
        positions = torch.stack(
            [share.positions for share in shares if share.positions is not None], 1
        ).flatten(0, 2)
        assert positions.tolist() == [row.positions for row in rows]
        assert {(share.position, share.num_samples) for share in shares} == {(8 * step + 8, 8)}
    (part,) = ranks[0]._streams.values()
    assert part._first + len(part._starts) - 1 > 2 * part.windows_per_epoch > 6


@given(
    shuffle=st.booleans(),
    restarts=st.lists(
        st.tuples(st.sampled_from(LAYOUTS), st.integers(0, 12)), min_size=2, max_size=5
    ),
)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_restarts_on_other_layouts_continue_at_the_same_sample(
    build: Build,
    corpus: Path,
    tokenizer: Tokenizer,
    shuffle: bool,
    restarts: list[tuple[tuple[int, int, int], int]],
) -> None:
    expected = stream(corpus, tokenizer, shuffle=shuffle)
    state: dict[str, Any] | None = None
    for layout, num_steps in restarts:
        ranks = ranks_of(build, layout, streamed_source(corpus), shuffle=shuffle)
        for rank in ranks if state else []:
            rank.load_state_dict(state)
        for _ in range(num_steps):
            check_step([next(rank) for rank in ranks], list(itertools.islice(expected, 8)))
        states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
        state = states[0]
        assert all(other == state for other in states) and len(json.dumps(state)) < 2000


def contents(batch: Batch) -> tuple[Any, ...]:
    return (
        *rows_of([batch]),
        batch.digest,
        batch.num_valid_tokens,
        batch.first_samples,
        batch.position,
        batch.num_samples,
    )


def test_workers_do_not_change_batches(build: Build, corpus: Path) -> None:
    """A restart in the middle repeats prefetched batches that were not returned."""
    layout, source = (2, 2, 2), streamed_source(corpus, max_epochs=1)
    expected = [contents(batch) for batch in build(layout, 1, source)]
    with_workers = build(layout, 1, source, num_workers=4)
    first_half = [next(with_workers) for _ in range(len(expected) // 2)]
    state = with_workers.state_dict(first_half[-2].position)
    assert [contents(batch) for batch in (*first_half, *with_workers)] == expected
    resumed = build(layout, 1, source, num_workers=1)
    resumed.load_state_dict(state)
    assert [contents(batch) for batch in resumed] == expected[len(first_half) - 1 :]


@pytest.mark.parametrize(
    ("layout", "num_epochs", "packing"),
    [((1, 1, 8), 2, "concat"), ((4, 1, 2), 1, "concat"), ((2, 2, 2), 2, "best_fit")],
    ids=str,
)
def test_all_ranks_end_the_last_epoch_together_after_every_token(
    build: Build,
    corpus: Path,
    tokenizer: Tokenizer,
    layout: tuple[int, int, int],
    num_epochs: int,
    packing: str,
) -> None:
    ranks = ranks_of(build, layout, streamed_source(corpus, max_epochs=num_epochs), packing=packing)
    steps = [list(rank) for rank in ranks]
    (length,) = {len(batches) for batches in steps}
    (end,) = {rank.position for rank in ranks}
    assert {batches[-1].position for batches in steps} == {end} and -(-end // 8) == length
    assert sum(batch.num_samples for batch in steps[0]) == end

    label_counts = Counter(
        label for batches in steps for batch in batches for label in batch.labels.flatten().tolist()
    )
    expected_counts: Counter[int] = Counter()
    (part,) = ranks[0]._streams.values()
    for tokens, starts in itertools.islice(
        windows_of(corpus, tokenizer, True), num_epochs * part.windows_per_epoch
    ):
        ignored = starts if packing == "best_fit" else {0}
        expected_counts.update(token for index, token in enumerate(tokens) if index not in ignored)
    del label_counts[-100]
    assert label_counts == expected_counts
    for rank in ranks:
        with pytest.raises(StopIteration):
            next(rank)
    resumed = ranks_of(
        build, layout, streamed_source(corpus, max_epochs=num_epochs), packing=packing
    )[-1]
    resumed.load_state_dict(ranks[0].state_dict())
    with pytest.raises(StopIteration):
        next(resumed)
    assert resumed.state_dict() == ranks[0].state_dict()
    longer = build(layout, 0, streamed_source(corpus, max_epochs=num_epochs + 1), packing=packing)
    longer.load_state_dict(ranks[0].state_dict())
    assert next(longer).num_samples == 8


def test_a_distant_position_builds_one_window(
    build: Build, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "NUM_AHEAD", 0)
    batches = build((1, 1, 8), 0, streamed_source(corpus))
    (part,) = batches._streams.values()
    built_windows, make = [], part._make

    def count(folder: Path, key: dict[str, Any]) -> TokenFile:
        built_windows.append(key["window"])
        return make(folder, key)

    monkeypatch.setattr(part, "_make", count)
    state = batches.state_dict(10**7) | {"cursors": {"own": (2_000_001, 10**7 - 5)}}
    batches.load_state_dict(state)
    batch = next(batches)
    assert batch.first_samples == [10**7] and batch.num_valid_tokens == 8 * SEQ_LEN
    assert built_windows == [2_000_001]


def test_only_windows_near_the_reader_are_kept_and_a_missing_one_is_rebuilt(
    build: Build, corpus: Path
) -> None:
    batches, steps = build((1, 1, 8), 0, streamed_source(corpus)), []
    (part,) = batches._streams.values()
    for _ in range(60):
        steps.append(next(batches))
        kept = [
            folder for folder in part._folder.glob("window-*") if not folder.name.startswith(".")
        ]
        assert len(kept) <= streaming.NUM_AHEAD + 3 and len(part._open) <= streaming.NUM_AHEAD + 1
    assert part._thread is not None
    part._thread.join()
    assert len(list(part._folder.glob(".*"))) <= streaming.NUM_AHEAD + 4  # locks
    restarted = build((1, 1, 8), 0, streamed_source(corpus))
    assert [next(restarted).digest for _ in range(60)] == [batch.digest for batch in steps]


@pytest.mark.parametrize("layout", [(1, 1, 8), (4, 1, 2)], ids=str)
def test_streamed_and_cached_sources_can_be_mixed(
    build: Build, corpus: Path, layout: tuple[int, int, int]
) -> None:
    """The mixture reads each source's samples in the order of a single-source run."""
    sources: dict[str, Any] = {
        "own": {"path": str(corpus), "streaming": True, "weight": 5},
        "other": {"path": str(corpus / "c.jsonl"), "streaming": True, "weight": 2},
        "small": {"path": str(corpus / "c.jsonl"), "weight": 1, "weight_from": [[10, 3]]},
    }
    single_source_rows = {
        name: (row for batch in build((1, 1, 1), 0, {name: source}) for row in rows_of([batch]))
        for name, source in (
            (name, {**source, "weight": 1, "weight_from": []}) for name, source in sources.items()
        )
    }
    num_read: Counter[str] = Counter()
    state = None
    for _ in range(3):
        ranks = ranks_of(build, layout, sources)
        for rank in ranks if state else []:
            rank.load_state_dict(state)
        for _ in range(8):
            number, _ = ranks[0].order.locate(ranks[0].next_positions())
            names = [ranks[0].order.supplies[index].key for index in number.tolist()]
            expected = [next(single_source_rows[name]) for name in names]
            shares = [next(rank) for rank in ranks]
            assert rows_of(shares) == expected
            row_sources = torch.stack([share.sources for share in shares], 1).flatten()
            assert row_sources.tolist() == number.tolist()
            num_read.update(names)
        state = json.loads(json.dumps(ranks[-1].state_dict()))
    assert state["counts"] == num_read and min(num_read.values()) > 10


def test_skipped_steps_are_not_read(build: Build, corpus: Path) -> None:
    plain = build((1, 1, 8), 0, streamed_source(corpus, max_epochs=1))
    expected = [
        contents(batch) for number, batch in enumerate(plain, start=1) if not 3 <= number <= 12
    ]
    skipping = build((1, 1, 8), 0, streamed_source(corpus, max_epochs=1), skip_steps=[[3, 12]])
    assert [contents(batch) for batch in skipping] == expected


def test_resume_refuses_a_stream_of_other_files(
    build: Build, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = build((1, 1, 8), 0, streamed_source(corpus))
    for _ in range(30):
        next(first)
    write_jsonl(corpus / "z.jsonl", ["one more"] * 99)
    changed = build((1, 1, 8), 0, streamed_source(corpus))
    with pytest.raises(
        DataMismatch,
        match=r"(?s)sources.own.files: saved '4 files, .*now '5 files, .*sources.own.order: ",
    ):
        changed.load_state_dict(first.state_dict())
    allowing = build((1, 1, 8), 0, streamed_source(corpus), allow_change=["sources.own.*"])
    allowing.load_state_dict(first.state_dict())
    assert next(allowing).position == first.position + 8
    (old,), (new,) = first._streams.values(), allowing._streams.values()
    # The new stream starts at the first window that the old one has not read.
    assert new._first == old.cursor(first.position)[0]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "text"])
def test_a_block_is_a_row_group_a_record_batch_or_a_text_file(
    build: Build, tmp_path: Path, tokenizer: Tokenizer, kind: str
) -> None:
    texts = [f"{number} {text}" for number in range(8) for text in TEXTS if text.strip()]
    folder = tmp_path / kind
    folder.mkdir()
    table = pyarrow.table({"text": texts})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=5)
    elif kind == "arrow":
        with (
            pyarrow.OSFile(str(folder / "a.arrow"), "wb") as sink,
            pyarrow.ipc.new_file(sink, table.schema) as out,
        ):
            out.write_table(table, max_chunksize=5)
    else:
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_text(text)
    cached = {"own": {"path": str(folder), "max_epochs": 1}}
    label_counts, expected = (
        Counter(
            label
            for batch in build((1, 1, 8), 0, sources)
            for label in batch.labels.flatten().tolist()
        )
        for sources in (streamed_source(folder, max_epochs=1), cached)
    )
    batches = build((1, 1, 8), 0, streamed_source(folder))
    (part,) = batches._streams.values()
    assert (
        len(part._blocks) == (-(-len(texts) // 5) if kind != "text" else len(texts))
        and part.windows_per_epoch > 1
    )
    del label_counts[-100], expected[-100]
    missing = expected - label_counts  # the first token of a window is not a label
    assert not label_counts - expected and missing == {tokenizer.bos_id: part.windows_per_epoch - 1}


def test_errors_in_streamed_files_are_reported(build: Build, corpus: Path) -> None:
    (corpus / "d.jsonl").write_text('{"text": "good"}\n{"text": 7}\n')
    with pytest.raises(DataError, match=r'd.jsonl, line 2: "text" is 7'):
        list(build((1, 1, 8), 0, streamed_source(corpus, max_epochs=1)))
    write_jsonl(corpus / "nothing" / "a.jsonl", [""] * 300)
    with pytest.raises(DataError, match="the 1 files of .*nothing contain no labels"):
        next(build((1, 1, 8), 0, streamed_source(corpus / "nothing")))


def test_the_config_check_refuses_sources_that_cannot_be_streamed() -> None:
    stream = {"path": "a", "streaming": True}
    for section, source, expected in (
        (Data, {**stream, "max_epochs": 2}, "in a mixture .*not available yet"),
        (Data, {**stream, "format": "tokens"}, 'false with format = "tokens"'),
        (partial(Validation, enable=True), stream, "sources that are not streamed"),
    ):
        with pytest.raises(ValueError, match=expected):
            section(sources={"one": DataSource(**source), "two": DataSource(path="b")})


def test_a_fork_releases_the_locks_of_other_threads(tmp_path: Path) -> None:
    """A loader may fork its workers while a thread builds the next window."""
    with token_cache._locked(tmp_path / "lock", tmp_path, wait=True):
        worker = multiprocessing.get_context("fork").Process(target=signal.pause)
        worker.start()
        with (
            pytest.raises(BlockingIOError),
            token_cache._locked(tmp_path / "lock", tmp_path, wait=False),
        ):
            pass
    try:
        with token_cache._locked(tmp_path / "lock", tmp_path, wait=False):
            pass
    finally:
        worker.kill()
        worker.join()


def test_a_process_can_end_while_windows_are_built(corpus: Path, tmp_path: Path) -> None:
    """The process does not wait for windows built ahead and ends without an error."""
    code = """if 1:
        import sys, threading
        from torchtitan_like.config.sections_training import Data, Training
        from torchtitan_like.data.builder import DataBuilder
        from torchtitan_like.data.samples import streaming
        from torchtitan_like.data.text import documents, tokenizer
        documents.BLOCK_BYTES, streaming.WINDOW_BYTES, streaming.MIN_SAMPLES = 1000, 5000, 1
        encode, started = streaming.encode_piece, threading.Event()
        def slow(*arguments):
            if threading.current_thread() is not threading.main_thread():
                print("building", flush=True)
                started.set()
                threading.main_thread().join()
            return encode(*arguments)
        streaming.encode_piece = slow
        builder = DataBuilder(
            Data(sources={"own": {"path": sys.argv[1], "streaming": True}}),
            tokenizer.load_tokenizer("tests/assets/tokenizer"), sys.argv[2])
        batches = builder.train_batches(Training(seq_len=16), seed=1, global_batch_size=8)
        next(batches)
        started.wait()
    """
    command = [sys.executable, "-c", code, str(corpus), str(tmp_path / "run")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "building\n", "")


def test_bad_records_end_a_stream_or_are_skipped_and_reported(
    build: Build, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [
        contents(batch)[:2]
        for batch in build(
            (1, 1, 8), 0, streamed_source(corpus / "c.jsonl", max_epochs=1), shuffle=False
        )
    ]
    with (corpus / "c.jsonl").open("a") as file:
        file.write('{"text": 7}\n')
    source = streamed_source(corpus / "c.jsonl", max_epochs=1)
    with pytest.raises(
        DataError,
        match=r'c.jsonl, line 91: .* \(data.on_bad_record = "skip" leaves such records out\)',
    ):
        list(build((1, 1, 8), 0, source, shuffle=False))
    skipping = build((1, 1, 8), 0, source, shuffle=False, on_bad_record="skip")
    assert [contents(batch)[:2] for batch in skipping] == expected
    assert "skipped 1 bad records, such as" in caplog.text
