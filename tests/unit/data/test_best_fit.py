"""Best-fit packing equals a plain loop, keeps every label, and never splits a document that fits.

The plan is computed once and stored next to the tokens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.harness.users import as_user_without_rights
from torchtitan_like.config.sections_training import Data, DataSource, Validation
from torchtitan_like.data.batches.batch import Batch, assemble
from torchtitan_like.data.batches.batch import Plan as ReadingPlan
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.data_errors import DataError, DataMismatch
from torchtitan_like.data.samples import best_fit
from torchtitan_like.data.samples.best_fit import (
    BestFitSamples,
    Plan,
    make_plan,
    open_plan,
    pack,
    plan_name,
)
from torchtitan_like.data.samples.packing import NO_SAMPLE, JoinedSamples, PackedSamples
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens.checked_file import CheckedArray, CheckedFile, RawFile
from torchtitan_like.data.tokens.token_cache import CacheFolders
from torchtitan_like.data.tokens.token_file import TokenFile, TokenMeta

from .conftest import flip_bit, write_jsonl
from .test_token_cache import wait_for

Build = Callable[..., TrainBatches]
BEST_FIT = {"packing": "best_fit"}
UNUSED = CacheFolders(None, "unused")


def token_file(folder: Path, lengths: list[int]) -> TokenFile:
    """Write documents of these lengths.

    Token number n has the id n + 1, so ids are unique and never equal padding.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
    num_tokens = int(offsets[-1])
    meta = TokenMeta(
        num_tokens=num_tokens,
        num_documents=len(lengths),
        text_digest=xxhash.xxh3_64_intdigest(repr(lengths).encode()),
    )
    path = folder / "tokens"
    path.parent.mkdir(exist_ok=True)
    np.arange(1, num_tokens + 1, dtype=np.uint32).tofile(path)
    tokens = CheckedArray(CheckedFile(RawFile(path)), np.dtype(np.uint32))
    return TokenFile(folder / ".token_cache" / "own-1", tokens, offsets, meta)


def cached_plan(file: TokenFile, seq_len: int, dump_folder: str = "unused") -> Plan:
    return best_fit.cached_plan(file, seq_len, CacheFolders(None, dump_folder))


def packed_by_a_plain_loop(lengths: list[int], seq_len: int) -> list[list[range]]:
    """Return the token numbers of each piece of each sample, in order."""
    pieces, start = [], 0
    for length in lengths:
        end = start + length
        pieces += [
            range(first, min(first + seq_len + 1, end)) for first in range(start, end - 1, seq_len)
        ]
        start = end
    samples: list[list[range]] = []
    # The sort is stable: pieces of equal length keep their order.
    for piece in sorted(pieces, key=lambda piece: -len(piece)):
        room = [seq_len + 1 - sum(map(len, sample)) for sample in samples]
        sufficient = [free for free in room if free >= len(piece)]
        if sufficient:
            samples[room.index(min(sufficient))].append(piece)
        else:
            samples.append([piece])
    samples.sort(key=lambda sample: sample[0].start)  # by the start of the longest piece
    return [sorted(sample, key=lambda piece: piece.start) for sample in samples]


def batch_of(samples: PackedSamples, numbers: list[int]) -> Batch:
    plan = ReadingPlan(np.array(numbers), np.arange(len(numbers)), 0, len(numbers))
    return assemble(JoinedSamples([samples]), plan, len(numbers), with_positions=True)


def packed(folder: Path, lengths: list[int], seq_len: int) -> BestFitSamples:
    return BestFitSamples(token_file(folder, lengths), seq_len, UNUSED)


corpora = (
    st.integers(1, 40)
    .flatmap(
        lambda seq_len: st.tuples(
            st.just(seq_len),
            st.lists(
                st.one_of(st.integers(1, seq_len + 2), st.integers(1, 4 * seq_len + 3)),
                min_size=1,
                max_size=60,
            ),
        )
    )
    .filter(lambda corpus: max(corpus[1]) > 1)
)


@given(corpora)
# Two samples have room for the last document, and the later one was packed first.
@example((19, [12, 9, 9, 6, 2]))
@settings(max_examples=200, deadline=None)
def test_samples_equal_those_of_a_plain_loop(
    tmp_path_factory: pytest.TempPathFactory, corpus: tuple[int, list[int]]
) -> None:
    seq_len, lengths = corpus
    samples = packed(tmp_path_factory.mktemp("plan"), lengths, seq_len)
    expected = packed_by_a_plain_loop(lengths, seq_len)
    assert samples.num_samples == len(expected)
    numbers = [*range(len(expected)), NO_SAMPLE, 0]
    rows, num_real = samples.read(np.array(numbers))
    ignored = set(
        zip(*(part.tolist() for part in samples.ignored_labels(np.array(numbers))), strict=True)
    )
    positions = samples.positions(np.array(numbers))
    for row, pieces in enumerate([*expected, [], expected[0]]):
        tokens = [number + 1 for piece in pieces for number in piece]
        assert rows[row].tolist() == tokens + [0] * (seq_len + 1 - len(tokens))
        assert num_real[row] == len(tokens)
        columns = [sum(map(len, pieces[:count])) for count in range(len(pieces))]
        assert {column for in_row, column in ignored if in_row == row} == {
            column - 1 for column in columns[1:]
        }
        expected_positions = [index for piece in pieces for index in range(len(piece))][:seq_len]
        num_expected = len(expected_positions)
        assert positions[row, :num_expected].tolist() == expected_positions
        padding = positions[row, num_expected:]
        assert (np.diff(positions[row, max(0, num_expected - 1) :]) == 1).all()
        assert padding.max(initial=0) < seq_len


@given(corpora)
@settings(max_examples=200, deadline=None)
def test_each_token_is_a_label_once_and_documents_that_fit_are_not_split(
    tmp_path_factory: pytest.TempPathFactory, corpus: tuple[int, list[int]]
) -> None:
    seq_len, lengths = corpus
    samples = packed(tmp_path_factory.mktemp("plan"), lengths, seq_len)
    batch = batch_of(samples, [*range(samples.num_samples), NO_SAMPLE])
    learned = batch.labels != -100
    # Ids are consecutive in the corpus, so a label is its token plus one.
    assert torch.equal(batch.tokens[learned] + 1, batch.labels[learned])
    firsts = {int(first) + 1 for first in samples.file.offsets[:-1]}
    expected = [
        label for label in range(1, samples.file.meta.num_tokens + 1) if label not in firsts
    ]
    assert sorted(batch.labels[learned].tolist()) == expected
    assert batch.num_valid_tokens == len(expected) == samples.num_labels

    rows_of = {first: set(torch.where(batch.tokens == first)[1].tolist()) for first in firsts}
    for start, length in zip(samples.file.offsets[:-1].tolist(), lengths, strict=True):
        if length == 1:
            assert rows_of[start + 1] == set()
        elif length <= seq_len + 1:
            (row,) = rows_of[start + 1]
            in_document = (batch.labels[0, row] > start) & (batch.labels[0, row] <= start + length)
            assert in_document.sum() == length - 1
    # A position is 0 where a token does not continue the previous one, and else one more.
    positions, tokens = batch.positions, batch.tokens
    assert positions is not None and (positions[..., 0] == 0).all()
    real = tokens[..., 1:] > 0
    continues = (tokens[..., 1:] == tokens[..., :-1] + 1) & ~torch.isin(
        tokens[..., 1:], torch.tensor([*firsts])
    )
    assert torch.equal(
        positions[..., 1:][real], torch.where(continues, positions[..., :-1] + 1, 0)[real]
    )


def test_many_documents_need_little_padding_and_keep_their_order() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 50_000).astype(np.int64) + 2
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    plan = make_plan(offsets.astype(np.uint64), 2048)
    ends = np.minimum(
        offsets[np.searchsorted(offsets, plan.starts, side="right")], plan.starts + 2049
    )
    samples = list(zip(plan.first_pieces[:-1], plan.first_pieces[1:], strict=True))
    lengths = ends - plan.starts
    sizes = [lengths[first:end] for first, end in samples]
    assert max(map(np.sum, sizes)) == 2049
    assert np.mean([size.sum() for size in sizes]) > 0.999 * 2049  # measured: 0.99998
    longest = [
        plan.starts[first + np.argmax(size)]
        for (first, _), size in zip(samples, sizes, strict=True)
    ]
    assert (np.diff(longest) > 0).all()


def test_a_long_plan_logs_its_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(best_fit, "PROGRESS_SECONDS", -1.0)
    caplog.set_level(logging.INFO)
    make_plan(np.array([0, 3, 5, 7, 9], np.uint64), 2)
    assert caplog.messages == ["packing: 25% of 4 pieces", "packing: 100% of 4 pieces"]


def test_documents_without_a_label_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r'all 3 documents .* have one token\. .*data\.packing = "concat"'
    ):
        BestFitSamples(token_file(tmp_path, [1, 1, 1]), 4, UNUSED)


def test_the_packing_policy_selects_the_class_of_samples(tmp_path: Path) -> None:
    file = token_file(tmp_path, [3, 5])
    assert type(pack(file, 4, Data(), UNUSED)) is PackedSamples
    assert type(pack(file, 4, Data(packing="best_fit"), UNUSED)) is BestFitSamples
    assert pack(file, 4, Data(mask_document_starts=True), UNUSED).mask_document_starts


# The plan on disk


def test_a_plan_is_stored_next_to_the_tokens_and_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = token_file(tmp_path, [3, 9, 2, 5])
    first = cached_plan(file, 4)
    plan_file, table = sorted((tmp_path / ".token_cache").glob("[!.]*"))
    assert plan_file.name == plan_name(file, 4) and plan_file.name.startswith("own-1-")
    assert table.name == f"{plan_file.name}.xxh3"
    monkeypatch.setattr(best_fit, "make_plan", lambda *_: pytest.fail("planned again"))
    second = cached_plan(file, 4)
    expected = make_plan(file.offsets, 4)
    for plan in (first, second):
        assert np.array_equal(plan.starts, expected.starts) and np.array_equal(
            plan.first_pieces, expected.first_pieces
        )


def test_each_sequence_length_and_corpus_has_its_own_plan(tmp_path: Path) -> None:
    one, other = token_file(tmp_path, [3, 9, 2, 5]), token_file(tmp_path, [3, 9, 5, 2])
    assert cached_plan(one, 4).num_samples != cached_plan(one, 3).num_samples
    assert plan_name(one, 4) != plan_name(other, 4)
    cache = tmp_path / ".token_cache"
    for suffix in ("", ".xxh3"):
        (cache / f"{plan_name(one, 4)}{suffix}").rename(cache / f"{plan_name(other, 4)}{suffix}")
    with pytest.raises(DataError, match=r"best_fit-v1-4 is damaged: .*delete it"):
        cached_plan(other, 4)


@pytest.mark.parametrize("size", [0, 5, 40, 56, -8])
def test_a_damaged_plan_is_refused(tmp_path: Path, size: int) -> None:
    file = token_file(tmp_path, [3, 9, 2, 5])
    cached_plan(file, 4)
    path = tmp_path / ".token_cache" / plan_name(file, 4)
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(DataError, match=rf"is damaged: it has {path.stat().st_size} bytes"):
        cached_plan(file, 4)


@pytest.mark.parametrize("offset", [8, 60, -3])
def test_a_plan_with_a_flipped_bit_is_refused(tmp_path: Path, offset: int) -> None:
    file = token_file(tmp_path, [3, 9, 2, 5])
    cached_plan(file, 4)
    flip_bit(tmp_path / ".token_cache" / plan_name(file, 4), offset)
    with pytest.raises(DataError, match=r"best_fit-v1-4 is damaged: .*delete .*made again"):
        cached_plan(file, 4)


def test_a_plan_without_hashes_is_rebuilt(tmp_path: Path) -> None:
    file = token_file(tmp_path, [3, 9, 2, 5])
    starts = cached_plan(file, 4).starts[:].tolist()
    path = tmp_path / ".token_cache" / plan_name(file, 4)
    path.with_name(f"{path.name}.xxh3").unlink()
    flip_bit(path, -3)
    assert cached_plan(file, 4).starts[:].tolist() == starts


def test_the_plan_of_read_only_tokens_is_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "run"))
    file = token_file(tmp_path / "data", [3, 9, 2, 5])
    (tmp_path / "data").chmod(0o555)
    (tmp_path / "run").mkdir()
    for folder in (*tmp_path.parents, tmp_path):
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "run").chmod(0o777)
    with as_user_without_rights():
        plan = cached_plan(file, 4)
        reopened = open_plan(
            tmp_path / "run/torchtitan_like/token_cache" / plan_name(file, 4), file, 4
        )
        assert reopened is not None and np.array_equal(reopened.starts, plan.starts)


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    file = token_file(tmp_path, [3, 9, 2, 5])
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", full_disk)
        with pytest.raises(DataError, match="cannot write .*No space left on device"):
            cached_plan(file, 4)
    assert [path.suffix for path in (tmp_path / ".token_cache").iterdir()] == [".lock"]
    assert cached_plan(file, 4).num_samples == 4


# A process that writes a plan, prints "paused" before the final rename, and waits for a line.
PLANNER = """
import logging, os, sys
from pathlib import Path
import numpy as np
from torchtitan_like.data.samples import best_fit
from torchtitan_like.data.tokens.token_cache import CacheFolders
from torchtitan_like.data.tokens.token_file import TokenFile, TokenMeta
fsync = os.fsync
def fsync_and_pause(descriptor):
    path = Path(os.readlink(f"/proc/self/fd/{{descriptor}}"))
    if path.name.startswith(".own-1-") and path.name.endswith(".building") and ".xxh3." not in path.name:
        print("paused", flush=True)
        sys.stdin.readline()
    fsync(descriptor)
os.fsync = fsync_and_pause
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
file = TokenFile(Path({folder!r}), np.empty(0), np.array({offsets}, np.uint64), {meta})
print(best_fit.cached_plan(file, 4, CacheFolders(None, "unused")).starts.tolist(), flush=True)
"""


@contextlib.contextmanager
def planner(
    file: TokenFile, repo_root: Path, stdin: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    script = PLANNER.format(folder=str(file.folder), offsets=file.offsets.tolist(), meta=file.meta)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=repo_root, stdin=stdin, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_plan_whose_writer_was_killed_is_rebuilt(tmp_path: Path, repo_root: Path) -> None:
    file = token_file(tmp_path, [3, 9, 2, 5])
    with planner(file, repo_root) as process:
        wait_for(process, "paused")
        process.kill()
        process.wait()
    (unfinished,) = (tmp_path / ".token_cache").glob(".*-4.*.building")
    os.truncate(unfinished, unfinished.stat().st_size // 2)
    assert open_plan(tmp_path / ".token_cache" / plan_name(file, 4), file, 4) is None
    plan, fresh = cached_plan(file, 4), make_plan(file.offsets, 4)
    assert np.array_equal(plan.starts, fresh.starts) and np.array_equal(
        plan.first_pieces, fresh.first_pieces
    )
    assert not list((tmp_path / ".token_cache").glob("*.building"))


def test_one_process_plans_while_the_others_wait(tmp_path: Path, repo_root: Path) -> None:
    file = token_file(tmp_path, [3, 9, 2, 5])
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(planner(file, repo_root))
        wait_for(first, "paused")  # the process holds the lock
        second = stack.enter_context(planner(file, repo_root, stdin=subprocess.DEVNULL))
        wait_for(second, "waiting for another process to build ")
        printed = [first.communicate("go on\n", timeout=60)[0], second.communicate(timeout=60)[0]]
    assert "packed: " in printed[0] and "pack" not in printed[1]
    starts = make_plan(file.offsets, 4).starts.tolist()
    assert [text.splitlines()[-1] for text in printed] == [str(starts)] * 2


# The pipeline


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_an_epoch_has_the_announced_number_of_labels(
    build: Build, corpus_file: Path, tokenizer: Tokenizer, packing: str, mask: bool
) -> None:
    data = {"packing": packing, "mask_document_starts": mask}
    batches = build(corpus_file, data=data, max_epochs=1, local_batch_size=3)
    (part,) = batches._batches._samples.parts
    announced, meta = part.num_labels, part.file.meta
    masked = mask or packing == "best_fit"
    assert announced == meta.num_tokens - (meta.num_documents if masked else 1)
    read = list(batches)
    assert sum(batch.num_valid_tokens for batch in read) == announced
    assert sum(int((batch.labels != -100).sum()) for batch in read) == announced
    labels = Counter(label for batch in read for label in batch.labels.flatten().tolist())
    assert (
        labels[tokenizer.eos_id] == meta.num_documents and bool(labels[tokenizer.bos_id]) != masked
    )


def test_layouts_and_restarts_read_the_same_samples(build: Build, corpus_file: Path) -> None:
    all_rows = build(corpus_file, data=BEST_FIT, local_batch_size=8)
    ranks = [
        build(corpus_file, data=BEST_FIT, dp=(rank, 2), num_accumulation=2) for rank in range(2)
    ]
    for step in range(2 * all_rows.order.supplies[0].num_samples // 8 + 1):
        if step % 5 == 4:
            state = ranks[0].state_dict()
            ranks = [build(corpus_file, data=BEST_FIT, dp=(rank, 4)) for rank in range(4)]
            for rank in ranks:
                rank.load_state_dict(state)
        batch, shares = next(all_rows), [next(rank) for rank in ranks]
        assert batch.digest == sum(share.digest for share in shares) % 2**64
        assert torch.equal(
            batch.labels.flatten(), torch.stack([share.labels for share in shares], 1).flatten()
        )


def test_resume_refuses_another_packing_policy_by_name(build: Build, corpus_file: Path) -> None:
    concat, best = (
        build(corpus_file, data={"mask_document_starts": True}),
        build(corpus_file, data=BEST_FIT),
    )
    with pytest.raises(
        DataMismatch,
        match=r"packing: saved 'concat-and-split, version 1', now 'best-fit decreasing, version 1'",
    ) as caught:
        best.load_state_dict(concat.state_dict())
    assert len([line for line in str(caught.value).splitlines() if line.startswith("  ")]) == 1


def test_validation_reads_packed_samples(
    build: Build, corpus_file: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source: Any = {"own": DataSource(path=str(corpus_file))}
    batches = DataBuilder(
        Data(packing="best_fit"), tokenizer=tokenizer, dump_folder=str(tmp_path)
    ).validation_sets(Validation(enable=True, seq_len=16, local_batch_size=3, sources=source))[""]
    (part,) = build(corpus_file, data=BEST_FIT)._batches._samples.parts
    meta = part.file.meta
    assert sum(batch.num_valid_tokens for batch in batches) == meta.num_tokens - meta.num_documents


def test_a_document_that_fits_is_in_one_sample(
    build: Build, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["abcdefg" * count for count in range(1, 8)])
    batches = build(file, data=BEST_FIT, seq_len=40, local_batch_size=1, max_epochs=1)
    sizes = np.diff(batches._batches._samples.parts[0].file.offsets[:].astype(np.int64))
    assert max(sizes) <= 41, "all documents must fit for this test"
    num_starts = num_ends = 0
    for batch in batches:
        num_starts += int((batch.tokens == tokenizer.bos_id).sum())
        num_ends += int((batch.labels == tokenizer.eos_id).sum())
        assert batch.tokens[0, 0, 0] == tokenizer.bos_id
    assert num_starts == num_ends == len(sizes) > batches.order.supplies[0].num_samples
