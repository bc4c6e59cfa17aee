"""Draw a few documents from a large dataset, for tests and experiments."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Literal

from torchtitan_like.config.sections_training import DataSource
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.documents import (
    Corpus,
    OnBadRecord,
    find_corpus,
    plan_pieces,
    read_piece,
)
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.data.tokens.token_cache import CacheFolders
from torchtitan_like.data.tokens.token_sources import open_token_source
from torchtitan_like.util.files import staged_path

NUM_PIECES = 64  # pieces of a corpus that are read at least


def make_tiny_dataset(
    path: str,
    out: Path,
    *,
    num_documents: int,
    seed: int,
    format_name: str = "auto",
    text_field: str = "text",
    on_bad_record: OnBadRecord = "error",
    tokenizer: str | None = None,
    token_dtype: Literal["auto", "uint16", "uint32"] = "auto",
) -> str:
    """Write documents of a dataset to `out` as JSON lines. Returns a line with their number.

    path: file, folder or glob. tokenizer, token_dtype: for token files (`format_name` "tokens").
    Raises DataError, TokenizerError, OSError.
    """
    if format_name != "tokens":
        corpus = find_corpus(path, format_name, text_field, on_bad_record)
        texts = draw_documents(corpus, num_documents, seed)
    elif tokenizer is None:
        raise DataError("--format tokens requires a tokenizer. Expected --tokenizer PATH: add it")
    else:
        source = DataSource(path=path, format="tokens", token_dtype=token_dtype)
        texts = decode_documents(source, tokenizer, num_documents, seed)
    if not texts:
        raise DataError(f"no text in {path}. Expected nonempty documents: check the path")
    with staged_path(out) as staged, staged.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    remark = " (all there are)" if len(texts) < num_documents else ""
    return f"{out}: {len(texts):,} documents{remark}, {out.stat().st_size / 2**20:,.1f} MiB"


def draw_documents(corpus: Corpus, num_documents: int, seed: int) -> list[str]:
    """Return `num_documents` nonempty documents in the order of the corpus, or all if it has fewer.

    They come from `NUM_PIECES` pieces (of some MiB) that are spread evenly over the corpus, and
    from further pieces if these do not hold enough. Reservoir sampling (Vitter's Algorithm R) makes
    any `num_documents` documents of these pieces equally likely.
    """
    generator = random.Random(seed)
    pieces = plan_pieces(corpus)
    num_pieces = min(len(pieces), NUM_PIECES)
    spread = [
        int((number + generator.random()) * len(pieces) / num_pieces)
        for number in range(num_pieces)
    ]
    others = sorted(set(range(len(pieces))) - set(spread))
    generator.shuffle(others)
    reservoir: list[tuple[int, int, str]] = []  # index of the piece, of the document in it, text
    num_read = 0
    for number, piece_index in enumerate([*spread, *others]):
        if number >= num_pieces and num_read >= num_documents:
            break
        for document_index, record in enumerate(read_piece(corpus, pieces[piece_index])):
            text = record.document
            if not isinstance(text, str) or not text:
                continue
            num_read += 1
            if len(reservoir) < num_documents:
                reservoir.append((piece_index, document_index, text))
            elif (slot := generator.randrange(num_read)) < num_documents:
                reservoir[slot] = (piece_index, document_index, text)
    return [text for _, _, text in sorted(reservoir)]


def decode_documents(
    source: DataSource, tokenizer_path: str, num_documents: int, seed: int
) -> list[str]:
    """Return documents of a source of tokens, evenly spread, as text without BOS and EOS."""
    tokenizer = load_tokenizer(tokenizer_path)
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        file = open_token_source(
            source, tokenizer, CacheFolders(folder, folder), with_documents=True
        )
        count = len(file.offsets) - 1
        indices = list(range(count))
        if num_documents < count:
            indices = [
                int((number + generator.random()) * count / num_documents)
                for number in range(num_documents)
            ]
        texts = []
        for index in indices:
            ids = file.tokens[int(file.offsets[index]) : int(file.offsets[index + 1])].tolist()
            if ids[:1] == [tokenizer.bos_id]:
                ids = ids[1:]
            if ids[-1:] == [tokenizer.eos_id]:
                ids = ids[:-1]
            texts.append(tokenizer.decode(ids))
    return [text for text in texts if text]
