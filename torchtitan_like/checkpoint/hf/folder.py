"""What a Hugging Face directory holds beside the weights: the model's config, generation settings, the tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.extents import FileRecord, write_file
from torchtitan_like.checkpoint.hf.direct import write_export
from torchtitan_like.checkpoint.hf.safetensors_file import INDEX
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.util.files import sync_path
from torchtitan_like.util.reading import read_json

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.loading import Identity

# Taken over from the folder of the tokenizer where they are.
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "*.model", "original/tokenizer.model", "*.tiktoken", "chat_template.*", "generation_config.json",
)  # fmt: skip
ORIGINAL = "original"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # a token in base64 and its rank


class SpecialToken(NamedTuple):
    """A token that begins or ends a text."""

    text: str
    id: int


def write_model(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    identity: Identity,
    votes: Votes,
    *,
    dtype: torch.dtype | None,
    executor: Literal["direct", "consolidate"] = "direct",
    shard_bytes: int = 5 * 10**9,
    by_index: bool = True,
) -> dict[str, FileRecord]:
    """A complete directory for `transformers`: weights as `write_export` does, and all that `write_folder` adds.

    All ranks call it together; the records of every file, on every rank. by_index: cut files as the index of the model's
    assets does, where there is one. config.json names `dtype`, or else the commonest of the weights.
    """
    spec, args = identity.spec, identity.args
    records = write_export(
        folder,
        tensors,
        rows=spec.hf_names(args),
        tied=spec.tied(args),
        dtype=dtype,
        group=votes.group,
        executor=executor,
        shard_bytes=shard_bytes,
        index=votes.leader_does(lambda: read_index(identity.hf_assets)) if by_index else None,
    )
    floating = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    of_all_ranks = [found for part in votes.all_do(lambda: floating) for found in part]
    named = dtype or max(
        sorted(set(of_all_ranks), key=str), key=of_all_ranks.count, default=torch.float32
    )

    def complete() -> dict[str, FileRecord]:
        bos, eos = identity.special_tokens()
        config = spec.hf_config(args)
        return write_folder(folder, config=config, dtype=named, assets=identity.tokenizer, bos=bos, eos=eos)

    return records | votes.leader_does(complete)


def write_folder(
    folder: Path,
    *,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    assets: Path,
    bos: SpecialToken | None,
    eos: SpecialToken | None,
) -> dict[str, FileRecord]:
    """Make an export complete for `transformers`; called on rank 0 alone. Returns what was written.

    config: the model's sizes (`ModelSpec.hf_config`). dtype: that of the exported weights. assets: the tokenizer's folder,
    or its file. bos, eos: None where the tokenizer has none. Raises OSError.
    """
    source = assets if assets.is_dir() else assets.parent
    files = [path for pattern in _COPIED for path in sorted(source.glob(pattern))]
    contents = {_name_in_export(path, source): path.read_bytes() for path in files}
    ids = {f"{name}_token_id": token.id if token else None for name, token in (("bos", bos), ("eos", eos))}
    texts = {f"{name}_token": token.text for name, token in (("bos", bos), ("eos", eos)) if token}
    name = str(dtype).removeprefix("torch.")  # older releases of transformers look for torch_dtype, newer for dtype
    contents["config.json"] = _as_json({**config, **ids, "torch_dtype": name, "dtype": name})
    contents.setdefault("generation_config.json", _as_json({"_from_model_config": True, **ids}))
    # Without it the class is guessed from the model's type, and the tokens that begin and end a text are unknown.
    contents.setdefault("tokenizer_config.json", _as_json({"tokenizer_class": "PreTrainedTokenizerFast", **texts}))
    records = {}
    for file, content in contents.items():
        (folder / file).parent.mkdir(exist_ok=True)
        records[file] = write_file(folder / file, content)
    for written in sorted({(folder / file).parent for file in contents}, reverse=True):
        sync_path(written)
    return records


def _name_in_export(path: Path, source: Path) -> str:
    """Where a copied file belongs: Meta's tiktoken table lies in `original/`, as in Meta's own releases.

    Readers of Hugging Face folders, llama.cpp among them, take a `tokenizer.model` beside the weights for SentencePiece.
    """
    if path.suffix == ".model" and _TIKTOKEN_LINE.match(path.read_bytes()[:4096]):
        return f"{ORIGINAL}/{path.name}"
    return path.relative_to(source).as_posix()


def read_index(assets: Path) -> dict[str, str] | None:
    """The index of a model's folder, its weight_map; None when it has none."""
    return read_weight_map(assets / INDEX) if (assets / INDEX).is_file() else None


def read_weight_map(path: Path) -> dict[str, str]:
    """The weight_map of a `model.safetensors.index.json`: tensor -> file. Raises CheckpointError."""
    try:
        return {str(name): str(file) for name, file in read_json(path)["weight_map"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as an index: {type(error).__name__} {error}") from error


def _as_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
