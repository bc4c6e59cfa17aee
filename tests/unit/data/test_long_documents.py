"""Long documents are encoded in parts if the ids are provably the same, and refused otherwise."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from torchtitan_like.config.dataset_names import DATASETS
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text import tokenizer as tokenizer_module
from torchtitan_like.data.text.documents import find_corpus, plan_pieces
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer
from torchtitan_like.data.text.word_patterns import PATTERNS
from torchtitan_like.data.tokens import encoding

from .conftest import ASSETS, write_jsonl
from .test_token_cache import cache

byte_level = pre_tokenizers.ByteLevel

PARTS = ["the", "ing", "an", " ", "  ", "\n", "\r\n", "\t", "th", "heref", " revenge", "ousands", "12", "1234567", "'s",
         "'LL", "'ſ", "é", "e\u0301", "中文", "мир", "ПРИ", "🙂", "👩‍👧", "²", "Ⅷ", "ǅ", "\u00a0", "\u2003", "\u200b",
         "\x00", "\x1c", "\x85", "\ufeff", "a" * 300, " " * 300, "ab" * 200, "-" * 200, "!?", "/", "<|endoftext|>", "aaa",
         "\U0001e030", "\U00020000", "\U000e0041"]  # fmt: skip


@functools.cache
def training_texts() -> list[str]:
    lines = DATASETS["shakespeare_validation"].file.read_text(encoding="utf-8").splitlines()
    texts = [
        "Größe naïve déjà vu ПРИВЕТ привет мир 中文中文 日本語 🙂🙂 12 123 1234 2024 \n\n\n    x\t\ty aaa aaaa"
    ] * 5
    return [json.loads(line)["text"] for line in lines] + texts


@functools.cache
def trained(style: str) -> str:
    """Return the content of a tokenizer.json with 1,000 tokens.

    `<|endoftext|>` is the first or the last token, as in published tokenizers.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if style == "GPT-2":
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = split(PATTERNS[style], "isolated", False)
    specials = ["<|endoftext|>"] if style == "Qwen 2" else []
    alphabet = sorted(byte_level.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=999, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return str(tokenizer.to_str())


def split(pattern: str, behavior: str, invert: bool) -> Any:
    words = pre_tokenizers.Split(Regex(pattern), behavior, invert)
    return pre_tokenizers.Sequence([words, byte_level(add_prefix_space=False, use_regex=False)])


# Name: (model, normalizer, pre-tokenizer). All of these tokenizers can encode a text in parts.
SPLITTABLE: dict[str, tuple[Any, Any, Any]] = {
    "prefix space": (models.BPE, None, byte_level(add_prefix_space=True)),
    "removed and inverted": (models.BPE, None, split(PATTERNS["Qwen 2"], "removed", True)),
    "normalized": (models.BPE, normalizers.NFKC(), byte_level(add_prefix_space=False)),
    "sequence": (
        models.BPE,
        normalizers.Sequence(
            [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
        ),
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)]),
    ),
    "bert": (models.WordPiece, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
    "white space": (models.WordLevel, None, pre_tokenizers.WhitespaceSplit()),
    "metaspace": (
        models.Unigram,
        normalizers.NFKC(),
        pre_tokenizers.Metaspace(prepend_scheme="always"),
    ),
    "metaspace first": (models.BPE, None, pre_tokenizers.Metaspace(prepend_scheme="first")),
}
TRAINERS = {
    models.BPE: trainers.BpeTrainer,
    models.WordPiece: trainers.WordPieceTrainer,
    models.WordLevel: trainers.WordLevelTrainer,
    models.Unigram: trainers.UnigramTrainer,
}


def trained_tokenizer(folder: Path, components: tuple[Any, Any, Any]) -> Tokenizer:
    """Train a tokenizer of 400 tokens with these components."""
    model, normalizer, pre_tokenizer = components
    unknown = {} if model in (models.BPE, models.Unigram) else {"unk_token": "[UNK]"}
    library = tokenizers.Tokenizer(model(**unknown))
    if normalizer is not None:
        library.normalizer = normalizer
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    options: dict[str, Any] = {
        "vocab_size": 400,
        "show_progress": False,
        "special_tokens": ["[UNK]"],
    }
    if model is models.Unigram:
        options["unk_token"] = "[UNK]"
    library.train_from_iterator(training_texts()[:20], TRAINERS[model](**options))
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def published(name: str) -> Callable[[Path], Tokenizer]:
    def load(folder: Path) -> Tokenizer:
        (folder / "tokenizer.json").write_text(trained(name))
        return load_tokenizer(folder)

    return load


LOADERS: dict[str, Callable[[Path], Tokenizer]] = {
    "shipped": lambda _: load_tokenizer(ASSETS),
    "tiktoken file": lambda _: load_tokenizer(ASSETS / "tokenizer.model"),
    **{name: published(name) for name in PATTERNS},
    **{
        name: (lambda folder, components=components: trained_tokenizer(folder, components))
        for name, components in SPLITTABLE.items()
    },
}


def difficult_text(draw: random.Random) -> str:
    words = [
        *PARTS,
        " ",
        " ",
        "\n",
        "'",
        "’",
        "-",
        "/",
        "\u0301",
        "\u00a8",
        "\ufdfa",
        "³",
        "_",
        "<|endoftext|>",
        "[UNK]",
        "▁",
    ]
    return "".join(
        draw.choice(words) + draw.choice(["", "", " ", "\n", "a", "?"])
        for _ in range(draw.randrange(120))
    )


@pytest.mark.parametrize("name", LOADERS)
def test_parts_have_the_ids_of_the_whole_document(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = LOADERS[name](tmp_path)
    monkeypatch.setattr(tokenizer_module, "PART_CHARACTERS", 3)
    draw, num_parts = random.Random(1), 0
    for _ in range(150):
        text = difficult_text(draw)
        parts = list(tokenizer.parts(text))
        assert "".join(parts) == text
        assert [token for part in parts for token in tokenizer.encode(part)] == tokenizer.encode(
            text
        ), repr(text)
        num_parts += len(parts)
    assert num_parts > 1000


UNSPLITTABLE: dict[str, Callable[[Any], None]] = {
    "no pre-tokenizer": lambda library: setattr(library, "pre_tokenizer", None),
    "an unknown pattern": lambda library: setattr(
        library, "pre_tokenizer", split(r"\w+ \w+|.", "isolated", False)
    ),
    "words that are merged": lambda library: setattr(
        library, "pre_tokenizer", split(PATTERNS["GPT-2"], "merged_with_next", False)
    ),
    "a prefix": lambda library: setattr(library, "normalizer", normalizers.Prepend("▁")),
    "an added token with a space": lambda library: library.add_tokens(
        [AddedToken("to be", special=False)]
    ),
    "an added token that strips": lambda library: library.add_tokens(
        [AddedToken("<x>", rstrip=True, special=False)]
    ),
    "no splitting": lambda library: setattr(
        library, "pre_tokenizer", pre_tokenizers.Metaspace(split=False)
    ),
}


@pytest.mark.parametrize("name", UNSPLITTABLE)
def test_a_tokenizer_that_needs_the_whole_text_refuses_long_documents(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tokenizers.Tokenizer.from_str(trained("GPT-2"))
    UNSPLITTABLE[name](library)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.split_pattern is None
    file = write_jsonl(tmp_path / "data" / "a.jsonl", ["to be or not to be " * 1000, "short"])
    monkeypatch.setattr(tokenizer, "max_part", 1000)
    monkeypatch.setattr(encoding, "GROUP_CHARACTERS", 1000)
    with pytest.raises(
        DataError,
        match=r"a\.jsonl, line 1: a document of 19,000 characters has 19,000 that cannot be split",
    ):
        cache(file, tokenizer)


class PanicException(BaseException):
    """As pyo3 raises it for a panic of Rust code."""


TEXTS = ["first", "a pan" + "ic", "third", "fourth"]


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet", "processor"])
def test_a_document_that_cannot_be_encoded_is_a_bad_record(
    kind: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = tokenizer.encode_batch

    def panic(texts: Sequence[str]) -> Any:
        if any("panic" in text for text in texts):
            raise DataError("the tokenizer has given up")
        return encode(texts)

    monkeypatch.setattr(tokenizer, "encode_batch", panic)
    places = {"jsonl": "a.jsonl, line 3", "txt": "1.txt, line 1", "parquet": "a.parquet, row 2"}
    if kind == "txt":
        for number, text in enumerate(TEXTS):
            (tmp_path / f"{number}.txt").write_text(text)
    elif kind == "parquet":
        table = pyarrow.table({"text": TEXTS})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    else:
        lines = [json.dumps({"text": text}) for text in TEXTS]
        (tmp_path / "a.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]))
    processor = (lambda record: [(record["text"], True)]) if kind == "processor" else None
    corpus = find_corpus(str(tmp_path))
    policy = encoding.TokenPolicy(tokenizer, None, tokenizer.eos_id)
    for on_bad_record in ("error", "skip"):
        corpus = replace(corpus, on_bad_record=on_bad_record, processor=processor)
        (piece,) = plan_pieces(corpus)
        if on_bad_record == "error":
            with pytest.raises(DataError, match=places.get(kind, places["jsonl"])):
                encoding.encode_piece(corpus, piece, policy)
            continue
        encoded = encoding.encode_piece(corpus, piece, policy)
        kept = [[*tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS if text != "a panic"]
        assert encoded.num_bad == 1 and [*encoded.lengths] == [len(ids) for ids in kept]
        assert [*encoded.tokens & 0xFFFF] == [token for ids in kept for token in ids]


def test_a_panic_of_the_library_is_a_data_error_and_a_signal_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tokenizers.Tokenizer.from_str(trained("GPT-2"))
    UNSPLITTABLE[next(iter(UNSPLITTABLE))](library)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)

    class Library:
        def encode_batch_fast(self, *_: Any, **__: Any) -> Any:
            raise errors[0]

    errors: list[BaseException] = [PanicException("retry limit")]
    monkeypatch.setattr(tokenizer, "_text_encoder", Library())
    with pytest.raises(DataError, match="that begins with 'to be': retry limit"):
        tokenizer.encode("to be")
    errors[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("to be")


def test_a_run_that_cannot_be_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(ASSETS)
    monkeypatch.setattr(tokenizer_module, "PART_CHARACTERS", 100)
    monkeypatch.setattr(tokenizer, "max_part", 1000)
    with pytest.raises(
        DataError, match="a document of 4,000 characters has 2,099 that cannot be split"
    ):
        list(tokenizer.parts("a " * 500 + "-" * 2000 + " b" * 500))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model"])
def test_a_batch_of_texts_has_the_ids_of_each_text(file: str) -> None:
    tokenizer, draw = load_tokenizer(ASSETS / file), random.Random(2)
    for _ in range(40):
        texts = [difficult_text(draw) for _ in range(draw.randrange(1, 6))]
        texts += draw.choice(
            [[], ["<|special|>"], [""], ["<|spec", "ial|>"], ["x" * 30_000], ["<|begin_of_text|>"]]
        )
        assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [
            tokenizer.encode(text) for text in texts
        ]


# Prints the peak memory in MiB that tokenizing one document adds to a process.
PEAK_MEMORY_PROGRAM = """
import sys
from tests.harness.memory import peak_resident_bytes
from torchtitan_like.data.text.documents import find_corpus, plan_pieces
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.data.tokens.encoding import TokenPolicy, encode_piece
corpus, policy = find_corpus(sys.argv[1]), TokenPolicy(load_tokenizer(sys.argv[2]), 1, 2)
policy.tokenizer.encode("warm")
before = peak_resident_bytes()
piece = plan_pieces(corpus)[0]
print(len(encode_piece(corpus, piece, policy).tokens))
print((peak_resident_bytes() - before) / 2**20)
"""


def peak_memory(file: Path, tokenizer: Path, repo_root: Path) -> float:
    command = [sys.executable, "-c", PEAK_MEMORY_PROGRAM, str(file), str(tokenizer)]
    result = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=True)
    return float(result.stdout.splitlines()[-1])


CHARACTERS = ASSETS.parent / "checkpoints" / "tokenizer"  # a token for each character


@pytest.mark.nightly
@pytest.mark.parametrize("size", [10, 299])
def test_a_giant_document_needs_six_bytes_of_memory_per_byte(
    size: int, tmp_path: Path, repo_root: Path
) -> None:
    """The limit is 6 bytes per byte of text, plus the memory of one part.

    The `tokenizers` library took 310 bytes per byte for the whole document.
    """
    vocabulary = json.loads((CHARACTERS / "tokenizer.json").read_text())["model"]["vocab"]
    words = "".join(
        character for character in vocabulary if len(character) == 1 and character.isalpha()
    )
    text = f"{words} " * (size * 2**20 // (len(words) + 1))
    file = write_jsonl(tmp_path / "giant.jsonl", [text])
    assert peak_memory(file, CHARACTERS, repo_root) < 6 * size + 120
