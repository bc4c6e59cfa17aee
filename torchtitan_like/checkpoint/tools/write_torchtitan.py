"""Write a full native step as a checkpoint that TorchTitan 0.2 resumes.

`checkpoint.torchtitan` lists the names in such a folder. The data position has no counterpart
there, so it is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.source import Source
from torchtitan_like.checkpoint.staged_output import StagedOutput
from torchtitan_like.checkpoint.tools.convert import Identify, meta_weights, native_weights
from torchtitan_like.checkpoint.tools.open_checkpoint import checkpoint_errors, open_checkpoint
from torchtitan_like.checkpoint.torchtitan import MOMENTS, AdamSettings
from torchtitan_like.config import JobConfig
from torchtitan_like.util.files import refuse_existing

_STATE = "optimizer.state."
_PROGRESS = "train_state.json"
# Function that returns a run's settings for the step after the given one.
ReadSettings = Callable[[JobConfig, int], AdamSettings]


def convert_to_torchtitan(
    source: Path, out: Path, *, num_data_ranks: int, identify: Identify, read_settings: ReadSettings
) -> None:
    """Write the full native step `source` as the new folder `out`. Needs memory for all tensors.

    num_data_ranks: data-parallel ranks of the run that loads it. TorchTitan counts the tokens of
    one of them. Raises CheckpointError, OSError.
    """
    step = open_checkpoint(source)
    if step.format != "native" or _PROGRESS not in step.object_names:
        raise CheckpointError(
            f"{source} has no optimizer and progress of this program. Expected a full step of a run: "
            "for the weights alone, use --to dcp"
        )
    identity, config = identify(source)
    if tied := identity.spec.tied(identity.args):
        raise CheckpointError(
            f"{source} has tied weights: {tied[0][0]} is {tied[0][1]}. Expected separate weights, "
            "because TorchTitan 0.2 trains no others: for the weights alone, use --to dcp"
        )
    settings = read_settings(config, _step_of(step))
    with StagedOutput(out) as output:
        refuse_existing(out)
        state = torchtitan_state(step, identity, settings, num_data_ranks)
        with checkpoint_errors(output.final):
            writer = dcp.FileSystemWriter(output.path, thread_count=1)
            dcp.save(state, storage_writer=writer, no_dist=True)
        output.publish(None)


def torchtitan_state(
    source: Source, identity: Identity, settings: AdamSettings, num_data_ranks: int
) -> dict[str, Any]:
    """Return the state dict that TorchTitan's checkpointer saves, without its data loader."""
    step = _step_of(source)
    weights = meta_weights(native_weights(source, identity), identity)
    moments = {key: meta_weights(_read_moment(source, key), identity) for key in MOMENTS}
    group, schedule = _settings_as_torch(settings, step)
    optimizer: dict[str, Any] = {}
    for name in moments[MOMENTS[0]]:
        optimizer[f"state.{name}.step"] = torch.tensor(float(step))
        optimizer |= {f"state.{name}.{key}": values[name] for key, values in moments.items()}
        optimizer |= {f"param_groups.{name}.{key}": value for key, value in group.items()}
    progress = json.loads(source.read(_PROGRESS))
    return {
        **weights,
        "optimizer": optimizer,
        "lr_scheduler": schedule,
        "train_state": {
            "step": step,
            "ntokens_seen": progress["n_tokens_seen"] // num_data_ranks,
        },
    }


def _step_of(source: Source) -> int:
    step: int = source.manifest["step"]
    return step


def _read_moment(source: Source, moment: str) -> dict[str, Tensor]:
    """Return a moment of every parameter by native parameter name."""
    names = [name for name in source.stored if name.startswith(_STATE)]
    if others := [n for n in names if not n.endswith((".step", *(f".{m}" for m in MOMENTS)))]:
        raise CheckpointError(
            f"{source.path} has the optimizer state {others[0]}. Expected the state of Adam alone, "
            "because TorchTitan has no counterpart: for the weights alone, use --to dcp"
        )
    moments = source.read_tensors(name for name in names if name.endswith(f".{moment}"))
    return {
        name.removeprefix(_STATE).removesuffix(f".{moment}"): tensor
        for name, tensor in moments.items()
    }


def _settings_as_torch(settings: AdamSettings, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameter group and the state of the schedule, as this release of torch has them."""
    optimizer = getattr(torch.optim, settings.name)(
        [torch.zeros(1, requires_grad=True)],
        lr=settings.peak_lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=settings.implementation == "fused",
        foreach=settings.implementation == "foreach",
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: settings.lr / settings.peak_lr
    )
    [group] = optimizer.param_groups
    scheduler_state = scheduler.state_dict() | {"last_epoch": step, "_step_count": step + 1}
    return {key: value for key, value in group.items() if key != "params"}, scheduler_state
