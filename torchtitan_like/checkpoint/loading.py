"""Load a checkpoint of any supported format into a run, in place, and verify it while reading."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_like.checkpoint.errors import SettingsError
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.saving import wait_until_visible
from torchtitan_like.checkpoint.stateful import Stateful
from torchtitan_like.checkpoint.step_folders import file_records
from torchtitan_like.checkpoint.stored_weights import EMA_KEY, average_entries
from torchtitan_like.checkpoint.verification import check_sizes
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import Rows
from torchtitan_like.models.spec import standard_hf_config

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.start import Start

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
    if start.format == "step":
        _load_step(start, {key: states[key] for key in keys}, group, identity, verify)
    elif start.kind == "resume":
        from torchtitan_like.checkpoint.torchtitan import load_run

        keys = [key for key in keys if key != "dataloader"]
        load_run(start, {key: states[key] for key in keys}, group, identity)
    else:
        _load_weights(start, states["model"], group, identity, quantized)
    not_loaded = sorted(set(states) - set(keys))
    note = f" (not loaded: {', '.join(not_loaded)})" if not_loaded else ""
    logger.info(f"Loaded {start.path} in {time.monotonic() - start_time:.2f} seconds{note}")
    return keys


def _load_step(
    start: Start, states: Mapping[str, Stateful], group: HostGroup, identity: Identity, verify: str
) -> None:
    """Load a native step, which is full or holds only the weights."""
    from torchtitan_like.checkpoint.dcp_storage import ExtentReader
    from torchtitan_like.checkpoint.verification import verify_rest

    path = start.path
    assert path is not None and start.manifest is not None
    records = file_records(start.manifest)
    reader = ExtentReader(path, records)
    # The reader verifies what it reads. Small files are always verified as a whole.
    to_verify = {
        name: record
        for name, record in records.items()
        if verify == "full" or not name.startswith("shard-")
    }
    group.run_on_leader(lambda: check_sizes(path, records))
    loaded: Mapping[str, Mapping[str, Any]] = {}
    if start.upcycles:
        from torchtitan_like.checkpoint.upcycling import load_upcycled

        load_upcycled(start, states["model"].state_dict(), group, identity, reader=reader)
    else:
        loaded = _read_entries(start, states, group, reader)
    group.run_on_all(lambda: verify_rest(path, to_verify, reader.verified, group))
    for key, entries in loaded.items():
        states[key].load_state_dict(dict(entries))


def _read_entries(
    start: Start, states: Mapping[str, Stateful], group: HostGroup, reader: Any
) -> dict[str, dict[str, Any]]:
    """Read all entries of a native step, in place where possible. Returns them by key of `states`."""
    from torchtitan_like.checkpoint.dcp_metadata import METADATA
    from torchtitan_like.checkpoint.dcp_storage import load_planned
    from torchtitan_like.checkpoint.unpickle import CheckedPlanner

    path = start.path
    assert path is not None
    dicts = {key: state.state_dict() for key, state in states.items()}
    flat = {f"{key}.{name}": value for key, names in dicts.items() for name, value in names.items()}
    stored: dict[str, Any] = {}
    entries: dict[str, str] = {}  # of averaged weights, by the names of the weights
    targets: dict[str, Any] = {}

    def read_metadata() -> None:
        # Rank 0 sees all files, so a missing file on another node is a mount error, not damage.
        wait_until_visible(path / METADATA)
        stored.update(reader.read_metadata().state_dict_metadata)
        if start.averaged:
            entries.update(average_entries(stored))

    def load() -> None:
        targets.update(_targets(str(path), stored, flat, surplus, may_convert=start.kind == "warm"))
        load_planned(targets, reader, CheckedPlanner(path))

    group.run_on_all(read_metadata)
    flat = {entries.get(name, name): value for name, value in flat.items()}
    # Pipeline stages have different names. Counts are reduced, because gathering all names of
    # thousands of ranks takes gigabytes.
    counts = group.sum_async([name in flat for name in stored]).wait()
    surplus = [
        name
        for name, count in zip(stored, counts, strict=True)
        if not count and name.split(".")[0] in states and name not in entries
    ]
    group.run_on_all(load)
    return {
        key: {name: targets[entries.get(f"{key}.{name}", f"{key}.{name}")] for name in names}
        for key, names in dicts.items()
    }


def _load_weights(
    start: Start, model: Stateful, group: HostGroup, identity: Identity, quantized: bool
) -> None:
    """Load the weights of another format, with the model's tables of names."""
    from torchtitan_like.checkpoint.hf.foreign import load_meta, load_torchtitan
    from torchtitan_like.checkpoint.hf.load import config_differences, load_hf
    from torchtitan_like.checkpoint.verification import verify_rest

    path, spec, args = start.path, identity.spec, identity.args
    assert path is not None
    tensors, tied = model.state_dict(), spec.tied(args)
    if start.manifest is not None:  # an export of this program, with hashes
        records = file_records(start.manifest)
        group.run_on_leader(lambda: check_sizes(path, records))
        group.run_on_all(lambda: verify_rest(path, records, {}, group))
    if start.upcycles:
        from torchtitan_like.checkpoint.upcycling import load_upcycled

        load_upcycled(start, tensors, group, identity, quantized=quantized)
        return
    if start.format == "hf":
        standardize = partial(standard_hf_config, spec)
        for line in config_differences(path, spec.hf_config(args), standardize):
            logger.warning(line)
        load_hf(
            path,
            tensors,
            rows=spec.hf_names(args),
            tied=tied,
            quantized=quantized,
            group=group,
            alternative_rows=spec.hf_alternative_names(args) if spec.hf_alternative_names else None,
            unread=spec.hf_unread(args),
        )
        return
    read = load_torchtitan if start.format == "dcp" else load_meta
    read(path, tensors, rows=meta_rows(identity, path), tied=tied, group=group)


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


def _targets(
    path: str,
    metadata: Mapping[str, Any],
    live: Mapping[str, Any],
    surplus: Sequence[str],
    *,
    may_convert: bool,
) -> dict[str, Any]:
    """Return the tensors for DCP to fill: the live ones, or new ones to convert from.

    DCP silently casts dtypes and ignores surplus entries. This function raises CheckpointError for
    both, and for missing entries and other shapes.

    surplus: stored entries that no rank loads.
    may_convert: return a new tensor if the stored floating-point dtype differs from the live one.
    """
    problems = [f"{name} is not in the checkpoint" for name in live if name not in metadata]
    problems += [f"{name} is in the checkpoint but not in this run" for name in surplus]
    targets = dict(live)
    conversions: set[tuple[torch.dtype, torch.dtype]] = set()
    for name in live.keys() & metadata.keys():
        target, stored = live[name], metadata[name]
        if not isinstance(target, torch.Tensor):
            continue
        dtype = stored.properties.dtype
        if tuple(stored.size) != tuple(target.shape):
            problems.append(
                f"{name} has shape {tuple(stored.size)}, this run needs {tuple(target.shape)}"
            )
        elif (
            dtype != target.dtype
            and may_convert
            and dtype.is_floating_point
            and target.is_floating_point()
        ):
            targets[name] = torch.empty_like(target, dtype=dtype, requires_grad=False)
            conversions.add((dtype, target.dtype))
        elif dtype != target.dtype:
            problems.append(f"{name} is {dtype}, this run needs {target.dtype}")
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise SettingsError(
            f"{path} does not match this run: {'; '.join(problems[:10])}{more}. Expected the "
            "tensors of this run. Set [model] and the dtypes as in the checkpoint, or load another "
            "one"
        )
    for stored_dtype, live_dtype in conversions:
        logger.info(f"Converted weights of {path} from {stored_dtype} to {live_dtype}")
    return targets
