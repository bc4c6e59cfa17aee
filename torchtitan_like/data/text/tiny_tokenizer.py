"""Make a small tokenizer from a large one, for tests and experiments.

The small tokenizer keeps the special tokens and the single bytes or characters. It fills up with
the first of the other entries: BPE by merges, Unigram by score, WordPiece by id.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torchtitan_like.data.data_errors import TokenizerError
from torchtitan_like.data.text.tokenizer import load_tokenizer, merges_of
from torchtitan_like.util.files import staged_path

Json = dict[str, Any]

_ALPHABET = "".join(map(chr, range(0x21, 0x7F)))
_SAMPLE = f"Hello, World! It's 2026: {_ALPHABET} the quick brown fox jumps over 13 lazy dogs."
_SAMPLE_OF_BYTES = "Grüße, 世界 🙂\n\ttabs  and   blanks\r\n"
_COPIED = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_NUM_LISTED = 8  # special tokens in the summary


def make_tiny_tokenizer(source: Path, out: Path, keep: int) -> str:
    """Write a tokenizer with `keep` entries of `source` into the folder `out`. Returns a summary.

    source: tokenizer.json or its folder. Raises TokenizerError if the small tokenizer encodes and
    decodes a text in another way than the large one, and OSError.
    """
    file = source / "tokenizer.json" if source.is_dir() else source
    if not file.is_file() or file.suffix != ".json":
        raise TokenizerError(
            f"no tokenizer.json at {source}. Expected the file, or its folder, not a tiktoken file: "
            "give its path"
        )
    load_tokenizer(file)  # reports a file that cannot be read
    content = json.loads(file.read_text(encoding="utf-8"))
    small, new_ids = shrink(content, keep)
    special_names = [token["content"] for token in content.get("added_tokens", [])]
    with staged_path(out) as staged:
        staged.mkdir()
        _write_json(staged / "tokenizer.json", small)
        for name in _COPIED:
            if (file.parent / name).exists():
                shutil.copyfile(file.parent / name, staged / name)
        _renumber_config(staged / "tokenizer_config.json", new_ids)
        has_bytes = bool(_byte_entries(content))
        _check_round_trip(file, staged / "tokenizer.json", special_names, has_bytes=has_bytes)
        vocab_size = load_tokenizer(staged).vocab_size
    listed = small["added_tokens"][:_NUM_LISTED]
    specials = ", ".join(f"{token['content']} {token['id']}" for token in listed) or "none"
    num_more = len(special_names) - _NUM_LISTED
    more = f" and {num_more} more" if num_more > 0 else ""
    total = len(_ids(content["model"]).keys() | set(special_names))
    return f"{out}: {vocab_size:,} of {total:,} entries; special: {specials}{more}"


def shrink(content: Json, keep: int) -> tuple[Json, dict[int, int]]:
    """Shrink the content of a tokenizer.json to at most `keep` entries, which keep their order.

    Returns the new content, and for each kept entry old id -> new id. Raises TokenizerError for
    other models than BPE, Unigram and WordPiece, and if `keep` is too small.
    """
    model = content["model"]
    added = content.get("added_tokens", [])
    if model.get("type") not in _SHRINKERS:
        raise TokenizerError(
            f"the tokenizer is of the kind {model.get('type')}. Expected {', '.join(_SHRINKERS)}: "
            "choose another one"
        )
    ids = _ids(model)
    specials = [token["content"] for token in added]
    names = (*specials, *_byte_entries(content), model.get("unk_token"))
    required = {name for name in names if name in ids}
    if model["type"] == "Unigram" and model.get("unk_id") is not None:
        required.add(model["vocab"][model["unk_id"]][0])
    # Added tokens with ids after the model's own entries.
    outside = [token for token in added if token["content"] not in ids]
    room = keep - len(outside)
    if room < len(required):
        least = len(required) + len(outside)
        raise TokenizerError(
            f"--keep is {keep}. Expected {least} or more, for the special tokens and the single "
            "bytes: raise it"
        )
    kept = sorted(_SHRINKERS[model["type"]](model, required, room), key=ids.__getitem__)
    new_ids = {ids[name]: index for index, name in enumerate(kept)}
    for index, token in enumerate(sorted(outside, key=lambda token: token["id"])):
        new_ids[token["id"]] = len(kept) + index
    moved = [{**token, "id": new_ids[token["id"]]} for token in added]
    small = {
        **content,
        "added_tokens": sorted(moved, key=lambda token: token["id"]),
        "post_processor": _renumbered(content.get("post_processor"), new_ids),
        "model": _with_entries(model, kept),
    }
    return small, new_ids


def _ids(model: Json) -> dict[str, int]:
    """Return the ids of all entries by name."""
    if model["type"] == "Unigram":
        return {name: index for index, (name, _) in enumerate(model["vocab"])}
    ids: dict[str, int] = model["vocab"]
    return ids


def _byte_entries(content: Json) -> list[str]:
    """Return the entries for single bytes; empty if the tokenizer has none."""
    if '"ByteLevel"' in json.dumps([content.get("pre_tokenizer"), content.get("decoder")]):
        from tokenizers import pre_tokenizers

        return sorted(pre_tokenizers.ByteLevel.alphabet())
    if content["model"].get("byte_fallback"):
        return [f"<0x{byte:02X}>" for byte in range(256)]
    return []


# ---- which entries are kept


def _fill(required: set[str], room: int, candidates: Iterable[str]) -> set[str]:
    """Return `required` and the first candidates, `room` entries at most."""
    kept = set(required)
    for name in candidates:
        if len(kept) == room:
            break
        kept.add(name)
    return kept


def _shrink_bpe(model: Json, required: set[str], room: int) -> set[str]:
    """Keep merges in their order, each with its two parts, so that kept entries can be merged."""
    kept = _fill(required, room, filter(model["vocab"].__contains__, _characters(model)))
    for parts in merges_of(model):
        new = {*parts, _joined(model, parts)} - kept
        if len(kept) + len(new) <= room:
            kept |= new
    return kept


def _joined(model: Json, parts: tuple[str, ...]) -> str:
    return parts[0] + parts[1].removeprefix(model.get("continuing_subword_prefix") or "")


def _shrink_unigram(model: Json, required: set[str], room: int) -> set[str]:
    scores = dict(model["vocab"])
    by_score = sorted(scores, key=lambda name: -scores[name])  # stable: ties as in the file
    characters = filter(scores.__contains__, _characters(model))
    return _fill(required, room, [*characters, *by_score])


def _shrink_wordpiece(model: Json, required: set[str], room: int) -> set[str]:
    vocab = model["vocab"]
    by_id = sorted(vocab, key=vocab.__getitem__)
    words = [name for name in by_id if not re.match(r"\[unused\d+\]", name)]
    return _fill(required, room, [*filter(vocab.__contains__, _characters(model)), *words])


def _characters(model: Json) -> list[str]:
    """Return the possible names of entries for single ASCII characters."""
    prefix = model.get("continuing_subword_prefix") or ""
    suffix = model.get("end_of_word_suffix") or ""
    names = [name for one in _ALPHABET for name in (one, prefix + one, one + suffix)]
    return list(dict.fromkeys(["▁", *names]))


_SHRINKERS: dict[str, Callable[[Json, set[str], int], set[str]]] = {
    "BPE": _shrink_bpe,
    "Unigram": _shrink_unigram,
    "WordPiece": _shrink_wordpiece,
}


# ---- the files of the small tokenizer


def _with_entries(model: Json, kept: list[str]) -> Json:
    """Return the model with the entries `kept`, whose ids are their indices."""
    new_ids = {name: index for index, name in enumerate(kept)}
    if model["type"] == "Unigram":
        scores = dict(model["vocab"])
        unknown = model.get("unk_id")
        unk_id = None if unknown is None else new_ids[model["vocab"][unknown][0]]
        return {**model, "vocab": [[name, scores[name]] for name in kept], "unk_id": unk_id}
    if model["type"] == "WordPiece":
        return {**model, "vocab": new_ids}
    merges = [
        merge
        for merge, parts in zip(model["merges"], merges_of(model), strict=True)
        if {*parts, _joined(model, parts)} <= new_ids.keys()
    ]
    return {**model, "vocab": new_ids, "merges": merges}


def _renumbered(part: Any, new_ids: dict[int, int]) -> Any:
    """Return a post-processor with new ids.

    Templates contain them as ``"ids": [1]``; BERT and RoBERTa use ``["[SEP]", 102]``.
    """
    if isinstance(part, dict):
        return {
            key: [new_ids[token_id] for token_id in value]
            if key == "ids"
            else _renumbered(value, new_ids)
            for key, value in part.items()
        }
    if isinstance(part, list):
        if len(part) == 2 and isinstance(part[0], str) and isinstance(part[1], int):
            return [part[0], new_ids[part[1]]]
        return [_renumbered(item, new_ids) for item in part]
    return part


def _renumber_config(file: Path, new_ids: dict[int, int]) -> None:
    """Put the new ids into tokenizer_config.json, if there is one."""
    if not file.exists():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    by_id = config.get("added_tokens_decoder")
    if by_id:
        renumbered = {str(new_ids[int(old_id)]): token for old_id, token in by_id.items()}
        _write_json(file, {**config, "added_tokens_decoder": renumbered})


def _check_round_trip(
    large_file: Path, small_file: Path, specials: Sequence[str], *, has_bytes: bool
) -> None:
    """Raise TokenizerError if the small tokenizer changes a sample text or a special token."""
    from tokenizers import Tokenizer

    large = Tokenizer.from_file(str(large_file))
    small = Tokenizer.from_file(str(small_file))
    for text in [_SAMPLE, _SAMPLE_OF_BYTES] if has_bytes else [_SAMPLE]:
        expected = large.decode(large.encode(text, add_special_tokens=False).ids)
        actual = small.decode(small.encode(text, add_special_tokens=False).ids)
        if actual != expected:
            raise TokenizerError(
                f"the small tokenizer decodes {text!r} as {actual!r}. Expected {expected!r}: raise "
                "--keep"
            )
    for name in specials:
        ids = small.encode(name, add_special_tokens=False).ids
        if name not in map(small.id_to_token, ids):
            raise TokenizerError(
                f"{small_file} encodes the special token {name!r} as {ids}. Expected one id: raise "
                "--keep"
            )
    actual_specials = [token for token in small.encode(_SAMPLE).tokens if token in specials]
    expected_specials = [token for token in large.encode(_SAMPLE).tokens if token in specials]
    if actual_specials != expected_specials:
        raise TokenizerError(
            f"{small_file} adds {actual_specials} to a text. Expected {expected_specials}: raise --keep"
        )


def _write_json(file: Path, content: Json) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
