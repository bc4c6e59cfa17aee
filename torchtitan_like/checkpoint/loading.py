"""Filling a run from a checkpoint of any known format, in place, verified as it is read."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.extents import check_sizes
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.probes import wait_until_visible
from torchtitan_like.checkpoint.stateful import Stateful
from torchtitan_like.checkpoint.step_folders import file_records
from torchtitan_like.checkpoint.votes import Votes

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.start import Start

logger = logging.getLogger()


def load_states(
    start: Start,
    states: Mapping[str, Stateful],
    votes: Votes,
    identity: Identity,
    *,
    exclude: Collection[str] = (),
    verify: str = "read",
    quantized: bool = False,
) -> None:
    """Read the checkpoint of `start` into `states`, in place, on every rank together.

    A warm start reads the weights alone, from any format; a resume reads all keys but those in `exclude`. Raises
    DamagedError when bytes are not those that were written, else CheckpointError; always on every rank.
    """
    begin = time.monotonic()
    keys = ["model"] if start.kind == "warm" else [key for key in states if key not in exclude]
    if start.format == "step":
        _load_step(start, {key: states[key] for key in keys}, votes, verify)
    else:
        _load_weights(start, states["model"], votes, identity, quantized)
    left_out = sorted(set(states) - set(keys))
    note = f" (not loaded: {', '.join(left_out)})" if left_out else ""
    logger.info(f"Loaded {start.path} in {time.monotonic() - begin:.2f} seconds{note}")


def _load_step(start: Start, states: Mapping[str, Stateful], votes: Votes, verify: str) -> None:
    """A step of ours: full, or the weights alone."""
    from torchtitan_like.checkpoint.dcp_storage import (
        METADATA,
        ExtentReader,
        load_planned,
        verify_rest,
    )
    from torchtitan_like.checkpoint.unpickle import CheckedPlanner, CheckedReader

    path, group = start.path, votes.group
    assert path is not None and start.manifest is not None
    reader: Any
    if start.manifest["format_version"] == 1:
        logger.warning(
            f"{path} was written in format 1, without hashes: what is read from it cannot be verified"
        )
        reader, others = CheckedReader(path), {}
    else:
        records = file_records(start.manifest)
        reader = ExtentReader(path, records)
        # What loading reads is verified as it is read; of the rest, the small files always.
        others = {
            n: record
            for n, record in records.items()
            if verify == "full" or not n.startswith("shard-")
        }
    dicts = {key: state.state_dict() for key, state in states.items()}
    flat = {f"{key}.{name}": value for key, part in dicts.items() for name, value in part.items()}
    stored: dict[str, Any] = {}
    targets: dict[str, Any] = {}

    def look() -> None:
        wait_until_visible(
            path / METADATA
        )  # rank 0 has found all files whole: what a node does not see is no damage
        stored.update(reader.read_metadata().state_dict_metadata)

    def load() -> None:
        targets.update(_targets(str(path), stored, flat, surplus, may_convert=start.kind == "warm"))
        load_planned(targets, reader, CheckedPlanner(path))

    votes.leader_does(lambda: check_sizes(path, getattr(reader, "records", {})))
    votes.all_do(look)
    # Every stage of a pipeline has names of its own. Counted, not gathered: of thousands of ranks they would be gigabytes.
    wanted = group.sum_async([name in flat for name in stored]).wait()
    surplus = [
        name
        for name, num in zip(stored, wanted, strict=True)
        if not num and name.split(".")[0] in states
    ]
    votes.all_do(load)
    if others:
        votes.all_do(lambda: verify_rest(path, others, reader.verified, group))
    for key, state in states.items():
        state.load_state_dict({name: targets[f"{key}.{name}"] for name in dicts[key]})


def _load_weights(
    start: Start, model: Stateful, votes: Votes, identity: Identity, quantized: bool
) -> None:
    """The weights of another format, through the model's tables of names."""
    from torchtitan_like.checkpoint.dcp_storage import verify_rest
    from torchtitan_like.checkpoint.hf.foreign import load_meta, load_torchtitan
    from torchtitan_like.checkpoint.hf.load import config_differences, load_hf

    path, spec, args = start.path, identity.spec, identity.args
    assert path is not None
    tensors, tied = model.state_dict(), spec.tied(args)
    if start.manifest is not None:  # an export of ours: its hashes are known
        records = file_records(start.manifest)
        votes.leader_does(lambda: check_sizes(path, records))
        votes.all_do(lambda: verify_rest(path, records, {}, votes.group))
    if start.format == "hf":
        for line in config_differences(path, spec.hf_config(args)):
            logger.warning(line)
        load_hf(
            path, tensors, rows=spec.hf_names(args), tied=tied, quantized=quantized, votes=votes
        )
        return
    if spec.meta_names is None:
        raise CheckpointError(
            f"{path}: of {spec.name} no checkpoints of TorchTitan or Meta are known"
        )
    read = load_torchtitan if start.format == "dcp" else load_meta
    read(path, tensors, rows=spec.meta_names(args), tied=tied, votes=votes)


def _targets(
    path: str,
    metadata: Mapping[str, Any],
    wanted: Mapping[str, Any],
    surplus: Sequence[str],
    *,
    may_convert: bool,
) -> dict[str, Any]:
    """What DCP is to fill: the tensors of `wanted`, or with `may_convert` new ones where the stored type is another.

    surplus: what is stored, and wanted by no rank.

    DCP casts dtypes and ignores surplus entries silently; here both are errors, and a missing one is named.
    """
    problems = [f"{name} is not in the checkpoint" for name in wanted if name not in metadata]
    problems += [f"{name} is in the checkpoint but not in this run" for name in surplus]
    targets = dict(wanted)
    converted: set[tuple[torch.dtype, torch.dtype]] = set()
    for name in wanted.keys() & metadata.keys():
        target, stored = wanted[name], metadata[name]
        if not isinstance(target, torch.Tensor):
            continue
        found = stored.properties.dtype
        if tuple(stored.size) != tuple(target.shape):
            problems.append(
                f"{name} has shape {tuple(stored.size)}, this run needs {tuple(target.shape)}"
            )
        elif (
            found != target.dtype
            and may_convert
            and found.is_floating_point
            and target.is_floating_point()
        ):
            targets[name] = torch.empty_like(target, dtype=found, requires_grad=False)
            converted.add((found, target.dtype))
        elif found != target.dtype:
            problems.append(f"{name} is {found}, this run needs {target.dtype}")
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"{path} does not fit this run: " + "; ".join(problems[:10]) + more)
    for found, needed in converted:
        logger.info(f"{path} holds {found}: converted to {needed}")
    return targets
