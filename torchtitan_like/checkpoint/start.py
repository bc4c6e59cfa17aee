"""Which weights a run starts from, and why: `checkpoint.start = auto | resume | warm | scratch`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.step_folders import (
    MANIFEST,
    NONFINITE,
    Manifest,
    StepFolder,
    all_steps,
    emptied,
    nonfinite_states,
    numbered_folders,
    read_manifest,
)

if TYPE_CHECKING:
    from torchtitan_like.config.sections_scale import Checkpoint

Format = Literal["step", "dcp", "hf", "meta"]
FORMAT_NAMES: dict[Format, str] = {
    "step": "a checkpoint of this program",
    "dcp": "a torch.distributed.checkpoint folder of another program",
    "hf": "Hugging Face safetensors",
    "meta": "Meta's consolidated.*.pth files",
}
# What a folder without a manifest must hold to be of a format; the first that matches counts.
_SIGNS: tuple[tuple[str, Format], ...] = (
    (".metadata", "dcp"),
    ("*.safetensors", "hf"),
    ("consolidated.*.pth", "meta"),
)
_NOT_BY_ITSELF = "Move them away to begin anew; a run never does so by itself"


@dataclass(frozen=True)
class Start:
    """One way to start, found by rank 0 before anything is built."""

    kind: Literal["scratch", "warm", "resume"]  # warm: weights only, step 0. resume: everything
    step: int
    path: Path | None
    why: str
    seed: int | None = None  # of the run that is resumed
    format: Format = "step"
    manifest: Manifest | None = None

    def with_manifest(self) -> Start:
        """This start from a full step, with its manifest read again. Raises DamagedError."""
        assert self.path is not None
        if (manifest := read_manifest(self.path)) is None:
            raise DamagedError(f"{self.path} has no manifest any more")
        return _resume(StepFolder(self.step, self.path, manifest), self.why)

    def __str__(self) -> str:
        source = f" from {self.path}" if self.path else ""
        return f"Checkpoint start: {self.kind}{source} at step {self.step}: {self.why}"


def format_of(path: Path) -> Format | None:
    """What kind of checkpoint a folder holds, by its files; None: none that is known.

    Raises DamagedError when its manifest cannot be believed.
    """
    manifest = read_manifest(path)
    if manifest is not None:
        return "hf" if manifest["kind"] == "hf" else "step"
    return next((kind for sign, kind in _SIGNS if any(path.glob(sign))), None)


def decide_start(
    section: Checkpoint, folder: Path, last_step: int, hf_assets_path: Path, config: str = ""
) -> list[Start]:
    """Apply `[checkpoint]` start, load_step and initial_load_path to what is on disk.

    `hf_assets_path`: where initial weights are when `initial_load_in_hf` stands without a path. `config`: this run's, as its
    steps hold it.

    Returns what to try in order: behind the first choice come the older full steps, in case its bytes turn out to be
    damaged. A start at `last_step` or beyond means that nothing is left to do, and nothing is loaded. Raises
    CheckpointError; DamagedError when all there is to resume from is damaged: a run never begins anew by itself.
    """
    if not section.enable:
        return [Start("scratch", 0, None, "checkpoint.enable is false")]
    if section.create_seed_checkpoint or section.start in ("scratch", "warm"):
        return [_new_run(section, folder, hf_assets_path)]
    steps = all_steps(folder)
    if section.load_step >= 0:
        named, later = (
            _named_step(section.load_step, folder, steps),
            [s for s in steps if s.step > section.load_step],
        )
        if not later or any(
            step.manifest and step.manifest.get("config") != config for step in later
        ):
            return [named]
        # This very command has gone back already, and is started again, by torchrun or by Slurm.
        steps = [step for step in steps if step.step >= named.step]
    whole = [step for step in steps if step.damage is None]
    if whole and whole[-1].step >= last_step:
        return [_resume(whole[-1], f"the newest checkpoint, and training.steps is {last_step}")]
    may_be_full = [step for step in reversed(steps) if step.manifest.get("kind", "full") == "full"]
    full = [step for step in may_be_full if step.damage is None]
    damage = [step.damage for step in may_be_full if step.damage]
    if full:
        left_out = f"; damaged and left out: {'; '.join(damage)}" if damage else ""
        left_out += _nonfinite_after(folder, full[0].step)
        first = _resume(full[0], f"newest full checkpoint{left_out}")
        return [first, *(_resume(older, "an older full checkpoint") for older in full[1:])]
    if damage:
        raise DamagedError(
            f"{folder} holds no full checkpoint that is whole: {'; '.join(damage)}. {_NOT_BY_ITSELF}"
        )
    if section.start == "resume":
        raise CheckpointError(
            f"checkpoint.start = 'resume', but {folder} holds no full checkpoint. Use start = 'auto' to begin a run"
        )
    return [_first_start(section, folder, last_step, hf_assets_path)]


def _resume(found: StepFolder, why: str) -> Start:
    """A start from a full step; its manifest holds the configuration that it was saved under."""
    manifest, config = found.manifest, found.path / "config.toml"
    if (
        manifest["format_version"] == 1 and config.exists()
    ):  # the first format kept it beside the manifest alone
        manifest = {**manifest, "config": config.read_text(encoding="utf-8")}
    return Start("resume", found.step, found.path, why, manifest.get("seed"), manifest=manifest)


def _nonfinite_after(folder: Path, step: int) -> str:
    """A clause that names the states after `step` that hold an inf or nan; empty if there are none."""
    names = [
        path.name
        for path in nonfinite_states(folder)
        if int(path.name.removeprefix("step-").removesuffix(NONFINITE)) > step
    ]
    return f"; not finite and left out: {', '.join(names)}" if names else ""


def _new_run(section: Checkpoint, folder: Path, hf_assets_path: Path) -> Start:
    """A start that takes nothing from this folder, which must hold nothing for it."""
    asked = (
        "create_seed_checkpoint = true"
        if section.create_seed_checkpoint
        else f"start = {section.start!r}"
    )
    present = [path.name for _, path in _checkpoints(folder)]
    if present:
        raise CheckpointError(
            f"checkpoint.{asked} begins a new run at step 0, but {folder} holds {len(present)} checkpoints (newest: "
            f"{present[-1]}). Choose another job.dump_folder, move them away, or use start = 'auto' to continue that run"
        )
    if section.start == "warm":
        return _initial(section, None, hf_assets_path, "checkpoint.start is 'warm'")
    return Start("scratch", 0, None, f"checkpoint.{asked}")


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Every `step-N` that holds a checkpoint of any format, be it damaged, or has lost one."""
    return [
        (number, path)
        for number, path in numbered_folders(folder)
        if os.path.lexists(path / MANIFEST) or emptied(path) or format_of(path)
    ]


def _named_step(number: int, folder: Path, steps: list[StepFolder]) -> Start:
    """`checkpoint.load_step`: that one or none."""
    found = next((step for step in steps if step.step == number), None)
    if found is not None and found.damage:
        raise DamagedError(
            f"checkpoint.load_step = {number}: {found.damage}. Name another step, or -1 for the newest"
        )
    if found is not None and found.is_full:
        return _resume(found, "checkpoint.load_step names it")
    known = ", ".join(str(step.step) for step in steps if step.is_full) or "none"
    there = format_of(folder / f"step-{number}")
    holds = f", step-{number} holds weights alone ({FORMAT_NAMES[there]})" if there else ""
    raise CheckpointError(
        f"checkpoint.load_step = {number}, but {folder} has no full checkpoint of that step{holds} (full checkpoints: "
        f"{known})"
    )


def _first_start(section: Checkpoint, folder: Path, last_step: int, hf_assets_path: Path) -> Start:
    """`auto` in a folder from which nothing can be resumed: step-0 of the user's, initial weights, or new ones."""
    found = _checkpoints(folder)
    if [number for number, _ in found] == [0]:
        step_0 = found[0][1]
        if section.initial_load_path:
            raise CheckpointError(
                f"two sources of weights: {step_0} and checkpoint.initial_load_path = {section.initial_load_path!r}. "
                "Move the first away, or leave the second out"
            )
        return _weights(section, step_0, "the user's step-0, and nothing newer is there")
    if found:  # the end of a run: it never begins anew by itself, whatever initial_load_path says
        newest = found[-1][1]
        raise CheckpointError(
            f"{folder} holds weights alone (newest: {newest.name}, {FORMAT_NAMES[format_of(newest) or 'step']}), from "
            f"which no run can be resumed. For a new run from these weights set checkpoint.initial_load_path = "
            f"{str(newest)!r} and another job.dump_folder; to begin anew, move them away"
        )
    why = f"no full checkpoint in {folder}{_nonfinite_after(folder, 0)}"
    if section.initial_load_path or section.initial_load_in_hf:
        return _initial(section, last_step, hf_assets_path, why)
    return Start("scratch", 0, None, f"{why}, no initial_load_path")


def _initial(section: Checkpoint, last_step: int | None, hf_assets_path: Path, why: str) -> Start:
    """What `initial_load_path` names: weights or, with `initial_load_model_only = false`, a whole run."""
    if section.initial_load_path:
        path, why = Path(section.initial_load_path), f"{why}, initial_load_path is set"
    else:
        path, why = hf_assets_path, f"{why}, initial_load_in_hf: those of model.hf_assets_path"
    start = _weights(section, path, why)
    if section.initial_load_model_only:
        return start
    manifest = start.manifest or {}
    if manifest.get("kind") != "full":
        raise CheckpointError(
            f"checkpoint.initial_load_model_only = false takes a whole run from checkpoint.initial_load_path, but {path} "
            f"holds weights alone ({FORMAT_NAMES[start.format]}). Set checkpoint.initial_load_model_only = true, or name a "
            "full step-N of this program"
        )
    step = manifest["step"]
    if last_step is not None and step >= last_step:
        raise CheckpointError(
            f"checkpoint.initial_load_path = {str(path)!r} is at step {step}, and training.steps = {last_step} leaves "
            "nothing to do. Raise training.steps, or set checkpoint.initial_load_model_only = true to start at step 0"
        )
    return _resume(StepFolder(step, path, manifest), why)


def _weights(section: Checkpoint, path: Path, why: str) -> Start:
    """A warm start from a folder of any format that is known, checked against what the settings say of it."""
    if "model" in section.exclude_from_loading and section.initial_load_model_only:
        raise CheckpointError(
            "checkpoint.exclude_from_loading names 'model', but a warm start loads the weights and nothing else. Take it "
            "out, or begin with new weights: checkpoint.start = 'scratch'"
        )
    found = format_of(path)
    if found is None:
        raise CheckpointError(
            f"{path} is not a checkpoint: it holds neither manifest.json, nor .metadata, *.safetensors or "
            "consolidated.*.pth. Give the full path of a step, such as outputs/checkpoint/step-100"
        )
    if section.initial_load_in_hf and found != "hf":
        raise CheckpointError(
            f"checkpoint.initial_load_in_hf = true, but {path} holds {FORMAT_NAMES[found]}, not {FORMAT_NAMES['hf']}. "
            "Leave it out: the format is detected"
        )
    return Start(
        "warm", 0, path, f"{why}; {FORMAT_NAMES[found]}", format=found, manifest=read_manifest(path)
    )
