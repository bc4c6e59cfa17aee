"""Token files of every format, split over files in any way, yield the same samples."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from torchtitan_like.config.sections_training import Data, DataSource, Validation
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.data_errors import DataError, DataMismatch
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer
from torchtitan_like.data.tokens import token_file, token_formats, token_sources
from torchtitan_like.data.tokens.token_sources import TokenStream

from .conftest import ASSETS
from .reference import samples_of
from .token_writers import (
    DOCUMENTS,
    EOS,
    TOKENS,
    VOCAB,
    eos_starts,
    index_starts,
    open_source,
    truncate,
    write_flat,
    write_megatron,
    write_npy,
)

Build = Callable[..., TrainBatches]
SEQ_LEN = 16


def check_equal(batches: TrainBatches, tokens: list[int], starts: set[int], mask: bool) -> None:
    """Check that one epoch in file order equals a plain loop."""
    num_samples = batches.order.supplies[0].num_samples
    assert num_samples == -(-(len(tokens) - 1) // SEQ_LEN)
    expected = list(itertools.islice(samples_of(tokens, starts, SEQ_LEN, None, mask), num_samples))
    batches_read = list(batches)
    for key in ("tokens", "labels", "positions"):
        actual = torch.cat([getattr(batch, key)[0] for batch in batches_read])[:num_samples]
        assert actual.tolist() == [getattr(row, key) for row in expected], key
    assert (
        sum(batch.digest for batch in batches_read) % 2**64
        == sum(row.digest for row in expected) % 2**64
    )
    assert sum(batch.num_valid_tokens for batch in batches_read) == len(tokens) - 1 - mask * len(
        starts - {0}
    )


def read_once(build: Build, path: Path, mask: bool = False, **source: Any) -> TrainBatches:
    data = {"shuffle": False, "mask_document_starts": mask}
    source = {"format": "tokens", "max_epochs": 1, **source}
    return build(path, seq_len=SEQ_LEN, with_positions=True, data=data, **source)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("code", [3, 4, 5, 8])
def test_megatron_files_have_the_documents_of_their_index(
    build: Build, tmp_path: Path, code: int, mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_megatron(tmp_path / "wiki_text_document", DOCUMENTS, code)
    for chunk in (2, 2**22):  # the index is checked in chunks
        monkeypatch.setattr(token_formats, "CHUNK", chunk)
        check_equal(read_once(build, prefix, mask), TOKENS, index_starts(DOCUMENTS), mask)
        shutil.rmtree(tmp_path / ".token_cache")


@pytest.mark.parametrize("code", [1, 2])
def test_megatron_files_may_store_tokens_as_bytes(build: Build, tmp_path: Path, code: int) -> None:
    documents = [[[*range(100)]], [[1, 2], [3] * 30]]
    tokens = [*range(100), 1, 2, *[3] * 30]
    check_equal(
        read_once(build, write_megatron(tmp_path / "bytes", documents, code)),
        tokens,
        {0, 100},
        False,
    )


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kind", ["auto", "uint16", "uint32", "<u2", "<u4", "<i4", "<i8"])
def test_in_files_without_an_index_documents_end_with_eos(
    build: Build, tmp_path: Path, kind: str, mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_formats, "CHUNK", 7)
    starts = eos_starts(TOKENS)
    assert len(starts) == 4
    if kind.startswith("<"):
        check_equal(
            read_once(build, write_npy(tmp_path / "a.npy", TOKENS, kind), mask),
            TOKENS,
            starts,
            mask,
        )
    else:
        file = write_flat(tmp_path / "a.bin", TOKENS, "I" if kind == "uint32" else "H")
        check_equal(read_once(build, file, mask, token_dtype=kind), TOKENS, starts, mask)


def test_auto_selects_uint32_for_a_large_vocabulary_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tokenizer: Tokenizer
) -> None:
    class Large:
        vocab_size, eos_id, fingerprint, path = 2**16 + 1, EOS, "", "large"

    caplog.set_level(logging.INFO)
    file = write_flat(tmp_path / "a.bin", [*TOKENS, 2**16], "I")
    large: Any = Large()
    assert open_source(file, large).tokens[:].tolist() == [*TOKENS, 2**16]
    assert "a.bin: read as uint32, for a vocabulary of 65,537" in caplog.text
    open_source(write_flat(tmp_path / "b.bin", TOKENS), tokenizer)
    assert "b.bin: read as uint16, for a vocabulary of 2,048" in caplog.text
    open_source(write_npy(tmp_path / "c.npy", TOKENS), tokenizer, token_dtype="uint32")
    assert "token_dtype has no effect" in caplog.text


def test_a_token_cache_can_be_a_source(build: Build, corpus_file: Path, tmp_path: Path) -> None:
    text = build(
        corpus_file, with_positions=True, max_epochs=1, data={"mask_document_starts": True}
    )
    moved = tmp_path / "moved"
    shutil.copytree(corpus_file.parent / ".token_cache", moved)
    data = {"mask_document_starts": True}
    (cache,) = moved.glob("[!.]*")
    for path in (moved, cache, cache / "tokens.bin"):
        tokens = build(path, with_positions=True, max_epochs=1, data=data, format="tokens")
        without_bos = build(
            path,
            with_positions=True,
            max_epochs=1,
            data={**data, "add_bos": False},
            format="tokens",
        )
        assert (
            tokens.fingerprint == without_bos.fingerprint
            and tokens.fingerprint["sources.own.bos"] is None
        )
        for cached_batch, text_batch in zip(tokens, text, strict=True):
            assert (
                torch.equal(cached_batch.labels, text_batch.labels)
                and cached_batch.digest == text_batch.digest
            )
            assert torch.equal(cached_batch.positions, text_batch.positions)
        text.load_state_dict(text.state_dict(0))
    assert not (moved / ".token_cache").exists(), "the list of documents was built again"


def test_a_token_cache_of_another_tokenizer_is_refused(build: Build, corpus_file: Path) -> None:
    build(corpus_file)
    (cache,) = (corpus_file.parent / ".token_cache").glob("[!.]*")
    other = load_tokenizer(ASSETS / "tokenizer.model")
    with pytest.raises(
        DataError, match=rf"made with another tokenizer \(fingerprint .*{other.fingerprint}"
    ):
        open_source(cache, other)
    meta = json.loads((cache / "meta.json").read_text())
    meta["key"]["format_version"] = 99
    meta["digest"] = token_file._digest(meta)
    (cache / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match=r"has version 99 of the token cache\. Expected version 1"):
        open_source(cache, other)
    (cache / "meta.json").unlink()
    with pytest.raises(DataError, match=r"is damaged: meta\.json is missing"):
        open_source(cache, other)


def test_paths_may_be_files_folders_or_patterns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "all"
    prefix = write_megatron(folder / "b", [[[1, 2, 3]]])
    write_flat(folder / "a" / "z.bin", [4, 5])
    write_npy(folder / "c.npy", [6, 7])
    write_flat(folder / ".hidden.bin", [8])
    write_flat(folder / ".token_cache" / "x.bin", [9])
    (folder / "README.md").write_text("not tokens")

    def read(path: Path | str) -> list[int]:
        return open_source(Path(path), tokenizer).tokens[:].tolist()

    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx", folder / "b.*", folder / "[b]*"):
        assert read(path) == [1, 2, 3]
    assert (
        read(folder) == read(f"{tmp_path}/a*") == read(folder / "[abc]*") == [4, 5, 1, 2, 3, 6, 7]
    )
    assert read(folder / "a") == [4, 5] == read(folder / "**" / "[xz].bin")
    assert read(folder / ".token_cache" / "*.bin") == [9]
    for path, message in (
        (folder / "no", "no token files at"),
        (folder / "README.md", "is not a token file"),
    ):
        with pytest.raises(DataError, match=f"{message}.*Expected .bin"):
            read(path)


KINDS = [
    "megatron 3",
    "megatron 5",
    "megatron 8",
    "flat",
    "npy <u2",
    "npy <u4",
    "npy <i4",
    "npy <i8",
]


def write_kind(folder: Path, number: int, kind: str, tokens: list[int]) -> None:
    name, _, detail = kind.partition(" ")
    if name == "megatron":
        write_megatron(folder / f"{number:02d}", [[tokens]], int(detail))
    elif name == "flat":
        write_flat(folder / f"{number:02d}.bin", tokens)
    else:
        write_npy(folder / f"{number:02d}.npy", tokens, detail)


@given(
    pieces=st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.lists(st.integers(0, VOCAB - 1) | st.just(EOS), min_size=1, max_size=60),
        ),
        min_size=1,
        max_size=6,
    ).filter(lambda pieces: sum(len(tokens) for _, tokens in pieces) > 1),
    seq_len=st.integers(1, 40),
    mask=st.booleans(),
    fractions=st.lists(st.floats(0, 0.999), max_size=20),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_split_over_files_does_not_change_the_stream(
    build: Build,
    tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[tuple[str, list[int]]],
    seq_len: int,
    mask: bool,
    fractions: list[float],
) -> None:
    folder = tmp_path_factory.mktemp("split")
    tokens: list[int] = []
    starts: set[int] = set()
    for number, (kind, part) in enumerate(pieces):
        write_kind(folder, number, kind, part)
        file_starts = {0} if kind.startswith("megatron") else eos_starts(part)
        starts |= {len(tokens) + start for start in file_starts}
        tokens += part
    assume(not mask or len(starts) < len(tokens))  # a source without labels is refused
    data = {"mask_document_starts": mask, "shuffle": False}
    batches = build(
        folder,
        seq_len=seq_len,
        with_positions=True,
        data=data,
        format="tokens",
        max_epochs=1,
        token_dtype="uint16",
    )
    num_samples = batches.order.supplies[0].num_samples
    batches_read = list(batches)
    rows = list(itertools.islice(samples_of(tokens, starts, seq_len, None, mask), num_samples))
    for key in ("tokens", "labels", "positions"):
        actual = torch.cat([getattr(batch, key)[0] for batch in batches_read])[:num_samples]
        assert actual.tolist() == [getattr(row, key) for row in rows], key
    assert (
        sum(batch.digest for batch in batches_read) % 2**64
        == sum(row.digest for row in rows) % 2**64
    )

    stream = open_source(folder, tokenizer, token_dtype="uint16").tokens
    assert isinstance(stream, TokenStream) and len(stream) == len(tokens)
    indices = np.array([int(fraction * len(tokens)) for fraction in fractions], np.int64)
    assert stream[indices].tolist() == [tokens[index] for index in indices]
    low, high = sorted([*indices.tolist(), 0, len(tokens)])[:2]
    assert stream[low:high].tolist() == tokens[low:high] and stream[high:].tolist() == tokens[high:]


def test_validation_reads_token_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    sources = {
        "validation": DataSource(path=str(write_flat(tmp_path / "a.bin", TOKENS)), format="tokens")
    }
    validation = Validation(enable=True, seq_len=SEQ_LEN, local_batch_size=2, sources=sources)
    builder = DataBuilder(Data(), tokenizer, str(tmp_path))
    labels = torch.cat(
        [batch.labels.flatten() for batch in builder.validation_sets(validation)[""]]
    )
    assert labels[labels >= 0].tolist() == TOKENS[1:]


def write_two_formats(folder: Path) -> Path:
    """Write a Megatron pair and a flat file of 150 KiB each: more than the identity hash covers."""
    tokens = [number % 2040 for number in range(80_000)]
    write_megatron(folder / "a", [[tokens[:1000]], [tokens[1000:]]])
    write_flat(folder / "b.bin", tokens)
    return folder


def edit(file: Path, offset: int, value: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(value)


CHANGES: dict[str, Callable[[Path], object]] = {
    "first token": lambda folder: edit(folder / "b.bin", 0, b"\x07\x00"),
    "last token": lambda folder: edit(folder / "b.bin", 159_998, b"\x07\x00"),
    "tokens in the middle": lambda folder: edit(folder / "a.bin", 64_000, b"\x07\x00" * 8192),
    "documents": lambda folder: write_megatron(
        folder / "a", [[[n % 2040 for n in range(999)]], [[n % 2040 for n in range(999, 80_000)]]]
    ),
    "order": lambda folder: (folder / "b.bin").rename(folder / "0.bin"),
    "another file": lambda folder: write_flat(folder / "c.bin", [1]),
    "a missing file": lambda folder: (folder / "b.bin").unlink(),
    "dtype": lambda folder: write_flat(folder / "b.bin", [n % 2040 for n in range(80_000)], "I"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_resume_refuses_a_changed_source(build: Build, tmp_path: Path, change: str) -> None:
    state = read_once(
        build, write_two_formats(tmp_path / "data"), token_dtype="uint16"
    ).state_dict()
    CHANGES[change](tmp_path / "data")
    changed = read_once(
        build, tmp_path / "data", token_dtype="uint32" if change == "dtype" else "uint16"
    )
    with pytest.raises(DataMismatch, match=r"sources\.own\.text: saved '[0-9a-f]{16}', now"):
        changed.load_state_dict(state)


def test_a_moved_and_renamed_source_keeps_its_fingerprint(build: Build, tmp_path: Path) -> None:
    first = read_once(build, write_two_formats(tmp_path / "data"))
    shutil.copytree(
        tmp_path / "data", tmp_path / "far" / "away", ignore=shutil.ignore_patterns(".token_cache")
    )
    for file in (tmp_path / "far" / "away").iterdir():
        os.utime(file, (1, 1))
        file.rename(file.with_name(f"part-{file.name}"))
    moved = read_once(build, tmp_path / "far")
    moved.load_state_dict(first.state_dict())
    assert moved.fingerprint == first.fingerprint


def test_bos_and_eos_are_not_added_to_token_files(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = write_flat(tmp_path / "a.bin", TOKENS)
    fingerprints = [
        build(file, format="tokens", data={"add_bos": add, "add_eos": add}).fingerprint
        for add in (False, True)
    ]
    assert (
        fingerprints[0] == fingerprints[1]
        and fingerprints[0]["sources.own.bos"] is fingerprints[0]["sources.own.eos"] is None
    )
    assert "1 token files, read without adding BOS or EOS" in caplog.text


def test_opening_reads_few_extents_and_keeps_none_in_memory(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test opens a sparse file of 64 GiB: reading it would take minutes and all memory."""
    file = tmp_path / "a.bin"
    file.touch()
    os.truncate(file, 2**36)
    monkeypatch.setattr(
        token_sources, "_write_offsets", lambda *_: pytest.fail("searched for documents")
    )
    tracemalloc.start()
    started = time.process_time()
    opened = open_source(file, tokenizer, token_dtype="uint16")
    assert time.process_time() - started < 1.0  # measured: 2 ms
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert opened.meta.num_tokens == 2**35 and opened.offsets.tolist() == [0, 2**35]
    assert not (tmp_path / ".token_cache").exists()


def test_documents_are_searched_once(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_two_formats(tmp_path / "data")
    edit(folder / "b.bin", 2000, struct.pack("<H", EOS))
    first = open_source(folder, tokenizer, with_documents=True)
    expected = [0, 1000, 80_000, 81_001, 160_000]
    assert first.offsets.tolist() == expected and first.meta.num_documents == 4
    search = token_sources._write_offsets
    monkeypatch.setattr(token_sources, "_write_offsets", lambda *_: pytest.fail("searched again"))
    reopened = open_source(folder, tokenizer, with_documents=True)
    assert reopened.offsets.tolist() == expected and reopened.meta == first.meta

    monkeypatch.setattr(token_sources, "_write_offsets", search)
    index_only = open_source(folder, tokenizer)  # without a search for EOS
    assert index_only.offsets.tolist() == [0, 1000, 80_000, 160_000]
    edit(folder / "b.bin", 4000, struct.pack("<H", EOS))
    os.utime(folder / "b.bin", (1, 1))
    assert open_source(folder, tokenizer, with_documents=True).meta.num_documents == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: truncate(file, 8),
        lambda file: truncate(file, 4),
        lambda file: truncate(file, 24),
    ],
)
def test_a_damaged_list_of_documents_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, damage: Callable[[Path], None]
) -> None:
    file = write_flat(tmp_path / "a.bin", [1, EOS, 2])
    open_source(file, tokenizer, with_documents=True)
    (offsets_file,) = (tmp_path / ".token_cache").glob("[!.]*.u64")
    assert offsets_file.stat().st_size == 24
    damage(offsets_file)
    with pytest.raises(DataError, match=rf"{offsets_file}.* (is damaged).*delete"):
        open_source(file, tokenizer, with_documents=True)


def test_the_search_for_documents_needs_little_memory(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_formats, "CHUNK", 2**14)
    tokens = np.tile(np.array([1, EOS], "<u4"), 2**20)
    np.save(tmp_path / "a.npy", tokens)
    tracemalloc.start()
    opened = open_source(tmp_path / "a.npy", tokenizer, with_documents=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened.meta.num_documents == 2**20
    # The file and the list have 8 MiB each; a chunk needs 8 bytes for each of its 16,384 tokens.
    assert peak < 2**21


def test_a_full_disk_leaves_no_unfinished_file(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    file = write_flat(tmp_path / "a.bin", TOKENS)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", full_disk)
        with pytest.raises(
            DataError, match=r"cannot write .*the list of documents .*: .*No space left on device"
        ):
            open_source(file, tokenizer, with_documents=True)
    assert all(path.suffix == ".lock" for path in (tmp_path / ".token_cache").iterdir())
    assert open_source(file, tokenizer, with_documents=True).meta.num_documents == len(
        eos_starts(TOKENS)
    )


def test_a_warning_reports_files_without_document_ends(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_flat(tmp_path / "a.bin", range(100))
    open_source(file, tokenizer)
    assert not caplog.messages
    open_source(file, tokenizer, with_documents=True)
    (message,) = caplog.messages
    assert (
        f"ends with the EOS {EOS} of" in message and "each file is read as one document" in message
    )
    shutil.copy(ASSETS / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    caplog.clear()
    assert open_source(file, load_tokenizer(tmp_path), with_documents=True).offsets.tolist() == [
        0,
        100,
    ]
    (message,) = caplog.messages
    assert "has no EOS: each of the 1 files without an index is one document" in message
