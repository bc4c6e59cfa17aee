"""Tokenizers of both formats encode alike; tokenizers that do not suit the model are refused."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from torchtitan_like.cli import main as titan
from torchtitan_like.config.dataset_names import DATASETS
from torchtitan_like.data.data_errors import TokenizerError
from torchtitan_like.data.text import tokenizer as tokenizer_module
from torchtitan_like.data.text.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from torchtitan_like.data.text.word_patterns import RANK_FILES

from .conftest import ASSETS

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


@pytest.fixture(scope="module")
def tiktoken_tokenizer() -> Tokenizer:
    return load_tokenizer(ASSETS / "tokenizer.model")


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """Return ``copy("tokenizer.json", ...)``, which copies shipped files to a folder."""

    def copy_files(*names: str) -> Path:
        folder = tmp_path / "tokenizer"
        folder.mkdir(exist_ok=True)
        for name in names:
            shutil.copy(ASSETS / name, folder / name)
        return folder

    return copy_files


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_shipped_tokenizer_has_2048_tokens_with_bos_and_eos_last(
    tokenizer: Tokenizer, tiktoken_tokenizer: Tokenizer
) -> None:
    for loaded in (tokenizer, tiktoken_tokenizer):
        assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (2048, 2046, 2047)
        assert loaded.decode([2046, 2047]) == "<|begin_of_text|><|end_of_text|>"
        assert len(loaded.num_bytes()) == 2048 and loaded.num_bytes()[2046:] == [0, 0]


@pytest.mark.parametrize("name", ["shakespeare", "shakespeare_validation"])
def test_both_formats_encode_and_decode_the_shipped_text_alike(
    tokenizer: Tokenizer, tiktoken_tokenizer: Tokenizer, name: str
) -> None:
    for line in DATASETS[name].file.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["text"]
        ids = tokenizer.encode(text)
        assert tiktoken_tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == tiktoken_tokenizer.decode(ids) == text
        assert max(ids) < 2046
        for loaded in (tokenizer, tiktoken_tokenizer):
            counts = loaded.num_bytes()
            assert sum(counts[token_id] for token_id in ids) == len(text.encode())


@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from(["the", "ing", "an", " ", "\n", "th", "he", "12", "'s", "é"])).map(
        "".join
    )
)
@settings(max_examples=300, deadline=None)
def test_both_formats_encode_and_decode_any_text_alike(text: str) -> None:
    one, other = (load_once(ASSETS / name) for name in FILES[:2])
    assert one.encode(text) == other.encode(text)
    assert one.decode(one.encode(text)) == other.decode(other.encode(text)) == text
    assert [ids.tolist() for ids in one.encode_batch([text, text])] == [one.encode(text)] * 2


load_once = functools.cache(load_tokenizer)


@pytest.mark.parametrize("name", FILES[:2])
def test_special_tokens_in_text_are_encoded_as_text(name: str) -> None:
    tokenizer = load_tokenizer(ASSETS / name)
    text = "a<|end_of_text|>b<|begin_of_text|>"
    ids = tokenizer.encode(text)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.decode(ids) == text


def test_a_bos_token_not_marked_special_is_encoded_as_text(copy: Callable[..., Path]) -> None:
    folder = copy(*FILES)
    edit_json(
        folder / "tokenizer.json",
        lambda content: [token.update(special=False) for token in content["added_tokens"]],
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_id == 2046 and 2046 not in tokenizer.encode("a<|begin_of_text|>")


def test_truncation_and_padding_settings_are_ignored(copy: Callable[..., Path]) -> None:
    folder = copy("tokenizer.json")
    plain = load_tokenizer(folder).encode("to be or not to be " * 50)
    truncation = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 4096},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
    }
    padding["pad_token"] = "x"
    edit_json(
        folder / "tokenizer.json",
        lambda content: content.update(truncation=truncation, padding=padding),
    )
    assert load_tokenizer(folder).encode("to be or not to be " * 50) == plain


def test_a_tokenizer_with_dropout_is_refused(copy: Callable[..., Path]) -> None:
    """With dropout, the same text would have different ids each time it is encoded."""
    folder = copy("tokenizer.json")
    edit_json(folder / "tokenizer.json", lambda content: content["model"].update(dropout=0.5))
    with pytest.raises(
        TokenizerError, match=r"encodes a text differently each time.*dropout is 0.5.*Expected null"
    ):
        load_tokenizer(folder)


LLAMA3_WORDS = {"pat_str": "Llama 3"}
NAMED = {
    "as text": ({"bos_token": "<|end_of_text|>", "eos_token": "<|begin_of_text|>"}, (2047, 2046)),
    "as object": ({"bos_token": {"content": "<|end_of_text|>"}}, (2047, 2047)),
    "null": ({"bos_token": None}, (None, 2047)),
    "not named": ({}, (2046, 2047)),
}


@pytest.mark.parametrize("vocabulary", FILES[:2])
@pytest.mark.parametrize("config_file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("case", NAMED)
def test_bos_and_eos_come_from_the_tokenizer_config_or_have_common_names(
    copy: Callable[..., Path], vocabulary: str, config_file: str, case: str
) -> None:
    config, expected = NAMED[case]
    folder = copy(vocabulary)
    (folder / "tokenizer_config.json").write_text(json.dumps(LLAMA3_WORDS))
    (folder / config_file).write_text(json.dumps(LLAMA3_WORDS | config))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == expected


def test_a_named_bos_that_does_not_exist_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy("tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.raises(
        TokenizerError, match="tokenizer_config.json has bos_token = '<s>', which is not in"
    ):
        load_tokenizer(folder)


def write_ranks(file: Path, num_ranks: int) -> Path:
    tokens = [bytes([byte]) for byte in range(256)] + [
        number.to_bytes(3, "big") for number in range(num_ranks - 256)
    ]
    file.write_text(
        "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    )
    return file


def test_llama_3s_tiktoken_file_has_its_256_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_ranks(tmp_path / "tokenizer.model", 128_000)
    with pytest.raises(TokenizerError, match="is no published file"):
        load_tokenizer(file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(tokenizer_module, "LLAMA3_RANKS", sha256)
    monkeypatch.setitem(RANK_FILES, sha256, "Llama 3")
    tokenizer = load_tokenizer(file)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (128_256, 128_000, 128_001)
    names = {
        128_002: "<|reserved_special_token_0|>",
        128_004: "<|finetune_right_pad_id|>",
        128_009: "<|eot_id|>",
    }
    names[128_255] = "<|reserved_special_token_247|>"
    assert {token_id: tokenizer.decode([token_id]) for token_id in names} == names


def test_another_tiktoken_file_has_bos_and_eos_after_the_last_token(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(LLAMA3_WORDS))
    tokenizer = load_tokenizer(write_ranks(tmp_path / "own.tiktoken", 300))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (302, 300, 301)


@pytest.mark.parametrize("is_published", [False, True])
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("gpt-oss", ["camel", "Case", " don't"]),
        ("Kimi", ["camel", "Case", " don't"]),
        ("Llama 3", ["camelCase", " don", "'t"]),
        ("[a-z]+|[^a-z]", ["camel", "C", "ase", " ", "don", "'", "t"]),
    ],
)
def test_a_rank_file_splits_words_by_its_own_pattern(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pattern: str,
    words: list[str],
    is_published: bool,
) -> None:
    """Merges make one token of each word, and of words that other patterns would make."""
    file = write_ranks(tmp_path / "own.tiktoken", 300)
    with file.open("a") as lines:
        for rank, word in enumerate(MERGED, start=300):
            lines.write(f"{base64.b64encode(word.encode()).decode()} {rank}\n")
    if is_published:
        monkeypatch.setitem(RANK_FILES, hashlib.sha256(file.read_bytes()).hexdigest(), pattern)
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pat_str": pattern}))
    tokenizer = load_tokenizer(file)
    pieces = [tokenizer.decode([token_id]) for token_id in tokenizer.encode("camelCase don't")]
    assert pieces == words
    assert (tokenizer.split_pattern is None) == (pattern == "[a-z]+|[^a-z]")


MERGED = ["camelCase", "camel", "Case", "ase", " don't", " don", "don", "'t"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "is no published file.*Expected a text as pat_str in .*tokenizer_config.json"),
        ({"pat_str": 3}, "has pat_str = 3. Expected a text"),
        ({"pat_str": "(a"}, "tokenizer_config.json has a pat_str that is not an expression"),
    ],
)
def test_a_rank_file_of_unknown_words_is_refused(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(write_ranks(tmp_path / "own.tiktoken", 300))


CHARACTERS = "\u2581theprics wao10n8</>d"
NAMES = ["<unk>", "<s>", "</s>", "<pad>"]
MODELS: dict[str, Callable[[], models.Model]] = {
    "Unigram": lambda: models.Unigram(
        [*((name, 0.0) for name in NAMES), *((c, -5.0) for c in CHARACTERS)], 0, False
    ),
    "WordLevel": lambda: models.WordLevel(
        {piece: number for number, piece in enumerate([*NAMES, "the"])}, "<unk>"
    ),
    "BPE that ignores merges": lambda: models.BPE(
        {piece: number for number, piece in enumerate([*NAMES, *CHARACTERS])},
        [],
        unk_token="<unk>",
        ignore_merges=True,
    ),
    "BPE": lambda: models.BPE(
        {piece: number for number, piece in enumerate([*NAMES, *CHARACTERS, "<s"])},
        [("<", "s"), ("<s", ">")],
        unk_token="<unk>",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("text", ["the price was <s>10</s> now 8", "<s>", "the </s> <pad> the"])
def test_a_model_that_has_the_names_of_special_tokens_reads_them_as_text(
    tmp_path: Path, kind: str, text: str
) -> None:
    library = tokenizers.Tokenizer(MODELS[kind]())
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "Unigram":
        library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.add_special_tokens(NAMES)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(text)
    assert ids and not {1, 2, 3} & {*ids}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


@pytest.mark.parametrize(
    "text", [" " * 2_000_000, "a" * 100_000 + "\n" * 100_000, "x " * 30_000 + " " * 26_000 + "y"]
)
def test_the_tiktoken_engine_handles_long_runs_of_one_character_class(
    tiktoken_tokenizer: Tokenizer, text: str
) -> None:
    assert tiktoken_tokenizer.decode(tiktoken_tokenizer.encode(text)) == text


def test_long_runs_are_split_at_25_000_characters_as_in_llama_3(
    tiktoken_tokenizer: Tokenizer,
) -> None:
    text = "be " + "to" * 20_000 + " or"
    parts = [text[: 3 + 25_000], text[3 + 25_000 :]]
    assert tiktoken_tokenizer.encode(text) == [
        token for part in parts for token in tiktoken_tokenizer.encode(part)
    ]


def test_only_the_ids_change_the_fingerprint(
    copy: Callable[..., Path], tokenizer: Tokenizer
) -> None:
    folder = copy(*FILES)
    edit_json(
        folder / "tokenizer.json", lambda content: content.update(post_processor=None, decoder=None)
    )
    assert load_tokenizer(folder).fingerprint == tokenizer.fingerprint
    edit_json(folder / "tokenizer.json", lambda content: content["model"]["merges"].pop())
    assert load_tokenizer(folder).fingerprint != tokenizer.fingerprint
    ranks = (folder / "tokenizer.model").read_text()
    before = load_tokenizer(folder / "tokenizer.model").fingerprint
    (folder / "tokenizer.model").write_text("".join(ranks.splitlines(keepends=True)[:-1]))
    assert load_tokenizer(folder / "tokenizer.model").fingerprint != before


BROKEN = {
    "no file": ({}, "no tokenizer at .*hf_assets_path"),
    "not JSON": ({"tokenizer.json": b"{"}, "cannot be read as JSON"),
    "not a tokenizer": (
        {"tokenizer.json": b"{}"},
        "is not a tokenizer of the `tokenizers` library",
    ),
    "a list": ({"tokenizer.json": b"[]"}, "contains a JSON list. Expected an object"),
    "SentencePiece": ({"tokenizer.model": b"\n\x0e\n\x05<unk>\x15\x00"}, "line 2.*SentencePiece"),
    "bytes missing": ({"tokenizer.model": b"YQ== 0\n"}, "a token for each of the 256 bytes"),
    "several": ({"a.model": b"", "b.model": b""}, r"several tokenizers \(a.model, b.model\)"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_tokenizer_is_refused(tmp_path: Path, case: str) -> None:
    files, message = BROKEN[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"(?s){message}"):
        load_tokenizer(tmp_path)


def test_special_tokens_of_another_vocabulary_are_refused(copy: Callable[..., Path]) -> None:
    folder = copy("tokenizer.model")
    (folder / "tokenizer_config.json").write_text(
        '{"added_tokens_decoder": {"5": {"content": "<s>"}}}'
    )
    with pytest.raises(TokenizerError, match="gives the id 5 to a special token"):
        load_tokenizer(folder)


VOCABULARIES = [
    (2048, True, True, {}, []),
    (4096, True, True, {}, []),
    (2047, True, True, {}, ["largest id is 2047, the model has a vocabulary of 2047"]),
    (2048, True, True, {"bos_token": None}, ["data.add_bos"]),
    (2048, False, True, {"bos_token": None}, []),
    (
        100,
        True,
        True,
        {"bos_token": None, "eos_token": None},
        ["vocabulary of 100", "data.add_bos", "data.add_eos"],
    ),
]


@pytest.mark.parametrize(("vocab_size", "add_bos", "add_eos", "config", "problems"), VOCABULARIES)
def test_vocabulary_is_checked_against_model_and_settings(
    copy: Callable[..., Path],
    vocab_size: int,
    add_bos: bool,
    add_eos: bool,
    config: dict[str, Any],
    problems: list[str],
) -> None:
    folder = copy("tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    if not problems:
        check_vocabulary(tokenizer, vocab_size, add_bos=add_bos, add_eos=add_eos)
        return
    with pytest.raises(TokenizerError) as caught:
        check_vocabulary(tokenizer, vocab_size, add_bos=add_bos, add_eos=add_eos)
    assert all(problem in str(caught.value) for problem in problems)


def test_training_reproduces_the_bundled_tokenizer(tmp_path: Path) -> None:
    assert titan(["data", "train-tokenizer", "--output", str(tmp_path)]) == 0
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (ASSETS / name).read_bytes(), name
