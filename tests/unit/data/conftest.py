"""Small corpora, the shipped tokenizer, and training batches built from them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.config.sections_training import Data, Training
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer

ASSETS = Path(__file__).parents[2] / "assets" / "tokenizer"

TEXTS = [
    "To be, or not to be, that is the question.",
    "",  # no tokens: skipped
    "Whether 'tis nobler in the mind to suffer\nThe slings and arrows of outrageous fortune,",
    "x",
    "Or to take arms against a sea of troubles — and by opposing end them. 🙂 <|end_of_text|> is only text here.",
    "   ",
    "To die—to sleep,\r\nNo more; " * 20,
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ASSETS)


def write_jsonl(file: Path, texts: Iterable[str], field: str = "text") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts), encoding="utf-8"
    )
    return file


def flip_bit(path: Path, offset: int) -> None:
    """Flip one bit but keep size and modification time, as a failing disk does.

    A negative offset counts from the end.
    """
    status, content = path.stat(), bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture(autouse=True)
def users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect the user's cache folder, so that no test writes to the real one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "torchtitan_like" / "token_cache"


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    """Write four copies of `TEXTS`; two of its seven texts are empty or blank."""
    return write_jsonl(
        tmp_path / "corpus" / "part.jsonl",
        [f"{number} {text}" * bool(text) for number in range(4) for text in TEXTS],
    )


@pytest.fixture
def build(tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., TrainBatches]:
    """Return ``build(path, seq_len=..., data={...}, dp=(rank, size))``.

    It builds the training batches of one rank from the corpus at ``path``.
    """

    def build_batches(
        path: Path,
        *,
        seq_len: int = 16,
        local_batch_size: int = 2,
        num_accumulation: int = 1,
        dp: tuple[int, int] = (0, 1),
        seed: int = 7,
        with_positions: bool = False,
        data: dict[str, Any] | None = None,
        replica_group: tuple[int, int] = (0, 1),
        **source: Any,
    ) -> TrainBatches:
        return DataBuilder(
            Data(**{"sources": {"own": {"path": str(path), **source}}, **(data or {})}),
            tokenizer=tokenizer,
            dump_folder=str(tmp_path / "run"),
            dp_rank=dp[0],
            dp_size=dp[1],
            with_positions=with_positions,
        ).train_batches(
            Training(seq_len=seq_len, local_batch_size=local_batch_size),
            seed=seed,
            global_batch_size=num_accumulation * dp[1] * local_batch_size * replica_group[1],
            replica_group=replica_group,
        )

    return build_batches
