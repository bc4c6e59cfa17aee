"""Errors of malformed token files state the problem, the expectation and the remedy."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens import token_formats

from .token_writers import (
    DOCUMENTS,
    TOKENS,
    VOCAB,
    open_source,
    truncate,
    write_flat,
    write_megatron,
    write_npy,
)

SEQ_LEN = 16


def damage_nothing(_: Path) -> None: ...


# Each row: changed parts of the index, a function that damages the files, the error message.
LENGTHS = [len(sequence) for document in DOCUMENTS for sequence in document]
POINTERS = [2 * sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
INDEX_DAMAGES: dict[str, tuple[dict[str, Any], Callable[[Path], None], str]] = {
    "truncated .bin": (
        {},
        lambda p: truncate(p.with_suffix(".bin"), 2),
        r"a\.bin has \d+ bytes\. Expected \d+, the end of the last",
    ),
    "longer .bin": (
        {},
        lambda p: write_flat(p.with_suffix(".bin"), [*TOKENS, 1]),
        r"a\.bin has \d+ bytes\. Expected",
    ),
    "empty .bin": (
        {},
        lambda p: write_flat(p.with_suffix(".bin"), []),
        r"a\.bin is empty. Expected tokens",
    ),
    "no .bin": ({}, lambda p: p.with_suffix(".bin").unlink(), r"a\.idx has no \.bin file"),
    "truncated .idx": (
        {},
        lambda p: truncate(p.with_suffix(".idx"), 1),
        r"a\.idx has \d+ bytes\. Expected \d+, for 12 seq",
    ),
    "only a header": (
        {},
        lambda p: os.truncate(p.with_suffix(".idx"), 20),
        r"a\.idx has 20 bytes\. Expected 34 or more",
    ),
    "older format": (
        {"magic": b"TNTIDX\x00\x00\x00"},
        damage_nothing,
        r"starts with b'TNTIDX.*Expected b'MMIDIDX",
    ),
    "version": ({"version": 2}, damage_nothing, r"a\.idx has version 2\. Expected version 1"),
    "floats": ({"declared": 7}, damage_nothing, r"has dtype code 7\. Expected 1 \(uint8\)"),
    "other type": (
        {"declared": 4},
        damage_nothing,
        r"a\.bin: token 0 .* is 131073\. .*: give .* not int32",
    ),
    "no sequence": ({"lengths": [], "pointers": []}, damage_nothing, r"a\.idx has 0 sequences"),
    "no documents": (
        {"borders": [0]},
        damage_nothing,
        r"a\.idx has 12 sequences and 1 document boundaries\. Expected a d",
    ),
    "pointer beyond the end": (
        {"pointers": [*POINTERS[:-1], 9999]},
        damage_nothing,
        r"a\.bin has \d+ bytes\. Expected 9,999",
    ),
    "gap": (
        {"pointers": [*POINTERS[:5], POINTERS[5] + 2, *POINTERS[6:]]},
        damage_nothing,
        r"a\.idx has sequence 5 at byte 88 \(1 tokens\)\. Expected byte 86",
    ),
    "negative length": (
        {"lengths": [*LENGTHS[:3], -1, *LENGTHS[4:]]},
        damage_nothing,
        r"a\.idx has sequence 3 at byte 86 \(-1 tokens\)",
    ),
    "sequence outside all documents": (
        {"borders": [0, 5]},
        damage_nothing,
        r"from sequence 0 to 5\. Expected all sequences, from 0 to 12",
    ),
    "decreasing borders": (
        {"borders": [0, 5, 4, 12]},
        damage_nothing,
        r"document boundary 2 at sequence 4",
    ),
    "border beyond the end": (
        {"borders": [0, 13, 12]},
        damage_nothing,
        r"document boundary 1 at sequence 13",
    ),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGES)
@pytest.mark.parametrize("chunk", [2, 2**22])
def test_a_damaged_megatron_pair_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, damage: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_formats, "CHUNK", chunk)
    changed, destroy, message = INDEX_DAMAGES[damage]
    destroy(write_megatron(tmp_path / "a", DOCUMENTS, **changed))
    with pytest.raises(DataError, match=message) as caught:
        open_source(tmp_path / "a", tokenizer)
    assert str(tmp_path) in str(caught.value) and re.search(
        r": (copy|create|remove|give)", str(caught.value)
    )
    assert not [*tmp_path.glob(".token_cache/[!.]*")]


FLAT_DAMAGES: dict[str, tuple[str, Callable[[Path], object], dict[str, Any], str]] = {
    "odd size": ("a.bin", lambda p: p.write_bytes(bytes(7)), {}, "has 7 bytes. Expected a multiple of 2, for uint16"),
    "half a token": (
        "a.bin", lambda p: p.write_bytes(bytes(6)), {"token_dtype": "uint32"}, "Expected a multiple of 4, for uint32",
    ),
    "empty": ("a.bin", lambda p: p.write_bytes(b""), {}, "is empty. Expected tokens"),
    "32 bits": ("a.bin", lambda p: write_flat(p, TOKENS, "I"), {}, 'zero in every second element.*`token_dtype` to "uint32"'),
    "16 bits": (
        "a.bin", lambda p: write_flat(p, TOKENS), {"token_dtype": "uint32"}, "Expected ids from 0 to 2047",
    ),
    "llm.c": ("a.bin", lambda p: write_flat(p, [20240520, 1, 9], "I"), {}, "a header of llm.c.*first 1,024 bytes"),
    "npy: empty file": ("a.npy", lambda p: p.write_bytes(b""), {}, "is empty. Expected tokens"),
    "npy: no tokens": ("a.npy", lambda p: write_npy(p, []), {}, "(has no token|is not a complete .npy file)"),
    "npy: truncated": ("a.npy", lambda p: (write_npy(p, TOKENS), truncate(p, 1)), {}, "is not a complete .npy file"),
    "npy: wrong content": ("a.npy", lambda p: write_flat(p, TOKENS), {}, "is not a complete .npy file"),
    "npy: matrix": ("a.npy", lambda p: write_npy(p, [[1], [2]]), {}, r"the shape \(2, 1\) and the dtype uint16\. Expected one"),
    "npy: floats": ("a.npy", lambda p: write_npy(p, [1, 2], "<f4"), {}, "the dtype float32. Expected .*uint16, uint32"),
    "npy: big-endian": ("a.npy", lambda p: write_npy(p, [1, 2], ">u2"), {}, "the dtype big-endian uint16"),
    "npy: objects": ("a.npy", lambda p: np.save(p, np.array([{}])), {}, "is not a complete .npy file"),
    "id beyond the vocabulary": (
        "a.bin", lambda p: write_flat(p, [1, VOCAB]), {}, r"a\.bin: token 1 .* is 2048\. Expected ids from 0",
    ),
    "negative id": (
        "a.npy", lambda p: write_npy(p, [1, 2, -3], "<i8"), {}, r"a\.npy: token 2 .* is -3\. Expected ids from",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", FLAT_DAMAGES)
def test_a_damaged_file_without_an_index_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, damage: str
) -> None:
    name, write, source, message = FLAT_DAMAGES[damage]
    write(tmp_path / name)
    with pytest.raises(DataError, match=message) as caught:
        open_source(tmp_path / name, tokenizer, **source)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "bad"), [("<u2", VOCAB), ("<u4", 2**32 - 1), ("<i4", -1), ("<i8", 2**40)]
)
@pytest.mark.parametrize("last", [False, True])
def test_a_batch_never_contains_an_id_beyond_the_vocabulary(
    build: Callable[..., TrainBatches], tmp_path: Path, dtype: str, bad: int, last: bool
) -> None:
    """The id is deep in the second file, which the start does not read, or in the last sample."""
    write_npy(tmp_path / "0.npy", range(100), "<u2")
    tokens, index = np.arange(100_001) % VOCAB, 99_999 if last else 30_000
    tokens[index] = bad
    write_npy(tmp_path / "1.npy", tokens, dtype)
    message = rf"1\.npy: token {index:,} \(counted from 0\) is {bad}\. Expected ids from 0 to 2047"
    if last:
        with pytest.raises(DataError, match=message):
            build(tmp_path, seq_len=SEQ_LEN, data={"shuffle": False}, format="tokens", max_epochs=1)
        return
    batches = build(
        tmp_path, seq_len=SEQ_LEN, data={"shuffle": False}, format="tokens", max_epochs=1
    )
    num_read = 0
    with pytest.raises(DataError, match=message):
        for batch in batches:
            num_read += batch.tokens.numel()
            assert 0 <= int(batch.tokens.min()) and int(batch.tokens.max()) < VOCAB
    assert num_read == (30_100 // SEQ_LEN // 2) * 2 * SEQ_LEN


@pytest.fixture
def switching_in_collections() -> Iterator[None]:
    """Collect garbage often, and let another thread run in each collection."""
    threshold = gc.get_threshold()

    def switch(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    gc.set_threshold(5)
    gc.callbacks.append(switch)
    yield
    gc.callbacks.remove(switch)
    gc.set_threshold(*threshold)


def test_npy_files_open_from_many_threads(
    tmp_path: Path, tokenizer: Tokenizer, switching_in_collections: None
) -> None:
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))
    with ThreadPoolExecutor(16) as pool:
        parts = pool.map(
            lambda _: token_formats.open_part(tmp_path / "a.npy", tokenizer, "auto"), range(1000)
        )
        assert {len(part.tokens) for part in parts} == {10}
