"""Files are hashed by extents; reads verify every extent that they touch."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import xxhash

from tests.harness.extents import record_file, verify_file
from torchtitan_like.checkpoint.errors import DamagedError
from torchtitan_like.checkpoint.verification import ExtentSource, check_sizes, find_damage
from torchtitan_like.util.extents import EXTENT, ExtentSink, FileRecord, HashedStream


def write(path: Path, content: bytes, step: int = 2**20 - 1) -> FileRecord:
    """Write `content` in pieces that do not align with extents."""
    with ExtentSink(path) as sink:
        for start in range(0, len(content), step):
            sink.write(content[start : start + step])
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
    """Return random bytes for two and a half extents."""
    return os.urandom(2 * EXTENT + EXTENT // 2)


@pytest.mark.parametrize("size", [0, 1, EXTENT - 1, EXTENT, EXTENT + 1, 2 * EXTENT + EXTENT // 2])
def test_a_record_has_the_size_and_the_hash_of_every_extent(
    tmp_path: Path, content: bytes, size: int
) -> None:
    record = write(tmp_path / "file", content[:size])
    hashes = [
        xxhash.xxh3_128_hexdigest(content[start : start + EXTENT][: size - start])
        for start in range(0, size, EXTENT)
    ]
    assert record == FileRecord(size, tuple(hashes))
    assert (tmp_path / "file").read_bytes() == content[:size]
    assert record_file(tmp_path / "file") == record
    verify_file(tmp_path / "file", record)


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError, match="file"):
        write(tmp_path / "file", b"second")


@pytest.mark.parametrize(
    "position", [0, EXTENT - 1, EXTENT, 2 * EXTENT, 2 * EXTENT + EXTENT // 2 - 1]
)
def test_a_flipped_bit_is_located(tmp_path: Path, content: bytes, position: int) -> None:
    record = write(tmp_path / "file", content)
    flip(tmp_path / "file", position)
    index = position // EXTENT
    start, end = index * EXTENT, min((index + 1) * EXTENT, len(content))
    with pytest.raises(
        DamagedError, match=rf"file is damaged: extent {index} \(bytes {start} to {end}\)"
    ):
        verify_file(tmp_path / "file", record)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (EXTENT, "has 4194304 bytes. Expected 10485760: "),
        (2 * EXTENT + EXTENT, "has 12582912 bytes"),
        (None, "is missing"),
    ],
)
def test_a_wrong_length_is_detected_without_reading(
    tmp_path: Path, content: bytes, size: int | None, message: str
) -> None:
    record = write(tmp_path / "file", content)
    if size is None:
        (tmp_path / "file").unlink()
    else:
        os.truncate(tmp_path / "file", size)
    for check in (
        check_sizes,
        lambda folder, records: verify_file(folder / "file", records["file"]),
    ):
        with pytest.raises(DamagedError, match=message):
            check(tmp_path, {"file": record})


def test_all_damage_of_a_folder_is_reported_and_progress_ends_at_the_total(
    tmp_path: Path, content: bytes
) -> None:
    records = {name: write(tmp_path / name, content) for name in ("a", "b", "c")}
    flip(tmp_path / "a", 5)
    flip(tmp_path / "a", EXTENT)
    os.truncate(tmp_path / "b", 7)
    calls: list[tuple[int, int]] = []
    errors = [
        str(e) for e in find_damage(tmp_path, records, progress=lambda *call: calls.append(call))
    ]
    assert [(error.split()[0][-2:], "extent" in error) for error in errors] == [
        ("/b", False),
        ("/a", True),
        ("/a", True),
    ]
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
def test_reading_a_range_reads_only_its_extents(
    tmp_path: Path, content: bytes, offset: int, length: int, extents: set[int]
) -> None:
    record = write(tmp_path / "file", content)
    for unread in {0, 1, 2} - extents:
        flip(tmp_path / "file", unread * EXTENT)
    buffer = bytearray(length)
    with ExtentSource(tmp_path / "file", record) as source:
        source.read(offset, memoryview(buffer))
        assert source.verified == extents
    assert buffer == content[offset : offset + length]


def test_neighboring_ranges_share_one_read(tmp_path: Path, content: bytes) -> None:
    record = write(tmp_path / "file", content)
    buffer = bytearray(8)
    with ExtentSource(tmp_path / "file", record) as source:
        source.read(0, memoryview(buffer))
        flip(tmp_path / "file", 3)
        source.read(8, memoryview(buffer))
        assert buffer == content[8:16]
        source.read(EXTENT, memoryview(buffer))
        with pytest.raises(DamagedError):
            source.read(8, memoryview(buffer))


def test_the_error_of_a_failed_write_names_the_file(tmp_path: Path, content: bytes) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (EXTENT + 1, limit[1]))
    try:
        with pytest.raises(OSError, match=r"\[Errno 27\].*/file'"):
            write(tmp_path / "file", content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_stream_of_other_extents_continues_an_incomplete_one(tmp_path: Path) -> None:
    """Token caches have small extents, and a build continues after a kill."""
    content = os.urandom(5 * 1024 + 100)
    digests = []
    with open(tmp_path / "file", "wb") as file:
        stream = HashedStream(file, 1024, xxhash.xxh3_64)
        stream.write(content[:1500])
        assert stream.tail_digest() == xxhash.xxh3_64_digest(content[1024:1500])
        digests += stream.take_digests()
        stream = HashedStream(file, 1024, xxhash.xxh3_64, tail=content[1024:1500])
        for start in range(1500, len(content), 777):
            stream.write(content[start : start + 777])
        digests += stream.finish()
    starts = range(0, len(content), 1024)
    assert digests == [xxhash.xxh3_64_digest(content[start : start + 1024]) for start in starts]
    assert (tmp_path / "file").read_bytes() == content
