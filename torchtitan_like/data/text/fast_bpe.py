"""The byte-level BPE of a ``tokenizer.json`` in tiktoken's engine, which is several times as fast, where the ids are the same.

Both libraries cut a text into words by a regular expression and then, word by word, join the two neighbours of the
lowest rank, the leftmost first, until none is left to join. They differ in three points:

- `tokenizers` joins the pairs that are listed, tiktoken any pair whose bytes together are a token. That is the same where
  the merges, applied to the bytes of a token alone, join them to that token. For inside a longer word, as long as no
  merge has reached across the token's ends, the bytes within are joined in the very same order; so only the pair that
  came last there ever stands where the token is made, and it is listed. A token that its own merges do not make is
  made in no word: it is left out of tiktoken's table.
- tiktoken takes a word that is a token as it is. So does `tokenizers` with `ignore_merges`, and then every token has to
  stay in the table. For one that its merges do not make, all pairs of tokens that spell it have to be listed (so both
  join the same), no two of them may overlap in a word, and no token of a lower rank may contain it as one of a pair (so it
  does not matter which of its places comes first).
- The expressions run in two engines (Oniguruma, fancy-regex). Only patterns whose constructs mean the same in both, and
  which match every character, are accepted (tiktoken drops what is not matched). Their Unicode tables depend on the
  versions: the characters that both put in the same classes are found first, and a text with others is left to
  `tokenizers`.

What is not proven so is refused with `Unproven`, and a set of difficult texts is compared before anything is encoded.
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

_LETTERS_OF_CONTRACTIONS = "(?i:s|t|re|ve|m|ll|d)"  # by itself this shows what they fold to
SEPARATOR = "<|special|>"  # no end of it is its beginning: in joined texts it is only where they are joined
_SURROGATES = range(0xD800, 0xE000)
_NUM_CODE_POINTS = 0x20000  # planes 0 and 1: beyond are ideographs of names, not worth the time
_CHUNK = 512  # characters; `tokenizers` takes longer for a text than for its parts


class Unproven(Exception):
    """Why tiktoken's engine might give other ids than the `tokenizers` library."""


class FastBPE:
    """Encodes what `accepts` accepts.

    content: the tokenizer.json; library: the `tokenizers.Tokenizer` made of it, which encodes special tokens as text.
    Raises Unproven.
    """

    def __init__(self, content: dict[str, Any], library: Any) -> None:
        import tiktoken

        pattern = _pattern(content)
        classes = {*re.findall(r"\\p\{\w+\}|\\s", pattern), *([_LETTERS_OF_CONTRACTIONS] if "(?i:" in pattern else [])}
        self._other_characters = _other_characters(tuple(sorted(classes)))
        _check_added_tokens(library)
        model = content["model"]
        _check_model(model)
        ids = _ranked_ids(model)
        # tiktoken's ids are ranks: those of the file where they are in the order of the merges, else 0, 1, 2, ...
        in_order = all(first < second for first, second in pairwise(list(ids.values())[256:]))
        self._id_of_rank = None if in_order else np.array(list(ids.values()), np.uint32)
        ranks = ids if in_order else {token: rank for rank, token in enumerate(ids)}
        # One special token: among none the engine looks for the empty text, at each character. It
        # is allowed only where it
        # separates texts (`encode_joined`).
        self._separator_rank = max(ranks.values()) + 1
        self._engine = tiktoken.Encoding(
            name="tokenizer.json",
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={SEPARATOR: self._separator_rank},
        )
        for text in difficult_texts(sorted(library.get_vocab(with_added_tokens=True))):
            if self.accepts(text) and self.encode(text) != library.encode(text, add_special_tokens=False).ids:
                raise Unproven(f"the ids of {text[:40]!r} differ")

    def accepts(self, text: str) -> bool:
        """Whether both engines know the classes of all characters of ``text``. It has no run that is too long."""
        return text.isascii() or self._other_characters.search(text) is None

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        return self.encode_to_array(text).tolist()

    def encode_to_array(self, text: str) -> array[int]:
        """The same, as uint32."""
        ids = self._engine.encode_to_numpy(text, disallowed_special=())
        return array("I", (ids if self._id_of_rank is None else self._id_of_rank[ids]).tobytes())

    def join(self, texts: Sequence[str]) -> str:
        """The texts for `encode_joined`; "" if that cannot tell them apart."""
        joined = SEPARATOR.join(texts)
        return joined if joined.count(SEPARATOR) == len(texts) - 1 else ""

    def encode_joined(self, joined: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Token ids of the texts of ``joined``, one after the other, and the number of ids of each.

        The engine cuts at special tokens first and encodes what lies between them by itself. One
        call for many texts: for a
        short text a call takes longer than the encoding.
        """
        ranks = self._engine.encode_to_numpy(joined, allowed_special={SEPARATOR}, disallowed_special=())
        is_separator = ranks == self._separator_rank
        borders = np.flatnonzero(is_separator)
        lengths = np.diff(borders, prepend=-1, append=len(ranks)) - 1
        ranks = ranks[~is_separator]
        return ranks if self._id_of_rank is None else self._id_of_rank[ranks], lengths


def _pattern(content: dict[str, Any]) -> str:
    """The expression that cuts words."""
    if content.get("normalizer") is not None:
        raise Unproven(f"it has a normalizer ({content['normalizer'].get('type')})")
    outer = content.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", []) if outer.get("type") == "Sequence" else [outer]
    names = [step.get("type") for step in steps]
    if names not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise Unproven(f"its pre-tokenizer is {', '.join(map(str, names))}; known are ByteLevel and Split, ByteLevel")
    if steps[-1].get("add_prefix_space", True):
        raise Unproven("it puts a blank before the text (add_prefix_space)")
    if steps[-1].get("use_regex", True) == (len(steps) == 2):
        raise Unproven("it cuts words twice, or not at all (use_regex)")
    if len(steps) == 1:
        return GPT2_PATTERN
    if steps[0].get("behavior") != "Isolated" or steps[0].get("invert"):
        raise Unproven("its Split does not keep the words that the pattern matches (behavior, invert)")
    pattern = steps[0].get("pattern", {}).get("Regex")
    if pattern not in PATTERNS.values():
        raise Unproven(f"its pattern is not one of those that are known ({', '.join(PATTERNS)})")
    return str(pattern)


def _check_added_tokens(library: Any) -> None:
    found = [token.content for token in library.get_added_tokens_decoder().values() if not token.special]
    if found:
        raise Unproven(f"it looks for added tokens that are not special in the text: {', '.join(map(repr, found[:3]))}")


def _check_model(model: dict[str, Any]) -> None:
    if model.get("type") != "BPE":
        raise Unproven(f"its model is {model.get('type')}, not BPE")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise Unproven(f"its model has {key} = {model[key]!r}")


def _ranked_ids(model: dict[str, Any]) -> dict[bytes, int]:
    """Token -> id: first the 256 bytes, then what merges make in the order in which they do, then what none makes."""
    byte_of = bytes_of_characters()
    vocabulary = {token: token_id for token, token_id in model["vocab"].items() if byte_of.keys() >= set(token)}
    merges = merges_of(model)
    if missing := [character for character in byte_of if character not in vocabulary]:
        raise Unproven(f"{len(missing)} of the 256 bytes have no token")
    if len(set(vocabulary.values())) < len(vocabulary):
        raise Unproven("two tokens have the same id")
    made = _made_by_merges(vocabulary, merges)
    keep = vocabulary.keys() if model.get("ignore_merges") else made
    ranked = dict.fromkeys(byte_of)
    last = ""
    for first, second in merges:
        token = first + second
        if token != last and token in keep:
            if token in ranked:
                raise Unproven(f"merges that make {token!r} stand apart")
            ranked[token] = None
            last = token
    ranked |= dict.fromkeys(token for token in keep if token not in ranked)
    _check_not_made(ranked, made, merges)
    return {bytes(byte_of[character] for character in token): vocabulary[token] for token in ranked}


def merges_of(model: dict[str, Any]) -> list[tuple[str, ...]]:
    """The pairs that are joined, in their order."""
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]


def _made_by_merges(vocabulary: dict[str, int], merges: list[tuple[str, ...]]) -> set[str]:
    """The tokens that the merges alone make of their own bytes."""
    from tokenizers import models

    # One of its own: with that of the library, where it ignores merges, other threads may be encoding.
    model = models.BPE(vocabulary, [(a, b) for a, b in merges if {a, b, a + b} <= vocabulary.keys()])
    return {word for word, token_id in vocabulary.items() if [t.id for t in model.tokenize(word)] == [token_id]}


def _check_not_made(ranked: dict[str, None], made: set[str], merges: list[tuple[str, ...]]) -> None:
    """Tokens whose merges do not make them, and which `ignore_merges` keeps: see the third sentence of the second point."""
    if ranked.keys() <= made:
        return
    pairs: dict[str, set[tuple[str, ...]]] = {token: set() for token in ranked if token not in made}
    rank_of = {token: rank for rank, token in enumerate(ranked)}
    for pair in merges:
        token = "".join(pair)
        if token in pairs:
            pairs[token].add(pair)
        for part in pair:
            if part in pairs and token in ranked and rank_of[token] < rank_of[part]:
                raise Unproven(f"{part!r}, which its merges do not make, is part of {token!r} of a lower rank")
    for token, listed in pairs.items():
        splits = {(token[:cut], token[cut:]) for cut in range(1, len(token))}
        if {split for split in splits if ranked.keys() >= set(split)} != listed:
            raise Unproven(f"{token!r} is not made by its merges, and not all pairs that spell it are listed")
        if any(first != second and any(second == other for other, _ in listed) for first, second in listed):
            raise Unproven(f"{token!r} is not made by its merges, and pairs that spell it overlap")


def bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters: these as themselves, the others, in order, from U+0100
    on (GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def difficult_texts(tokens: list[str]) -> list[str]:
    """Texts in which engines are most likely to differ; ``tokens``: of the vocabulary, some of which they contain."""
    ascii_characters = [chr(code) for code in range(128)]
    some = tokens[:: max(1, len(tokens) // 200)] + [token for token in tokens if token.startswith(("<", "["))][:50]
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
    """Matches a character that the two engines do not put in the same ``classes``, or that is not compared: about 0.1 s."""
    import tiktoken
    from tokenizers import Regex, normalizers

    points = [code for code in range(_NUM_CODE_POINTS) if code not in _SURROGATES]
    chunks = ["".join(map(chr, points[start : start + _CHUNK])) for start in range(0, len(points), _CHUNK)]
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    others: set[str] = set()
    for name in classes:
        keep = tiktoken.Encoding("class", pat_str=name, mergeable_ranks=single_bytes, special_tokens={})
        remove = normalizers.Replace(Regex(name), "")
        for chunk in chunks:
            inside, outside = bytes(keep.encode_ordinary(chunk)).decode(), remove.normalize_str(chunk)
            if len(inside) + len(outside) != len(chunk) or not set(inside).isdisjoint(outside):
                others |= set(inside).symmetric_difference(set(chunk).difference(outside))
    borders = sorted({-1, *map(ord, others), *_SURROGATES, _NUM_CODE_POINTS})
    same = [(first + 1, last - 1) for first, last in pairwise(borders) if last - first > 1]
    return re.compile("[^" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in same) + "]")
