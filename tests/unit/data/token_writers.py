"""Write small token files byte by byte, and compute the documents that they contain."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_like.config.sections_training import DataSource
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens.token_cache import CacheFolders
from torchtitan_like.data.tokens.token_file import TokenFile
from torchtitan_like.data.tokens.token_sources import open_token_source

EOS, VOCAB = 2047, 2048  # of the shipped tokenizer

# Documents as lists of sequences; some documents and some sequences are empty.
DOCUMENTS: list[list[list[int]]] = [
    [],
    [[*range(1, 40)], [7, EOS]],
    [[5, EOS]],
    [[], []],
    [[EOS], [], [*range(2000, 2047)] * 3],
    [[0]],
    [[], [9] * 20],
    [[]],
    [],
]
TOKENS = [token for document in DOCUMENTS for sequence in document for token in sequence]
CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}  # Megatron's code -> struct's


def write_megatron(
    prefix: Path, documents: list[list[list[int]]], code: int = 8, **changed: Any
) -> Path:
    """Write the two files of MMapIndexedDataset. ``changed`` replaces parts of the index."""
    sequences = [sequence for document in documents for sequence in document]
    raw = b"".join(
        struct.pack(f"<{len(sequence)}{CODES[code]}", *sequence) for sequence in sequences
    )
    lengths = changed.get("lengths", [len(sequence) for sequence in sequences])
    pointers, borders = [0], [0]
    for sequence in sequences[:-1]:
        pointers.append(pointers[-1] + len(sequence) * struct.calcsize(CODES[code]))
    for document in documents:
        borders.append(borders[-1] + len(document))
    pointers, borders = changed.get("pointers", pointers), changed.get("borders", borders)
    header = struct.pack("<QB", changed.get("version", 1), changed.get("declared", code))
    counts = struct.pack("<QQ", len(lengths), len(borders))
    index = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(
        f"<{len(pointers)}q", *pointers
    )
    index += struct.pack(f"<{len(borders)}q", *borders)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_suffix(".bin").write_bytes(raw)
    prefix.with_suffix(".idx").write_bytes(
        changed.get("magic", b"MMIDIDX\x00\x00") + header + counts + index
    )
    return prefix


def write_flat(file: Path, tokens: Iterable[int], letter: str = "H") -> Path:
    tokens = list(tokens)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    return file


def write_npy(file: Path, tokens: Any, dtype: str = "<u2") -> Path:
    np.save(file, np.array(tokens, dtype))
    return file


def index_starts(documents: list[list[list[int]]]) -> set[int]:
    starts, offset = set(), 0
    for document in documents:
        if sum(map(len, document)):
            starts.add(offset)
        offset += sum(map(len, document))
    return starts


def eos_starts(*files: list[int]) -> set[int]:
    """Return the offsets of document starts in consecutive files without an index."""
    starts, offset = set(), 0
    for tokens in files:
        starts |= {
            offset,
            *(offset + index + 1 for index in range(len(tokens) - 1) if tokens[index] == EOS),
        }
        offset += len(tokens)
    return starts


def open_source(
    path: Path,
    tokenizer: Tokenizer,
    with_documents: bool = False,
    run: Path | None = None,
    is_recorder: bool = True,
    **source: Any,
) -> TokenFile:
    return open_token_source(
        DataSource(path=str(path), format="tokens", **source),
        tokenizer,
        CacheFolders(None, str(run or path.parent / "run")),
        with_documents=with_documents,
        is_recorder=is_recorder,
    )


def truncate(file: Path, size: int) -> None:
    """Remove the last ``size`` bytes of ``file``."""
    os.truncate(file, file.stat().st_size - size)
