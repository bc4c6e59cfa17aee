"""Make a small tokenizer, text or model out of a large one, for tests and for trying things out.

    python scripts/make_tiny.py tokenizer assets/hf/Llama-3.1-8B tiny/tokenizer --keep 4000
    python scripts/make_tiny.py dataset "/data/wiki/*.parquet" tiny/wiki.jsonl --n 10000
    python scripts/make_tiny.py model train_configs/qwen3_0.6b.toml tiny/qwen3 --model.hf_assets_path tiny/tokenizer

tokenizer: the same tokenizer with KEEP entries: its special tokens, the single bytes or characters, and of the rest what
comes first (BPE: by merges, Unigram: by score, WordPiece: by number). BPE, Unigram or WordPiece, as tokenizer.json.
dataset: N documents, drawn by a seed from all parts of a source, as JSON lines.
model: random weights of the config's family in few sizes, with config.json and tokenizer, as `transformers` loads them, in
OUT/step-0 as a checkpoint of this program, and in OUT/make.sh the command that made them; further arguments are settings of the
config (--model.args.dim 128).

What is made appears under its name when it is complete. No GPU is used. Exit codes: 0 made, 2 it could not be done.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.config import ConfigError
from torchtitan_like.data.errors import DataError, TokenizerError
from torchtitan_like.data.text.documents import (
    ENDINGS,
    Corpus,
    find_corpus,
    plan_pieces,
    read_piece,
)
from torchtitan_like.data.text.fast_bpe import merges_of
from torchtitan_like.data.text.formats import BadRecord
from torchtitan_like.data.text.tokenizer import load_tokenizer

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]

# ---- tokenizer

_ALPHABET = "".join(map(chr, range(0x21, 0x7F)))
_SAMPLE = f"Hello, World! It's 2026: {_ALPHABET} the quick brown fox jumps over 13 lazy dogs."
_SAMPLE_OF_BYTES = "Grüße, 世界 🙂\n\ttabs  and   blanks\r\n"
_COPIED = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def shrink(content: Json, keep: int) -> tuple[Json, dict[int, int]]:
    """The content of a tokenizer.json with ``keep`` entries, or fewer where there are fewer; old id -> new id of these.

    The entries keep their order. Raises TokenizerError for other kinds of models, and where ``keep`` is too few.
    """
    model, added = content["model"], content.get("added_tokens", [])
    if model.get("type") not in _SHRINKERS:
        raise TokenizerError(f"a tokenizer of the kind {model.get('type')}: expected {', '.join(_SHRINKERS)}")
    ids = _ids(model)
    specials = [token["content"] for token in added]
    required = {name for name in (*specials, *_bytes_of(content), model.get("unk_token")) if name in ids}
    if model["type"] == "Unigram" and model.get("unk_id") is not None:
        required.add(model["vocab"][model["unk_id"]][0])
    outside = [name for name in specials if name not in ids]  # behind the model's own entries
    room = keep - len(outside)
    if room < len(required):
        least = len(required) + len(outside)
        raise TokenizerError(f"--keep {keep}: expected {least} or more, for the special tokens and the single bytes")
    kept = sorted(_SHRINKERS[model["type"]](model, required, room), key=ids.__getitem__)
    new_ids = {ids[name]: number for number, name in enumerate(kept)}
    outside.sort(key=lambda name: next(token["id"] for token in added if token["content"] == name))
    new_ids |= {
        token["id"]: len(kept) + outside.index(token["content"]) for token in added if token["content"] in outside
    }
    moved = [{**token, "id": new_ids[token["id"]]} for token in added]
    post = content.get("post_processor")
    return {
        **content,
        "added_tokens": sorted(moved, key=lambda token: token["id"]),
        "post_processor": _renumbered(post, new_ids),
        "model": _with_entries(model, kept),
    }, new_ids


def _ids(model: Json) -> dict[str, int]:
    if model["type"] == "Unigram":
        return {name: number for number, (name, _) in enumerate(model["vocab"])}
    ids: dict[str, int] = model["vocab"]
    return ids


def _bytes_of(content: Json) -> list[str]:
    """The entries that stand for single bytes, where the tokenizer has any."""
    if '"ByteLevel"' in json.dumps([content.get("pre_tokenizer"), content.get("decoder")]):
        from tokenizers import pre_tokenizers

        return sorted(pre_tokenizers.ByteLevel.alphabet())
    return [f"<0x{byte:02X}>" for byte in range(256)] if content["model"].get("byte_fallback") else []


def _filled(required: set[str], room: int, candidates: Iterable[str]) -> set[str]:
    kept = set(required)
    for name in candidates:
        if len(kept) == room:
            break
        kept.add(name)
    return kept


def _shrink_bpe(model: Json, required: set[str], room: int) -> set[str]:
    """Merges in their order, each with the two parts that it joins: what is kept, can be reached."""
    kept = _filled(required, room, filter(model["vocab"].__contains__, _characters(model)))
    for parts in merges_of(model):
        new = {*parts, _joined(model, parts)} - kept
        if len(kept) + len(new) <= room:
            kept |= new
    return kept


def _joined(model: Json, parts: tuple[str, ...]) -> str:
    return parts[0] + parts[1].removeprefix(model.get("continuing_subword_prefix") or "")


def _shrink_unigram(model: Json, required: set[str], room: int) -> set[str]:
    scores = dict(model["vocab"])
    by_score = sorted(scores, key=lambda name: -scores[name])  # equal ones as in the file
    return _filled(required, room, [*filter(scores.__contains__, _characters(model)), *by_score])


def _shrink_wordpiece(model: Json, required: set[str], room: int) -> set[str]:
    by_number = sorted(model["vocab"], key=model["vocab"].__getitem__)
    characters = filter(model["vocab"].__contains__, _characters(model))
    return _filled(required, room, [*characters, *(name for name in by_number if not re.match(r"\[unused\d+\]", name))])


def _characters(model: Json) -> list[str]:
    """What a single character of ASCII may be called."""
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    names = [name for one in _ALPHABET for name in (one, prefix + one, one + suffix)]
    return list(dict.fromkeys(["▁", *names]))


_SHRINKERS: dict[str, Callable[[Json, set[str], int], set[str]]] = {
    "BPE": _shrink_bpe,
    "Unigram": _shrink_unigram,
    "WordPiece": _shrink_wordpiece,
}


def _with_entries(model: Json, kept: list[str]) -> Json:
    places = {name: number for number, name in enumerate(kept)}
    if model["type"] == "Unigram":
        scores, unknown = dict(model["vocab"]), model.get("unk_id")
        unk_id = None if unknown is None else places[model["vocab"][unknown][0]]
        return {**model, "vocab": [[name, scores[name]] for name in kept], "unk_id": unk_id}
    if model["type"] == "WordPiece":
        return {**model, "vocab": places}
    merges = [
        merge
        for merge, parts in zip(model["merges"], merges_of(model), strict=True)
        if {*parts, _joined(model, parts)} <= places.keys()
    ]
    return {**model, "vocab": places, "merges": merges}


def _renumbered(part: Any, new_ids: dict[int, int]) -> Any:
    """A post-processor with other ids: ``"ids": [1]`` of templates, ``["[SEP]", 102]`` of BERT's and RoBERTa's."""
    if isinstance(part, dict):
        return {
            key: [new_ids[number] for number in value] if key == "ids" else _renumbered(value, new_ids)
            for key, value in part.items()
        }
    if isinstance(part, list):
        if len(part) == 2 and isinstance(part[0], str) and isinstance(part[1], int):
            return [part[0], new_ids[part[1]]]
        return [_renumbered(item, new_ids) for item in part]
    return part


def make_tokenizer(source: Path, out: Path, keep: int) -> str:
    """Raises TokenizerError where the small tokenizer would not say what the large one says."""
    file = source / "tokenizer.json" if source.is_dir() else source
    if not file.is_file() or file.suffix != ".json":
        raise TokenizerError(f"no tokenizer.json at {source}: expected the file or its folder (tiktoken has none)")
    load_tokenizer(file)  # that it can be read
    content = json.loads(file.read_text(encoding="utf-8"))
    small, new_ids = shrink(content, keep)
    with _made(out) as staged:
        staged.mkdir()
        _write_json(staged / "tokenizer.json", small)
        for name in _COPIED:
            if (file.parent / name).exists():
                shutil.copyfile(file.parent / name, staged / name)
        _renumber_config(staged / "tokenizer_config.json", new_ids)
        names = [token["content"] for token in content.get("added_tokens", [])]
        _check_round_trip(file, staged / "tokenizer.json", names, every_byte=bool(_bytes_of(content)))
        made = load_tokenizer(staged)
    told = ", ".join(f"{token['content']} {token['id']}" for token in small["added_tokens"][:8])
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    total = len(_ids(content["model"]).keys() | set(names))
    return f"{out}: {made.vocab_size:,} of {total:,} entries; special: {told or 'none'}{more}"


def _renumber_config(file: Path, new_ids: dict[int, int]) -> None:
    if not file.exists():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    named = config.get("added_tokens_decoder")
    if named:
        config["added_tokens_decoder"] = {str(new_ids[int(old)]): token for old, token in named.items()}
        _write_json(file, config)


def _check_round_trip(large: Path, small: Path, specials: Sequence[str], *, every_byte: bool) -> None:
    from tokenizers import Tokenizer

    before, after = Tokenizer.from_file(str(large)), Tokenizer.from_file(str(small))
    for text in [_SAMPLE, *([_SAMPLE_OF_BYTES] if every_byte else [])]:
        expected, found = (one.decode(one.encode(text, add_special_tokens=False).ids) for one in (before, after))
        if found != expected:
            raise TokenizerError(f"--keep is too few: {text!r} comes back as {found!r}, expected {expected!r}")
    for name in specials:
        ids = after.encode(name, add_special_tokens=False).ids
        if name not in map(after.id_to_token, ids):
            raise TokenizerError(f"the special token {name!r} is lost: {small} encodes it as {ids}")
    put, wanted = ([token for token in one.encode(_SAMPLE).tokens if token in specials] for one in (after, before))
    if put != wanted:
        raise TokenizerError(f"{small} puts {put} around a text, expected {wanted}")


# ---- dataset


def documents_of(corpus: Corpus, n: int, seed: int, num_pieces: int = 64) -> list[str]:
    """``n`` documents that are not empty, or all where there are fewer, in the corpus's order.

    Of ``num_pieces`` pieces (of some MiB) that are spread evenly, so that a large corpus is not read as a whole; of more
    where those do not hold enough. Any n documents of these are equally likely (reservoir sampling, Algorithm R).
    """
    draw, pieces = random.Random(seed), plan_pieces(corpus)
    num_pieces = min(len(pieces), num_pieces)
    order = [int((number + draw.random()) * len(pieces) / num_pieces) for number in range(num_pieces)]
    rest = sorted(set(range(len(pieces))) - set(order))
    draw.shuffle(rest)
    chosen: list[tuple[int, int, str]] = []
    seen = 0
    for number, index in enumerate([*order, *rest]):
        if number >= num_pieces and seen >= n:
            break
        for place, text in enumerate(read_piece(corpus, pieces[index])):
            if isinstance(text, BadRecord) or not text:
                continue
            seen += 1
            if len(chosen) < n:
                chosen.append((index, place, text))
            elif (slot := draw.randrange(seen)) < n:
                chosen[slot] = (index, place, text)
    return [text for _, _, text in sorted(chosen)]


def decoded_documents(path: str, tokenizer_path: str, token_dtype: str, n: int, seed: int) -> list[str]:
    """``n`` documents of files with tokens, evenly spread, as text without BOS and EOS."""
    import tempfile

    from torchtitan_like.config.sections_training import DataSource
    from torchtitan_like.data.tokens.token_sources import open_token_source

    tokenizer, draw = load_tokenizer(tokenizer_path), random.Random(seed)
    source = DataSource(path=path, format="tokens", token_dtype=token_dtype)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        file = open_token_source(source, tokenizer, with_documents=True, cache_folder=folder, dump_folder=folder)
        count = len(file.offsets) - 1
        numbers = [int((place + draw.random()) * count / n) for place in range(n)] if n < count else range(count)
        texts = []
        for number in numbers:
            ids = file.tokens[int(file.offsets[number]) : int(file.offsets[number + 1])].tolist()
            ids = ids[1:] if ids[:1] == [tokenizer.bos_id] else ids
            texts.append(tokenizer.decode(ids[:-1] if ids[-1:] == [tokenizer.eos_id] else ids))
    return [text for text in texts if text]


def make_dataset(arguments: argparse.Namespace) -> str:
    """Raises DataError."""
    if arguments.format == "tokens":
        if arguments.tokenizer is None:
            raise DataError("--format tokens: expected --tokenizer, which the tokens were made with")
        texts = decoded_documents(
            arguments.input, arguments.tokenizer, arguments.token_dtype, arguments.n, arguments.seed
        )
    else:
        corpus = find_corpus(arguments.input, arguments.format, arguments.text_field, arguments.on_bad_record)
        texts = documents_of(corpus, arguments.n, arguments.seed)
    if not texts:
        raise DataError(f"no text in {arguments.input}")
    with _made(arguments.out) as staged, staged.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    few = " (all there are)" if len(texts) < arguments.n else ""
    size = arguments.out.stat().st_size / 2**20
    return f"{arguments.out}: {len(texts):,} documents{few}, {size:,.1f} MiB"


# ---- model

# Sizes of a tiny model, by the names that families have for them.
SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "head_dim": 16, "hidden_dim": 128, "multiple_of": 32}


def make_model(config_file: str, out: Path, settings: list[str], dtype: str) -> str:
    """Raises ConfigError, DataError, CheckpointError, or ValueError for sizes that do not fit each other."""
    import dataclasses

    import torch

    from torchtitan_like.build import identify
    from torchtitan_like.checkpoint.hf.folder import write_model
    from torchtitan_like.checkpoint.step_folders import write_manifest
    from torchtitan_like.checkpoint.tools.contents import open_contents
    from torchtitan_like.checkpoint.tools.convert import convert
    from torchtitan_like.checkpoint.votes import Votes
    from torchtitan_like.config import dump_toml, load_config
    from torchtitan_like.distributed.data_parallel import DTYPES
    from torchtitan_like.distributed.initialize import initialize, materialize
    from torchtitan_like.distributed.world import HostGroup
    from torchtitan_like.models.spec import get_spec, resolve_args
    from torchtitan_like.stored_config import custom_import_in, import_custom

    asked = ["--job.config_file", config_file, *settings]
    config = load_config(asked)
    import_custom(config, custom_import_in(settings))
    spec = get_spec(config.model.name)
    large = resolve_args(spec, config.model.flavor, config.model.args)
    vocab_size = load_tokenizer(config.model.tokenizer_folder).vocab_size
    sizes = {**SIZES, "vocab_size": vocab_size, "n_kv_heads": _kv_heads(large)}
    known = {field.name for field in dataclasses.fields(large)}
    given = {setting.split("=")[0].removeprefix("--model.args.") for setting in settings}
    changed = {name: value for name, value in sizes.items() if name in known - given and value is not None}
    args = resolve_args(spec, config.model.flavor, {**config.model.args, **changed})
    with torch.device("meta"):
        model = spec.build(args).to(DTYPES[dtype])
    materialize(model, torch.device("cpu"))
    initialize(model, spec.init_table(args), config.debug.seed or 0)
    votes = Votes(HostGroup.alone())
    with _made(out) as staged:
        staged.mkdir()
        identity = dataclasses.replace(identify(config.model), args=args)
        files = write_model(staged, model.state_dict(), identity, votes, dtype=DTYPES[dtype], by_index=False)
        write_manifest(staged, {"kind": "hf", "step": 0, "files": files})
        config = load_config([*asked, *(f"--model.args.{name}={json.dumps(value)}" for name, value in changed.items())])
        convert(
            open_contents(staged),
            staged / "step-0",
            "native",
            dtype=None,
            identity=identity,
            config=dump_toml(config),
        )
        script = str(ROOT / "scripts/make_tiny.py")
        command = shlex.join(["python", script, "model", config_file, str(out), "--dtype", dtype, *settings])
        (staged / "make.sh").write_text(f"cd {shlex.quote(os.getcwd())} &&\n    {command}\n", encoding="utf-8")
    told = "".join(f"\n{name} = {json.dumps(value)}" for name, value in changed.items())
    return f"{out}: {spec.name} with {spec.num_params(args):,} parameters\n\n[model.args]{told}"


def _kv_heads(args: Any) -> int | None:
    """In the proportion of the large model; None where it has no such number."""
    heads, kv_heads = getattr(args, "n_heads", None), getattr(args, "n_kv_heads", None)
    return None if heads is None or kv_heads is None else max(1, SIZES["n_heads"] * kv_heads // heads)


# ---- common


@contextmanager
def _made(out: Path) -> Iterator[Path]:
    """A place to write, which becomes ``out`` at the end if nothing is raised."""
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        yield staged
        os.rename(staged, out)
    finally:
        if staged.is_dir():
            shutil.rmtree(staged)
        staged.unlink(missing_ok=True)


def _write_json(file: Path, content: Json) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("tokenizer", help="a tokenizer with few entries")
    one.add_argument("source", type=Path, help="tokenizer.json, or a folder with one")
    one.add_argument("out", type=Path, help="the folder to make")
    one.add_argument("--keep", type=_positive, default=4000, help="entries, special ones included (default: 4000)")
    one = kinds.add_parser("dataset", help="a few documents of a large text")
    one.add_argument("input", help="file, folder or (in quotes) glob")
    one.add_argument("out", type=Path, help="the .jsonl file to make")
    one.add_argument("--n", type=_positive, default=10_000, help="documents (default: 10000)")
    one.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    one.add_argument("--format", choices=["auto", *ENDINGS, "tokens"], default="auto", help="as in [data.sources]")
    one.add_argument("--text-field", default="text", help="field or column with the text (default: text)")
    one.add_argument("--on-bad-record", choices=["error", "skip"], default="error", help="as data.on_bad_record")
    one.add_argument("--tokenizer", help="of files with tokens: what they were made with")
    one.add_argument("--token-dtype", choices=["auto", "uint16", "uint32"], default="auto", help="of flat .bin files")
    one = kinds.add_parser("model", help="random weights of a family in few sizes")
    one.add_argument("config", help="a training config; further settings may follow, as for training")
    one.add_argument("out", type=Path, help="the folder to make")
    one.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    return parser


def main(argv: list[str]) -> int:
    parser = _parser()
    arguments, settings = parser.parse_known_args(argv)
    if settings and arguments.kind != "model":
        parser.error(f"unknown arguments: {' '.join(settings)}")
    try:
        if arguments.out.exists():
            raise DataError(f"{arguments.out} exists already: give another name")
        if arguments.kind == "tokenizer":
            print(make_tokenizer(arguments.source, arguments.out, arguments.keep))
        elif arguments.kind == "dataset":
            print(make_dataset(arguments))
        else:
            print(make_model(arguments.config, arguments.out, settings, arguments.dtype))
    except (CheckpointError, ConfigError, DataError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
