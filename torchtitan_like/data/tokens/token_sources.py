"""Sources with format = "tokens": files that were tokenized elsewhere are read as they stand, and nothing is copied.

No BOS or EOS is put in. The files of a source, in the order of their names, are one stream, cut into samples without
regard to where a file ends. Where documents begin is worked out once, if it is wanted, and kept in the token cache: a
list of 8 bytes for each. A source is known by the sizes of its files and by samples of their bytes, wherever they lie.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.config.sections_training import DataSource
from torchtitan_like.data.errors import DataError
from torchtitan_like.data.text.documents import files_below, matching
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens.build_once import look_once
from torchtitan_like.data.tokens.checked_file import (
    CheckedArray,
    CheckedFile,
    HashTable,
    RawFile,
    table_path,
)
from torchtitan_like.data.tokens.encoding import Progress
from torchtitan_like.data.tokens.run_digests import RunDigests
from torchtitan_like.data.tokens.token_cache import find_or_build
from torchtitan_like.data.tokens.token_file import (
    OFFSET_TYPE,
    OFFSETS,
    TOKENS,
    TokenFile,
    TokenMeta,
    written_with_hashes,
)
from torchtitan_like.data.tokens.token_formats import ENDINGS, is_cache, open_part
from torchtitan_like.data.tokens.token_stream import TokenPart, TokenStream
from torchtitan_like.distributed.world import HostGroup

logger = logging.getLogger()

Offsets: TypeAlias = "NDArray[np.uint64] | CheckedArray"

# Changes with anything that makes a list of documents of an older version, or the identity of a source, another.
DOCUMENTS_VERSION = 1
# A file is known by its size and this many extents of this many bytes, evenly spread; a smaller one by all its bytes.
NUM_EXTENTS = 8
EXTENT_BYTES = 2**14
NUM_THREADS, AT_ONCE = 16, 1024  # that ask a file server; files whose extents are in memory


@dataclass(frozen=True)
class _Seen:
    """What there is to know of a source before it is read. eos_id: with which documents end in files without an index.

    documents: what the list of documents goes by in the token cache. digest: what the source is known by. signs: of files.
    """

    folder: Path
    parts: list[TokenPart]
    eos_id: int | None
    documents: str
    digest: int
    signs: list[tuple[int, ...]]

    def is_here(self) -> bool:
        return self.signs == _signs(self.parts)


def open_token_source(
    source: DataSource,
    tokenizer: Tokenizer,
    *,
    with_documents: bool,
    cache_folder: str | None,
    dump_folder: str,
    group: HostGroup | None = None,
    is_recorder: bool = True,
) -> TokenFile:
    """The tokens of all files of ``source`` as one. A collective of ``group`` (None: this process
    is alone). is_recorder: see `RunDigests`.

    with_documents: whether it matters where documents begin; if not, files without an index are not searched for their
    ends, and each is one document. Raises DataError for files that are not what they should be, or of another tokenizer.
    """
    group = group or HostGroup.alone()
    seen = look_once(group, source.path, lambda: _look(source, tokenizer, with_documents), _Seen.is_here)
    parts = _recorded(seen, dump_folder, group, is_recorder)
    stream, folder, eos_id = TokenStream(parts, tokenizer.vocab_size, tokenizer.path), seen.folder, seen.eos_id
    offsets = group.all_do(lambda: _offsets(stream, seen, cache_folder, dump_folder))
    if eos_id is not None and len(offsets) - 1 <= len(seen.parts):
        logger.warning(f"the EOS {eos_id} of {tokenizer.path} ends no document in {folder}: each file is taken for one")
    meta = TokenMeta(num_tokens=len(stream), num_documents=len(offsets) - 1, text_digest=seen.digest)
    return TokenFile(folder, stream, offsets, meta)


def _recorded(
    seen: _Seen, dump_folder: str, group: HostGroup, is_recorder: bool
) -> list[TokenPart]:
    """The parts, where the run records the hashes of files that have none."""
    without = [part for part in seen.parts if part.tokens.file.hashes is None]
    files = [part.tokens.file.file for part in without]
    digests = RunDigests(dump_folder, files, seen.digest, is_recorder=is_recorder)
    group.leader_does(digests.merge)
    group.all_do(digests.open)
    checked = dict(zip(map(id, without), digests.files(), strict=True))
    return [
        replace(part, tokens=part.tokens.of(checked[id(part)])) if id(part) in checked else part
        for part in seen.parts
    ]


def _look(source: DataSource, tokenizer: Tokenizer, with_documents: bool) -> _Seen:
    files = find_token_files(source.path)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        parts = list(pool.map(lambda file: open_part(file, tokenizer, source.token_dtype), files))
        stream = TokenStream(parts, tokenizer.vocab_size, tokenizer.path)
        list(pool.map(partial(_check_ids, stream), range(len(parts))))
    folder = Path(os.path.commonpath([file.parent for file in files]))
    _announce(source, tokenizer, stream, folder, with_documents)
    eos_id = tokenizer.eos_id if with_documents and any(part.is_flat for part in parts) else None
    return _Seen(folder, parts, eos_id, _documents(parts, folder, eos_id), _identity(parts, eos_id), _signs(parts))


def _signs(parts: Sequence[TokenPart]) -> list[tuple[int, ...]]:
    """By which the first and the last file are known to be the same on two nodes; -1: there is none."""
    files = [path for part in (parts[0], parts[-1]) for path in part.files]
    found = [path.stat() if path.exists() else None for path in files]
    return [(-1,) if one is None else (one.st_ino, one.st_size, one.st_mtime_ns) for one in found]


def find_token_files(path: str) -> list[Path]:
    """The files with tokens that ``path`` means, sorted: of a Megatron pair the .bin, of a token cache its tokens.bin.

    path: a file (either of a pair), what two files of a pair have in common, a folder with all below it, or a glob of
    files and folders. Raises DataError where there is none, or a file of another kind.
    """
    given = Path(path)
    matches = [given] if given.exists() else matching(given)
    matches = matches or [Path(f"{given}{ending}") for ending in ENDINGS if os.path.isfile(f"{given}{ending}")]
    below = (files_below(match, ENDINGS) if match.is_dir() else [match] for match in matches)
    files = [Path(file) for found in below for file in found]
    unknown = [file for file in files if file.suffix not in ENDINGS]
    if unknown or not files:
        what = f"no file with tokens: {unknown[0]}" if unknown else "no files with tokens"
        raise DataError(
            f"{what} at {path!r}: expected .bin (with or without .idx), .npy, or folders of a token cache (relative "
            f"paths start at {os.getcwd()}); text is read with another `format`"
        )
    return sorted({_with_tokens(file.absolute()) for file in files}, key=lambda file: file.parts)


def _with_tokens(file: Path) -> Path:
    if file.name == OFFSETS and is_cache(file.with_name(TOKENS)):
        return file.with_name(TOKENS)
    return file.with_suffix(".bin") if file.suffix == ".idx" else file


def _check_ids(stream: TokenStream, part: int) -> None:
    """Look at a few ids of each file: one of another tokenizer or type is better refused now than in a late step."""
    start, stop = stream.starts[part : part + 2]
    for place in (start, (start + stop) // 2, max(start, stop - EXTENT_BYTES)):
        stream[place : min(place + EXTENT_BYTES, stop)]


def _announce(
    source: DataSource, tokenizer: Tokenizer, stream: TokenStream, folder: Path, with_documents: bool
) -> None:
    """Say what was decided without being asked."""
    flat = [part for part in stream.parts if part.is_flat]
    headerless = [part for part in flat if part.files[0].suffix == ".bin"]
    logger.info(f"{folder}: {len(stream.parts)} files of tokens, read as they stand: no BOS or EOS is put in")
    if headerless and source.token_dtype == "auto":
        name, size = headerless[0].tokens.dtype.name, tokenizer.vocab_size
        logger.info(
            f"{headerless[0].files[0]}: read as {name}, for a vocabulary of {size:,} (token_dtype sets another)"
        )
    if not headerless and source.token_dtype != "auto":
        logger.warning(f"token_dtype has no effect: the files in {folder} tell their types themselves")
    if flat and with_documents and tokenizer.eos_id is None:
        logger.warning(f"{tokenizer.path} has no EOS: each of the {len(flat)} files without an index is one document")


def _offsets(stream: TokenStream, seen: _Seen, cache_folder: str | None, dump_folder: str) -> Offsets:
    """Where each document of the stream begins, and its length, (num_documents + 1,)."""
    parts, eos_id = stream.parts, seen.eos_id
    if len(parts) == 1 and parts[0].offsets is not None:
        return parts[0].offsets
    if eos_id is None and all(part.is_flat for part in parts):
        return np.array(stream.starts, OFFSET_TYPE)
    return find_or_build(
        seen.documents,
        lambda file: _open_offsets(file, len(stream)),
        lambda file: _write_offsets(file, stream, eos_id),
        data_folder=seen.folder,
        cache_folder=cache_folder,
        dump_folder=dump_folder,
    )


def _documents(parts: Sequence[TokenPart], folder: Path, eos_id: int | None) -> str:
    """What the list of documents goes by in the token cache."""
    files = [(file, file.stat()) for part in parts for file in part.files]
    key = {
        "version": DOCUMENTS_VERSION,
        "files": [(str(file.relative_to(folder)), status.st_size, status.st_mtime_ns) for file, status in files],
        "types": [part.tokens.dtype.str for part in parts],
        "eos": eos_id,
    }
    return f"documents-{xxhash.xxh3_64_hexdigest(json.dumps(key).encode())}.u64"


def _open_offsets(file: Path, num_tokens: int) -> CheckedArray | None:
    if not (file.exists() and table_path(file).exists()):
        return None  # a list that an earlier version made has no hashes: it is made again
    remedy = f"delete {file}, it will be made again"
    raw = RawFile(file)
    offsets = CheckedArray(CheckedFile(raw, HashTable(raw, remedy)), OFFSET_TYPE, in_memory=True)
    size = raw.size
    if not size or size % OFFSET_TYPE.itemsize or (int(offsets[0]), int(offsets[-1])) != (0, num_tokens):
        raise DataError(f"{file} does not list documents of {num_tokens:,} tokens: {remedy}")
    return offsets


def _write_offsets(file: Path, stream: TokenStream, eos_id: int | None) -> CheckedArray:
    num_bytes = sum(part.tokens.nbytes for part in stream.parts)
    ends = "" if eos_id is None else f", which end with {eos_id} in files without an index"
    logger.info(f"looking for documents{ends}, in {num_bytes / 2**20:,.1f} MiB of tokens, into {file}")
    progress, num_documents, last = Progress(num_bytes, 0, 0), 0, -1
    with written_with_hashes(file, "the list of documents") as out:
        for starts, done in _starts(stream, eos_id):
            # An empty document begins where the next one does: one of the two is left.
            fresh = starts[np.diff(starts, prepend=last) > 0]
            out.write(fresh.astype(OFFSET_TYPE).tobytes())
            num_documents, last = num_documents + len(fresh), int(starts[-1]) if len(starts) else last
            line = progress.line(done - progress.done, last)
            if line:
                logger.info(f"looking for documents: {line}")
    logger.info(f"found {num_documents - 1:,} documents, {progress.rates(len(stream))}")
    offsets = _open_offsets(file, len(stream))
    assert offsets is not None
    return offsets


def _starts(stream: TokenStream, eos_id: int | None) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Where documents begin, in chunks, and at the end the number of tokens; with each, the bytes of tokens behind it."""
    bytes_before = 0
    for part, first in zip(stream.parts, stream.starts[:-1], strict=True):
        for starts in part.starts(eos_id):
            reached = int(starts[-1]) * part.tokens.dtype.itemsize if len(starts) else 0
            yield starts + first, bytes_before + reached
        bytes_before += part.tokens.nbytes
    yield np.array([len(stream)]), bytes_before


def _identity(parts: Sequence[TokenPart], eos_id: int | None) -> int:
    """What a source is known by, in [0, 2**64): sizes and samples of the bytes of its files, in their order."""
    state = xxhash.xxh3_64(f"{DOCUMENTS_VERSION} {eos_id}".encode())
    files = [file for part in parts for file in part.files]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for low in range(0, len(files), AT_ONCE):
            for sample in pool.map(_sample, files[low : low + AT_ONCE]):
                state.update(sample)
    return int(state.intdigest())


def _sample(file: Path) -> bytes:
    size = file.stat().st_size
    sample = f"{size} ".encode()
    with file.open("rb", buffering=0) as stream:
        for extent in range(NUM_EXTENTS):
            stream.seek(max(size - EXTENT_BYTES, 0) * extent // (NUM_EXTENTS - 1))
            sample += stream.read(EXTENT_BYTES)
    return sample
