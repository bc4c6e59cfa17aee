"""Which weights a run starts from, and why: `checkpoint.start = auto | resume | warm | scratch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.checkpoint.step_folders import StepFolder, published_steps, read_manifest

if TYPE_CHECKING:
    from torchtitan_like.config.sections_scale import Checkpoint


class CheckpointError(Exception):
    """A checkpoint cannot be written, found or read; the text says which, why, and what to do."""


@dataclass(frozen=True)
class Start:
    """Decided once, by rank 0, before anything is built."""

    kind: str  # scratch | warm (weights only, step 0) | resume (everything)
    step: int
    path: Path | None
    why: str
    seed: int | None = None  # of the run that is resumed

    def __str__(self) -> str:
        source = f" from {self.path}" if self.path else ""
        return f"Checkpoint start: {self.kind}{source} at step {self.step}: {self.why}"


def decide_start(section: Checkpoint, folder: Path, last_step: int) -> Start:
    """Apply `[checkpoint]` start, load_step and initial_load_path to what is on disk. Raises CheckpointError.

    A start at `last_step` or beyond means that nothing is left to do, and nothing is loaded.
    """
    if not section.enable:
        return Start("scratch", 0, None, "checkpoint.enable is false")
    steps = published_steps(folder)
    if section.start == "scratch":
        if steps:
            raise CheckpointError(
                f"checkpoint.start = 'scratch', but {folder} holds {len(steps)} checkpoints (newest: step "
                f"{steps[-1].step}). Choose another job.dump_folder, move them away, or use start = 'auto'"
            )
        return Start("scratch", 0, None, "checkpoint.start is 'scratch'")
    if section.start == "warm":
        if steps:
            raise CheckpointError(
                f"checkpoint.start = 'warm' starts a new run at step 0, but {folder} holds checkpoints up to step "
                f"{steps[-1].step}. Choose another job.dump_folder, or use start = 'auto' to continue that run"
            )
        return _warm(section, "checkpoint.start is 'warm'")

    full = [s for s in steps if s.is_full]
    if section.load_step >= 0:
        wanted = [s for s in full if s.step == section.load_step]
        if not wanted:
            found = ", ".join(str(s.step) for s in full) or "none"
            raise CheckpointError(
                f"checkpoint.load_step = {section.load_step}, but {folder} has no full checkpoint of that step "
                f"(full checkpoints: {found})"
            )
        return _resume(wanted[0], "checkpoint.load_step names it")
    if steps and steps[-1].step >= last_step:
        return _resume(steps[-1], f"the newest checkpoint, and training.steps is {last_step}")
    if full:
        return _resume(full[-1], "newest full checkpoint")
    if section.start == "resume":
        raise CheckpointError(
            f"checkpoint.start = 'resume', but {folder} holds no full checkpoint. Use start = 'auto' to begin a run"
        )
    if section.initial_load_path:
        return _warm(section, f"no full checkpoint in {folder}, initial_load_path is set")
    if steps:
        raise CheckpointError(
            f"{folder} holds weights alone (newest: step {steps[-1].step}, of checkpoint.last_save_model_only), from which "
            f"no run can be resumed. For a new run from these weights set checkpoint.initial_load_path = "
            f"{str(steps[-1].path)!r} and another job.dump_folder; to begin anew, move them away"
        )
    return Start("scratch", 0, None, f"no full checkpoint in {folder}, no initial_load_path")


def _resume(found: StepFolder, why: str) -> Start:
    return Start("resume", found.step, found.path, why, found.manifest.get("seed"))


def _warm(section: Checkpoint, why: str) -> Start:
    if not section.initial_load_path:
        raise CheckpointError("checkpoint.start = 'warm' needs checkpoint.initial_load_path: where the weights are")
    if "model" in section.exclude_from_loading:
        raise CheckpointError(
            "checkpoint.exclude_from_loading names 'model', but a warm start loads the weights and nothing else. Take it "
            "out, or begin with new weights: checkpoint.start = 'scratch'"
        )
    path = Path(section.initial_load_path)
    if read_manifest(path) is None:
        raise CheckpointError(
            f"checkpoint.initial_load_path = {str(path)!r} is not a checkpoint: it has no valid manifest.json. "
            "Give the full path of a step, such as outputs/checkpoint/step-100"
        )
    return Start("warm", 0, path, why)
