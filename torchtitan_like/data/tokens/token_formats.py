"""Files that hold tokens, not text: what each format looks like, and how one is opened. Nothing is read but its ends.

    a.bin + a.idx    Megatron-LM's MMapIndexedDataset, version 1 (megatron/core/datasets/indexed_dataset.py)
    a.npy            one-dimensional, integers
    a.bin            without an .idx: nothing but little-endian uint16 or uint32
    tokens.bin       with meta.json and offsets.bin: a folder of our own token cache

The first and the last know where documents begin. In the others a document ends with the tokenizer's EOS, or with the
file.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.data.errors import DataError
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
from torchtitan_like.data.tokens.token_stream import TokenPart

ENDINGS = (".bin", ".idx", ".npy")
# Files are scanned, and indices checked, in chunks of this many entries.
CHUNK = 2**22
_LOOK = 4096  # tokens at the begin of a flat file that tell whether they were taken for another type

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the type, number of sequences, borders of documents
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are floating-point
_LLMC_MAGICS = (20240520, 20240801)  # the headers of llm.c's token files
_NPY_TYPES = ("uint16", "uint32", "int32", "int64")
# Files are opened from several threads. In CPython 3.11 two threads that parse Python source at once can fail with
# "AST constructor recursion depth mismatch" (fixed in 3.12), and numpy parses the header of an .npy file as Python source.
_NPY_HEADER_LOCK = threading.Lock()


def open_part(file: Path, tokenizer: Tokenizer, token_dtype: str) -> TokenPart:
    """``file``: an .npy file, a .bin file (Megatron's where its .idx is there), or tokens.bin of a token cache.

    token_dtype: "auto", "uint16" or "uint32", of flat .bin files. Raises DataError where it is not what it should be.
    """
    if is_cache(file):
        return _open_cache(file.parent, tokenizer)
    if not file.exists():
        raise _fault(
            file.with_suffix(".idx"), "has no .bin file beside it", f"the tokens in {file.name}", "fetch it too"
        )
    if file.stat().st_size == 0:
        raise _fault(file, "is empty", "tokens", "leave it out, or fetch it again")
    if file.suffix == ".npy":
        return _open_npy(file)
    if file.with_suffix(".idx").exists():
        return _open_megatron(file, file.with_suffix(".idx"))
    return _open_flat(file, tokenizer, token_dtype)


def is_cache(file: Path) -> bool:
    """Whether ``file`` is the tokens of one of our own token caches, complete or not."""
    return file.name == TOKENS and any((file.parent / name).exists() for name in (META, OFFSETS))


def _fault(file: Path, found: str, expected: str, remedy: str) -> DataError:
    return DataError(f"{file} {found}: expected {expected}; {remedy}")


def _open_cache(folder: Path, tokenizer: Tokenizer) -> TokenPart:
    key = key_of(folder)
    if key.get("format_version") != FORMAT_VERSION:
        found = f"has the version {key.get('format_version')} of a token cache"
        raise _fault(folder, found, f"version {FORMAT_VERSION}", "tokenize the text again")
    if key.get("tokenizer") != tokenizer.fingerprint:
        raise DataError(
            f"the token cache {folder} was made with another tokenizer (fingerprint {key.get('tokenizer')}): expected that "
            f"of {tokenizer.path}, {tokenizer.fingerprint}; name the tokenizer it was made with, or train on the text itself"
        )
    cached = open_token_file(folder, key, is_one_of_many=True)
    assert cached is not None
    if not cached.meta.num_documents:
        raise _fault(folder, "is empty", "tokens", "leave it out")
    tokens, offsets = cached.tokens, cached.offsets
    assert isinstance(tokens, CheckedArray) and isinstance(offsets, CheckedArray)
    files = folder / TOKENS, folder / OFFSETS
    return TokenPart(tokens, files, partial(_cached_starts, offsets), offsets=offsets)


def _cached_starts(offsets: CheckedArray, _: int | None) -> Iterator[NDArray[np.int64]]:
    for low in range(0, len(offsets) - 1, CHUNK):
        yield offsets[low : min(low + CHUNK, len(offsets) - 1)].astype(np.int64)


def _numbers(file: Path, dtype: np.dtype[Any], offset: int = 0, count: int | None = None) -> CheckedArray:
    return CheckedArray(CheckedFile(RawFile(file, is_one_of_many=True)), dtype, offset, count)


def _open_npy(file: Path) -> TokenPart:
    try:
        with _NPY_HEADER_LOCK:
            tokens = np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # the header is read as Python: a damaged one raises what Python's parser raises
        raise _fault(
            file, f"is no complete .npy file ({error})", "one array", "write it again with numpy.save"
        ) from error
    name = tokens.dtype.name if tokens.dtype.byteorder != ">" else f"big-endian {tokens.dtype.name}"
    if tokens.ndim != 1 or name not in _NPY_TYPES:
        expected = f"one dimension, {', '.join(_NPY_TYPES)}"
        raise _fault(file, f"has the shape {tokens.shape} and the type {name}", expected, "convert it with numpy")
    if not len(tokens):
        raise _fault(file, "has no token", "1 or more", "leave it out")
    return _flat_part(_numbers(file, tokens.dtype, tokens.offset))


def _open_flat(file: Path, tokenizer: Tokenizer, token_dtype: str) -> TokenPart:
    dtype = token_type(tokenizer.vocab_size) if token_dtype == "auto" else np.dtype(token_dtype).newbyteorder("<")
    size = file.stat().st_size
    if size % dtype.itemsize:
        raise _fault(
            file,
            f"has {size:,} bytes",
            f"a multiple of {dtype.itemsize}, for {dtype.name}",
            "fetch it again, or set the source's `token_dtype`",
        )
    tokens = _numbers(file, dtype)
    if size >= 4 and int(_numbers(file, np.dtype("<u4"), 0, 1)[0]) in _LLMC_MAGICS:
        raise _fault(
            file, "begins with a header of llm.c", "tokens from the first byte on", "cut off its first 1,024 bytes"
        )
    begin = tokens[:_LOOK]
    if token_dtype == "auto" and dtype.itemsize == 2 and begin[::2].any() and len(begin) > 32 and not begin[1::2].any():
        raise _fault(
            file,
            "has a zero in every second place, read as uint16",
            f"that type for a vocabulary of {tokenizer.vocab_size:,}",
            'set the source\'s `token_dtype` to "uint32" (or to "uint16", if this is how it should be)',
        )
    return _flat_part(tokens)


def _flat_part(tokens: CheckedArray) -> TokenPart:
    return TokenPart(tokens, (tokens.file.file.path,), partial(_flat_starts, tokens), is_flat=True)


def _flat_starts(tokens: CheckedArray, eos_id: int | None) -> Iterator[NDArray[np.int64]]:
    yield np.zeros(1, np.int64)
    for low in range(0, len(tokens) if eos_id is not None else 0, CHUNK):
        yield np.flatnonzero(tokens[low : low + CHUNK] == eos_id) + (low + 1)


def _open_megatron(file: Path, index: Path) -> TokenPart:
    again = "fetch both files again, or make them again with Megatron-LM's tools/preprocess_data.py"
    size, found = file.stat().st_size, index.stat().st_size
    with index.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise _fault(index, f"begins with {header[: len(_MAGIC)]!r}", f"{_MAGIC!r}, a memory-mapped index", again)
    if len(header) < _HEADER.size:
        raise _fault(index, f"has {found} bytes", f"{_HEADER.size} or more", again)
    _, version, code, num_sequences, num_borders = _HEADER.unpack(header)
    if version != 1:
        raise _fault(index, f"is of version {version}", "version 1", again)
    if code not in _CODES:
        codes = ", ".join(f"{known} ({name})" for known, name in _CODES.items())
        raise _fault(index, f"gives the type {code} to its tokens", codes, again)
    expected = _HEADER.size + num_sequences * 12 + num_borders * 8
    if found != expected:
        counts = f"{num_sequences:,} sequences and {num_borders:,} borders of documents"
        raise _fault(index, f"has {found:,} bytes", f"{expected:,}, for {counts}", again)
    if not num_sequences or num_borders < 2:
        raise _fault(index, f"has {num_sequences} sequences and {num_borders} borders", "a document", "leave it out")

    dtype = np.dtype(_CODES[code]).newbyteorder("<")
    lengths, pointers, _ = _indexed(index, num_sequences, num_borders)
    needed = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize
    if needed != size:
        raise _fault(file, f"has {size:,} bytes", f"{needed:,}, where the last sequence of {index} ends", again)
    starts = partial(_megatron_starts, index, num_sequences, num_borders, dtype.itemsize)
    return TokenPart(_numbers(file, dtype), (file, index), starts)


def _indexed(index: Path, num_sequences: int, num_borders: int) -> tuple[CheckedArray, ...]:
    """Tokens of each sequence, the byte at which it begins, and the sequences with which documents begin."""
    lengths = _numbers(index, np.dtype("<i4"), _HEADER.size, num_sequences)
    pointers = _numbers(index, np.dtype("<i8"), _HEADER.size + 4 * num_sequences, num_sequences)
    return lengths, pointers, _numbers(index, np.dtype("<i8"), _HEADER.size + 12 * num_sequences, num_borders)


def _megatron_starts(
    index: Path, num_sequences: int, num_borders: int, itemsize: int, _: int | None
) -> Iterator[NDArray[np.int64]]:
    lengths, pointers, borders = _indexed(index, num_sequences, num_borders)
    _check_sequences(index, lengths, pointers, itemsize)
    yield from _document_starts(index, pointers, borders, itemsize)


def _check_sequences(index: Path, lengths: CheckedArray, pointers: CheckedArray, itemsize: int) -> None:
    """Raise DataError unless the sequences lie one behind the other, as Megatron writes them: no token is left out."""
    behind = 0
    for low in range(0, len(lengths), CHUNK):
        sizes = lengths[low : low + CHUNK].astype(np.int64) * itemsize
        ends = behind + np.cumsum(sizes)
        wrong = np.flatnonzero((pointers[low : low + CHUNK] != ends - sizes) | (sizes < 0))
        if len(wrong):
            at = low + int(wrong[0])
            found = f"has sequence {at} at byte {pointers[at]:,} with {lengths[at]:,} tokens"
            expected = (
                f"it at byte {ends[wrong[0]] - sizes[wrong[0]]:,}, where the one before ends, and 0 tokens or more"
            )
            raise _fault(index, found, expected, "make it again with Megatron-LM's tools/preprocess_data.py")
        behind = int(ends[-1])


def _document_starts(
    index: Path, pointers: CheckedArray, borders: CheckedArray, itemsize: int
) -> Iterator[NDArray[np.int64]]:
    """First token of each document: document i is sequences [borders[i], borders[i + 1])."""
    if (borders[0], borders[-1]) != (0, len(pointers)):
        found = f"has documents from sequence {borders[0]:,} to {borders[-1]:,}"
        remedy = "make it again with Megatron-LM's tools/preprocess_data.py"
        raise _fault(index, found, f"them from 0 to {len(pointers):,}, so that each sequence is in one", remedy)
    before = 0
    for low in range(0, len(borders), CHUNK):
        chunk = borders[low : low + CHUNK]
        if (np.diff(chunk, prepend=before) < 0).any() or chunk[-1] > len(pointers):
            at = low + int(np.argmax((np.diff(chunk, prepend=before) < 0) | (chunk > len(pointers))))
            expected = f"a sequence up to {len(pointers):,}, and not below that of the border before"
            remedy = "make it again with Megatron-LM's tools/preprocess_data.py"
            raise _fault(index, f"has border {at} of its documents at sequence {borders[at]:,}", expected, remedy)
        before = int(chunk[-1])
        yield pointers[chunk[chunk < len(pointers)]] // itemsize
