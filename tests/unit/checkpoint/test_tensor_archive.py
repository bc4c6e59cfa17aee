"""torch reads the archives of `checkpoint/tensor_archive.py` bit for bit."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import pytest
import torch

from torchtitan_like.checkpoint.dcp_source import MAX_GAP
from torchtitan_like.checkpoint.dcp_storage import ALIGNMENT
from torchtitan_like.checkpoint.tensor_archive import (
    HEADER_BYTES,
    archive_header,
    archive_trailer,
)

DTYPES = [
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
    *(torch.complex64, torch.complex128),
]
SHAPES = [(), (1,), (0,), (3, 0, 2), (7, 5), (300, 2, 1, 4), (1,) * 32]


def archive(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return archive_header(len(content)) + content + archive_trailer(dtype, shape)


def example(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return bytes for the elements of a tensor."""
    return bytes(i % 2 for i in range(math.prod(shape) * dtype.itemsize))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_loads_every_dtype_and_shape(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        content = example(dtype, shape)
        blob = archive(content, dtype, shape)
        loaded = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
        assert (loaded.dtype, tuple(loaded.shape)) == (dtype, shape)
        assert loaded.is_contiguous() and not loaded.requires_grad
        assert bytes(loaded.view(-1).view(torch.uint8).tolist()) == content


def test_elements_start_at_a_fixed_and_aligned_offset() -> None:
    assert HEADER_BYTES == 64, "a part of format version 3"
    for num_bytes in (0, 1, 2**31, 2**32, 2**40):
        assert len(archive_header(num_bytes)) == HEADER_BYTES
    assert HEADER_BYTES % ALIGNMENT == 0


def test_archive_is_a_zip_file_with_the_records_of_torch_save() -> None:
    content = example(torch.float32, (3, 5))
    blob = archive(content, torch.float32, (3, 5))
    saved = io.BytesIO()
    torch.save(torch.ones(3, 5), saved)
    expected = zipfile.ZipFile(saved)
    with zipfile.ZipFile(io.BytesIO(blob)) as opened:
        names = opened.namelist()
        assert set(names) <= set(expected.namelist())
        for name in ("archive/byteorder", "archive/version"):  # zipfile checks their CRC-32
            assert opened.read(name) == expected.read(name)
        assert opened.read("archive/data.pkl")
        data = opened.getinfo("archive/data/0")
    assert data.file_size == len(content) and data.CRC == 0


def test_archives_of_more_than_4_gib_load(tmp_path: Path) -> None:
    """The file is sparse, and torch maps it into memory."""
    num_elements = (5 * 2**30) // 4
    path = tmp_path / "large.pt"
    with open(path, "wb") as file:
        file.write(archive_header(4 * num_elements))
        file.seek(4 * num_elements - 4, 1)
        file.write(torch.tensor(1.5).numpy().tobytes())
        file.write(archive_trailer(torch.float32, (num_elements,)))
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded.shape == (num_elements,)
    assert loaded[-2:].tolist() == [0, 1.5]


def test_gaps_between_tensors_are_read_along() -> None:
    """Extents of neighboring tensors are read in place if MAX_GAP covers trailer and header."""
    longest = archive_trailer(torch.float8_e4m3fnuz, (2**40,) * 3)
    assert len(longest) + ALIGNMENT + HEADER_BYTES < MAX_GAP


def test_equal_tensors_have_equal_bytes() -> None:
    trailer = archive_trailer(torch.float32, (3, 5))
    assert trailer == archive_trailer(torch.float32, torch.Size((3, 5)))
