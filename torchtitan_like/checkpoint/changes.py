"""What may differ between the run that saved a checkpoint and the one that resumes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torchtitan_like.checkpoint.errors import ChangedError, CheckpointError
from torchtitan_like.config.layers import Layer, leaves, parse_toml
from torchtitan_like.config.loader import build_config
from torchtitan_like.config.problems import ConfigError

# Patterns of settings -> the part of the run that they shape; the first match counts. A part's settings may not change,
# unless the part is excluded from loading. "" shapes nothing that is learnt, "told" what a run is free to change and tells of.
# What is read, and in which order, is compared by the data's fingerprint, whatever the settings (data.allow_change).
PARTS: tuple[tuple[str, str], ...] = (
    ("model.hf_assets_path", ""),
    ("model.tokenizer_path", ""),
    ("model.print_after_conversion", ""),
    ("model.*", "model"),
    ("quantize.*", "model"),
    ("experimental.custom_import", "model"),
    ("experimental.*", ""),
    ("optimizer.implementation", ""),
    ("optimizer.*", "optimizer"),
    ("training.max_norm", "optimizer"),
    ("lr_scheduler.*", "lr_scheduler"),
    ("data.*", ""),
    ("training.dtype", "model"),
    ("training.mixed_precision_*", "numerics"),
    ("debug.matmul_precision", "numerics"),
    ("debug.moe_force_load_balance", "numerics"),
    ("training.global_batch_size", "dataloader"),
    ("training.batch_ramp", "dataloader"),
    ("training.skip_steps", "told"),
    ("debug.seed", "train_state"),
    ("debug.*", ""),
    ("training.*", ""),
    ("loss.chunk_mib", ""),
    ("fault_tolerance.semi_sync_method", "numerics"),
    *(
        (f"{section}.*", "")
        for section in (
            "job", "profiling", "metrics", "parallelism", "checkpoint", "activation_checkpoint", "compile", "comm",
            "memory_estimation", "fault_tolerance", "validation", "resilience",
        )
    ),
)  # fmt: skip

# Settings whose value is worked out when a run starts (from the layout, or at random), and its name in a manifest.
RESOLVED = {"training.global_batch_size": "global_batch_size", "debug.seed": "seed"}
_UNSET = (None, -1)  # a resolved setting that the configuration leaves to the run
HORIZON, STEPS = (
    "lr_scheduler.total_steps",
    "training.steps",
)  # the first, unset, is the second, with which it may grow


class Change(NamedTuple):
    """A setting, its value in the checkpoint and the one of now; None: unset."""

    key: str
    stored: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {json.dumps(self.stored)} -> {json.dumps(self.now)}"


class Changes(NamedTuple):
    """`refused` would make another run of the one that is resumed."""

    harmless: list[Change]
    refused: list[Change]

    def accepted(self) -> list[str]:
        """Those of `harmless` that do shape the run: allowed by name or with the part they belong to, steps that are left out,
        or a horizon that has moved with the run's last step.
        """
        return [str(change) for change in self.harmless if part_of(change.key)]

    def reordered(self) -> list[str]:
        """Accepted changes that put the samples in another order."""
        return [str(change) for change in self.harmless if part_of(change.key) == "dataloader"]


def part_of(key: str) -> str:
    """What a setting shapes: a part of the checkpoint, "numerics", "told", or "" for nothing that is learnt.

    Raises KeyError for a setting that no row of `PARTS` matches.
    """
    for pattern, part in PARTS:
        if fnmatchcase(key, pattern):
            return part
    raise KeyError(key)


def diff_settings(
    stored: str | Mapping[str, Any],
    current: Mapping[str, Any],
    stored_summary: Mapping[str, Any],
    current_summary: Mapping[str, Any],
) -> Changes:
    """Compare the configuration in a checkpoint (TOML text, or tables) with this run's tables.

    A setting that one of the two does not know has its default there. The summaries hold what `RESOLVED` names, as far
    as it is known; the stored one also the step. `checkpoint.allow_change` and `exclude_from_loading` of `current`
    decide with `PARTS` what is refused.
    Raises CheckpointError when the stored configuration cannot be read.
    """
    section = current.get("checkpoint", {})
    allowed, excluded = section.get("allow_change", ()), {*section.get("exclude_from_loading", ())}
    if "train_state" in excluded:  # the data position follows from the step, which starts anew
        excluded.add("dataloader")
    is_seed = (
        stored_summary.get("step") == 0
    )  # nothing has been learnt yet, and its layout was one rank

    def is_free(key: str) -> bool:
        part, is_allowed = part_of(key), any(fnmatchcase(key, pattern) for pattern in allowed)
        return part in ("", "told", *excluded) or (is_seed and part != "model") or is_allowed

    before, now = _complete(stored), _complete(current)
    changes = Changes([], [])
    for key in dict.fromkeys((*before, *now)):
        if key == "job.config_file":  # never stored: it has no meaning in a file
            continue
        change = Change(key, before.get(key), now.get(key))
        if key in RESOLVED:
            name = RESOLVED[key]
            change = Change(
                key, stored_summary.get(name, change.stored), current_summary.get(name, change.now)
            )
            if change.stored in _UNSET or change.now in _UNSET:
                continue
        grows = key == HORIZON and change.stored == change.now
        if key == HORIZON:
            change = Change(key, change.stored or before[STEPS], change.now or now[STEPS])
        if change.stored != change.now:
            (changes.harmless if grows or is_free(key) else changes.refused).append(change)
    return changes


def check_changes(changes: Changes) -> str | None:
    """Raise ChangedError naming every refused change; else a line about the others, if there are any."""
    if changes.refused:
        keys = json.dumps([change.key for change in changes.refused])
        raise ChangedError(
            f"settings that would make another run of the one that saved the checkpoint: "
            f"{'; '.join(map(str, changes.refused))}. Put them back, or accept them with checkpoint.allow_change = {keys}"
        )
    return (
        f"Changed since the checkpoint: {'; '.join(map(str, changes.harmless))}"
        if changes.harmless
        else None
    )


def _complete(tables: str | Mapping[str, Any]) -> dict[str, Any]:
    """Every setting by its dotted key, under today's name, with today's defaults."""
    try:
        given = parse_toml(tables) if isinstance(tables, str) else tables
        config = build_config([Layer("the checkpoint", list(leaves(given)))])
    except ConfigError as error:
        if error.partial is None:
            raise CheckpointError(
                f"the configuration in the checkpoint cannot be read: {error}"
            ) from error
        config = error.partial  # settings of another version: they mean nothing here
    except ValueError as error:
        raise CheckpointError(f"the configuration in the checkpoint is no TOML: {error}") from error
    return {".".join(path): value for path, value in leaves(config.model_dump()) if value != {}}
