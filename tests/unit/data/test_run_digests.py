"""A run records hashes of the token file extents that it reads, and verifies them later.

Token files of the user have no hashes of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchtitan_like.config.sections_training import DataSource
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens import checked_file, run_digests
from torchtitan_like.data.tokens.token_file import TokenFile

from .conftest import flip_bit
from .token_writers import open_source, write_megatron, write_npy

TOKENS = [*range(2000)] * 100  # 400 KB as uint16: more than the bytes that identify a file
EXTENT = 1024


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a flat token file and a Megatron pair, and set extents of 1 KiB."""
    monkeypatch.setattr(checked_file, "EXTENT_BYTES", EXTENT)
    (tmp_path / "data").mkdir()
    np.array(TOKENS, "<u2").tofile(tmp_path / "data" / "a.bin")
    write_megatron(tmp_path / "data" / "b", [[TOKENS]])
    return tmp_path / "data"


@pytest.fixture
def start(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., TokenFile]:
    """Return a function that opens the source, as each start of the run does."""
    return lambda **options: open_source(folder, tokenizer, run=tmp_path / "run", **options)


# Outside the bytes that identify the source: 16 KiB at eight offsets of each file.
OFFSET = 17_000


def test_a_flipped_bit_is_detected_at_the_next_start(
    start: Callable[..., TokenFile], folder: Path, tmp_path: Path
) -> None:
    first = start()
    first.tokens[8_000:10_000]
    flip_bit(folder / "a.bin", OFFSET)
    with pytest.raises(
        DataError,
        match=r"a\.bin is damaged: bytes 16,384 to 17,407 have the hash .* recorded by this run",
    ):
        start()
    flip_bit(folder / "a.bin", OFFSET)
    assert start().tokens[8_000:10_000].tolist() == TOKENS[8_000:10_000]
    flip_bit(folder / "a.bin", OFFSET)
    next((tmp_path / "run" / "token_digests").glob("*.u32")).unlink()  # as the message advises
    start().tokens[8_000:10_000]


def test_files_not_verified_at_the_start_are_verified_when_read(
    start: Callable[..., TokenFile], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().tokens[:]
    flip_bit(folder / "b.bin", OFFSET)
    monkeypatch.setattr(run_digests, "NUM_AT_START", 1)
    second = start()
    second.tokens[len(TOKENS) : len(TOKENS) + 8_000]
    with pytest.raises(DataError, match=r"b\.bin is damaged: bytes 16,384 to"):
        second.tokens[len(TOKENS) + 8_000 : len(TOKENS) + 9_000]


def test_the_records_of_all_processes_are_merged_and_bounded(
    start: Callable[..., TokenFile], tmp_path: Path
) -> None:
    records = tmp_path / "run" / "token_digests"
    for _ in range(3):
        start().tokens[:]
        start(is_recorder=False).tokens[:]
    (table,) = records.glob("*.u32")
    assert len(list(records.iterdir())) == 1, "the logs were not merged"
    num_extents = 2 * -(-2 * len(TOKENS) // EXTENT)
    assert table.stat().st_size == 4 * num_extents
    assert np.count_nonzero(np.fromfile(table, "<u4")) == num_extents


def test_a_second_source_with_the_same_files_keeps_the_record(
    start: Callable[..., TokenFile], tmp_path: Path
) -> None:
    training = start()
    training.tokens[:1_000]
    start()  # such as a validation source: it merges and removes the first log
    training.tokens[:]
    start()
    (table,) = (tmp_path / "run" / "token_digests").glob("*.u32")
    assert np.fromfile(table, "<u4").all()


def test_processes_that_read_different_bytes_end_the_next_start(
    start: Callable[..., TokenFile], folder: Path
) -> None:
    one, other = start(), start()
    one.tokens[8_000:10_000]
    flip_bit(folder / "a.bin", OFFSET)
    other.tokens[8_000:10_000]
    with pytest.raises(
        DataError,
        match=r"a\.bin has changed during this run: .* contents of the 1,024 bytes from 16,384 on",
    ):
        start()


def test_a_truncated_log_is_read_up_to_its_last_record(
    start: Callable[..., TokenFile], tmp_path: Path, folder: Path
) -> None:
    start().tokens[8_000:10_000]
    (log,) = (tmp_path / "run" / "token_digests").glob("*.log")
    with log.open("ab") as stream:
        stream.write(b"\xff" * 8 + b"\0\0\0")  # an extent that does not exist, and half a record
    start()
    flip_bit(folder / "a.bin", OFFSET)
    with pytest.raises(DataError, match="is damaged"):
        start()


def test_overwriting_or_truncating_a_file_ends_the_run(
    start: Callable[..., TokenFile], folder: Path
) -> None:
    opened = start()
    opened.tokens[:]
    status = (folder / "a.bin").stat()
    flip_bit(folder / "a.bin", OFFSET)
    os.utime(folder / "a.bin", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(
        DataError,
        match=r"a\.bin has changed since the run opened it \(the same size, another modification time\)",
    ):
        opened.tokens[0:10]
    flip_bit(folder / "a.bin", OFFSET)
    opened = start()
    os.truncate(folder / "a.bin", OFFSET)
    with pytest.raises(
        DataError,
        match=r"a\.bin has changed since the run opened it \(17,000 bytes, expected 400,000\)",
    ):
        opened.tokens[8_000:10_000]


def test_a_full_disk_causes_one_warning(
    start: Callable[..., TokenFile],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    opened = start()
    monkeypatch.setattr(os, "open", full)
    assert opened.tokens[:].tolist() == TOKENS * 2
    (warning,) = [record.message for record in caplog.records if "cannot record" in record.message]
    assert "No space left on device" in warning


def test_an_npy_file_is_recorded_with_its_header(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_npy(tmp_path / "data.npy", TOKENS)
    source = DataSource(path=str(tmp_path / "data.npy"), format="tokens")
    open_source(Path(source.path), tokenizer, run=tmp_path / "run").tokens[:]
    flip_bit(tmp_path / "data.npy", 50_001)
    with pytest.raises(DataError, match=r"data\.npy is damaged: bytes 32,768 to 65,535"):
        open_source(Path(source.path), tokenizer, run=tmp_path / "run")
