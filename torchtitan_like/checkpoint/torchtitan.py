"""Continue a run of TorchTitan 0.2 from its full checkpoint. `tools.write_torchtitan` writes one.

Its checkpoint is a folder of torch.distributed.checkpoint (DCP) with these names:

| names | content |
| --- | --- |
| `<parameter>` | a weight |
| `optimizer.state.<parameter>.<key>` | Adam's `exp_avg`, `exp_avg_sq` and `step` |
| `lr_scheduler.last_epoch` | the number of steps that the schedule has made |
| `train_state.step`, `train_state.ntokens_seen` | steps, and tokens of one data-parallel rank |
| `dataloader.world_size`, `dataloader.dp_rank_<n>` | data-parallel degree; a position for each rank |

Weights and moments of a parameter have the same rows, so the model's table of names orders both.
The data positions belong to TorchTitan's dataset and have no counterpart here.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_like.checkpoint.errors import SettingsError
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.stateful import Progress, Stateful
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import Rows

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.dcp_source import DcpSource
    from torchtitan_like.checkpoint.start import Start

logger = logging.getLogger()

OPTIMIZERS = ("Adam", "AdamW")  # of TorchTitan, as torch.optim names them
MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = re.compile(r"state\.(?P<parameter>.+)\.(?P<key>exp_avg|exp_avg_sq|step)")
# Entries that are not weights. The weights are at the top level too.
_NOT_THE_MODEL = re.compile(r"(optimizer|lr_scheduler|dataloader|train_state)\b.*")
_PREFIX = "model."  # prefix of the weights' names in older TorchTitan checkpoints
_STEP = "train_state.step"
_TOKENS = "train_state.ntokens_seen"
_NUM_DATA_RANKS = "dataloader.world_size"
_EPOCH = "lr_scheduler.last_epoch"


class AdamSettings(NamedTuple):
    """The optimizer of a run whose parameters all have the same settings.

    name: in `OPTIMIZERS`. lr: learning rate of the next step. peak_lr: what the schedule multiplies.
    """

    name: str
    lr: float
    peak_lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    implementation: str


def read_step(folder: Path) -> int:
    """Return the step of a TorchTitan checkpoint. Raises CheckpointError if it has only weights."""
    step: int = _read_numbers(folder, [_STEP])[_STEP]
    return step


def check_data_choice(
    start: Start, skip_steps: Sequence[Sequence[int]], excluded: Collection[str]
) -> None:
    """Raise CheckpointError unless the settings say where the data of the run start.

    skip_steps: `training.skip_steps`. excluded: `checkpoint.exclude_from_loading`.
    """
    if "dataloader" in excluded or (skip_steps and skip_steps[0][0] == 1):
        return
    raise SettingsError(
        f"{start.path} has a dataloader state of TorchTitan, which cannot be loaded. Expected a "
        "choice, because the order of samples is another one here. Skip as many samples as "
        f"{start.step} steps of this run read: --training.skip_steps '[[1, {start.step}]]'. Or "
        "start the data from the beginning: --checkpoint.exclude_from_loading dataloader"
    )


def load_run(
    start: Start, states: Mapping[str, Stateful], group: HostGroup, identity: Identity
) -> None:
    """Load a full TorchTitan checkpoint into `states`, in place, on every layout. A collective.

    states: of the keys `model`, `optimizer`, `lr_scheduler` and `train_state`, in any selection.
    Raises CheckpointError on every rank if an entry is missing or does not match the run.
    """
    path = start.path
    assert path is not None
    if "model" in states:
        _load_tensors(path, states["model"].state_dict(), "weights", group, identity)
    if "optimizer" in states:
        _load_optimizer(path, start.step, states["optimizer"], group, identity)
    if "lr_scheduler" in states:
        group.run_on_leader(partial(_check_schedule, path, start.step))
    if "train_state" in states:
        tokens = group.run_on_leader(partial(_count_tokens, path))
        progress = Progress(step=start.step, n_tokens_seen=tokens)
        states["train_state"].load_state_dict({"json": json.dumps(asdict(progress))})


def _load_tensors(
    path: Path, tensors: Mapping[str, Any], key: str, group: HostGroup, identity: Identity
) -> None:
    """Load the weights, or the moment `key`, into `tensors` by native parameter name."""
    from torchtitan_like.checkpoint.hf.load import load_weights

    rows = meta_rows(identity, path)
    select = partial(_moment_names, key) if key in MOMENTS else weight_names
    source = group.run_on_leader(lambda: open_torchtitan(path, select))
    tied = identity.spec.tied(identity.args)
    load_weights(source, tensors, rows=rows, tied=tied, group=group)


def meta_rows(identity: Identity, path: Path) -> Rows:
    """Return the table of TorchTitan's and Meta's names. Raises CheckpointError if there is none.

    path: of the checkpoint, for the message.
    """
    spec = identity.spec
    if spec.meta_names is None:
        raise SettingsError(
            f"{path} cannot be loaded into {spec.name}, which has no table of TorchTitan's or "
            "Meta's names. Expected a native step or Hugging Face safetensors. Convert it first"
        )
    return spec.meta_names(identity.args)


def weight_names(names: Iterable[str]) -> dict[str, str]:
    """Return the stored name of each weight in a TorchTitan checkpoint, by parameter name."""
    weights = [name for name in names if not _NOT_THE_MODEL.fullmatch(name)]
    has_prefix = bool(weights) and all(name.startswith(_PREFIX) for name in weights)
    return {name.removeprefix(_PREFIX) if has_prefix else name: name for name in weights}


def open_torchtitan(
    folder: Path, select: Callable[[Iterable[str]], dict[str, str]] = weight_names
) -> DcpSource:
    """Open the weights. Raises CheckpointError; DamagedError if a file is absent or too short.

    select: returns the stored names of the wanted tensors, by parameter name.
    """
    from torchtitan_like.checkpoint.dcp_source import DcpSource

    source = DcpSource(folder)
    # All ranks receive this. The other entries would triple its size.
    selected = source.select(select(source.stored))
    selected.check()
    return selected


def _moment_names(key: str, names: Iterable[str]) -> dict[str, str]:
    """Return the stored name of each parameter's moment `key`, by parameter name."""
    matches = {name: _STATE.fullmatch(name.removeprefix("optimizer.")) for name in names}
    return {
        match["parameter"]: name
        for name, match in matches.items()
        if match and match["key"] == key and name.startswith("optimizer.")
    }


def _load_optimizer(
    path: Path, step: int, optimizer: Stateful, group: HostGroup, identity: Identity
) -> None:
    state = optimizer.state_dict()
    matches = {name: _STATE.fullmatch(name) for name in state}
    if others := sorted(name for name, match in matches.items() if match is None):
        raise SettingsError(
            f"{path} cannot be resumed: TorchTitan has no counterpart of {', '.join(others[:5])}. "
            "Expected the state of Adam alone. Load only the weights: "
            "checkpoint.initial_load_model_only = true"
        )
    by_key: dict[str, dict[str, Any]] = {}
    for name, match in matches.items():
        assert match is not None
        by_key.setdefault(match["key"], {})[match["parameter"]] = state[name]
    for moment in MOMENTS:
        _load_tensors(path, by_key.get(moment, {}), moment, group, identity)
    updates = group.run_on_leader(partial(_count_updates, path, step))
    for tensor in by_key.get("step", {}).values():
        tensor.fill_(updates)


def _count_updates(path: Path, step: int) -> float:
    """Return Adam's step, which must be the same for all parameters."""
    entries = _read(path, lambda names: _moment_names("step", names).values())
    updates = {float(value) for value in entries.values()}
    if updates != {float(step)}:
        raise SettingsError(
            f"{path}: Adam's steps are {sorted(updates)}. Expected {step} for every parameter, "
            "which is the step of the run. Load only the weights: "
            "checkpoint.initial_load_model_only = true"
        )
    return float(step)


def _check_schedule(path: Path, step: int) -> None:
    """The learning rate is a function of the step here, so both positions must be equal."""
    position = _read_numbers(path, [_EPOCH])[_EPOCH]
    if position != step:
        raise SettingsError(
            f"{path}: {_EPOCH} is {position}. Expected {step}, the step of the run. To ignore it, "
            "add lr_scheduler to checkpoint.exclude_from_loading"
        )
    logger.warning(
        f"{path} holds the position of TorchTitan's schedule, not its settings. This run uses its own "
        "[optimizer] and [lr_scheduler]. With equal settings, its learning rates are equal"
    )


def _count_tokens(path: Path) -> int:
    """Return the tokens that all data-parallel ranks have read."""
    numbers = _read_numbers(path, [_TOKENS, _NUM_DATA_RANKS])
    tokens: int = numbers[_TOKENS] * numbers[_NUM_DATA_RANKS]
    return tokens


def _read_numbers(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read integers by stored name. Raises CheckpointError if one is absent or not an integer."""
    numbers = _read(folder, lambda stored: [name for name in names if name in stored])
    if problems := [name for name in names if type(numbers.get(name)) is not int]:
        raise SettingsError(
            f"{folder} has no number {', '.join(problems)}. Expected a full checkpoint of TorchTitan "
            "0.2. Load only the weights: checkpoint.initial_load_model_only = true"
        )
    return numbers


def _read(folder: Path, select: Callable[[Collection[str]], Iterable[str]]) -> dict[str, Any]:
    """Read the entries whose stored names `select` returns."""
    from torchtitan_like.checkpoint.dcp_source import DcpSource

    source = DcpSource(folder)
    return {name: source.read(name) for name in select([*source.stored, *source.object_names])}
