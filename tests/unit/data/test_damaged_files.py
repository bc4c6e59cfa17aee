"""Damaged files are read or refused by name: no crash, no hang, no other error.

The test damages valid files of each format in many ways, drawn from a seed. It runs in a separate
process, because a crash of that process must fail the test.
"""

from __future__ import annotations

import faulthandler
import functools
import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.documents import find_corpus, plan_pieces, read_piece
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer

from .conftest import ASSETS, TEXTS, write_jsonl
from .test_documents import write_table
from .token_writers import DOCUMENTS, TOKENS, open_source, write_flat, write_megatron, write_npy

TIMEOUT_SECONDS = 10  # for a file of a few KB, which takes milliseconds to read


def write_text(file: Path) -> Path:
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    return file


def pack(file: Path) -> Path:
    file.write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    return file


def read_texts(file: Path, on_bad_record: str) -> object:
    corpus = find_corpus(str(file), "auto", "text", on_bad_record)  # type: ignore[arg-type]
    records = [record for piece in plan_pieces(corpus) for record in read_piece(corpus, piece)]
    assert all(isinstance(record.document, str) or record.problem for record in records)
    return [record.document.encode() for record in records if isinstance(record.document, str)]


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(ASSETS)


def read_tokens(file: Path, _: str) -> object:
    """Check the tokens of ``file`` and return the offsets of its documents."""
    source = open_source(file, tokenizer(), with_documents=True)
    starts = np.asarray(source.offsets).tolist()
    assert starts[0] == 0 and starts[-1] == len(source.tokens) and starts == sorted(set(starts))
    assert int(source.tokens[0 : len(source.tokens)].max()) < 2048
    return starts


# File to damage: (function that writes it and related files, function that reads it)
FORMATS: dict[str, tuple[Callable[[Path], object], Callable[[Path, str], object]]] = {
    "a.jsonl": (lambda file: write_jsonl(file, TEXTS), read_texts),
    "a.jsonl.gz": (lambda file: pack(write_jsonl(file, TEXTS)), read_texts),
    "a.txt": (write_text, read_texts),
    "a.parquet": (lambda file: write_table(file, TEXTS), read_texts),
    "dictionary.parquet": (lambda file: write_table(file, TEXTS, kind="dictionary"), read_texts),
    "stream.arrow": (lambda file: write_table(file, TEXTS), read_texts),
    "file.arrow": (lambda file: write_table(file, TEXTS), read_texts),
    "large.arrow": (lambda file: write_table(file, TEXTS, kind="large"), read_texts),
    "dictionary.arrow": (lambda file: write_table(file, TEXTS, kind="dictionary"), read_texts),
    "a.npy": (lambda file: write_npy(file, TOKENS), read_tokens),
    "flat.bin": (lambda file: write_flat(file, TOKENS), read_tokens),
    "pair.bin": (lambda file: write_megatron(file.with_suffix(""), DOCUMENTS), read_tokens),
    "pair.idx": (lambda file: write_megatron(file.with_suffix(""), DOCUMENTS), read_tokens),
}


def damaged(raw: bytes, draw: random.Random) -> bytes:
    """Return ``raw`` with up to three kinds of damage, mostly near its ends, where headers are."""
    content = bytearray(raw)
    for _ in range(draw.randint(1, 3)):
        size = len(content)
        near = draw.choice([size, min(size, 64)])
        offset = draw.randrange(near) if draw.random() < 0.5 else size - 1 - draw.randrange(near)
        match draw.randrange(6):
            case 0:
                content[offset] = draw.randrange(256)
            case 1:
                content[offset] ^= 1 << draw.randrange(8)
            case 2:
                del content[offset:]
            case 3:
                del content[offset : offset + draw.randrange(1, 9)]
            case 4:
                content[offset:offset] = draw.randbytes(draw.randrange(1, 9))
            case _:
                content[offset : offset + 8] = draw.choice(
                    [b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f"]
                )
        if not content:
            break
    return bytes(content)


def fuzz(folder: Path, name: str, num_cases: int, seed: int = 0) -> dict[str, int]:
    """Count how often the damaged file was read or refused. Raises any other error."""
    write, read = FORMATS[name]
    file = folder / name
    write(file)
    read(file, "error")
    raw, counts = file.read_bytes(), {"read": 0, "refused": 0}
    for case in range(seed * num_cases, (seed + 1) * num_cases):
        draw = random.Random(f"{name} {case}")
        file.write_bytes(damaged(raw, draw))
        faulthandler.dump_traceback_later(TIMEOUT_SECONDS, exit=True)
        print(f"{name} case {case}", file=sys.stderr)
        try:
            read(file, draw.choice(["error", "skip"]))
            counts["read"] += 1
        except DataError as error:
            assert file.stem in str(error), f"case {case}: the error does not name {name}: {error}"
            counts["refused"] += 1
        faulthandler.cancel_dump_traceback_later()
    return counts


def test_damaged_files_of_every_format_are_read_or_refused_by_name(
    tmp_path: Path, repo_root: Path
) -> None:
    command = [sys.executable, "-m", "tests.unit.data.test_damaged_files", str(tmp_path), "50"]
    result = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    counts = json.loads(result.stdout)
    assert list(counts) == list(FORMATS)
    assert all(
        count["read"] + count["refused"] == 50 and count["refused"] for count in counts.values()
    ), counts
    assert sum(count["read"] for count in counts.values()) > 50, counts


def main(folder: str, num_cases: str, *names: str) -> None:
    """Print how often each format was read and refused. FUZZ_SEED selects the cases."""
    counts = {}
    for name in names or FORMATS:
        case_folder = Path(folder, name)
        case_folder.mkdir()
        counts[name] = fuzz(
            case_folder, name, int(num_cases), int(os.environ.get("FUZZ_SEED", "0"))
        )
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
