"""Write a complete Hugging Face directory: weights, model config, generation config, tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.hf.export import write_export
from torchtitan_like.checkpoint.hf.safetensors_file import INDEX, read_weight_map
from torchtitan_like.checkpoint.identity import Identity, SpecialToken
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.extents import FileRecord, write_file
from torchtitan_like.util.files import sync_path
from torchtitan_like.util.reading import read_json

# Copied from the tokenizer's folder if they exist.
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "*.model", "original/tokenizer.model", "*.tiktoken",
    "chat_template.*", "generation_config.json",
)  # fmt: skip
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ORIGINAL = "original"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # a token in base64 and its rank


def write_model(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    identity: Identity,
    group: HostGroup,
    *,
    dtype: torch.dtype | None,
    shard_bytes: int = 5 * 10**9,
    by_index: bool = True,
) -> dict[str, FileRecord]:
    """Write a complete directory for `transformers`; all ranks call it together.

    `write_export` writes the weights, `write_folder` the other files. config.json contains `dtype`,
    or the most common dtype of the weights if `dtype` is None.

    by_index: divide the weights into files as in the index of the model's assets, if it exists.

    Returns the records of all files on every rank.
    """
    spec, args = identity.spec, identity.args
    records = write_export(
        folder,
        tensors,
        rows=spec.hf_names(args),
        tied=spec.tied(args),
        copies=spec.hf_copies(args),
        dtype=dtype,
        group=group,
        shard_bytes=shard_bytes,
        index=group.run_on_leader(lambda: read_index(identity.hf_assets)) if by_index else None,
    )
    floating = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    dtypes = [each for rank_dtypes in group.gather_objects(floating) for each in rank_dtypes]
    by_name = sorted(set(dtypes), key=str)
    config_dtype = dtype or max(by_name, key=dtypes.count, default=torch.float32)

    def complete() -> dict[str, FileRecord]:
        bos, eos = identity.special_tokens()
        config = spec.hf_config(args)
        assets = identity.tokenizer
        return write_folder(
            folder, config=config, dtype=config_dtype, assets=assets, bos=bos, eos=eos
        )

    return records | group.run_on_leader(complete)


def write_folder(
    folder: Path,
    *,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    assets: Path,
    bos: SpecialToken | None,
    eos: SpecialToken | None,
) -> dict[str, FileRecord]:
    """Write the files that `transformers` needs next to the weights; rank 0 only.

    Returns the records of the files.

    config: the model's sizes (`ModelSpec.hf_config`).
    dtype: dtype of the exported weights.
    assets: the tokenizer's folder or file.
    bos, eos: None if the tokenizer has none. Their ids in an existing config.json of `assets`
        precede: a model may end a text with one of several tokens.
    """
    source = assets if assets.is_dir() else assets.parent
    files = [path for pattern in _COPIED for path in sorted(source.glob(pattern))]
    contents = {_name_in_export(path, source): path.read_bytes() for path in files}
    special = {"bos": bos, "eos": eos}
    ids = _stored_token_ids(source)
    if ids is None:
        ids = {f"{name}_token_id": token.id if token else None for name, token in special.items()}
    texts = {f"{name}_token": token.text for name, token in special.items() if token}
    # Older releases of transformers read torch_dtype, newer ones dtype.
    dtype_name = str(dtype).removeprefix("torch.")
    dtypes = {"torch_dtype": dtype_name, "dtype": dtype_name}
    contents["config.json"] = _as_json({**config, **ids, **dtypes})
    contents.setdefault("generation_config.json", _as_json({"_from_model_config": True, **ids}))
    # Without this file transformers guesses the tokenizer class and has no special tokens.
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **texts}
    contents.setdefault("tokenizer_config.json", _as_json(tokenizer_config))
    records = {}
    for file, content in contents.items():
        (folder / file).parent.mkdir(exist_ok=True)
        records[file] = write_file(folder / file, content)
    for parent in sorted({(folder / file).parent for file in contents}, reverse=True):
        sync_path(parent)
    return records


def _stored_token_ids(source: Path) -> dict[str, Any] | None:
    """Return the ids of special tokens in a config.json as they are; None without the file.

    An absent id stays absent. Raises CheckpointError if the file cannot be read.
    """
    file = source / "config.json"
    if not file.is_file():
        return None
    try:
        config = read_json(file)
        return {key: config[key] for key in _TOKEN_IDS if key in config}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is not valid: {type(error).__name__} {error}") from error


def _name_in_export(path: Path, source: Path) -> str:
    """Return the path of a copied file in the export.

    Meta's tiktoken table goes to `original/`, as in Meta's repositories.
    llama.cpp and other readers of Hugging Face folders expect a SentencePiece model in a
    `tokenizer.model` at the top level.
    """
    if path.suffix == ".model" and _TIKTOKEN_LINE.match(path.read_bytes()[:4096]):
        return f"{ORIGINAL}/{path.name}"
    return path.relative_to(source).as_posix()


def read_index(assets: Path) -> dict[str, str] | None:
    """Return the weight_map of a model folder's index; None if it has no index."""
    return read_weight_map(assets / INDEX) if (assets / INDEX).is_file() else None


def _as_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
