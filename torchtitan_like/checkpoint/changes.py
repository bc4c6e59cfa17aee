"""Decide which settings may change between a checkpoint and the run that resumes it.

Each setting declares the state of the run that it affects (`Affected` in config/base.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torchtitan_like.checkpoint.errors import ChangedError, CheckpointError
from torchtitan_like.config.base import Affected
from torchtitan_like.config.fields import find
from torchtitan_like.config.layers import Layer, by_key, leaves, parse_toml
from torchtitan_like.config.loader import CUSTOM_IMPORT_KEY, build_config
from torchtitan_like.config.problems import ConfigError
from torchtitan_like.models.spec import get_spec, resolve_args

# Settings that a run may resolve at its start -> their names in a manifest.
RESOLVED = {"training.global_batch_size": "global_batch_size", "debug.seed": "seed"}
_UNSET = (None, -1)  # values of a setting that the run resolves
# The converter, and the section of its settings, which have no effect without it.
FLOAT8 = "quantize.linear.float8"
# The horizon defaults to the steps, and may then change with them.
HORIZON = "lr_scheduler.total_steps"
STEPS = "training.steps"


class Change(NamedTuple):
    """A setting with its stored and current values. None means unset."""

    key: str
    stored: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {json.dumps(self.stored)} -> {json.dumps(self.now)}"


class Changes(NamedTuple):
    """The changed settings. The `refused` ones would change the result of the resumed run."""

    harmless: list[Change]
    refused: list[Change]

    def accepted(self) -> list[str]:
        """Return the accepted changes that affect the result.

        These are allowed by `allow_change` or `exclude_from_loading`, or are `skip_steps` or a
        horizon that has changed with `training.steps`.
        """
        return [str(change) for change in self.harmless if affected_state(change.key) != "nothing"]

    def reordered(self) -> list[str]:
        """Return the accepted changes that reorder the samples."""
        return [
            str(change) for change in self.harmless if affected_state(change.key) == "dataloader"
        ]


def affected_state(key: str) -> Affected:
    """Return the state that a setting affects. Raises KeyError if there is no such setting."""
    setting = find(tuple(key.split(".")))
    if setting is None:
        raise KeyError(key)
    return setting.affects


def diff_settings(
    stored: str,
    current: Mapping[str, Any],
    stored_summary: Mapping[str, Any],
    current_summary: Mapping[str, Any],
) -> Changes:
    """Compare the configuration in a checkpoint, as TOML, with all settings of this run.

    A setting that the checkpoint lacks has its default value. The affected states,
    `checkpoint.allow_change`, and `checkpoint.exclude_from_loading` of `current` decide which
    changes are refused.

    stored_summary: the step and the resolved values of the checkpoint (`RESOLVED`).
    current_summary: the resolved values of this run.
    Raises CheckpointError if the stored configuration cannot be read.
    """
    before = complete_settings(stored)
    excluded = set(current["checkpoint.exclude_from_loading"])
    if "train_state" in excluded:  # the run starts at step 0, and so does the data
        excluded.add("dataloader")
    if not (before["ema.enable"] and current["ema.enable"]):  # no average continues
        excluded.add("ema")
    is_seed = stored_summary.get("step") == 0  # a seed checkpoint, without any training
    uses_float8 = FLOAT8 in (*before["model.converters"], *current["model.converters"])

    def is_free(key: str) -> bool:
        state = affected_state(key)
        is_allowed = any(
            fnmatchcase(key, pattern) for pattern in current["checkpoint.allow_change"]
        )
        is_untrained = is_seed and state != "model"
        is_idle = key.startswith(f"{FLOAT8}.") and not uses_float8
        is_free_state = state in ("nothing", "future_samples", *excluded)
        return is_free_state or is_untrained or is_idle or is_allowed

    changes = Changes([], [])
    for key in dict.fromkeys((*before, *current)):
        if key == "job.config_file":  # never stored
            continue
        change = Change(key, before.get(key), current.get(key))
        if key in RESOLVED:
            name = RESOLVED[key]
            change = Change(
                key, stored_summary.get(name, change.stored), current_summary.get(name, change.now)
            )
            if change.stored in _UNSET or change.now in _UNSET:
                continue
        grows = key == HORIZON and change.stored == change.now
        if key == HORIZON:
            change = Change(key, change.stored or before[STEPS], change.now or current[STEPS])
        if change.stored != change.now:
            (changes.harmless if grows or is_free(key) else changes.refused).append(change)
    return changes


def check_changes(changes: Changes) -> str | None:
    """Raise ChangedError if a change is refused. Returns a line about other changes, or None."""
    if changes.refused:
        keys = json.dumps([change.key for change in changes.refused])
        raise ChangedError(
            "Settings that affect the result have changed since the checkpoint: "
            f"{'; '.join(map(str, changes.refused))}. Expected the stored values. For a new run set "
            "another job.dump_folder. To continue this one, restore them, or accept the changes with "
            f"checkpoint.allow_change = {keys}"
        )
    return (
        f"Changed since the checkpoint: {'; '.join(map(str, changes.harmless))}"
        if changes.harmless
        else None
    )


def check_finished(manifest: Mapping[str, Any], current: Mapping[str, Any], folder: str) -> None:
    """Raise ChangedError if a finished run had other settings than the start that finds its folder.

    More or fewer steps are no other settings. manifest: of the run's last step. current: all
    settings of the start.
    """
    if "config" not in manifest:
        return
    refused = diff_settings(manifest["config"], current, manifest, {}).refused
    changed = [str(change) for change in refused if change.key != HORIZON]
    if changed:
        raise ChangedError(
            f"{folder} has a finished run with other settings: {'; '.join(changed)}. Nothing was "
            "trained with the new ones. Expected a folder for each run: set another job.dump_folder"
        )


def warm_differences(
    stored: Mapping[str, Any], current: Mapping[str, Any], args: Any, tokenizer: str
) -> list[Change]:
    """Return what a warm start changes about the model that trained the weights.

    These are arguments that both models have, settings of state "model", and the tokenizer.

    stored: the manifest. current: all settings of this run. args: the sizes of its model.
    tokenizer: its fingerprint in this run.
    Raises CheckpointError if the stored configuration cannot be read.
    """
    before = complete_settings(stored["config"])
    keys = [key for key in before.keys() & current.keys() if affected_state(key) == "model"]
    old = {key: before[key] for key in keys} | _stored_args(before)
    new = {key: current[key] for key in keys} | by_key({"model": {"args": asdict(args)}})
    # The arguments describe a flavor, the module is code, and the load reports another dtype.
    for key in ("model.flavor", CUSTOM_IMPORT_KEY, "training.dtype"):
        old.pop(key, None)
    old_tokenizer = stored.get("data", {}).get("fingerprint", {}).get("tokenizer")
    if old_tokenizer is not None:
        old["tokenizer"], new["tokenizer"] = old_tokenizer, tokenizer
    return [
        Change(key, old[key], new[key])
        for key in sorted(old.keys() & new.keys())
        if old[key] != new[key]
    ]


def _stored_args(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved arguments of a model by dotted key; {} if this version cannot read them."""
    prefix = "model.args."
    given = {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}
    try:
        args = resolve_args(get_spec(settings["model.name"]), settings["model.flavor"], given)
    except (KeyError, ValueError):  # a model or an argument of another version or extension
        return {key: value for key, value in settings.items() if key.startswith(prefix)}
    return by_key({"model": {"args": asdict(args)}})


def complete_settings(toml: str) -> dict[str, Any]:
    """Return every setting of a stored configuration by its key, with current names and defaults.

    Raises CheckpointError if it cannot be read.
    """
    unknown_names: dict[str, Any] = {}
    try:
        config = build_config([Layer("the checkpoint", list(leaves(parse_toml(toml))))])
    except ConfigError as error:
        if error.partial is None:
            raise CheckpointError(
                f"The configuration in the checkpoint cannot be read: {error}. Expected the "
                "settings of its run: use another checkpoint"
            ) from error
        config = error.partial  # unknown settings of another version are ignored
        unknown_names = {
            problem.key: problem.value
            for problem in error.problems
            if (setting := find(tuple(problem.key.split(".")))) and setting.name_of
        }
    except ValueError as error:
        raise CheckpointError(
            f"The configuration in the checkpoint is not valid TOML: {error}. Expected the "
            "settings of its run: use another checkpoint"
        ) from error
    return by_key(config.model_dump()) | unknown_names
