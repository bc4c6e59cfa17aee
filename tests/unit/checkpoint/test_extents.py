"""Files in hashed extents: what is recorded, what is noticed, what is read."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import xxhash

from tests.harness.extents import record_file, verify_file
from torchtitan_like.checkpoint.errors import DamagedError
from torchtitan_like.checkpoint.extents import (
    EXTENT,
    ExtentSink,
    ExtentSource,
    FileRecord,
    check_sizes,
    find_damage,
)


def write(path: Path, content: bytes, step: int = 2**20 - 1) -> FileRecord:
    """Write `content` in pieces that no boundary divides."""
    with ExtentSink(path) as sink:
        for begin in range(0, len(content), step):
            sink.write(content[begin : begin + step])
        return sink.close()


def flip(path: Path, position: int) -> None:
    """Invert one bit on disk."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module")
def content() -> bytes:
    """Two and a half extents."""
    return os.urandom(2 * EXTENT + EXTENT // 2)


@pytest.mark.parametrize("size", [0, 1, EXTENT - 1, EXTENT, EXTENT + 1, 2 * EXTENT + EXTENT // 2])
def test_a_record_is_the_size_and_the_hash_of_every_extent(tmp_path: Path, content: bytes, size: int) -> None:
    record = write(tmp_path / "file", content[:size])
    hashes = [
        xxhash.xxh3_128_hexdigest(content[begin : begin + EXTENT][: size - begin]) for begin in range(0, size, EXTENT)
    ]
    assert record == FileRecord(size, tuple(hashes))
    assert (tmp_path / "file").read_bytes() == content[:size]
    assert record_file(tmp_path / "file") == record
    verify_file(tmp_path / "file", record)


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError, match="file"):
        write(tmp_path / "file", b"second")


@pytest.mark.parametrize("position", [0, EXTENT - 1, EXTENT, 2 * EXTENT, 2 * EXTENT + EXTENT // 2 - 1])
def test_a_flipped_bit_is_located(tmp_path: Path, content: bytes, position: int) -> None:
    record = write(tmp_path / "file", content)
    flip(tmp_path / "file", position)
    index = position // EXTENT
    begin, end = index * EXTENT, min((index + 1) * EXTENT, len(content))
    with pytest.raises(DamagedError, match=rf"file is damaged: extent {index} \(bytes {begin} to {end}\)"):
        verify_file(tmp_path / "file", record)


@pytest.mark.parametrize(
    ("size", "text"),
    [(EXTENT, "has 4194304 bytes, expected 10485760"), (2 * EXTENT + EXTENT, "has 12582912 bytes"), (None, "is missing")],
)
def test_a_wrong_length_is_found_without_reading(tmp_path: Path, content: bytes, size: int | None, text: str) -> None:
    record = write(tmp_path / "file", content)
    if size is None:
        (tmp_path / "file").unlink()
    else:
        os.truncate(tmp_path / "file", size)
    for check in (check_sizes, lambda folder, records: verify_file(folder / "file", records["file"])):
        with pytest.raises(DamagedError, match=text):
            check(tmp_path, {"file": record})


def test_all_damage_of_a_folder_is_reported_and_progress_ends_at_the_total(tmp_path: Path, content: bytes) -> None:
    records = {name: write(tmp_path / name, content) for name in ("a", "b", "c")}
    flip(tmp_path / "a", 5)
    flip(tmp_path / "a", EXTENT)
    os.truncate(tmp_path / "b", 7)
    calls: list[tuple[int, int]] = []
    found = [str(e) for e in find_damage(tmp_path, records, progress=lambda *call: calls.append(call))]
    assert [(text.split()[0][-2:], "extent" in text) for text in found] == [("/b", False), ("/a", True), ("/a", True)]
    assert calls == sorted(calls) and calls[-1] == (2 * len(content), 2 * len(content))
    assert list(find_damage(tmp_path, records, [("a", 2), ("c", 0)])) == []


@pytest.mark.parametrize(
    ("offset", "length", "extents"),
    [
        (0, 2 * EXTENT + EXTENT // 2, {0, 1, 2}),
        (5, 10, {0}),
        (EXTENT, EXTENT, {1}),
        (EXTENT - 1, 2, {0, 1}),
        (3, 2 * EXTENT, {0, 1, 2}),
        (2 * EXTENT + 9, 0, set()),
    ],
)
def test_a_range_is_read_and_only_its_extents(
    tmp_path: Path, content: bytes, offset: int, length: int, extents: set[int]
) -> None:
    record = write(tmp_path / "file", content)
    for unread in {0, 1, 2} - extents:
        flip(tmp_path / "file", unread * EXTENT)
    into = bytearray(length)
    with ExtentSource(tmp_path / "file", record) as source:
        source.read(offset, memoryview(into))
        assert source.verified == extents
    assert into == content[offset : offset + length]


def test_neighboring_ranges_share_one_read(tmp_path: Path, content: bytes) -> None:
    record = write(tmp_path / "file", content)
    into = bytearray(8)
    with ExtentSource(tmp_path / "file", record) as source:
        source.read(0, memoryview(into))
        flip(tmp_path / "file", 3)
        source.read(8, memoryview(into))
        assert into == content[8:16]
        source.read(EXTENT, memoryview(into))
        with pytest.raises(DamagedError):
            source.read(8, memoryview(into))


def test_a_write_that_fails_names_the_file(tmp_path: Path, content: bytes) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (EXTENT + 1, limit[1]))
    try:
        with pytest.raises(OSError, match=r"\[Errno 27\].*/file'"):
            write(tmp_path / "file", content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
