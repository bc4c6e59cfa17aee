"""Encode with a byte-level BPE ``tokenizer.json`` in tiktoken's engine, if the ids provably agree.

tiktoken is several times as fast as `tokenizers`. Both libraries split a text into words by a
regular expression. In each word they merge the adjacent pair of the lowest rank, leftmost first,
until no pair can be merged. They differ in three points:

1. `tokenizers` merges listed pairs. tiktoken merges any pair whose bytes are a token. The results
   agree for a token that its own merges produce from its bytes. In a longer word, its bytes merge
   in the same order until a merge crosses its ends, so that its last pair is always the listed one.
   A token that its own merges do not produce occurs in no word: tiktoken's table omits it.
2. tiktoken keeps a word that is a token. `tokenizers` does the same only with `ignore_merges`, and
   then the table needs every token. For a token that its merges do not produce, three conditions
   are required. All pairs of tokens that spell it are listed, so that both libraries merge the same
   pairs. No two of these pairs overlap in a word. No token of a lower rank has it as a part, so
   that the order of its occurrences does not matter.
3. The expressions run in two engines (Oniguruma, fancy-regex). A pattern must have the same meaning
   in both, and must match every character, because tiktoken drops unmatched text. The engines'
   Unicode tables depend on their versions: `tokenizers` encodes every text with a character that
   the engines classify differently.

`Unproven` rejects every other tokenizer. A set of difficult texts is compared before any encoding.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.data.text.word_patterns import GPT2_PATTERN, PATTERNS

_LETTERS_OF_CONTRACTIONS = "(?i:s|t|re|ve|m|ll|d)"  # to compare their case folding
# No suffix of it is also its prefix: joined texts contain it only between texts.
SEPARATOR = "<|special|>"
_SURROGATES = range(0xD800, 0xE000)
_NUM_CODE_POINTS = 0x20000  # planes 0 and 1; other planes have rare ideographs
_CHUNK = 512  # characters; `tokenizers` is slower for long texts


class Unproven(Exception):
    """tiktoken's engine might give other ids than the `tokenizers` library. Has the reason."""


class FastBPE:
    """Encodes the texts that `accepts` accepts.

    content: the tokenizer.json.
    library: the `tokenizers.Tokenizer` of that file, set to encode special tokens as text.

    Raises Unproven.
    """

    def __init__(self, content: dict[str, Any], library: Any) -> None:
        import tiktoken

        pattern = _pattern(content)
        classes = {*re.findall(r"\\p\{\w+\}|\\s", pattern)}
        if "(?i:" in pattern:
            classes.add(_LETTERS_OF_CONTRACTIONS)
        self._other_characters = _other_characters(tuple(sorted(classes)))
        _check_added_tokens(library)
        model = content["model"]
        _check_model(model)
        ids = _ranked_ids(model)
        # tiktoken's ids are ranks: the ids of the file if they follow the merges, else 0, 1, 2, ...
        in_order = all(first < second for first, second in pairwise(list(ids.values())[256:]))
        self._id_of_rank = None if in_order else np.array(list(ids.values()), np.uint32)
        ranks = ids if in_order else {token: rank for rank, token in enumerate(ids)}
        # Without special tokens, the engine would search for the empty text at each character. The
        # one special token is allowed only between texts (`encode_joined`).
        self._separator_rank = max(ranks.values()) + 1
        self._engine = tiktoken.Encoding(
            name="tokenizer.json",
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={SEPARATOR: self._separator_rank},
        )
        for text in difficult_texts(sorted(library.get_vocab(with_added_tokens=True))):
            expected = library.encode(text, add_special_tokens=False).ids
            if self.accepts(text) and self.encode(text) != expected:
                raise Unproven(f"the ids of {text[:40]!r} differ")

    def accepts(self, text: str) -> bool:
        """Return True if both engines classify all characters of ``text`` equally.

        ``text`` must not have runs that are too long.
        """
        return text.isascii() or self._other_characters.search(text) is None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""
        return self.encode_to_array(text).tolist()

    def encode_to_array(self, text: str) -> array[int]:
        """Return the token ids of ``text`` as uint32."""
        ids = self._engine.encode_to_numpy(text, disallowed_special=())
        return array("I", (ids if self._id_of_rank is None else self._id_of_rank[ids]).tobytes())

    def join(self, texts: Sequence[str]) -> str:
        """Return the texts for `encode_joined`; "" if a text contains the separator."""
        joined = SEPARATOR.join(texts)
        return joined if joined.count(SEPARATOR) == len(texts) - 1 else ""

    def encode_joined(self, joined: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the token ids of all texts in ``joined``, and the number of ids of each text.

        The engine splits at special tokens first and encodes each part separately. One call for
        many
        texts is faster: for a short text, a call takes longer than the encoding.
        """
        ranks = self._engine.encode_to_numpy(
            joined, allowed_special={SEPARATOR}, disallowed_special=()
        )
        is_separator = ranks == self._separator_rank
        boundaries = np.flatnonzero(is_separator)
        lengths = np.diff(boundaries, prepend=-1, append=len(ranks)) - 1
        ranks = ranks[~is_separator]
        return ranks if self._id_of_rank is None else self._id_of_rank[ranks], lengths


def _pattern(content: dict[str, Any]) -> str:
    """Return the expression that splits text into words. Raises Unproven."""
    if content.get("normalizer") is not None:
        raise Unproven(f"it has a normalizer ({content['normalizer'].get('type')})")
    outer = content.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", []) if outer.get("type") == "Sequence" else [outer]
    names = [step.get("type") for step in steps]
    if names not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise Unproven(
            f"its pre-tokenizer is {', '.join(map(str, names))}; supported are ByteLevel, and "
            "Split with ByteLevel"
        )
    if steps[-1].get("add_prefix_space", True):
        raise Unproven("it adds a space before the text (add_prefix_space)")
    if steps[-1].get("use_regex", True) == (len(steps) == 2):
        raise Unproven("it splits text into words twice, or never (use_regex)")
    if len(steps) == 1:
        return GPT2_PATTERN
    if steps[0].get("behavior") != "Isolated" or steps[0].get("invert"):
        raise Unproven(
            "its Split does not isolate the words that the pattern matches (behavior, invert)"
        )
    pattern = steps[0].get("pattern", {}).get("Regex")
    if pattern not in PATTERNS.values():
        raise Unproven(f"its pattern is not one of {', '.join(PATTERNS)}")
    return str(pattern)


def _check_added_tokens(library: Any) -> None:
    added_tokens = library.get_added_tokens_decoder().values()
    contents = [token.content for token in added_tokens if not token.special]
    if contents:
        examples = ", ".join(map(repr, contents[:3]))
        raise Unproven(f"it searches the text for added tokens that are not special: {examples}")


def _check_model(model: dict[str, Any]) -> None:
    if model.get("type") != "BPE":
        raise Unproven(f"its model is {model.get('type')}, not BPE")
    for key in (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
    ):
        if model.get(key):
            raise Unproven(f"its model has {key} = {model[key]!r}")


def _ranked_ids(model: dict[str, Any]) -> dict[bytes, int]:
    """Return token -> id: the 256 bytes, the tokens of merges in their order, all other tokens."""
    byte_of = bytes_of_characters()
    vocabulary = {
        token: token_id
        for token, token_id in model["vocab"].items()
        if byte_of.keys() >= set(token)
    }
    merges = merges_of(model)
    if missing := [character for character in byte_of if character not in vocabulary]:
        raise Unproven(f"{len(missing)} of the 256 bytes have no token")
    if len(set(vocabulary.values())) < len(vocabulary):
        raise Unproven("two tokens have the same id")
    mergeable = _mergeable_tokens(vocabulary, merges)
    keep = vocabulary.keys() if model.get("ignore_merges") else mergeable
    ranked = dict.fromkeys(byte_of)
    last = ""
    for first, second in merges:
        token = first + second
        if token != last and token in keep:
            if token in ranked:
                raise Unproven(f"the merges of {token!r} are not consecutive")
            ranked[token] = None
            last = token
    ranked |= dict.fromkeys(token for token in keep if token not in ranked)
    _check_unmergeable(ranked, mergeable, merges)
    return {bytes(byte_of[character] for character in token): vocabulary[token] for token in ranked}


def merges_of(model: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the merged pairs in order."""
    return [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        for merge in model["merges"]
    ]


def _mergeable_tokens(vocabulary: dict[str, int], merges: list[tuple[str, ...]]) -> set[str]:
    """Return the tokens that the merges produce from their own bytes."""
    from tokenizers import models

    # A separate model: other threads may encode with the library's model, which may ignore merges.
    pairs = [(a, b) for a, b in merges if {a, b, a + b} <= vocabulary.keys()]
    model = models.BPE(vocabulary, pairs)
    return {
        word
        for word, token_id in vocabulary.items()
        if [token.id for token in model.tokenize(word)] == [token_id]
    }


def _check_unmergeable(
    ranked: dict[str, None], mergeable: set[str], merges: list[tuple[str, ...]]
) -> None:
    """Raise Unproven unless the conditions of point 2 hold for tokens that no merges produce."""
    if ranked.keys() <= mergeable:
        return
    pairs: dict[str, set[tuple[str, ...]]] = {
        token: set() for token in ranked if token not in mergeable
    }
    rank_of = {token: rank for rank, token in enumerate(ranked)}
    for pair in merges:
        token = "".join(pair)
        if token in pairs:
            pairs[token].add(pair)
        for part in pair:
            if part in pairs and token in ranked and rank_of[token] < rank_of[part]:
                raise Unproven(
                    f"{part!r}, which its merges do not produce, is part of {token!r} of a lower "
                    "rank"
                )
    for token, listed in pairs.items():
        splits = {(token[:index], token[index:]) for index in range(1, len(token))}
        if {split for split in splits if ranked.keys() >= set(split)} != listed:
            raise Unproven(
                f"its merges do not produce {token!r}, and not all pairs that spell it are listed"
            )
        firsts = {first for first, _ in listed}
        if any(first != second and second in firsts for first, second in listed):
            raise Unproven(f"its merges do not produce {token!r}, and pairs that spell it overlap")


def bytes_of_characters() -> dict[str, int]:
    """Return character -> byte for byte-level BPE (GPT-2).

    Printable bytes are themselves. The others are the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def difficult_texts(tokens: list[str]) -> list[str]:
    """Return texts for which engines are likely to differ, with some ``tokens`` among them."""
    ascii_characters = [chr(code) for code in range(128)]
    some = tokens[:: max(1, len(tokens) // 200)]
    some += [token for token in tokens if token.startswith(("<", "["))][:50]
    return [
        "".join(f"a{one}{one}1{one} {one}" for one in ascii_characters),
        "'s'S'ſ'T're'RE'Ve'll'LL'lL'd'D'm'Mx's 's''s s's\n's'ﬆ'ß'ŉ'K",
        'To be, or not:\nthat is (the question).\r\n\r\nDon\'t!\n  "Thou," he said...\n\n\tand;\n',
        "1 12 123 1234 12345 ²³ ½ ٣٤٥ ⅷ Ⅷ 一二 १२३",
        " \t\n\r\n \u00a0\u2003\u3000 \u2028\u2029\u0085\u200b\ufeff \v\f\x1c\x1f \n\n\n   x   \r y\r\r\n  ",
        "a" * 1000 + " " * 1000 + "ab" * 500 + "\n" * 300 + "the" * 300 + "-" * 500 + "9" * 500,
        "naïve cafe\u0301 Ångström İıŞş ǅ Σίσυφος ПРИВЕТ мир שָׁלוֹם العربية हिन्दी ไทย 한국어 日本語 中文，。",
        "🙂👩‍👩‍👧🇩🇪👍🏽☃️ \u0378\U0001e030\U0001f1e6\ue000\ufffd\uffff",
        "".join(some),
        " ".join(some),
        "<|begin_of_text|><|end_of_text|><|endoftext|><s></s>[BOS]",
        "camelCase HTTPServer a/b//c\\d\n/ e!=f; #include <x> \"y\" 'z' _w_ -- ... ~`^",
    ]


@functools.cache
def _other_characters(classes: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of characters that the engines classify differently, or that are not tested.

    classes: the character classes. The comparison takes about 0.1 s.
    """
    import tiktoken
    from tokenizers import Regex, normalizers

    points = [code for code in range(_NUM_CODE_POINTS) if code not in _SURROGATES]
    starts = range(0, len(points), _CHUNK)
    chunks = ["".join(map(chr, points[start : start + _CHUNK])) for start in starts]
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    others: set[str] = set()
    for name in classes:
        encoding = tiktoken.Encoding(
            "class", pat_str=name, mergeable_ranks=single_bytes, special_tokens={}
        )
        remove = normalizers.Replace(Regex(name), "")
        for chunk in chunks:
            inside = bytes(encoding.encode_ordinary(chunk)).decode()
            outside = remove.normalize_str(chunk)
            if len(inside) + len(outside) != len(chunk) or not set(inside).isdisjoint(outside):
                others |= set(inside).symmetric_difference(set(chunk).difference(outside))
    boundaries = sorted({-1, *map(ord, others), *_SURROGATES, _NUM_CODE_POINTS})
    same = [(first + 1, last - 1) for first, last in pairwise(boundaries) if last - first > 1]
    ranges = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in same)
    return re.compile(f"[^{ranges}]")
