"""Tokenizers behind one interface: Hugging Face ``tokenizer.json`` and tiktoken ``.model`` files.

Text is only ever text: where a document happens to contain the characters of a special token, they become ordinary
tokens. BOS and EOS are put in by whoever builds the token stream.

Which tokens are BOS and EOS is read from ``bos_token`` and ``eos_token`` of ``tokenizer_config.json`` or
``special_tokens_map.json`` beside the vocabulary (a ``null`` there means "none"); where neither file names
them, they are looked up among the usual names (``<|begin_of_text|>``, ``</s>``, ...).

tiktoken files hold the ordinary tokens only. Their special tokens are those of ``added_tokens_decoder`` in a
``tokenizer_config.json`` beside the file; without one, the 256 of Llama 3 where the file has Llama 3's 128,000
tokens, else ``<|begin_of_text|>`` and ``<|end_of_text|>`` behind the last token. Text is cut into words by Llama
3's pattern.

A ``tokenizer.json`` is encoded by tiktoken's engine too where that gives the same ids (see `fast_bpe`), and by the
`tokenizers` library, which is several times as slow, where it might not.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import logging
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from torchtitan_like.data.errors import DataError, TokenizerError
from torchtitan_like.data.text.word_patterns import LLAMA3_PATTERN, PATTERNS
from torchtitan_like.util.reading import read_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from torchtitan_like.data.text.fast_bpe import FastBPE

logger = logging.getLogger()

LLAMA3_NUM_RANKS = 128_000
LLAMA3_NUM_SPECIALS = 256

_BOS_NAMES = ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]")
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")

# A longer run of blanks, or of anything else, is encoded in pieces: as Llama 3 does, and tiktoken's stack overflows
# near 10^6.
_MAX_RUN = 25_000

# A longer document is encoded in parts of about this size, where its tokenizer allows that.
PART_CHARACTERS = 2**18
# A longer part is refused: the `tokenizers` library takes some 310 bytes for each character.
MAX_PART_CHARACTERS = 2**22

# Where a text may be cut without another id: behind the match. No pattern in `word_patterns.PATTERNS`,
# and no pre-tokenizer in
# `_cuts_of`, has a word that contains a character other than white space and then a blank, or a
# letter or digit and then a
# newline; and none looks further ahead than one character behind a word. So a word ends there in
# any case, and the next one
# begins. The letters are those that every version of Unicode knows as letters.
_LETTERS = "0-9A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
BEFORE_BLANKS = re.compile(r"[\w!-~](?= )")
BEFORE_SPACES = re.compile(rf"[\w!-~](?= )|[{_LETTERS}](?=\n)")
# Normalizers change characters one by one, or together with combining marks. Some make blanks of
# others, none of ASCII.
BEFORE_BLANKS_ASCII = re.compile(r"[!-~](?= )")


class Tokenizer(ABC):
    """Text to token ids and back.

    path: what was loaded, and can be loaded again by another process. vocab_size: largest id + 1.
    bos_id, eos_id: None where the tokenizer has no such token. fingerprint: a hash of all that determines the ids
    of a text. cuts: matches the character behind which a text may be cut without another id; None:
    nowhere.
    max_part: how many characters a text, or a part of it, may have; None: any number.
    """

    path: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str
    cuts: re.Pattern[str] | None
    max_part: int | None = None

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[array[int]]:
        """Token ids of each text, without BOS and EOS, as uint32."""

    def encode_texts(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """The same ids of all texts in one array, and the number of ids of each text."""
        import numpy as np  # here, since checking a config must not take the time of its import

        encoded = self.encode_batch(texts)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.frombuffer(b"".join(encoded), np.uint32), lengths

    def parts(self, text: str) -> Iterator[str]:
        """``text`` in parts whose ids, one after the other, are those of ``text``.

        Raises DataError for a text of more than ``max_part`` characters that cannot be cut.
        """
        start = 0
        while start < len(text):
            cut = None
            if self.cuts is not None and len(text) - start > PART_CHARACTERS:
                cut = self.cuts.search(text, start + PART_CHARACTERS - 1)
            stop = len(text) if cut is None else cut.end()
            if self.max_part is not None and stop - start > self.max_part:
                raise DataError(
                    f"a document of {len(text):,} characters has {stop - start:,} that cannot be cut, expected "
                    f"at most {self.max_part:,}: {self.path} has to encode them at once, which takes more memory "
                    "than 2 GiB; split the document"
                )
            yield text[start:stop]
            start = stop

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without BOS and EOS."""
        return self.encode_batch([text])[0].tolist()

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens by their names; bytes that are no UTF-8 become U+FFFD."""

    def num_bytes(self) -> list[int]:
        """UTF-8 bytes that each token stands for, (vocab_size,): 0 for special ones, and for all where that is not known."""
        return [0] * self.vocab_size

    def __str__(self) -> str:
        return f"{self.path}: {self.vocab_size:,} tokens, BOS {self.bos_id}, EOS {self.eos_id}"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a file, or from a folder with ``tokenizer.json`` or else one ``.model`` or ``.tiktoken`` file.

    A folder may also hold ``original/tokenizer.model``, as exports and Meta's releases do.

    Raises TokenizerError where there is none, or where it cannot be read.
    """
    given = Path(path).expanduser()
    file = _vocabulary_file(given) if given.is_dir() else given
    if not file.is_file():
        raise TokenizerError(
            f"no tokenizer at {str(path)!r}: expected tokenizer.json or a tiktoken .model file, or a folder with one; "
            "set model.hf_assets_path to where it lies (`titan download` fetches one)"
        )
    if file.suffix == ".json":
        return _HuggingFaceTokenizer(file)
    return _TiktokenTokenizer(file, given if given.is_dir() else file.parent)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, *, add_bos: bool, add_eos: bool) -> None:
    """Raise TokenizerError, with every reason, unless a model of ``vocab_size`` tokens can be trained on its ids."""
    problems = []
    if tokenizer.vocab_size > vocab_size:
        problems.append(
            f"its largest id is {tokenizer.vocab_size - 1}, the model has a vocabulary of {vocab_size}: choose the "
            f"tokenizer that belongs to the model, or set model.args.vocab_size to {tokenizer.vocab_size} or more"
        )
    for wanted, token_id, name, key in (
        (add_bos, tokenizer.bos_id, "beginning-of-text (BOS)", "data.add_bos"),
        (add_eos, tokenizer.eos_id, "end-of-text (EOS)", "data.add_eos"),
    ):
        if wanted and token_id is None:
            problems.append(
                f"it has no {name} token, and {key} is true: set {key} = false, or name one in tokenizer_config.json"
            )
    if problems:
        raise TokenizerError(f"the tokenizer {tokenizer.path} does not fit: " + "; ".join(problems))


class _HuggingFaceTokenizer(Tokenizer):
    def __init__(self, file: Path) -> None:
        import tokenizers  # here, so that a config check without a tokenizer does not pay for it

        self.path = str(file)
        self._content = content = _read_json(file)
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{file} is not a tokenizer of the `tokenizers` library: {error}") from error
        if dropout := content["model"].get("dropout"):
            raise TokenizerError(
                f"{file} gives other ids each time that a text is encoded (model.dropout is {dropout}): expected null, with "
                "which they follow from the text"
            )
        # What the file may carry from whoever saved it must not cut documents or turn their text into special tokens.
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True

        self._is_byte_level = '"ByteLevel"' in json.dumps(content.get("decoder"))
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.bos_id, self.eos_id = _bos_and_eos(file.parent, vocabulary)
        added = self._inner.get_added_tokens_decoder()
        for token_id, token in added.items():
            if token_id in (self.bos_id, self.eos_id) and not token.special:
                self._inner.add_special_tokens([tokenizers.AddedToken(token.content, special=True)])
        parts = ("added_tokens", "normalizer", "pre_tokenizer", "model")
        self.fingerprint = _fingerprint(
            "tokenizer.json", json.dumps([content.get(part) for part in parts], sort_keys=True)
        )
        self.cuts = _cuts_of(content)
        self.max_part = MAX_PART_CHARACTERS

    @functools.cached_property
    def _fast(self) -> FastBPE | None:
        """Made for the first text: it takes up to a second, and who only checks a config encodes nothing."""
        from torchtitan_like.data.text.fast_bpe import FastBPE, Unproven

        content, self._content = self._content, {}
        try:
            return FastBPE(content, self._inner)
        except Unproven as reason:
            logger.info(
                f"{self.path} is used through the `tokenizers` library, not through tiktoken's engine: {reason}"
            )
            return None

    def encode_batch(self, texts: Sequence[str]) -> list[array[int]]:
        fast = self._fast
        if fast is None:
            return self._encode_by_library(texts)

        def encode(text: str) -> array[int]:
            # A longer run would have to be cut for tiktoken, and the library cuts nothing.
            is_known = not _has_long_run(text) and fast.accepts(text)
            return fast.encode_to_array(text) if is_known else self._encode_by_library([text])[0]

        return [encode(text) for text in texts]

    def encode_texts(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        joined = "" if self._fast is None else self._fast.join(texts)
        if self._fast is None or not joined or _has_long_run(joined) or not self._fast.accepts(joined):
            return super().encode_texts(texts)
        return self._fast.encode_joined(joined)

    def _encode_by_library(self, texts: Sequence[str]) -> list[array[int]]:
        """Its call for many texts, without their offsets, is the quickest it has, also for one."""
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def num_bytes(self) -> list[int]:
        counts = super().num_bytes()
        if self._is_byte_level:  # each character of a token is a byte
            for token, token_id in self._inner.get_vocab(with_added_tokens=False).items():
                counts[token_id] = len(token)
            for token_id, added in self._inner.get_added_tokens_decoder().items():
                counts[token_id] = 0 if added.special else len(added.content.encode())
        return counts


class _TiktokenTokenizer(Tokenizer):
    def __init__(self, file: Path, folder: Path) -> None:
        """`folder`: where tokenizer_config.json lies, if there is one."""
        import tiktoken

        self.path = str(file)
        self._ranks = ranks = _read_ranks(file)
        specials = _special_tokens(folder, file, ranks)
        self._inner = tiktoken.Encoding(
            name=file.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        self.vocab_size = max(*ranks.values(), *specials.values()) + 1
        self.bos_id, self.eos_id = _bos_and_eos(folder, specials)
        self.cuts = BEFORE_SPACES
        self.fingerprint = _fingerprint(
            "tiktoken", LLAMA3_PATTERN, repr(sorted(ranks.items(), key=lambda item: item[1]))
        )

    def encode_batch(self, texts: Sequence[str]) -> list[array[int]]:
        return list(map(self._encode_to_array, texts))

    def _encode_to_array(self, text: str) -> array[int]:
        ids = array("I")
        for piece in _cut_long_runs(text) if _has_long_run(text) else (text,):
            ids.frombytes(self._inner.encode_to_numpy(piece, disallowed_special=()).tobytes())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids))

    def num_bytes(self) -> list[int]:
        counts = super().num_bytes()
        for token, token_id in self._ranks.items():
            counts[token_id] = len(token)
        return counts


def _cuts_of(content: dict[str, Any]) -> re.Pattern[str] | None:
    """`Tokenizer.cuts` of a tokenizer.json: None unless all its steps are known to allow cuts."""
    for token in content.get("added_tokens") or []:
        strips = token.get("lstrip") or token.get("rstrip") or token.get("single_word")
        if not token.get("special") and (strips or re.search(r"\s", token.get("content", ""))):
            return None
    normalizers = _steps(content.get("normalizer"), "normalizers")
    local = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
    if not {step.get("type") for step in normalizers} <= local:
        return None
    first = (_steps(content.get("pre_tokenizer"), "pretokenizers") or [{}])[0]
    kind, cuts = first.get("type"), BEFORE_SPACES
    if kind == "Split":
        keeps = (first.get("behavior"), bool(first.get("invert")))
        is_known = first.get("pattern", {}).get("Regex") in {*PATTERNS.values(), "."}
        if not is_known or keeps not in {("Isolated", False), ("Removed", True)}:
            return None
    elif kind == "ByteLevel":
        if not first.get("use_regex", True):
            return None
        cuts = BEFORE_BLANKS if first.get("add_prefix_space", True) else BEFORE_SPACES
    elif kind == "Metaspace":
        if not first.get("split", True):
            return None
        cuts = BEFORE_BLANKS
    elif kind not in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
        return None
    return BEFORE_BLANKS_ASCII if normalizers else cuts


def _steps(outer: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a sequence, or the one step that stands for itself."""
    if not outer:
        return []
    return list(outer[name]) if outer.get("type") == "Sequence" else [outer]


def _vocabulary_file(folder: Path) -> Path:
    if (folder / "tokenizer.json").exists():
        return folder / "tokenizer.json"
    found = sorted(file for ending in ("*.model", "*.tiktoken") for file in folder.glob(ending))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise TokenizerError(f"{folder} has several tokenizers ({names}): give the file that is meant, not the folder")
    original = folder / "original" / "tokenizer.model"
    if not found and original.exists():
        return original
    return found[0] if found else folder / "tokenizer.json"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} holds a JSON {type(content).__name__}, expected an object")
    return content


def _read_optional_json(file: Path) -> dict[str, Any]:
    return _read_json(file) if file.exists() else {}


def _bos_and_eos(folder: Path, ids: dict[str, int]) -> tuple[int | None, int | None]:
    """Ids of BOS and EOS: as the files beside the vocabulary name them, else by the usual names."""
    files = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    contents = {file: _read_optional_json(file) for file in files}

    def look_up(key: str, usual_names: tuple[str, ...]) -> int | None:
        for file, content in contents.items():
            if key in content:
                name = content[key]["content"] if isinstance(content[key], dict) else content[key]
                if name is not None and name not in ids:
                    raise TokenizerError(f"{file} names {name!r} as {key}, which is not in the vocabulary beside it")
                return None if name is None else ids[name]
        return next((ids[name] for name in usual_names if name in ids), None)

    return look_up("bos_token", _BOS_NAMES), look_up("eos_token", _EOS_NAMES)


def _read_ranks(file: Path) -> dict[bytes, int]:
    """The table of a tiktoken file: one line per token, its bytes in base64, a blank, its rank (which is its id)."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"{file}, line {number}: expected a token in base64 and its rank, as in tiktoken files; "
                "SentencePiece models, which are often called tokenizer.model too, are used through the "
                "tokenizer.json of the same model"
            ) from error
    if len(set(ranks.values())) != len(ranks) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise TokenizerError(f"{file} is incomplete: expected different ranks and a token for each of the 256 bytes")
    return ranks


def _special_tokens(folder: Path, file: Path, ranks: dict[bytes, int]) -> dict[str, int]:
    """Special tokens and their ids, which a tiktoken file does not hold."""
    config = folder / "tokenizer_config.json"
    added = _read_optional_json(config).get("added_tokens_decoder")
    if added:
        try:
            specials = {str(token["content"]): int(token_id) for token_id, token in added.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(
                f'{config}: expected added_tokens_decoder = {{"<id>": {{"content": "<text>"}}}}'
            ) from error
        taken = sorted(set(specials.values()) & set(ranks.values()))
        if taken:
            raise TokenizerError(f"{config} gives the id {taken[0]} to a special token, {file.name} to an ordinary one")
        return specials
    num_ranks = max(ranks.values()) + 1
    if num_ranks == LLAMA3_NUM_RANKS:
        return {name: num_ranks + offset for offset, name in enumerate(_llama3_special_names())}
    return {"<|begin_of_text|>": num_ranks, "<|end_of_text|>": num_ranks + 1}


def _llama3_special_names() -> list[str]:
    """The special tokens of Llama 3.1, in the order of their ids (its published tokenizer_config.json)."""
    names = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>", 6: "<|start_header_id|>"}
    names |= {7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>"}
    reserved = (f"<|reserved_special_token_{number}|>" for number in range(LLAMA3_NUM_SPECIALS))
    return [names[offset] if offset in names else next(reserved) for offset in range(LLAMA3_NUM_SPECIALS)]


def _has_long_run(text: str) -> bool:
    """Whether ``text`` may hold more than ``_MAX_RUN`` blanks, or non-blanks, in a row.

    Looks at segments of half that length only: a longer run covers one of them wholly.
    """
    half = _MAX_RUN // 2
    if len(text) <= _MAX_RUN:
        return False
    segments = (text[start : start + half] for start in range(0, len(text) - half + 1, half))
    return any(segment.isspace() or segment.split(None, 1)[0] == segment for segment in segments)


def _cut_long_runs(text: str) -> Iterator[str]:
    start = 0
    for run in re.finditer(r"\s+|\S+", text):
        for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _fingerprint(*parts: str) -> str:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part.encode())
        state.update(b"\0")
    return str(state.hexdigest())
