"""Compressed text yields the same documents for any piece size; damage is reported or skipped."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
from pathlib import Path

import pyarrow
import pytest

from torchtitan_like.cli import main as titan
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text import documents, formats
from torchtitan_like.data.text.documents import Blocks, find_corpus, plan_pieces, read_piece
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens.encoding import TokenPolicy
from torchtitan_like.data.tokens.token_cache import CacheFolders, entry_of
from torchtitan_like.data.tokens.tokenizing import cached_tokens

from .conftest import ASSETS, TEXTS, write_jsonl

MANY_TEXTS = [f"{number} {text}" for number in range(30) for text in TEXTS]


def write_compressed(file: Path, texts: list[str], num_members: int = 1) -> Path:
    """Write a file of several members (gzip) or frames (zstd), as ``cat`` or bgzip produce it."""
    raw = write_jsonl(file, texts).read_bytes()
    offsets = [len(raw) * member // num_members for member in range(num_members + 1)]
    parts = [
        pyarrow.compress(raw[start:end], codec="zstd", asbytes=True)
        if file.suffix == ".zst"
        else gzip.compress(raw[start:end], mtime=0)
        for start, end in zip(offsets[:-1], offsets[1:], strict=True)
    ]
    file.write_bytes(b"".join(parts))
    return file


def split_into_parts(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "COMPRESSED_BYTES", part_bytes)
    monkeypatch.setattr(documents, "PIECE_BYTES", 1)


def read(path: Path, on_bad_record: str = "error") -> list[str]:
    """Read texts and bad records by cache pieces; check that stream blocks yield the same."""
    corpus = find_corpus(str(path), on_bad_record=on_bad_record)  # type: ignore[arg-type]
    blocks = Blocks(corpus)
    by_pieces, by_blocks = (
        [
            str(record if record.document is None else record.document)
            for piece in pieces
            for record in read_piece(corpus, piece)
        ]
        for pieces in (plan_pieces(corpus), ([blocks[index]] for index in range(len(blocks))))
    )
    assert by_blocks == by_pieces
    return by_pieces


@pytest.mark.parametrize("num_members", [1, 7])
@pytest.mark.parametrize("part_bytes", [300, 2000, 2**30])
@pytest.mark.parametrize(
    ("ending", "expansion"), [(".jsonl.gz", 2.5), (".json.gz", 2.5), (".jsonl.zst", 4)]
)
def test_pieces_of_a_compressed_file_yield_its_texts_in_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part_bytes: int,
    num_members: int,
    ending: str,
    expansion: float,
) -> None:
    split_into_parts(part_bytes, monkeypatch)
    file = write_compressed(tmp_path / f"a{ending}", MANY_TEXTS, num_members)
    assert read(file) == read(tmp_path) == MANY_TEXTS
    spans = [span for piece in plan_pieces(find_corpus(str(file))) for span in piece]
    text_bytes = int(file.stat().st_size * expansion)
    assert len(spans) == -(-text_bytes // part_bytes)
    assert sum(span.size for span in spans) == pytest.approx(text_bytes, abs=len(spans))


def test_gzip_and_plain_files_form_one_source_and_small_files_share_a_piece(tmp_path: Path) -> None:
    write_compressed(tmp_path / "a.jsonl.gz", ["one", "two"])
    write_jsonl(tmp_path / "b.jsonl", ["three"])
    (tmp_path / "c.jsonl.gz").write_bytes(b"")
    write_compressed(tmp_path / "d.json.gz", ["four"])
    write_compressed(tmp_path / "e.jsonl.zst", ["five"])
    assert read(tmp_path) == ["one", "two", "three", "four", "five"]
    assert len(plan_pieces(find_corpus(str(tmp_path)))) == 1


def test_a_bad_line_is_reported_with_its_line_number(tmp_path: Path) -> None:
    raw = b'{"text": "good"}\n' * 3 + b'{"text": 7}\n'
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(raw))
    with pytest.raises(DataError, match=rf'^{file}, line 4: "text" is 7'):
        read(file)
    assert read(file, "skip") == [
        *["good"] * 3,
        f'{file}, byte 51: "text" is 7, expected text',
    ]


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("part_bytes", [500, 2**30])
def test_a_truncated_file_is_reported_or_its_rest_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int, ending: str
) -> None:
    split_into_parts(part_bytes, monkeypatch)
    # With several members, the data before the truncation can be decompressed.
    file = write_compressed(tmp_path / f"a.jsonl.{ending}", MANY_TEXTS, num_members=10)
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 3 // 5])
    with pytest.raises(
        DataError,
        match=rf"^{file}, line \d+: cannot be decompressed from here on .*truncated \(data.on_bad",
    ):
        read(file)
    records = read(file, "skip")
    texts = [text for text in records if text in MANY_TEXTS]
    errors = records[len(texts) :]
    assert texts == MANY_TEXTS[: len(texts)]
    # Of zstd, up to 4 KiB before the damage are lost.
    lowest = 0.5 if ending == "gz" else 0.35
    assert lowest * len(MANY_TEXTS) < len(texts) < 0.65 * len(MANY_TEXTS)
    num_parts = len(Blocks(find_corpus(str(file))))
    assert 1 <= len(errors) <= num_parts and all(
        "cannot be decompressed" in error and str(file) in error for error in errors
    )


@pytest.mark.parametrize(
    ("name", "error"),
    [("a.json.gz", "Not a gzipped file"), ("a.json.zst", "ZSTD decompress failed")],
)
def test_a_file_that_is_not_compressed_is_reported(tmp_path: Path, name: str, error: str) -> None:
    (tmp_path / name).write_text(json.dumps({"text": "plain"}))
    with pytest.raises(
        DataError, match=rf"{name}, line 1: cannot be decompressed from here on \({error}"
    ):
        read(tmp_path)


def test_gzip_and_plain_text_have_the_same_token_cache(
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(formats, "COMPRESSED_BYTES", 2000)
    policy = TokenPolicy(tokenizer, tokenizer.bos_id, tokenizer.eos_id)
    plain, compressed = (tmp_path / name / "a.jsonl" for name in ("plain", "compressed"))
    write_jsonl(plain, MANY_TEXTS)
    write_compressed(compressed.with_name("a.jsonl.gz"), MANY_TEXTS)

    def make_cache(folder: Path, on_bad_record: str = "error") -> tuple[bytes, int, int]:
        corpus = find_corpus(str(folder), on_bad_record=on_bad_record)  # type: ignore[arg-type]
        file = cached_tokens(corpus, policy, entry_of(corpus, "own", policy),
                             CacheFolders(None, str(tmp_path)), num_workers=1)  # fmt: skip
        return (file.folder / "tokens.bin").read_bytes(), file.meta.text_digest, file.meta.num_bad

    complete = make_cache(plain.parent)
    assert make_cache(compressed.parent) == complete
    output = ["--tokenizer", str(ASSETS), "--output", str(tmp_path / "tokens"), "--workers", "1"]
    assert titan(["data", "tokenize", str(compressed.parent), *output]) == 0
    assert (tmp_path / "tokens/tokens.bin").read_bytes() == complete[0]

    file = compressed.with_name("a.jsonl.gz")
    write_compressed(file, MANY_TEXTS, num_members=10)
    file.write_bytes(file.read_bytes()[:-400])
    shutil.rmtree(compressed.with_name(".token_cache"))
    caplog.set_level(logging.WARNING)
    tokens, _, num_bad = make_cache(compressed.parent, "skip")
    assert complete[0].startswith(tokens) and num_bad >= 1
    assert f"skipped {num_bad} bad records, the first of them: {file}, byte " in caplog.text
