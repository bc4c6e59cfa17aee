"""One interface for Hugging Face tokenizers (``tokenizer.json``) and tiktoken files (``.model``).

Text never becomes special tokens: the characters of a special token in a document are encoded as
ordinary tokens. The caller adds BOS and EOS.

``bos_token`` and ``eos_token`` of ``tokenizer_config.json`` or ``special_tokens_map.json``, next to
the vocabulary, define BOS and EOS; ``null`` means none. Without these entries, common names are
searched in the vocabulary (``<|begin_of_text|>``, ``</s>``, ...).

tiktoken files contain only ordinary tokens. ``added_tokens_decoder`` in a ``tokenizer_config.json``
next to the file defines the special tokens. Without it, Llama 3's file gets its 256 special tokens,
and any other file ``<|begin_of_text|>`` and ``<|end_of_text|>`` after the last token. Nor do they
contain the pattern that splits text into words. ``pat_str`` in the ``tokenizer_config.json`` gives
it: an expression, or the name of one of `word_patterns.RANK_FILE_PATTERNS`. Published files are
recognized by their SHA-256. Others need ``pat_str``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_like.data.data_errors import DataError, TokenizerError
from torchtitan_like.data.text.word_patterns import (
    LLAMA3_RANKS,
    PATTERNS,
    RANK_FILE_PATTERNS,
    RANK_FILES,
)
from torchtitan_like.util.reading import read_json

CONFIG = "tokenizer_config.json"
LLAMA3_NUM_SPECIALS = 256

_BOS_NAMES = ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]")
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")

# A longer run of blanks, or of non-blanks, is encoded in pieces, as in Llama 3. tiktoken's stack
# overflows near 10^6 characters.
_MAX_RUN = 25_000

# A longer document is encoded in parts of about this size, if its tokenizer allows splitting.
PART_CHARACTERS = 2**18
# A longer part is an error: the `tokenizers` library needs about 310 bytes for each character.
MAX_PART_CHARACTERS = 2**22

# A text may be split after a match without changing its ids. A word always ends there:
# - In no pattern of `word_patterns.PATTERNS`, and no pre-tokenizer in `_split_pattern`, does a word
#   contain a non-blank followed by a blank, or a letter or digit followed by a newline.
# - None of them looks ahead more than one character after a word.
# The letters are letters in every version of Unicode.
_LETTERS = "0-9A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
BEFORE_BLANKS = re.compile(r"[\w!-~](?= )")
BEFORE_SPACES = re.compile(rf"[\w!-~](?= )|[{_LETTERS}](?=\n)")
# Normalizers change single characters, or characters with combining marks. Some convert other
# characters to blanks, but none does so for ASCII.
BEFORE_BLANKS_ASCII = re.compile(r"[!-~](?= )")


class Tokenizer(ABC):
    """Converts text to token ids and back.

    path: the loaded file; another process can load it again.
    vocab_size: largest id + 1.
    bos_id, eos_id: None if the tokenizer has no such token.
    fingerprint: a hash of everything that determines the ids of a text.
    split_pattern: a text may be split after a match without changing its ids; None: never.
    max_part: maximum number of characters of a text or part of it; None: no limit.
    """

    path: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str
    split_pattern: re.Pattern[str] | None
    max_part: int | None = None

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[array[int]]:
        """Return the token ids of each text, without BOS and EOS, as uint32."""

    def parts(self, text: str) -> Iterator[str]:
        """Yield parts of ``text`` whose concatenated ids are the ids of ``text``.

        Raises DataError if more than ``max_part`` characters cannot be split.
        """
        start = 0
        while start < len(text):
            match = None
            if self.split_pattern is not None and len(text) - start > PART_CHARACTERS:
                match = self.split_pattern.search(text, start + PART_CHARACTERS - 1)
            stop = len(text) if match is None else match.end()
            if self.max_part is not None and stop - start > self.max_part:
                raise DataError(
                    f"a document of {len(text):,} characters has {stop - start:,} that cannot be "
                    f"split. Expected at most {self.max_part:,}, because {self.path} would need "
                    "more than 2 GiB of memory to encode them at once: split the document"
                )
            yield text[start:stop]
            start = stop

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without BOS and EOS."""
        return self.encode_batch([text])[0].tolist()

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. Invalid UTF-8 becomes U+FFFD, special tokens their names."""

    def known_ids(self) -> Set[int]:
        """Return the ids of all tokens. A model's vocabulary may have more."""
        return set(range(self.vocab_size))

    def num_bytes(self) -> list[int]:
        """Return the UTF-8 bytes of each token (vocab_size,); 0 for special tokens.

        All are 0 if the tokenizer is not a byte-level one.
        """
        return [0] * self.vocab_size

    def __str__(self) -> str:
        return f"{self.path}: {self.vocab_size:,} tokens, BOS {self.bos_id}, EOS {self.eos_id}"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a file or folder.

    A folder has a ``tokenizer.json``, or else one ``.model`` or ``.tiktoken`` file. The folder of
    an export or of Meta's releases may have ``original/tokenizer.model`` instead.

    Raises TokenizerError if the tokenizer is missing or invalid.
    """
    location = Path(path).expanduser()
    file = _vocabulary_file(location) if location.is_dir() else location
    if not file.is_file():
        raise TokenizerError(
            f"no tokenizer at {str(path)!r}. Expected tokenizer.json or a tiktoken .model file, or "
            "a folder with one: set model.hf_assets_path to its path, or run `titan download`"
        )
    if file.suffix == ".json":
        return _HuggingFaceTokenizer(file)
    return _TiktokenTokenizer(file, location if location.is_dir() else file.parent)


def check_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, *, add_bos: bool, add_eos: bool
) -> None:
    """Raise TokenizerError, with all problems, if a model cannot be trained on the tokenizer's ids.

    vocab_size: vocabulary size of the model.
    """
    problems = []
    if tokenizer.vocab_size > vocab_size:
        problems.append(
            f"its largest id is {tokenizer.vocab_size - 1}, the model has a vocabulary of "
            f"{vocab_size}: choose the tokenizer of the model, or set model.args.vocab_size to "
            f"{tokenizer.vocab_size} or more"
        )
    for is_used, token_id, name, key in (
        (add_bos, tokenizer.bos_id, "beginning-of-text (BOS)", "data.add_bos"),
        (add_eos, tokenizer.eos_id, "end-of-text (EOS)", "data.add_eos"),
    ):
        if is_used and token_id is None:
            problems.append(
                f"it has no {name} token, and {key} is true: set {key} = false, or name one in "
                "tokenizer_config.json"
            )
    if problems:
        raise TokenizerError(
            f"the tokenizer {tokenizer.path} does not match the model or the settings: "
            + "; ".join(problems)
        )


class _HuggingFaceTokenizer(Tokenizer):
    def __init__(self, file: Path) -> None:
        import tokenizers  # a slow import, which a config check without a tokenizer does not need

        self.path = str(file)
        content = _read_json(file)
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(
                f"{file} is not a tokenizer of the `tokenizers` library: {error}. Expected a "
                "tokenizer.json: download it again"
            ) from error
        if dropout := content["model"].get("dropout"):
            raise TokenizerError(
                f"{file} encodes a text differently each time (model.dropout is {dropout}). "
                "Expected null: remove the dropout"
            )
        # Settings that were saved in the file must not truncate documents or encode special tokens.
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
        fingerprinted = [json.dumps([content.get(part) for part in parts], sort_keys=True)]
        names = {
            token.content
            for token in self._inner.get_added_tokens_decoder().values()
            if token.special
        }
        self._text_encoder = self._inner
        if without_names := _without_names(content, names):
            self._text_encoder = tokenizers.Tokenizer.from_str(json.dumps(without_names))
            self._text_encoder.encode_special_tokens = True
            fingerprinted.append("names of special tokens are text")
        self.fingerprint = _fingerprint("tokenizer.json", *fingerprinted)
        self.split_pattern = _split_pattern(content)
        self.max_part = MAX_PART_CHARACTERS

    def encode_batch(self, texts: Sequence[str]) -> list[array[int]]:
        # The library's fastest function, also for one text: it computes no offsets.
        with _library_errors(self.path, texts[0] if texts else ""):
            encoded = self._text_encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def known_ids(self) -> Set[int]:
        return set(self._inner.get_vocab().values())

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
        """Load the tokenizer. folder: the folder of tokenizer_config.json, if there is one."""
        import tiktoken

        self.path = str(file)
        content = file.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        self._ranks = ranks = _read_ranks(file, content)
        specials = _special_tokens(folder, file, ranks, is_llama3=sha256 == LLAMA3_RANKS)
        pattern = _word_pattern(folder, file, sha256)
        try:
            self._inner = tiktoken.Encoding(
                name=file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials
            )
        except ValueError as error:
            raise TokenizerError(
                f"{folder / CONFIG} has a pat_str that is not an expression: {error}. Expected an "
                f"expression of tiktoken, or one of {', '.join(RANK_FILE_PATTERNS)}: correct it"
            ) from error
        self._special_ids = {*specials.values()}
        self.vocab_size = max(*ranks.values(), *specials.values()) + 1
        self.bos_id, self.eos_id = _bos_and_eos(folder, specials)
        is_known = pattern in RANK_FILE_PATTERNS.values()
        self.split_pattern = BEFORE_SPACES if is_known else None
        self.fingerprint = _fingerprint(
            "tiktoken", pattern, repr(sorted(ranks.items(), key=lambda item: item[1]))
        )

    def encode_batch(self, texts: Sequence[str]) -> list[array[int]]:
        return list(map(self._encode_to_array, texts))

    def _encode_to_array(self, text: str) -> array[int]:
        ids = array("I")
        for piece in _split_long_runs(text) if _has_long_run(text) else (text,):
            ids.frombytes(self._inner.encode_to_numpy(piece, disallowed_special=()).tobytes())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids))

    def known_ids(self) -> Set[int]:
        return {*self._ranks.values(), *self._special_ids}

    def num_bytes(self) -> list[int]:
        counts = super().num_bytes()
        for token, token_id in self._ranks.items():
            counts[token_id] = len(token)
        return counts


@contextmanager
def _library_errors(path: str, text: str) -> Iterator[None]:
    """Convert an error of the library that encodes `text`, also a panic, into a DataError."""
    try:
        yield
    except BaseException as error:
        # A panic of Rust code is no Exception, and neither is KeyboardInterrupt.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{path} cannot encode the text that begins with {text[:40]!r}: {error}. Expected text "
            "for its expressions: remove it, or split it"
        ) from error


def _without_names(content: dict[str, Any], names: Set[str]) -> dict[str, Any] | None:
    """Return a tokenizer.json that encodes the names of special tokens as other text.

    A model whose own vocabulary has a name would give the special token's id to it. The copy has
    another string at this id, which no text contains. None: the model never gives such an id.
    """
    model = content["model"]
    vocabulary = model.get("vocab") or {}
    is_list = isinstance(vocabulary, list)  # Unigram: piece and score
    names = names & {piece for piece, _ in vocabulary} if is_list else names & vocabulary.keys()
    merges = merges_of(model)
    if model.get("type") == "BPE" and not model.get("ignore_merges"):
        # Only merges, or single characters, make a token.
        names = names & ({"".join(merge) for merge in merges} | {n for n in names if len(n) == 1})
    if not names:
        return None

    def rename(piece: str) -> str:
        return f"\U0010ffff{piece}\U0010ffff" if piece in names else piece

    model = dict(model)
    if is_list:
        model["vocab"] = [[rename(piece), score] for piece, score in vocabulary]
    else:
        model["vocab"] = {rename(piece): number for piece, number in vocabulary.items()}
    if model.get("unk_token") is not None:
        model["unk_token"] = rename(model["unk_token"])
    if merges:
        model["merges"] = [m for m in merges if not {"".join(m), *m} & names]
    added = [token for token in content["added_tokens"] if token["content"] not in names]
    return {**content, "model": model, "added_tokens": added, "post_processor": None}


def merges_of(model: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the merged pairs of a tokenizer.json in order. Only BPE models have them."""
    return [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        for merge in model.get("merges") or []
    ]


def bytes_of_characters() -> dict[str, int]:
    """Return character -> byte for byte-level BPE (GPT-2).

    Printable bytes are themselves. The others are the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _split_pattern(content: dict[str, Any]) -> re.Pattern[str] | None:
    """Return `Tokenizer.split_pattern` of a tokenizer.json; None if a step may forbid splitting."""
    for token in content.get("added_tokens") or []:
        strips = token.get("lstrip") or token.get("rstrip") or token.get("single_word")
        if not token.get("special") and (strips or re.search(r"\s", token.get("content", ""))):
            return None
    normalizers = _steps(content.get("normalizer"), "normalizers")
    local = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
    if not {step.get("type") for step in normalizers} <= local:
        return None
    first = (_steps(content.get("pre_tokenizer"), "pretokenizers") or [{}])[0]
    kind = first.get("type")
    pattern = BEFORE_SPACES
    if kind == "Split":
        behavior = (first.get("behavior"), bool(first.get("invert")))
        is_supported = first.get("pattern", {}).get("Regex") in {*PATTERNS.values(), "."}
        if not is_supported or behavior not in {("Isolated", False), ("Removed", True)}:
            return None
    elif kind == "ByteLevel":
        if not first.get("use_regex", True):
            return None
        pattern = BEFORE_BLANKS if first.get("add_prefix_space", True) else BEFORE_SPACES
    elif kind == "Metaspace":
        if not first.get("split", True):
            return None
        pattern = BEFORE_BLANKS
    elif kind not in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
        return None
    return BEFORE_BLANKS_ASCII if normalizers else pattern


def _steps(outer: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a component: of a Sequence, or else the component itself."""
    if not outer:
        return []
    return list(outer[name]) if outer.get("type") == "Sequence" else [outer]


def _vocabulary_file(folder: Path) -> Path:
    if (folder / "tokenizer.json").exists():
        return folder / "tokenizer.json"
    files = sorted(file for ending in ("*.model", "*.tiktoken") for file in folder.glob(ending))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise TokenizerError(
            f"{folder} has several tokenizers ({names}). Expected one: give the path of the file"
        )
    original = folder / "original" / "tokenizer.model"
    if not files and original.exists():
        return original
    return files[0] if files else folder / "tokenizer.json"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"{file} cannot be read as JSON: {error}. Expected a JSON object: download it again"
        ) from error
    if not isinstance(content, dict):
        raise TokenizerError(
            f"{file} contains a JSON {type(content).__name__}. Expected an object: download it "
            "again"
        )
    return content


def _read_optional_json(file: Path) -> dict[str, Any]:
    return _read_json(file) if file.exists() else {}


def _bos_and_eos(folder: Path, ids: dict[str, int]) -> tuple[int | None, int | None]:
    """Return the ids of BOS and EOS from the files next to the vocabulary, else by common names."""
    files = [folder / name for name in (CONFIG, "special_tokens_map.json")]
    contents = {file: _read_optional_json(file) for file in files}

    def look_up(key: str, common_names: tuple[str, ...]) -> int | None:
        for file, content in contents.items():
            if key in content:
                name = content[key]["content"] if isinstance(content[key], dict) else content[key]
                if name is not None and name not in ids:
                    raise TokenizerError(
                        f"{file} has {key} = {name!r}, which is not in the vocabulary. Expected a "
                        "token of the vocabulary, or null: correct it"
                    )
                return None if name is None else ids[name]
        return next((ids[name] for name in common_names if name in ids), None)

    return look_up("bos_token", _BOS_NAMES), look_up("eos_token", _EOS_NAMES)


def _read_ranks(file: Path, content: bytes) -> dict[bytes, int]:
    """Read the content of a tiktoken file. Each line has a token's bytes in base64, a blank, and its rank (id)."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"{file}, line {number} is not of a tiktoken file. Expected a token in base64 and "
                "its rank: for a SentencePiece model, which may also be called tokenizer.model, "
                "give the tokenizer.json of the same model"
            ) from error
    if len(set(ranks.values())) != len(ranks) or any(
        bytes([byte]) not in ranks for byte in range(256)
    ):
        raise TokenizerError(
            f"{file} is incomplete. Expected different ranks and a token for each of the 256 "
            "bytes: download it again"
        )
    return ranks


def _word_pattern(folder: Path, file: Path, sha256: str) -> str:
    """Return the expression that splits text into words, which is not in a tiktoken file."""
    config = folder / CONFIG
    pattern = _read_optional_json(config).get("pat_str", RANK_FILES.get(sha256))
    if isinstance(pattern, str):
        return RANK_FILE_PATTERNS.get(pattern, pattern)
    given = f"{file} is no published file, and nothing says how it splits text into words"
    if pattern is not None:
        given = f"{config} has pat_str = {pattern!r}"
    raise TokenizerError(
        f"{given}. Expected a text as pat_str in {config}: set it to the expression in the code of "
        f"the tokenizer, or to one of {', '.join(RANK_FILE_PATTERNS)}"
    )


def _special_tokens(
    folder: Path, file: Path, ranks: dict[bytes, int], *, is_llama3: bool
) -> dict[str, int]:
    """Return special tokens and their ids, which are not in a tiktoken file."""
    config = folder / CONFIG
    added = _read_optional_json(config).get("added_tokens_decoder")
    if added:
        try:
            specials = {str(token["content"]): int(token_id) for token_id, token in added.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(
                f"{config} has a malformed added_tokens_decoder. Expected "
                f'{{"<id>": {{"content": "<text>"}}}}: download it again'
            ) from error
        duplicate_ids = sorted(set(specials.values()) & set(ranks.values()))
        if duplicate_ids:
            raise TokenizerError(
                f"{config} gives the id {duplicate_ids[0]} to a special token, {file.name} to an "
                "ordinary one. Expected different ids: download both files again"
            )
        return specials
    num_ranks = max(ranks.values()) + 1
    if is_llama3:
        return {name: num_ranks + offset for offset, name in enumerate(_llama3_special_names())}
    return {"<|begin_of_text|>": num_ranks, "<|end_of_text|>": num_ranks + 1}


def _llama3_special_names() -> list[str]:
    """Return the special tokens of Llama 3.1 by id, as in its published tokenizer_config.json."""
    names = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>"}
    names |= {6: "<|start_header_id|>", 7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>"}
    names |= {10: "<|python_tag|>"}
    reserved = (f"<|reserved_special_token_{number}|>" for number in range(LLAMA3_NUM_SPECIALS))
    return [
        names[offset] if offset in names else next(reserved)
        for offset in range(LLAMA3_NUM_SPECIALS)
    ]


def _has_long_run(text: str) -> bool:
    """Return True if ``text`` may contain a run of more than ``_MAX_RUN`` blanks or non-blanks.

    Checks segments of half that length: a longer run covers at least one whole segment.
    """
    half = _MAX_RUN // 2
    if len(text) <= _MAX_RUN:
        return False
    segments = (text[start : start + half] for start in range(0, len(text) - half + 1, half))
    return any(segment.isspace() or segment.split(None, 1)[0] == segment for segment in segments)


def _split_long_runs(text: str) -> Iterator[str]:
    start = 0
    for run in re.finditer(r"\s+|\S+", text):
        for stop in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
            yield text[start:stop]
            start = stop
    yield text[start:]


def _fingerprint(*parts: str) -> str:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part.encode())
        state.update(b"\0")
    return str(state.hexdigest())
