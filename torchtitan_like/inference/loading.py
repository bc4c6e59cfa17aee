"""Load the model and the tokenizer of a checkpoint, on one rank or with tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan_like.build import identify
from torchtitan_like.checkpoint.averages import check_average
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.loading import load_states
from torchtitan_like.checkpoint.start import Start, format_of
from torchtitan_like.checkpoint.stateful import ModelState
from torchtitan_like.checkpoint.step_folders import read_manifest, suggest_step
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.config.problems import Problem
from torchtitan_like.data.errors import TokenizerError
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer
from torchtitan_like.distributed.data_parallel import DTYPES
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.initialize import materialize
from torchtitan_like.distributed.world import LaunchedAs, World, join_world
from torchtitan_like.models.spec import ModelSpec, with_reference_attention
from torchtitan_like.stored_config import check_model_name, find_assets, load_trusted
from torchtitan_like.util.reading import read_json
from torchtitan_like.util.run_directory import CONFIG, MANIFEST

# Of collectives, while the slowest rank reads its shard of the weights.
TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to generate, and what its text needs.

    assets: the tokenizer's folder.
    bos_id: token before each text, as in training; None: no token.
    end_ids: tokens that end a text, of the tokenizer and of generation_config.json.
    context: maximum number of tokens of a text.
    step: the training step of the weights.
    """

    model: nn.Module
    tokenizer: Tokenizer
    assets: Path
    bos_id: int | None
    end_ids: frozenset[int]
    context: int
    step: int
    device: torch.device


@contextmanager
def inference_world(launched: LaunchedAs) -> Iterator[World]:
    """Join the launched ranks, which shard the model by tensor parallelism."""
    dims = ParallelDims(launched.world_size, tp=launched.world_size)
    world = join_world(
        launched, dims, TIMEOUT, TIMEOUT, needs_mesh=False, agree=lambda gather: None
    )
    try:
        yield world
    finally:
        world.leave()


def load_checkpoint(
    checkpoint: Path,
    world: World,
    *,
    assets: str | None = None,
    custom_import: str = "",
    dtype: str | None = None,
    averaged: bool = False,
) -> LoadedModel:
    """Load the model and the tokenizer of a published step, or of an export. A collective.

    assets: the tokenizer's folder; None: the folder of an export, or the one in a step's config.
    custom_import: see `stored_config.load_trusted`. dtype: of the weights; None: as stored.
    averaged: load the averaged weights of a step (`[ema]`).
    Raises CheckpointError, ConfigError, TokenizerError.
    """
    manifest = read_manifest(checkpoint)
    if manifest is None:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint: it has no {MANIFEST}. Expected a published step-N "
            f"or an export: {suggest_step(checkpoint)}"
        )
    if averaged:
        check_average(checkpoint, manifest)
    config = load_trusted(checkpoint / CONFIG, custom_import)
    check_model_name(config, custom_import)
    is_export = manifest["kind"] == "hf"
    in_config = find_assets(config.model.tokenizer_folder, checkpoint)
    folder = Path(assets or (checkpoint if is_export else in_config)).expanduser()
    if not folder.exists():
        raise TokenizerError(
            f"there is no tokenizer at {folder}. Expected the tokenizer of the model: give its "
            "folder with --assets"
        )
    tokenizer = load_tokenizer(folder)
    folder = folder if folder.is_dir() else folder.parent
    end_ids = _end_ids(folder, tokenizer)
    if dtype is None:
        dtype = _dtype_of_export(checkpoint) if is_export else config.training.dtype
    model = load_model(checkpoint, config, world, dtype, averaged=averaged)
    identity = identify(config.model)
    limits = identity.spec.constraints(identity.args)
    return LoadedModel(
        model,
        tokenizer,
        folder,
        tokenizer.bos_id if config.data.add_bos else None,
        end_ids,
        limits.get("max_seq_len", config.training.seq_len),
        manifest["step"],
        world.device,
    )


def load_model(
    checkpoint: Path, config: JobConfig, world: World, dtype: str, *, averaged: bool = False
) -> nn.Module:
    """Build the config's model, sharded over the ranks, and load its weights. A collective.

    dtype: of the weights. averaged: see `load_checkpoint`.
    Raises CheckpointError, and ConfigError if the ranks do not divide the model's heads.
    """
    identity = identify(config.model)
    spec, args = identity.spec, with_reference_attention(identity.args)
    _check_heads(spec, args, world.dims.tp)
    with torch.device("meta"):
        model = spec.build(args).to(DTYPES[dtype])
    if world.mesh is not None:
        from torchtitan_like.distributed.tensor import apply_tensor_parallel

        apply_tensor_parallel(model, spec, world.mesh["tp"], sequence_parallel=False)
    materialize(model, world.device)
    stored_format = format_of(checkpoint) or "step"
    reason = "named on the command line"
    manifest = read_manifest(checkpoint)
    start = Start("warm", 0, checkpoint, reason, None, stored_format, manifest, averaged)
    votes = Votes(world.checkpoint_group)
    load_states(start, {"model": ModelState([model])}, votes, identity)
    return model.eval()


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


def _check_heads(spec: ModelSpec, args: Any, num_ranks: int) -> None:
    limits = spec.constraints(args)
    problems = [
        Problem(
            "",
            None,
            f"a number of ranks that divides {name} = {limits[name]} of {spec.name}; there are "
            f"{num_ranks} ranks",
            "start another number of ranks",
        )
        for name in ("n_heads", "n_kv_heads")
        if limits.get(name, 0) % num_ranks
    ]
    if problems:
        raise ConfigError(problems)
