"""Files with bytes that are not as they were: they are read, or refused by name; nothing else, and never for long.

Each format's valid files are damaged in many ways, drawn from a seed. All of it runs in one process of its own, because what
must not happen includes the end of the process.
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

from torchtitan_like.data.errors import DataError
from torchtitan_like.data.text.documents import find_corpus, plan_pieces, read_piece
from torchtitan_like.data.text.formats import BadRecord
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer

from .conftest import ASSETS, TEXTS, write_jsonl
from .test_documents import write_table
from .token_writers import DOCUMENTS, TOKENS, open_source, write_flat, write_megatron, write_npy

SECONDS = 10  # for one file of a few KB: reading takes milliseconds


def write_text(file: Path) -> Path:
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    return file


def pack(file: Path) -> Path:
    file.write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    return file


def read_texts(file: Path, on_bad_record: str) -> object:
    corpus = find_corpus(str(file), "auto", "text", on_bad_record)  # type: ignore[arg-type]
    documents = [text for piece in plan_pieces(corpus) for text in read_piece(corpus, piece)]
    assert all(isinstance(text, str | BadRecord) for text in documents)
    return [text.encode() for text in documents if isinstance(text, str)]


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(ASSETS)


def read_tokens(file: Path, _: str) -> object:
    """Every token of ``file``, and where documents begin."""
    found = open_source(file, tokenizer(), with_documents=True)
    starts = np.asarray(found.offsets).tolist()
    assert starts[0] == 0 and starts[-1] == len(found.tokens) and starts == sorted(set(starts))
    assert int(found.tokens[0 : len(found.tokens)].max()) < 2048
    return starts


# name of the damaged file: function that writes it (and related files), function that reads it
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
    """Return ``raw`` with one to three kinds of damage, most often at its ends, where headers are."""
    content = bytearray(raw)
    for _ in range(draw.randint(1, 3)):
        size = len(content)
        near = draw.choice([size, min(size, 64)])
        place = draw.randrange(near) if draw.random() < 0.5 else size - 1 - draw.randrange(near)
        match draw.randrange(6):
            case 0:
                content[place] = draw.randrange(256)
            case 1:
                content[place] ^= 1 << draw.randrange(8)
            case 2:
                del content[place:]
            case 3:
                del content[place : place + draw.randrange(1, 9)]
            case 4:
                content[place:place] = draw.randbytes(draw.randrange(1, 9))
            case _:
                content[place : place + 8] = draw.choice([b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f"])
        if not content:
            break
    return bytes(content)


def fuzz(folder: Path, name: str, num_cases: int, seed: int = 0) -> dict[str, int]:
    """How often the damaged file was read and refused. Raises what must not be raised, with the case's number."""
    write, read = FORMATS[name]
    file = folder / name
    write(file)
    read(file, "error")
    raw, counts = file.read_bytes(), {"read": 0, "refused": 0}
    for case in range(seed * num_cases, (seed + 1) * num_cases):
        draw = random.Random(f"{name} {case}")
        file.write_bytes(damaged(raw, draw))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        print(f"{name} case {case}", file=sys.stderr)
        try:
            read(file, draw.choice(["error", "skip"]))
            counts["read"] += 1
        except DataError as error:
            assert file.stem in str(error), f"case {case} of {name} is refused without its name: {error}"
            counts["refused"] += 1
        faulthandler.cancel_dump_traceback_later()
    return counts


def test_damaged_files_of_every_format_are_read_or_refused_by_name(tmp_path: Path, repo_root: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.data.test_damaged_files", str(tmp_path), "50"]
    ran = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-3000:]
    counts = json.loads(ran.stdout)
    assert list(counts) == list(FORMATS)
    assert all(count["read"] + count["refused"] == 50 and count["refused"] for count in counts.values()), counts
    assert sum(count["read"] for count in counts.values()) > 50, counts


def main(folder: str, num_cases: str, *names: str) -> None:
    """Print how often the file of each format was read and refused; FUZZ_SEED gives other cases."""
    counts = {}
    for name in names or FORMATS:
        place = Path(folder, name)
        place.mkdir()
        counts[name] = fuzz(place, name, int(num_cases), int(os.environ.get("FUZZ_SEED", "0")))
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
