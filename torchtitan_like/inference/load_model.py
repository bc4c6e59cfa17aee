"""Load the model and the tokenizer of a checkpoint in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan_like.build import identify
from torchtitan_like.checkpoint.errors import CheckpointError, with_checkpoint_errors
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.loading import load_states
from torchtitan_like.checkpoint.start import Start, format_of
from torchtitan_like.checkpoint.stateful import ModelState
from torchtitan_like.checkpoint.step_folders import read_manifest, suggest_step
from torchtitan_like.checkpoint.stored_weights import check_average
from torchtitan_like.data.data_errors import TokenizerError
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer
from torchtitan_like.distributed.data_parallel import DTYPES
from torchtitan_like.distributed.initialize import materialize
from torchtitan_like.distributed.world import HostGroup, pick_device
from torchtitan_like.models.spec import with_reference_attention
from torchtitan_like.stored_config import check_model_name, find_run_assets, load_trusted
from torchtitan_like.util.host import available_bytes
from torchtitan_like.util.reading import read_json
from torchtitan_like.util.run_directory import CONFIG, MANIFEST

EXPORT_REMEDY = "`titan ckpt export`, and then vLLM or transformers on several devices"


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to generate, and what its text needs.

    bos_id: token before each text, as in training; None: no token.
    end_ids: tokens that end a text, of the tokenizer and of generation_config.json.
    context: maximum number of tokens of a text.
    """

    model: nn.Module
    tokenizer: Tokenizer
    bos_id: int | None
    end_ids: frozenset[int]
    context: int


def read_checkpoint(checkpoint: Path, *, averaged: bool = False) -> dict[str, Any]:
    """Return the manifest of a published step, or of an export.

    averaged: it must contain averaged weights (`[ema]`). Raises CheckpointError.
    """
    manifest = read_manifest(checkpoint)
    if manifest is None:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint: it has no {MANIFEST}. Expected a published step-N "
            f"or an export: {suggest_step(checkpoint)}"
        )
    if averaged:
        check_average(checkpoint, manifest)
    return manifest


def load_checkpoint(
    checkpoint: Path,
    *,
    assets: str | None = None,
    custom_import: str = "",
    dtype: str | None = None,
    averaged: bool = False,
) -> LoadedModel:
    """Load the model and the tokenizer of a published step, or of an export.

    assets: the tokenizer's folder; None: the folder of an export, or the one in a step's config.
    custom_import: see `stored_config.load_trusted`. dtype: of the weights; None: as stored.
    averaged: load the averaged weights of a step (`[ema]`).
    Raises CheckpointError, ConfigError, TokenizerError.
    """
    manifest = read_checkpoint(checkpoint, averaged=averaged)
    config = load_trusted(checkpoint / CONFIG, custom_import)
    check_model_name(config, custom_import)
    is_export = manifest["kind"] == "hf"
    in_config = find_run_assets(config.model.tokenizer_folder, checkpoint)
    folder = Path(assets or (checkpoint if is_export else in_config)).expanduser()
    if not folder.exists():
        raise TokenizerError(
            f"there is no tokenizer at {folder}. Expected the tokenizer of the model: give its "
            "folder with --assets"
        )
    tokenizer = load_tokenizer(folder)
    end_ids = _end_ids(folder if folder.is_dir() else folder.parent, tokenizer)
    if dtype is None:
        dtype = _dtype_of_export(checkpoint) if is_export else config.training.dtype
    identity = identify(config.model)
    model = load_model(checkpoint, identity, dtype, averaged=averaged)
    limits = identity.spec.constraints(identity.args)
    return LoadedModel(
        model,
        tokenizer,
        tokenizer.bos_id if config.data.add_bos else None,
        end_ids,
        limits.get("max_seq_len", config.training.seq_len),
    )


def load_model(
    checkpoint: Path, identity: Identity, dtype: str, *, averaged: bool = False
) -> nn.Module:
    """Build a model on the GPU, or else the CPU, and load its weights.

    dtype: of the weights. averaged: see `load_checkpoint`. Raises CheckpointError.
    """
    device = pick_device(0)
    with torch.device("meta"):
        model = identity.spec.build(with_reference_attention(identity.args)).to(DTYPES[dtype])
    _check_memory(checkpoint, model, device)
    materialize(model, device)
    stored_format = format_of(checkpoint) or "native"
    reason = "named on the command line"
    manifest = read_manifest(checkpoint)
    start = Start("warm", 0, checkpoint, reason, None, stored_format, manifest, averaged)
    load_states(
        start, {"model": ModelState([model])}, with_checkpoint_errors(HostGroup.alone()), identity
    )
    return model.eval()


def _check_memory(checkpoint: Path, model: nn.Module, device: torch.device) -> None:
    """Raise CheckpointError if the weights need more memory than the device has."""
    needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    if needed > free:
        raise CheckpointError(
            f"the weights of {checkpoint} need {needed / 2**30:,.1f} GiB, and {device} has "
            f"{free / 2**30:,.1f} GiB free. Expected a model that fits one device: give --dtype "
            f"bfloat16, or use {EXPORT_REMEDY}"
        )


def _dtype_of_export(folder: Path) -> str:
    """Return the dtype in an export's config.json. Raises CheckpointError."""
    path = folder / "config.json"
    try:
        dtype = str(read_json(path)["dtype"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} has no dtype: {type(error).__name__} {error}. Expected the file that the "
            "export wrote: give --dtype, or export again"
        ) from error
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{path} has dtype {dtype!r}. Expected one of {', '.join(DTYPES)}: give --dtype"
        )
    return dtype


def _end_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a text. Raises TokenizerError for a malformed file."""
    end_ids = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    path = folder / "generation_config.json"
    if path.exists():
        try:
            more = read_json(path).get("eos_token_id")
            end_ids.update(more if isinstance(more, list) else () if more is None else (int(more),))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise TokenizerError(
                f"{path} is malformed: {type(error).__name__} {error}. Expected an object with the "
                "ids in eos_token_id: download it again"
            ) from error
    return frozenset(end_ids)
