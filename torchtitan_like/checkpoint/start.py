"""Decide which weights a run starts from: `checkpoint.start = auto | resume | warm | scratch`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchtitan_like.checkpoint.errors import DamagedError, SettingsError
from torchtitan_like.checkpoint.step_folders import (
    NONFINITE,
    Manifest,
    StepFolder,
    all_steps,
    emptied,
    nonfinite_states,
    read_manifest,
)
from torchtitan_like.util.run_directory import MANIFEST, numbered_folders, step_name

if TYPE_CHECKING:
    from torchtitan_like.config.sections_checkpoint import Checkpoint

Format = Literal["native", "dcp", "hf", "pt"]
FORMAT_NAMES: dict[Format, str] = {
    "native": "a checkpoint of this program",
    "dcp": "a torch.distributed.checkpoint folder of another program",
    "hf": "Hugging Face safetensors",
    "pt": "Meta's consolidated.*.pth files",
}
# Files that identify the format of a folder without a manifest. The first match applies.
_FORMAT_PATTERNS: tuple[tuple[str, Format], ...] = (
    (".metadata", "dcp"),
    ("*.safetensors", "hf"),
    ("consolidated.*.pth", "pt"),
)
_RESTART_REMEDY = "Move them away to start a new run"


@dataclass(frozen=True)
class Start:
    """One way to start a run. Rank 0 chooses it before the model is built."""

    kind: Literal["scratch", "warm", "resume"]  # warm: weights only, step 0. resume: everything
    step: int
    path: Path | None
    reason: str
    seed: int | None = None  # of the run that is resumed
    format: Format = "native"
    manifest: Manifest | None = None
    averaged: bool = False  # warm: the weights are the averaged ones of a native step
    upcycles: bool = False  # warm: the weights are of a dense model, the run's model has experts

    def with_manifest(self) -> Start:
        """Read the manifest of a full step again, and return the start with it.

        Raises DamagedError.
        """
        assert self.path is not None
        if (manifest := read_manifest(self.path)) is None:
            raise DamagedError(
                f"{self.path} no longer has a manifest. Expected it until the end of the start: "
                "check who removed it"
            )
        return _resume(StepFolder(self.step, self.path, manifest), self.reason)

    def __str__(self) -> str:
        source = f" from {self.path}" if self.path else ""
        return f"Checkpoint start: {self.kind}{source} at step {self.step}: {self.reason}"


def format_of(path: Path) -> Format | None:
    """Return the format of the checkpoint in a folder, or None if it has no known format.

    Raises DamagedError if its manifest is damaged.
    """
    manifest = read_manifest(path)
    if manifest is not None:
        return "hf" if manifest["kind"] == "hf" else "native"
    return next((name for pattern, name in _FORMAT_PATTERNS if any(path.glob(pattern))), None)


def decide_start(
    section: Checkpoint, folder: Path, last_step: int, hf_assets_path: Path, config: str = ""
) -> list[Start]:
    """Choose a start from the files on disk and `[checkpoint]` start, load_step, initial_load_path.

    Returns the candidates in order of preference. Older full steps follow the first choice, in case
    it is damaged. A start at `last_step` or later means that the run is finished.

    hf_assets_path: the initial weights if `initial_load_in_hf` is set without a path.
    config: the configuration of this run, as its checkpoints store it.
    Raises CheckpointError, or DamagedError if all full checkpoints are damaged. A run with damaged
    checkpoints never starts from scratch automatically.
    """
    if not section.enable:
        return [Start("scratch", 0, None, "checkpoint.enable is false")]
    if section.create_seed_checkpoint or section.start in ("scratch", "warm"):
        return [_new_run(section, folder, hf_assets_path)]
    steps = all_steps(folder)
    if section.load_step >= 0:
        named = _named_step(section.load_step, folder, steps)
        later = [step for step in steps if step.step > section.load_step]
        if not later or any(
            step.manifest and step.manifest.get("config") != config for step in later
        ):
            return [named]
        # A requeued run, which went back to `load_step` at its first start, and now continues.
        steps = [step for step in steps if step.step >= named.step]
    undamaged = [step for step in steps if step.damage is None]
    if undamaged and undamaged[-1].step >= last_step:
        reason = f"the newest checkpoint, and training.steps is {last_step}"
        return [_resume(undamaged[-1], reason)]
    may_be_full = [step for step in reversed(steps) if step.manifest.get("kind", "full") == "full"]
    full = [step for step in may_be_full if step.damage is None]
    damage = [step.damage for step in may_be_full if step.damage]
    if full:
        skipped = f"; skipped because of damage: {'; '.join(damage)}" if damage else ""
        skipped += _nonfinite_after(folder, full[0].step)
        first = _resume(full[0], f"newest full checkpoint{skipped}")
        return [first, *(_resume(older, "an older full checkpoint") for older in full[1:])]
    if damage:
        raise DamagedError(
            f"{folder} has no undamaged full checkpoint: {'; '.join(damage)}. {_RESTART_REMEDY}"
        )
    if section.start == "resume":
        raise SettingsError(
            f"{folder} holds no full checkpoint. Expected one, because checkpoint.start = "
            "'resume'. Set start = 'auto' to start a new run"
        )
    return [_first_start(section, folder, last_step, hf_assets_path)]


def _resume(step: StepFolder, reason: str) -> Start:
    """Return a start from a full step, with its configuration in the manifest."""
    seed = step.manifest.get("seed")
    return Start("resume", step.step, step.path, reason, seed, manifest=step.manifest)


def _nonfinite_after(folder: Path, step: int) -> str:
    """Return a clause that names the non-finite states after `step`, or an empty string."""
    names = [
        path.name
        for path in nonfinite_states(folder)
        if int(path.name.removeprefix("step-").removesuffix(NONFINITE)) > step
    ]
    return f"; skipped because not finite: {', '.join(names)}" if names else ""


def _new_run(section: Checkpoint, folder: Path, hf_assets_path: Path) -> Start:
    """Return the start of a new run. Raises CheckpointError if the folder has checkpoints."""
    is_seed = section.create_seed_checkpoint
    setting = "create_seed_checkpoint = true" if is_seed else f"start = {section.start!r}"
    names = [path.name for _, path in _checkpoints(folder)]
    if names:
        raise SettingsError(
            f"{folder} holds {len(names)} checkpoints (newest: {names[-1]}), but "
            f"checkpoint.{setting} starts a new run at step 0. Expected no checkpoints. Choose "
            "another job.dump_folder, move them away, or set start = 'auto' to continue that run"
        )
    if section.start == "warm":
        return _initial(section, None, hf_assets_path, "checkpoint.start is 'warm'")
    return Start("scratch", 0, None, f"checkpoint.{setting}")


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return every `step-N` with a checkpoint of any format, including damaged and emptied ones."""
    return [
        (number, path)
        for number, path in numbered_folders(folder)
        if os.path.lexists(path / MANIFEST) or emptied(path) or format_of(path)
    ]


def _named_step(number: int, folder: Path, steps: list[StepFolder]) -> Start:
    """Return a start from `checkpoint.load_step`. Raises CheckpointError if it cannot be used."""
    match = next((step for step in steps if step.step == number), None)
    if match is not None and match.damage:
        raise DamagedError(
            f"checkpoint.load_step = {number} cannot be loaded: {match.damage}. Expected an "
            "undamaged step. Set load_step to another one, or to -1 for the newest"
        )
    if match is not None and match.is_full:
        return _resume(match, f"checkpoint.load_step = {number}")
    full_steps = ", ".join(str(step.step) for step in steps if step.is_full) or "none"
    format_name = format_of(folder / step_name(number))
    note = f"; step-{number} has only weights ({FORMAT_NAMES[format_name]})" if format_name else ""
    raise SettingsError(
        f"checkpoint.load_step = {number}, but {folder} has no full checkpoint of that step{note}. "
        f"Expected a full checkpoint ({full_steps}). Set load_step to one, or to -1 for the newest"
    )


def _first_start(section: Checkpoint, folder: Path, last_step: int, hf_assets_path: Path) -> Start:
    """Return the start of `auto` in a folder without a full checkpoint.

    The candidates are a step-0 from the user, initial weights, and random weights, in this order.
    """
    checkpoints = _checkpoints(folder)
    if [number for number, _ in checkpoints] == [0]:
        step_0 = checkpoints[0][1]
        if section.initial_load_path:
            raise SettingsError(
                f"There are two sources of weights: {step_0} and checkpoint.initial_load_path = "
                f"{section.initial_load_path!r}. Expected one. Move the first away, or unset the "
                "second"
            )
        return _weights(section, step_0, "step-0 from the user, and no later checkpoint")
    if checkpoints:  # of a finished run, which never restarts automatically
        newest = checkpoints[-1][1]
        raise SettingsError(
            f"{folder} holds only weights (newest: {newest.name}, "
            f"{FORMAT_NAMES[format_of(newest) or 'native']}). Expected a full checkpoint to resume "
            "from. To start a new run from these weights, set checkpoint.initial_load_path = "
            f"{str(newest)!r} and another job.dump_folder. To start from scratch, move them away"
        )
    reason = f"no full checkpoint in {folder}{_nonfinite_after(folder, 0)}"
    if section.initial_load_path or section.initial_load_in_hf:
        return _initial(section, last_step, hf_assets_path, reason)
    return Start("scratch", 0, None, f"{reason}, no initial_load_path")


def _initial(
    section: Checkpoint, last_step: int | None, hf_assets_path: Path, reason: str
) -> Start:
    """Return a start from `initial_load_path`: weights, or the full state of another run."""
    if section.initial_load_path:
        path = Path(section.initial_load_path)
        reason = f"{reason}, initial_load_path is set"
    else:
        path = hf_assets_path
        reason = f"{reason}, initial_load_in_hf is set: loading model.hf_assets_path"
    start = _weights(section, path, reason)
    if section.initial_load_model_only:
        return start
    if start.format == "dcp":
        from torchtitan_like.checkpoint.torchtitan import read_step

        step = read_step(path)
        _check_unfinished(path, step, last_step)
        return Start("resume", step, path, reason, format="dcp")
    manifest = start.manifest or {}
    if manifest.get("kind") != "full":
        raise SettingsError(
            f"checkpoint.initial_load_path = {str(path)!r} holds only weights "
            f"({FORMAT_NAMES[start.format]}). Expected a full checkpoint, because "
            "checkpoint.initial_load_model_only = false. Set checkpoint.initial_load_model_only = true, or set the path to "
            "a full step-N of this program or of TorchTitan 0.2"
        )
    _check_unfinished(path, manifest["step"], last_step)
    return _resume(StepFolder(manifest["step"], path, manifest), reason)


def _check_unfinished(path: Path, step: int, last_step: int | None) -> None:
    if last_step is not None and step >= last_step:
        raise SettingsError(
            f"checkpoint.initial_load_path = {str(path)!r} is at step {step}. Expected a step before "
            f"training.steps = {last_step}. Raise training.steps, or set "
            "checkpoint.initial_load_model_only = true to start at step 0"
        )


def _weights(section: Checkpoint, path: Path, reason: str) -> Start:
    """Return a warm start from a folder of any known format. Raises CheckpointError."""
    if "model" in section.exclude_from_loading and section.initial_load_model_only:
        raise SettingsError(
            "checkpoint.exclude_from_loading contains 'model'. Expected no 'model', because a warm "
            "start loads only the weights. Remove it, or start from new weights: checkpoint.start = 'scratch'"
        )
    format_name = format_of(path)
    if format_name is None:
        raise SettingsError(
            f"{path} is not a checkpoint. Expected manifest.json, .metadata, *.safetensors, or "
            "consolidated.*.pth. Give the full path of a step, such as "
            "outputs/checkpoint/step-100"
        )
    if section.initial_load_in_hf and format_name != "hf":
        raise SettingsError(
            f"checkpoint.initial_load_in_hf = true, but {path} holds {FORMAT_NAMES[format_name]}. "
            f"Expected {FORMAT_NAMES['hf']}. Unset it: the format is detected"
        )
    reason = f"{reason}; {FORMAT_NAMES[format_name]}"
    upcycles = section.initial_load_upcycle
    if upcycles:
        reason = f"{reason}; initial_load_upcycle is set: every expert becomes a copy"
    manifest = read_manifest(path)
    return Start("warm", 0, path, reason, format=format_name, manifest=manifest, upcycles=upcycles)
