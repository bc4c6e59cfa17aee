"""Sources with format = "tokens": read token files of other programs unchanged, without a copy.

No BOS or EOS is added. The files of a source, in the order of their names, are one stream, and a
sample may continue in the next file. The starts of documents are computed once, if needed, and
stored in the token cache (8 bytes each). The sizes of its files and samples of their bytes identify
a source, independently of their paths.

A start cannot read a terabyte to check all ids. Every id is therefore compared with the vocabulary
when it is read: no id outside the vocabulary reaches the embedding.
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.config.sections_training import DataSource
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.file_lists import files_below, matching
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens.build_once import read_once
from torchtitan_like.data.tokens.checked_file import (
    CheckedArray,
    CheckedFile,
    HashTable,
    RawFile,
    table_path,
)
from torchtitan_like.data.tokens.encoding import Progress
from torchtitan_like.data.tokens.run_digests import RunDigests
from torchtitan_like.data.tokens.token_cache import CacheFolders
from torchtitan_like.data.tokens.token_file import (
    OFFSET_TYPE,
    OFFSETS,
    TOKENS,
    TokenFile,
    TokenMeta,
    written_with_hashes,
)
from torchtitan_like.data.tokens.token_formats import ENDINGS, TokenPart, is_cache, open_part
from torchtitan_like.distributed.world import HostGroup

logger = logging.getLogger()

Offsets: TypeAlias = "NDArray[np.uint64] | CheckedArray"

# Increase it with any change of the list of documents, or of the identity of a source.
DOCUMENTS_VERSION = 1
# A file's identity is its size and this many evenly spaced pieces of this many bytes. For a
# smaller file it is all bytes.
NUM_PIECES = 8
PIECE_BYTES = 2**14
NUM_THREADS = 16  # that read from the file server
FILES_AT_A_TIME = 1024  # files whose pieces are in memory


class TokenStream:
    """The concatenated tokens of ``parts``.

    Supports len(), slices of step 1 and arrays of indices, which return copies. Reading raises
    DataError, with file and index, for an id that is negative or not below ``vocab_size``.

    dtype: unsigned, the widest dtype of the parts.
    vocabulary: the tokenizer's name, for messages.
    """

    def __init__(self, parts: Sequence[TokenPart], vocab_size: int, vocabulary: str) -> None:
        self.parts = tuple(parts)
        # As unsigned integers, negative ids are large: one comparison detects both errors.
        self._tokens = [part.tokens.view(f"<u{part.tokens.dtype.itemsize}") for part in parts]
        self.dtype = max(
            (tokens.dtype for tokens in self._tokens), key=lambda dtype: dtype.itemsize
        )
        self.starts: list[int] = [0, *np.cumsum([len(tokens) for tokens in self._tokens]).tolist()]
        self._vocab_size = vocab_size
        self._vocabulary = vocabulary
        self._may_exceed = vocab_size < 2 ** (8 * self.dtype.itemsize)

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, key: slice | NDArray[Any]) -> NDArray[Any]:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            assert step == 1, step
            row: NDArray[Any] = self.rows(np.array([start]), max(stop - start, 0))[0]
            return row
        indices = key.ravel()
        part_of = np.searchsorted(self.starts, indices, side="right") - 1
        ids = np.empty(indices.shape, self.dtype)
        for part in np.unique(part_of).tolist():
            in_part = part_of == part
            ids[in_part] = self._tokens[part][indices[in_part] - self.starts[part]]
        self._check(ids, lambda flat_index: int(indices[flat_index]))
        return ids.reshape(key.shape)

    def rows(self, first: NDArray[np.int64], length: int) -> NDArray[Any]:
        """Return [first, first + length) for each of ``first`` (rows,), as (rows, length)."""
        rows = np.empty((len(first), length), self.dtype)
        for row, start in zip(rows, first.tolist(), strict=True):
            self._copy(row, start)
        self._check(rows, lambda index: int(first[index // length]) + index % length)
        return rows

    def fill(self, out: NDArray[Any], first: int) -> None:
        """Fill ``out`` with the tokens from index ``first`` on."""
        self._copy(out, first)
        self._check(out, lambda index: first + index)

    def _copy(self, row: NDArray[Any], start: int) -> None:
        """Fill ``row`` with the tokens from ``start`` on, across parts."""
        part = bisect_right(self.starts, start) - 1
        num_filled = 0
        while num_filled < len(row):
            tokens = self._tokens[part]
            offset = start + num_filled - self.starts[part]
            count = min(len(row) - num_filled, len(tokens) - offset)
            if tokens.dtype == row.dtype:
                tokens.fill(row[num_filled : num_filled + count], offset)
            else:
                row[num_filled : num_filled + count] = tokens[offset : offset + count]
            num_filled += count
            part += 1

    def _check(self, ids: NDArray[Any], stream_index: Callable[[int], int]) -> None:
        """Raise DataError for an id outside the vocabulary.

        stream_index: maps a flat index of ``ids`` to an index of the stream.
        """
        if not self._may_exceed or not ids.size or int(ids.max()) < self._vocab_size:
            return
        index = stream_index(int(np.argmax(ids.ravel() >= self._vocab_size)))
        part = bisect_right(self.starts, index) - 1
        tokens = self.parts[part].tokens
        offset = index - self.starts[part]
        raise DataError(
            f"{self.parts[part].files[0]}: token {offset:,} (counted from 0) is {tokens[offset]}. "
            f"Expected ids from 0 to {self._vocab_size - 1}, the vocabulary of {self._vocabulary}: "
            "give the tokenizer of the file, or, if its ids are not "
            f"{tokens.dtype.name}, correct the file (for a flat .bin: the source's `token_dtype`)"
        )


@dataclass(frozen=True)
class _SourceMetadata:
    """The metadata of a source.

    eos_id: ends documents in files without an index; None: each such file is one document.
    list_name: name of the list of documents in the token cache.
    digest: identifies the source.
    file_versions: see `_file_versions`.
    """

    folder: Path
    parts: list[TokenPart]
    eos_id: int | None
    list_name: str
    digest: int
    file_versions: list[tuple[int, ...]]

    def is_local(self) -> bool:
        """Return True if this node has the same files."""
        return self.file_versions == _file_versions(self.parts)


def open_token_source(
    source: DataSource,
    tokenizer: Tokenizer,
    folders: CacheFolders,
    *,
    with_documents: bool,
    group: HostGroup | None = None,
    is_recorder: bool = True,
) -> TokenFile:
    """Open all files of ``source`` as one token file. A collective of ``group``.

    with_documents: find the documents in files without an index; False: each such file is one
        document.
    group: None: only this process.
    is_recorder: see `RunDigests`.

    Raises DataError for invalid files, and for files of another tokenizer.
    """
    group = group or HostGroup.alone()
    metadata = read_once(
        group,
        source.path,
        lambda: _read_metadata(source, tokenizer, with_documents),
        _SourceMetadata.is_local,
    )
    parts = _with_recorded_hashes(metadata, folders.dump_folder, group, is_recorder)
    stream = TokenStream(parts, tokenizer.vocab_size, tokenizer.path)
    offsets = group.run_on_all(lambda: _offsets(stream, metadata, folders))
    if metadata.eos_id is not None and len(offsets) - 1 <= len(metadata.parts):
        logger.warning(
            f"no document in {metadata.folder} ends with the EOS {metadata.eos_id} of "
            f"{tokenizer.path}: each file is read as one document"
        )
    meta = TokenMeta(
        num_tokens=len(stream), num_documents=len(offsets) - 1, text_digest=metadata.digest
    )
    return TokenFile(metadata.folder, stream, offsets, meta)


def _with_recorded_hashes(
    metadata: _SourceMetadata, dump_folder: str, group: HostGroup, is_recorder: bool
) -> list[TokenPart]:
    """Return the parts; the run records the hashes of files without hashes."""
    unhashed = [part for part in metadata.parts if part.tokens.file.hashes is None]
    files = [part.tokens.file.file for part in unhashed]
    digests = RunDigests(dump_folder, files, metadata.digest, is_recorder=is_recorder)
    group.run_on_leader(digests.merge)
    group.run_on_all(digests.open)
    checked = dict(zip(map(id, unhashed), digests.files(), strict=True))
    return [
        replace(part, tokens=part.tokens.with_file(checked[id(part)]))
        if id(part) in checked
        else part
        for part in metadata.parts
    ]


def _read_metadata(
    source: DataSource, tokenizer: Tokenizer, with_documents: bool
) -> _SourceMetadata:
    files = find_token_files(source.path)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        parts = list(pool.map(lambda file: open_part(file, tokenizer, source.token_dtype), files))
        stream = TokenStream(parts, tokenizer.vocab_size, tokenizer.path)
        list(pool.map(partial(_check_ids, stream), range(len(parts))))
    folder = Path(os.path.commonpath([file.parent for file in files]))
    _log_decisions(source, tokenizer, stream, folder, with_documents)
    eos_id = tokenizer.eos_id if with_documents and any(part.is_flat for part in parts) else None
    return _SourceMetadata(
        folder,
        parts,
        eos_id,
        list_name=_list_name(parts, folder, eos_id),
        digest=_digest(parts, eos_id),
        file_versions=_file_versions(parts),
    )


def _file_versions(parts: Sequence[TokenPart]) -> list[tuple[int, ...]]:
    """Return inode, size and time of the first and last files, to compare nodes; -1 if missing."""
    files = [path for part in (parts[0], parts[-1]) for path in part.files]
    versions: list[tuple[int, ...]] = []
    for file in files:
        if file.exists():
            status = file.stat()
            versions.append((status.st_ino, status.st_size, status.st_mtime_ns))
        else:
            versions.append((-1,))
    return versions


def find_token_files(path_text: str) -> list[Path]:
    """Return the token files of a path, sorted: .bin of a Megatron pair, tokens.bin of a cache.

    path_text: a file (either one of a pair), the common prefix of a pair, a folder with its
        sub-folders, or a glob of files and folders.

    Raises DataError if there are no files, or files of another kind.
    """
    path = Path(path_text)
    matches = [path] if path.exists() else matching(path)
    if not matches:
        pair = [Path(f"{path}{ending}") for ending in ENDINGS]
        matches = [file for file in pair if file.is_file()]
    files: list[Path] = []
    for match in matches:
        files += map(Path, files_below(match, ENDINGS)) if match.is_dir() else [match]
    unknown = [file for file in files if file.suffix not in ENDINGS]
    if unknown or not files:
        problem = f"{unknown[0]} is not a token file" if unknown else "no token files"
        raise DataError(
            f"{problem} at {path_text!r}. Expected .bin (with or without .idx), .npy, or folders "
            f"of a token cache: check the path (relative paths start at {os.getcwd()}), or set "
            "another `format` for text"
        )
    return sorted({_with_tokens(file.absolute()) for file in files}, key=lambda file: file.parts)


def _with_tokens(file: Path) -> Path:
    if file.name == OFFSETS and is_cache(file.with_name(TOKENS)):
        return file.with_name(TOKENS)
    return file.with_suffix(".bin") if file.suffix == ".idx" else file


def _check_ids(stream: TokenStream, part: int) -> None:
    """Check a few ids of each file, to detect another tokenizer or dtype before the training."""
    start, stop = stream.starts[part : part + 2]
    for first in (start, (start + stop) // 2, max(start, stop - PIECE_BYTES)):
        stream[first : min(first + PIECE_BYTES, stop)]


def _log_decisions(
    source: DataSource,
    tokenizer: Tokenizer,
    stream: TokenStream,
    folder: Path,
    with_documents: bool,
) -> None:
    """Log the automatic decisions about a source."""
    flat = [part for part in stream.parts if part.is_flat]
    headerless = [part for part in flat if part.files[0].suffix == ".bin"]
    logger.info(f"{folder}: {len(stream.parts)} token files, read without adding BOS or EOS")
    if headerless and source.token_dtype == "auto":
        name, size = headerless[0].tokens.dtype.name, tokenizer.vocab_size
        logger.info(
            f"{headerless[0].files[0]}: read as {name}, for a vocabulary of {size:,} (token_dtype "
            "sets another)"
        )
    if not headerless and source.token_dtype != "auto":
        logger.warning(f"token_dtype has no effect: the files in {folder} store their dtypes")
    if flat and with_documents and tokenizer.eos_id is None:
        logger.warning(
            f"{tokenizer.path} has no EOS: each of the {len(flat)} files without an index is one "
            "document"
        )


def _offsets(stream: TokenStream, metadata: _SourceMetadata, folders: CacheFolders) -> Offsets:
    """Return the first token of each document, then the number of tokens: (num_documents + 1,)."""
    parts, eos_id = stream.parts, metadata.eos_id
    if len(parts) == 1 and parts[0].offsets is not None:
        return parts[0].offsets
    if eos_id is None and all(part.is_flat for part in parts):
        return np.array(stream.starts, OFFSET_TYPE)
    return folders.find_or_build(
        metadata.list_name,
        lambda file: _open_offsets(file, len(stream)),
        lambda file: _write_offsets(file, stream, eos_id),
        metadata.folder,
    )


def _list_name(parts: Sequence[TokenPart], folder: Path, eos_id: int | None) -> str:
    """Return the name of the list of documents in the token cache."""
    files = [(file, file.stat()) for part in parts for file in part.files]
    key = {
        "version": DOCUMENTS_VERSION,
        "files": [
            (str(file.relative_to(folder)), status.st_size, status.st_mtime_ns)
            for file, status in files
        ],
        "types": [part.tokens.dtype.str for part in parts],
        "eos": eos_id,
    }
    return f"documents-{xxhash.xxh3_64_hexdigest(json.dumps(key).encode())}.u64"


def _open_offsets(file: Path, num_tokens: int) -> CheckedArray | None:
    if not (file.exists() and table_path(file).exists()):
        return None
    remedy = f"delete {file}, and it is made again"
    raw = RawFile(file)
    offsets = CheckedArray(CheckedFile(raw, HashTable(raw, remedy)), OFFSET_TYPE, in_memory=True)
    size = raw.size
    if (
        not size
        or size % OFFSET_TYPE.itemsize
        or (int(offsets[0]), int(offsets[-1])) != (0, num_tokens)
    ):
        raise DataError(
            f"{file} is damaged. Expected a list of documents with {num_tokens:,} tokens: {remedy}"
        )
    return offsets


def _write_offsets(file: Path, stream: TokenStream, eos_id: int | None) -> CheckedArray:
    num_bytes = sum(part.tokens.nbytes for part in stream.parts)
    by_eos = "" if eos_id is None else f" by EOS {eos_id}"
    logger.info(
        f"searching documents{by_eos} in {num_bytes / 2**20:,.1f} MiB of tokens, writing {file}"
    )
    progress = Progress(num_bytes, 0, 0)
    num_documents = 0
    last = -1
    with written_with_hashes(file, "the list of documents") as out:
        for starts, done in _starts(stream, eos_id):
            # An empty document has the same start as the next one: keep one of the two.
            new_starts = starts[np.diff(starts, prepend=last) > 0]
            out.write(new_starts.astype(OFFSET_TYPE).tobytes())
            num_documents += len(new_starts)
            last = int(starts[-1]) if len(starts) else last
            line = progress.line(done - progress.done, last)
            if line:
                logger.info(f"searching documents: {line}")
    logger.info(f"found {num_documents - 1:,} documents, {progress.rates(len(stream))}")
    offsets = _open_offsets(file, len(stream))
    assert offsets is not None
    return offsets


def _starts(stream: TokenStream, eos_id: int | None) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield chunks of document starts, then the number of tokens; each with the bytes before it."""
    bytes_before = 0
    for part, first in zip(stream.parts, stream.starts[:-1], strict=True):
        for starts in part.starts(eos_id):
            num_bytes = int(starts[-1]) * part.tokens.dtype.itemsize if len(starts) else 0
            yield starts + first, bytes_before + num_bytes
        bytes_before += part.tokens.nbytes
    yield np.array([len(stream)]), bytes_before


def _digest(parts: Sequence[TokenPart], eos_id: int | None) -> int:
    """Return a digest of a source in [0, 2**64), from the sizes of its files and some bytes."""
    state = xxhash.xxh3_64(f"{DOCUMENTS_VERSION} {eos_id}".encode())
    files = [file for part in parts for file in part.files]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for low in range(0, len(files), FILES_AT_A_TIME):
            for sample in pool.map(_sample, files[low : low + FILES_AT_A_TIME]):
                state.update(sample)
    return int(state.intdigest())


def _sample(file: Path) -> bytes:
    size = file.stat().st_size
    sample = f"{size} ".encode()
    with file.open("rb", buffering=0) as stream:
        for piece in range(NUM_PIECES):
            stream.seek(max(size - PIECE_BYTES, 0) * piece // (NUM_PIECES - 1))
            sample += stream.read(PIECE_BYTES)
    return sample
