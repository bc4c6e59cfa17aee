"""Load a checkpoint of any supported format into a run, in place, and verify it while reading."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_like.checkpoint.dcp_metadata import METADATA
from torchtitan_like.checkpoint.errors import SettingsError
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.saving import wait_until_visible
from torchtitan_like.checkpoint.source import Source
from torchtitan_like.checkpoint.stateful import Stateful
from torchtitan_like.checkpoint.step_folders import file_records
from torchtitan_like.checkpoint.stored_weights import (
    EMA_KEY,
    PREFIX,
    StoredWeights,
    average_entries,
)
from torchtitan_like.checkpoint.torchtitan import load_run, meta_rows, open_torchtitan
from torchtitan_like.checkpoint.verification import check_sizes
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import count_named
from torchtitan_like.models.spec import standard_hf_config
from torchtitan_like.util.extents import FileRecord

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.dcp_source import StepSource
    from torchtitan_like.checkpoint.start import Format, Start

logger = logging.getLogger()


def load_states(
    start: Start,
    states: Mapping[str, Stateful],
    group: HostGroup,
    identity: Identity,
    *,
    exclude: Collection[str] = (),
    verify: str = "read",
    quantized: bool = False,
) -> list[str]:
    """Load the checkpoint of `start` into `states`, in place. All ranks must call it together.

    A warm start loads only the weights, from any format. A resume loads all keys except `exclude`,
    averaged weights that the checkpoint lacks, and the dataloader of a TorchTitan checkpoint. An
    upcycling start leaves tensors unchanged that the dense model does not have.
    Returns the keys of the states that were loaded.
    Raises DamagedError if the checkpoint's bytes have changed, or another CheckpointError. An error
    of one rank is raised on every rank.
    """
    start_time = time.monotonic()
    has_average = EMA_KEY in (start.manifest or {})
    missing = () if has_average else (EMA_KEY,)
    keys = [key for key in states if key not in (*exclude, *missing)]
    if start.kind == "warm":
        keys = ["model"]
    elif has_average and EMA_KEY not in states:
        logger.warning(
            f"Ignored the averaged weights in {start.path}, because ema.enable = false. Checkpoints "
            "of this run will not have them"
        )
    if start.format == "native":
        _load_step(start, {key: states[key] for key in keys}, group, identity, verify)
    elif start.kind == "resume":
        keys = [key for key in keys if key != "dataloader"]
        load_run(start, {key: states[key] for key in keys}, group, identity)
    else:
        _load_weights(start, states["model"], group, identity, quantized)
    not_loaded = sorted(set(states) - set(keys))
    note = f" (not loaded: {', '.join(not_loaded)})" if not_loaded else ""
    logger.info(f"Loaded {start.path} in {time.monotonic() - start_time:.2f} seconds{note}")
    return keys


def load_stored_weights(start: Start, group: HostGroup, identity: Identity) -> StoredWeights:
    """Load the weights of a native step in the dtypes they are stored in. A collective.

    start: a warm start. Each rank gets some of the tensors.
    """
    path = start.path
    assert path is not None and start.manifest is not None
    records = file_records(start.manifest)
    source = group.run_on_all(lambda: open_step(path, records))
    weights = StoredWeights(source.stored, group.rank, group.size, averaged=start.averaged)
    load_states(start, {"model": weights}, group, identity)
    return weights


def open_step(path: Path, records: Mapping[str, FileRecord]) -> StepSource:
    """Read the metadata of a native step, on every rank."""
    from torchtitan_like.checkpoint.dcp_source import StepSource

    # Rank 0 sees all files, so a missing file on another node is a mount error, not damage.
    wait_until_visible(path / METADATA)
    return StepSource(path, records)


def open_weights(
    path: Path, stored_format: Format, group: HostGroup, *, quantized: bool = False
) -> Source:
    """Open the weights of another format. A collective.

    quantized: safetensors are float8 or MXFP4 with a scale for each block. They are dequantized in
        float32.
    Raises CheckpointError if they are quantized and `quantized` is False, or the reverse.
    """
    from torchtitan_like.checkpoint.hf.safetensors_source import open_safetensors
    from torchtitan_like.checkpoint.pth_source import open_meta

    if stored_format == "hf":
        return group.run_on_leader(lambda: open_safetensors(path, quantized=quantized))
    if stored_format == "dcp":
        return group.run_on_leader(lambda: open_torchtitan(path))
    return group.run_on_all(lambda: open_meta(path))  # each rank maps the files


def _load_step(
    start: Start, states: Mapping[str, Stateful], group: HostGroup, identity: Identity, verify: str
) -> None:
    """Load a native step, which is full or holds only the weights."""
    from torchtitan_like.checkpoint.verification import verify_rest

    path = start.path
    assert path is not None and start.manifest is not None
    records = file_records(start.manifest)
    # The source verifies what it reads. Small files are always verified as a whole.
    to_verify = {
        name: record
        for name, record in records.items()
        if verify == "full" or not name.startswith("shard-")
    }
    group.run_on_leader(lambda: check_sizes(path, records))
    source = group.run_on_all(lambda: open_step(path, records))
    loaded: Mapping[str, Mapping[str, Any]] = {}
    if start.upcycles:
        from torchtitan_like.checkpoint.upcycling import load_upcycled

        weights = {n.removeprefix(PREFIX): n for n in source.stored if n.startswith(PREFIX)}
        tensors = states["model"].state_dict()
        load_upcycled(start, lambda: source.select(weights), tensors, group, identity)
    else:
        loaded = _read_entries(start, states, group, source)
    group.run_on_all(lambda: verify_rest(path, to_verify, source.verified, group))
    for key, entries in loaded.items():
        states[key].load_state_dict(dict(entries))


def _read_entries(
    start: Start, states: Mapping[str, Stateful], group: HostGroup, source: StepSource
) -> dict[str, dict[str, Any]]:
    """Read all entries of a native step, tensors in place. Returns them by key of `states`."""
    dicts = {key: state.state_dict() for key, state in states.items()}
    stored = (*source.stored, *source.object_names)
    # The entries of averaged weights, by the names of the weights.
    entries = average_entries(stored) if start.averaged else {}
    flat = {
        entries.get(f"{key}.{name}", f"{key}.{name}"): value
        for key, names in dicts.items()
        for name, value in names.items()
    }
    # Pipeline stages have different names. Counts are reduced, because gathering all names of
    # thousands of ranks takes gigabytes.
    counts = group.sum_async([name in flat for name in stored]).wait()
    surplus = [
        name
        for name, count in zip(stored, counts, strict=True)
        if not count and name.split(".")[0] in states and name not in entries
    ]

    def load() -> dict[str, Any]:
        _check_entries(source, flat, surplus, may_convert=start.kind == "warm")
        source.fill_tensors({n: flat[n] for n in flat if n in source.stored})
        return flat | source.read_objects(name for name in flat if name not in source.stored)

    values = group.run_on_all(load)
    return {
        key: {name: values[entries.get(f"{key}.{name}", f"{key}.{name}")] for name in names}
        for key, names in dicts.items()
    }


def _load_weights(
    start: Start, model: Stateful, group: HostGroup, identity: Identity, quantized: bool
) -> None:
    """Load the weights of another format, with the model's tables of names."""
    from torchtitan_like.checkpoint.hf.load import config_differences, load_weights
    from torchtitan_like.checkpoint.verification import verify_rest

    path, spec, args = start.path, identity.spec, identity.args
    assert path is not None and start.format != "native"
    tensors = model.state_dict()
    if start.manifest is not None:  # an export of this program, with hashes
        records = file_records(start.manifest)
        group.run_on_leader(lambda: check_sizes(path, records))
        group.run_on_all(lambda: verify_rest(path, records, {}, group))
    if start.format == "hf" and not start.upcycles:
        standardize = partial(standard_hf_config, spec)
        for line in config_differences(path, spec.hf_config(args), standardize):
            logger.warning(line)
    open_source = partial(open_weights, path, start.format, group, quantized=quantized)
    if start.upcycles:
        from torchtitan_like.checkpoint.upcycling import load_upcycled

        load_upcycled(start, open_source, tensors, group, identity)
        return
    source = open_source()
    unread: tuple[str, ...] = ()
    if start.format == "hf":
        rows = spec.hf_names(args)
        unread = spec.hf_unread(args)
        if spec.hf_alternative_names:
            tables = (rows, spec.hf_alternative_names(args))
            rows = max(tables, key=lambda table: count_named(table, source.stored))
    else:
        rows = meta_rows(identity, path)
    load_weights(source, tensors, rows=rows, tied=spec.tied(args), group=group, unread=unread)


def _check_entries(
    source: Source, live: Mapping[str, Any], surplus: Sequence[str], *, may_convert: bool
) -> None:
    """Raise CheckpointError for missing and surplus entries, and for other dtypes and shapes.

    surplus: stored entries that no rank loads.
    may_convert: accept another floating-point dtype.
    """
    stored_names = {*source.stored, *source.object_names}
    problems = [f"{name} is not in the checkpoint" for name in live if name not in stored_names]
    problems += [f"{name} is in the checkpoint but not in this run" for name in surplus]
    conversions: set[tuple[torch.dtype, torch.dtype]] = set()
    for name in live.keys() & stored_names:
        target, stored = live[name], source.stored.get(name)
        if stored is None or not isinstance(target, torch.Tensor):
            if stored is not None or isinstance(target, torch.Tensor):
                problems.append(f"{name} is a tensor on one side only")
        elif stored.shape != tuple(target.shape):
            problems.append(
                f"{name} has shape {stored.shape}, this run needs {tuple(target.shape)}"
            )
        elif stored.dtype != target.dtype:
            is_floating = stored.dtype.is_floating_point and target.is_floating_point()
            if may_convert and is_floating:
                conversions.add((stored.dtype, target.dtype))
            else:
                problems.append(f"{name} is {stored.dtype}, this run needs {target.dtype}")
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise SettingsError(
            f"{source.path} does not match this run: {'; '.join(problems[:10])}{more}. Expected the "
            "tensors of this run. Set [model] and the dtypes as in the checkpoint, or load another "
            "one"
        )
    for stored_dtype, live_dtype in conversions:
        logger.info(f"Converted weights of {source.path} from {stored_dtype} to {live_dtype}")
