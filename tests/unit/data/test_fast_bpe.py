"""The fast encoder (tiktoken's engine) returns the same ids as the `tokenizers` library."""

from __future__ import annotations

import functools
import json
import logging
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers

from torchtitan_like.config.datasets import DATASETS
from torchtitan_like.data.text import fast_bpe
from torchtitan_like.data.text.fast_bpe import PATTERNS, FastBPE, Unproven
from torchtitan_like.data.text.tokenizer import load_tokenizer

from .conftest import ASSETS

Content = dict[str, Any]


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
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        words = pre_tokenizers.Split(Regex(PATTERNS[style]), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    specials = ["<|endoftext|>"] if style == "Qwen 2" else []
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=999, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return str(tokenizer.to_str())


def shuffled(content: Content) -> None:
    """Shuffle the ids: only the order of the merges must matter."""
    vocabulary = content["model"]["vocab"]
    ids = sorted(vocabulary.values())
    random.Random(3).shuffle(ids)
    content["model"]["vocab"] = dict(zip(vocabulary, ids, strict=True))


def converted(content: Content) -> None:
    """Imitate a file converted from a tiktoken vocabulary.

    It lists all pairs that spell a token and sets ignore_merges. Some tokens are not the result of
    any merge.
    """
    model = content["model"]
    vocabulary: dict[str, int] = model["vocab"]
    for token in ("heref", "Ġreven", "ĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠ", "ousands"):
        vocabulary.setdefault(token, 2000 + len(vocabulary))
    ranked = sorted(vocabulary, key=lambda token: vocabulary[token])
    pairs = [[token[:end], token[end:]] for token in ranked for end in range(1, len(token))]
    model["merges"] = [pair for pair in pairs if vocabulary.keys() >= set(pair)]
    model["ignore_merges"] = True


def unchanged(content: Content) -> None:
    pass


CASES: dict[str, tuple[str, Callable[[Content], None]]] = {
    **{style: (style, unchanged) for style in PATTERNS},
    "GPT-2, shuffled ids": ("GPT-2", shuffled),
    "Llama 3, converted": ("Llama 3", converted),
    "gpt-oss, ignore_merges": (
        "gpt-oss",
        lambda content: content["model"].update(ignore_merges=True),
    ),
}


def library_of(content: Content) -> Any:
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.encode_special_tokens = True
    return library


@functools.cache
def engines(case: str) -> tuple[FastBPE, Any]:
    if case == "shipped":
        content = json.loads((ASSETS / "tokenizer.json").read_text())
    else:
        style, change = CASES[case]
        content = json.loads(trained(style))
        change(content)
    library = library_of(content)
    return FastBPE(content, library), library


PARTS = ["the", "ing", "an", " ", "  ", "\n", "\r\n", "\t", "th", "heref", " revenge", "ousands", "12", "1234567", "'s",
         "'LL", "'ſ", "é", "e\u0301", "中文", "мир", "ПРИ", "🙂", "👩‍👧", "²", "Ⅷ", "ǅ", "\u00a0", "\u2003", "\u200b",
         "\x00", "\x1c", "\x85", "\ufeff", "a" * 300, " " * 300, "ab" * 200, "-" * 200, "!?", "/", "<|endoftext|>", "aaa",
         "\U0001e030", "\U00020000", "\U000e0041"]  # fmt: skip


@pytest.mark.parametrize("case", ["shipped", *CASES])
@given(
    st.text(max_size=100)
    | st.lists(st.sampled_from(PARTS) | st.characters(exclude_categories=["Cs"])).map("".join)
)
@settings(max_examples=60, deadline=None)
def test_ids_equal_those_of_the_library_for_any_text(case: str, text: str) -> None:
    fast, library = engines(case)
    if fast.accepts(text):
        assert fast.encode(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("case", ["shipped", *CASES])
def test_ids_equal_those_of_the_library_for_a_longer_text(case: str) -> None:
    fast, library = engines(case)
    for text in training_texts():
        assert fast.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_difficult_cases_are_covered() -> None:
    """Shuffled ids need a table. A converted vocabulary has tokens that no merge produces."""
    assert engines("GPT-2, shuffled ids")[0]._id_of_rank is not None
    assert engines("Qwen 2")[0]._id_of_rank is None
    assert engines("Qwen 2")[0].accepts("中文 мир é 🙂") and not engines("Qwen 2")[0].accepts(
        "\U00020000"
    )
    vocabulary = engines("Llama 3, converted")[1].get_vocab(with_added_tokens=False)
    model = json.loads(engines("Llama 3, converted")[1].to_str())["model"]
    unmerged = vocabulary.keys() - fast_bpe._mergeable_tokens(vocabulary, fast_bpe.merges_of(model))
    assert "ousands" in unmerged and engines("Llama 3, converted")[0].encode("ousands") == [
        vocabulary["ousands"]
    ]


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=12),
    st.booleans(),
    st.lists(st.text("ab", min_size=2, max_size=5), max_size=2),
    st.lists(st.text("abc", min_size=1, max_size=14), min_size=20, max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_every_accepted_vocabulary_returns_the_ids_of_the_library(
    joins: list[tuple[int, int]], ignore_merges: bool, extra_tokens: list[str], words: list[str]
) -> None:
    """Random merges cover cases of the acceptance rule that no published file contains."""
    content = shipped()
    model, tokens, merges = content["model"], ["a", "b", "c"], []
    for first, second in joins:
        pair = [tokens[first % len(tokens)], tokens[second % len(tokens)]]
        if pair not in merges:
            merges.append(pair)
            tokens.append("".join(pair))
    all_tokens = dict.fromkeys([*fast_bpe.bytes_of_characters(), *tokens, *extra_tokens])
    vocabulary = {token: token_id for token_id, token in enumerate(all_tokens)}
    if len(extra_tokens) == 1:  # as in converted files: all pairs, in the order of their tokens
        pairs = [[token[:end], token[end:]] for token in vocabulary for end in range(1, len(token))]
        merges = [pair for pair in pairs if vocabulary.keys() >= set(pair)]
    model.update(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges)
    library = library_of(content)
    try:
        fast = FastBPE(content, library)
    except Unproven as reason:
        assert "differ" not in str(reason)
        return
    for word in words:
        assert fast.encode(word) == library.encode(word, add_special_tokens=False).ids


def shipped() -> Content:
    content: Content = json.loads((ASSETS / "tokenizer.json").read_text())
    return content


def of_split(content: Content, **changes: Any) -> None:
    content["pre_tokenizer"]["pretokenizers"][0].update(changes)


def of_byte_level(content: Content, **changes: Any) -> None:
    content["pre_tokenizer"]["pretokenizers"][1].update(changes)


SETTINGS: dict[str, tuple[Callable[[Content], object], str]] = {
    "normalizer": (lambda c: c.update(normalizer={"type": "NFC"}), r"it has a normalizer \(NFC\)"),
    "no pre-tokenizer": (lambda c: c.update(pre_tokenizer=None), "its pre-tokenizer is None"),
    "other pre-tokenizer": (
        lambda c: c.update(pre_tokenizer={"type": "Whitespace"}),
        "its pre-tokenizer is Whitespace",
    ),
    "adds a leading space": (lambda c: of_byte_level(c, add_prefix_space=True), "add_prefix_space"),
    "two patterns": (lambda c: of_byte_level(c, use_regex=True), "splits text into words twice"),
    "no pattern": (
        lambda c: c.update(pre_tokenizer=c["pre_tokenizer"]["pretokenizers"][1]),
        "or never",
    ),
    "words joined": (
        lambda c: of_split(c, behavior="MergedWithPrevious"),
        "does not isolate the words",
    ),
    "inverted": (
        lambda c: of_split(c, behavior="Isolated", invert=True),
        "does not isolate the words",
    ),
    "unknown pattern": (
        lambda c: of_split(c, pattern={"Regex": r"\w+|\W+"}),
        "its pattern is not one of",
    ),
    "split by a string": (
        lambda c: of_split(c, pattern={"String": " "}),
        "its pattern is not one of",
    ),
    "other model": (lambda c: c["model"].update(type="Unigram"), "its model is Unigram, not BPE"),
    "dropout": (lambda c: c["model"].update(dropout=0.1), "dropout = 0.1"),
    "unknown token": (lambda c: c["model"].update(unk_token="!"), "unk_token = '!'"),
    "prefix": (
        lambda c: c["model"].update(continuing_subword_prefix="##"),
        "continuing_subword_prefix = '##'",
    ),
    "suffix": (
        lambda c: c["model"].update(end_of_word_suffix="</w>"),
        "end_of_word_suffix = '</w>'",
    ),
    "byte fallback": (lambda c: c["model"].update(byte_fallback=True), "byte_fallback = True"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_may_change_the_ids_are_refused(name: str) -> None:
    change, reason = SETTINGS[name]
    content, library = shipped(), library_of(shipped())
    FastBPE(content, library)
    change(content)
    with pytest.raises(Unproven, match=reason):
        FastBPE(content, library)


def without_a_byte(content: Content) -> None:
    model = content["model"]
    model["vocab"] = {
        token: token_id for token, token_id in model["vocab"].items() if "\u0122" not in token
    }
    model["merges"] = [pair for pair in model["merges"] if "\u0122" not in "".join(pair)]


def with_merges(content: Content, *merges: str) -> None:
    """Add merges and the tokens they need, and set ignore_merges."""
    model = content["model"]
    for token in (merge.replace(" ", "") for merge in merges):
        model["vocab"].setdefault(token, 3000 + len(model["vocab"]))
    model["merges"] += [merge.split() for merge in merges]
    model["ignore_merges"] = True


VOCABULARIES: dict[str, tuple[Callable[[Content], object], str]] = {
    "a byte missing": (without_a_byte, "1 of the 256 bytes have no token"),
    "same id": (
        lambda c: c["model"]["vocab"].update({"a": c["model"]["vocab"]["b"]}),
        "two tokens have the same id",
    ),
    "merges not consecutive": (
        lambda c: with_merges(c, "t he"),
        "the merges of 'the' are not consecutive",
    ),
    "pairs not listed": (
        lambda c: c["model"].update(
            ignore_merges=True, vocab={**c["model"]["vocab"], "qzxj": 4000, "zxj": 4001}
        ),
        "its merges do not produce 'qzxj', and not all pairs that spell it are listed",
    ),
    "pairs overlap": (  # two pairs spell eight q, but merging eight q yields four times "qq"
        lambda c: with_merges(
            c, "q q", "q qq", "qq q", "qq qqq", "qqq qq", "qqq qqqqq", "qqqqq qqq"
        ),
        "its merges do not produce 'qqqqqqqq', and pairs that spell it overlap",
    ),
    "part of a lower rank": (  # z and x merge first, so no sequence of merges produces qzxj
        lambda c: with_merges(c, "z x", "q z", "x j", "qzxj k", "qz xj"),
        "'qzxj', which its merges do not produce, is part of 'qzxjk' of a lower rank",
    ),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies_that_may_change_the_ids_are_refused(name: str) -> None:
    change, reason = VOCABULARIES[name]
    content = shipped()
    change(content)
    with pytest.raises(Unproven, match=reason):
        FastBPE(content, library_of(content))


def test_tokens_that_no_merge_produces_are_accepted() -> None:
    content = shipped()
    content["model"]["vocab"] |= {"qzxj": 4000, "zxj": 4001}
    library = library_of(content)
    text = "qzxj zxj aqzxj"
    assert FastBPE(content, library).encode(text) == library.encode(text).ids


def test_added_tokens_that_match_in_text_are_refused() -> None:
    library = library_of(shipped())
    library.add_tokens(["thou"])
    with pytest.raises(Unproven, match="that are not special: 'thou'"):
        FastBPE(shipped(), library)


def test_construction_compares_the_ids_of_difficult_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A safety net for errors in the proof: the test gives the two engines different patterns."""
    monkeypatch.setattr(fast_bpe, "_pattern", lambda content: PATTERNS["GPT-2"])
    with pytest.raises(Unproven, match=r"the ids of '.*' differ"):
        FastBPE(shipped(), library_of(shipped()))


def test_characters_that_the_engines_treat_differently_use_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test simulates an older Unicode table without two letters."""
    replace = tokenizers.normalizers.Replace
    older_letters = Regex(r"[\p{L}&&[^жЩ]]")
    monkeypatch.setattr(
        tokenizers.normalizers, "Replace", lambda pattern, content: replace(older_letters, content)
    )
    unsupported = fast_bpe._other_characters.__wrapped__((r"\p{L}",))
    characters = [
        character
        for character in map(chr, [*range(0xD800), *range(0xE000, 0x20010)])
        if unsupported.search(character)
    ]
    assert characters == ["Щ", "ж", *map(chr, range(0x20000, 0x20010))]


def test_the_tokenizer_uses_fast_bpe_or_falls_back_to_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer: Any = load_tokenizer(ASSETS)
    texts = ["to be", "мир", "\U00020000", "a" * 26_000, "x " * 9_000 + "\n" * 26_000]
    expected = [tokenizer._inner.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected
    monkeypatch.setattr(tokenizer._fast, "encode_to_array", lambda text: array("I", [1]))
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [[1], [1], *expected[2:]]


def test_ids_stay_the_same_while_the_fast_encoder_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams encode in threads, and the first text in one of them builds the encoder."""
    content = json.loads(trained(CASES["Llama 3, converted"][0]))
    CASES["Llama 3, converted"][1](content)
    library = library_of(content)
    expected, encoded = library.encode("ousands").ids, []
    original = fast_bpe._mergeable_tokens

    def watched_tokens(vocabulary: dict[str, int], *arguments: Any) -> set[str]:
        class Watched(dict[str, int]):
            def items(self) -> Any:
                for item in super().items():
                    encoded.append(library.encode("ousands").ids)
                    yield item

        return original(Watched(vocabulary), *arguments)

    monkeypatch.setattr(fast_bpe, "_mergeable_tokens", watched_tokens)
    FastBPE(content, library)
    assert encoded and all(ids == expected for ids in encoded)


def test_the_reason_for_the_fallback_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tokenizer = load_tokenizer(ASSETS)
    assert tokenizer.encode_batch(["a", "b"]) and not caplog.messages
    content = shipped()
    content["normalizer"] = {"type": "NFC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
    assert caplog.messages == [
        f"{tmp_path}/tokenizer.json: encoding with the `tokenizers` library, not with tiktoken's engine: it has a "
        "normalizer (NFC)"
    ]
