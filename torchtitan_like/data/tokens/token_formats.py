"""Open files of tokens. Only headers and the first and last entries are read.

    a.bin + a.idx    Megatron-LM's MMapIndexedDataset, version 1
                     (megatron/core/datasets/indexed_dataset.py)
    a.npy            one-dimensional, integers
    a.bin            without an .idx: only little-endian uint16 or uint32
    tokens.bin       with meta.json and offsets.bin: a folder of this program's token cache

The first and the last format store the start of each document. In the other formats a document ends
with the tokenizer's EOS or with the file.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens.checked_file import CheckedArray, CheckedFile, RawFile
from torchtitan_like.data.tokens.token_cache import FORMAT_VERSION
from torchtitan_like.data.tokens.token_file import (
    META,
    OFFSETS,
    TOKENS,
    key_of,
    open_token_file,
    token_type,
)

ENDINGS = (".bin", ".idx", ".npy")
CHUNK = 2**22  # entries of a file or index that are read at a time
_NUM_INSPECTED = 4096  # first tokens of a flat file that are inspected to detect a wrong dtype

_MAGIC = b"MMIDIDX\x00\x00"
# Magic, version, code of the dtype, number of sequences, number of document boundaries.
_HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are floating-point dtypes.
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_PREPROCESS = "create it again with Megatron-LM's tools/preprocess_data.py"
_LLMC_MAGICS = (20240520, 20240801)  # the headers of llm.c's token files
_NPY_TYPES = ("uint16", "uint32", "int32", "int64")
# Several threads open files, and numpy parses the header of an .npy file as Python source. In
# CPython 3.11 two threads that parse Python source can fail with "AST constructor recursion depth
# mismatch" (fixed in 3.12).
_NPY_HEADER_LOCK = threading.Lock()


@dataclass(frozen=True)
class TokenPart:
    """A token file, with its index if it has one. Can be pickled.

    tokens: (num_tokens,) integers.
    files: the file of the tokens, then the file of the index.
    starts(eos_id): yields the first token of each document, empty ones included, as non-decreasing
        chunks of int64. It checks the index.
    is_flat: the file has no index. Documents end at ``eos_id``; None: the file is one document.
    offsets: (num_documents + 1,) uint64, the starts as an array, if one exists.
    """

    tokens: CheckedArray
    files: tuple[Path, ...]
    starts: Callable[[int | None], Iterator[NDArray[np.int64]]]
    is_flat: bool = False
    offsets: CheckedArray | None = None


def open_part(file: Path, tokenizer: Tokenizer, token_dtype: str) -> TokenPart:
    """Open a token file.

    file: an .npy file, a .bin file (Megatron's if it has an .idx), or tokens.bin of a token cache.
    token_dtype: dtype of flat .bin files: "auto", "uint16" or "uint32".

    Raises DataError if the file is invalid.
    """
    if is_cache(file):
        return _open_cache(file.parent, tokenizer)
    if not file.exists():
        raise _fault(
            file.with_suffix(".idx"),
            "has no .bin file",
            f"the tokens in {file.name}",
            "copy it too",
        )
    if file.stat().st_size == 0:
        raise _fault(file, "is empty", "tokens", "remove it from the source, or copy it again")
    if file.suffix == ".npy":
        return _open_npy(file)
    if file.with_suffix(".idx").exists():
        return _open_megatron(file, file.with_suffix(".idx"))
    return _open_flat(file, tokenizer, token_dtype)


def is_cache(file: Path) -> bool:
    """Return True if ``file`` is tokens.bin of a token cache, complete or not."""
    return file.name == TOKENS and any((file.parent / name).exists() for name in (META, OFFSETS))


def _fault(file: Path, problem: str, expected: str, remedy: str) -> DataError:
    return DataError(f"{file} {problem}. Expected {expected}: {remedy}")


def _open_cache(folder: Path, tokenizer: Tokenizer) -> TokenPart:
    key = key_of(folder)
    if key.get("format_version") != FORMAT_VERSION:
        problem = f"has version {key.get('format_version')} of the token cache"
        raise _fault(folder, problem, f"version {FORMAT_VERSION}", "tokenize the text again")
    if key.get("tokenizer") != tokenizer.fingerprint:
        raise DataError(
            f"the token cache {folder} was made with another tokenizer (fingerprint "
            f"{key.get('tokenizer')}). Expected {tokenizer.fingerprint}, of {tokenizer.path}: "
            "give the tokenizer of the cache, or train on the text itself"
        )
    cached = open_token_file(folder, key, is_one_of_many=True)
    assert cached is not None
    if not cached.meta.num_documents:
        raise _fault(folder, "is empty", "tokens", "remove it from the source")
    tokens, offsets = cached.tokens, cached.offsets
    assert isinstance(tokens, CheckedArray) and isinstance(offsets, CheckedArray)
    files = folder / TOKENS, folder / OFFSETS
    return TokenPart(tokens, files, partial(_cached_starts, offsets), offsets=offsets)


def _cached_starts(offsets: CheckedArray, _: int | None) -> Iterator[NDArray[np.int64]]:
    for low in range(0, len(offsets) - 1, CHUNK):
        yield offsets[low : min(low + CHUNK, len(offsets) - 1)].astype(np.int64)


def _numbers(
    file: Path, dtype: np.dtype[Any], offset: int = 0, count: int | None = None
) -> CheckedArray:
    return CheckedArray(CheckedFile(RawFile(file, is_one_of_many=True)), dtype, offset, count)


def _open_npy(file: Path) -> TokenPart:
    try:
        with _NPY_HEADER_LOCK:
            tokens = np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # a damaged header raises the errors of Python's parser
        raise _fault(
            file,
            f"is not a complete .npy file ({error})",
            "one array",
            "write it again with numpy.save",
        ) from error
    name = tokens.dtype.name if tokens.dtype.byteorder != ">" else f"big-endian {tokens.dtype.name}"
    if tokens.ndim != 1 or name not in _NPY_TYPES:
        expected = f"one dimension, {', '.join(_NPY_TYPES)}"
        problem = f"has the shape {tokens.shape} and the dtype {name}"
        raise _fault(file, problem, expected, "convert it with numpy")
    if not len(tokens):
        raise _fault(file, "has no token", "1 or more", "remove it from the source")
    return _flat_part(_numbers(file, tokens.dtype, tokens.offset))


def _open_flat(file: Path, tokenizer: Tokenizer, token_dtype: str) -> TokenPart:
    if token_dtype == "auto":
        dtype = token_type(tokenizer.vocab_size)
    else:
        dtype = np.dtype(token_dtype).newbyteorder("<")
    size = file.stat().st_size
    if size % dtype.itemsize:
        raise _fault(
            file,
            f"has {size:,} bytes",
            f"a multiple of {dtype.itemsize}, for {dtype.name}",
            "copy it again, or set the source's `token_dtype`",
        )
    tokens = _numbers(file, dtype)
    if size >= 4 and int(_numbers(file, np.dtype("<u4"), 0, 1)[0]) in _LLMC_MAGICS:
        raise _fault(
            file,
            "starts with a header of llm.c",
            "tokens from the first byte on",
            "remove its first 1,024 bytes",
        )
    first = tokens[:_NUM_INSPECTED]
    is_automatic_uint16 = token_dtype == "auto" and dtype.itemsize == 2
    looks_like_uint32 = len(first) > 32 and first[::2].any() and not first[1::2].any()
    if is_automatic_uint16 and looks_like_uint32:
        raise _fault(
            file,
            "has a zero in every second element, read as uint16",
            f"uint16 for a vocabulary of {tokenizer.vocab_size:,}",
            'set the source\'s `token_dtype` to "uint32" (or to "uint16", if the zeros are tokens)',
        )
    return _flat_part(tokens)


def _flat_part(tokens: CheckedArray) -> TokenPart:
    return TokenPart(tokens, (tokens.file.file.path,), partial(_flat_starts, tokens), is_flat=True)


def _flat_starts(tokens: CheckedArray, eos_id: int | None) -> Iterator[NDArray[np.int64]]:
    yield np.zeros(1, np.int64)
    for low in range(0, len(tokens) if eos_id is not None else 0, CHUNK):
        yield np.flatnonzero(tokens[low : low + CHUNK] == eos_id) + (low + 1)


def _open_megatron(file: Path, index: Path) -> TokenPart:
    remedy = "copy both files again, or create them with Megatron-LM's tools/preprocess_data.py"
    size, index_size = file.stat().st_size, index.stat().st_size
    with index.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        problem = f"starts with {header[: len(_MAGIC)]!r}"
        raise _fault(index, problem, f"{_MAGIC!r}, a memory-mapped index", remedy)
    if len(header) < _HEADER.size:
        raise _fault(index, f"has {index_size} bytes", f"{_HEADER.size} or more", remedy)
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(header)
    if version != 1:
        raise _fault(index, f"has version {version}", "version 1", remedy)
    if code not in _CODES:
        codes = ", ".join(f"{number} ({name})" for number, name in _CODES.items())
        raise _fault(index, f"has dtype code {code}", codes, remedy)
    expected_size = _HEADER.size + num_sequences * 12 + num_boundaries * 8
    if index_size != expected_size:
        counts = f"{num_sequences:,} sequences and {num_boundaries:,} document boundaries"
        raise _fault(index, f"has {index_size:,} bytes", f"{expected_size:,}, for {counts}", remedy)
    if not num_sequences or num_boundaries < 2:
        problem = f"has {num_sequences} sequences and {num_boundaries} document boundaries"
        raise _fault(index, problem, "a document", "remove it from the source")

    dtype = np.dtype(_CODES[code]).newbyteorder("<")
    lengths, pointers, _ = _read_index(index, num_sequences, num_boundaries)
    end = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize
    if end != size:
        expected = f"{end:,}, the end of the last sequence of {index}"
        raise _fault(file, f"has {size:,} bytes", expected, remedy)
    starts = partial(_megatron_starts, index, num_sequences, num_boundaries, dtype.itemsize)
    return TokenPart(_numbers(file, dtype), (file, index), starts)


def _read_index(index: Path, num_sequences: int, num_boundaries: int) -> tuple[CheckedArray, ...]:
    """Return length and first byte of each sequence, and the first sequence of each document."""
    lengths = _numbers(index, np.dtype("<i4"), _HEADER.size, num_sequences)
    pointers = _numbers(index, np.dtype("<i8"), _HEADER.size + 4 * num_sequences, num_sequences)
    boundaries_offset = _HEADER.size + 12 * num_sequences
    boundaries = _numbers(index, np.dtype("<i8"), boundaries_offset, num_boundaries)
    return lengths, pointers, boundaries


def _megatron_starts(
    index: Path, num_sequences: int, num_boundaries: int, itemsize: int, _: int | None
) -> Iterator[NDArray[np.int64]]:
    lengths, pointers, boundaries = _read_index(index, num_sequences, num_boundaries)
    _check_sequences(index, lengths, pointers, itemsize)
    yield from _document_starts(index, pointers, boundaries, itemsize)


def _check_sequences(
    index: Path, lengths: CheckedArray, pointers: CheckedArray, itemsize: int
) -> None:
    """Raise DataError unless the sequences are contiguous, as Megatron writes them."""
    end = 0
    for low in range(0, len(lengths), CHUNK):
        sizes = lengths[low : low + CHUNK].astype(np.int64) * itemsize
        ends = end + np.cumsum(sizes)
        wrong = np.flatnonzero((pointers[low : low + CHUNK] != ends - sizes) | (sizes < 0))
        if len(wrong):
            number = low + int(wrong[0])
            num_tokens = f"{lengths[number]:,} tokens"
            problem = f"has sequence {number} at byte {pointers[number]:,} ({num_tokens})"
            start = ends[wrong[0]] - sizes[wrong[0]]
            expected = f"byte {start:,}, the end of the sequence before, and 0 tokens or more"
            raise _fault(index, problem, expected, _PREPROCESS)
        end = int(ends[-1])


def _document_starts(
    index: Path, pointers: CheckedArray, boundaries: CheckedArray, itemsize: int
) -> Iterator[NDArray[np.int64]]:
    """Yield first tokens of documents. Document i starts at sequence boundaries[i]."""
    if (boundaries[0], boundaries[-1]) != (0, len(pointers)):
        problem = f"has documents from sequence {boundaries[0]:,} to {boundaries[-1]:,}"
        expected = f"all sequences, from 0 to {len(pointers):,}"
        raise _fault(index, problem, expected, _PREPROCESS)
    last = 0
    for low in range(0, len(boundaries), CHUNK):
        chunk = boundaries[low : low + CHUNK]
        is_wrong = (np.diff(chunk, prepend=last) < 0) | (chunk > len(pointers))
        if is_wrong.any():
            number = low + int(np.argmax(is_wrong))
            problem = f"has document boundary {number} at sequence {boundaries[number]:,}"
            expected = f"non-decreasing boundaries up to {len(pointers):,}"
            raise _fault(index, problem, expected, _PREPROCESS)
        last = int(chunk[-1])
        yield pointers[chunk[chunk < len(pointers)]] // itemsize
