"""The machine: release of torch, variables of NCCL, run directory, initial checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.problems import Problem
from torchtitan_like.util.run_directory import numbered_folders, step_name
from torchtitan_like.util.suggestions import did_you_mean

if TYPE_CHECKING:
    from torchtitan_like.check.context import RunContext
    from torchtitan_like.config import JobConfig

# The oldest release of torch that is supported, and the newest that the tests have run on.
OLDEST_TORCH = (2, 11)
NEWEST_TESTED_TORCH = (2, 14)


def check_torch(run: RunContext) -> Iterator[Problem]:
    """Refuse a torch that is too old; warn about one that is newer than the tested releases."""
    release = ".".join(map(str, run.torch_release))
    oldest = ".".join(map(str, OLDEST_TORCH))
    newest = ".".join(map(str, NEWEST_TESTED_TORCH))
    if run.torch_release < OLDEST_TORCH:
        expected = f"torch {oldest} or newer; torch {release} is installed"
        yield Problem("torch", None, expected, f"pip install 'torch>={oldest}'")
    elif run.torch_release > NEWEST_TESTED_TORCH:
        text = f"torch {release} is newer than the newest tested release, {newest}"
        remedy = "report what fails; torch 2.13 runs in every CI run"
        yield Problem("torch", None, text, remedy, severity="warning")


def check_nccl(run: RunContext) -> Iterator[Problem]:
    """Warn about a fixed algorithm or protocol of NCCL, unless debug.deterministic sets both."""
    if run.device_type != "cuda" or run.config.debug.deterministic:
        return
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        if value := os.environ.get(name):
            text = (
                f"{name}={value} is set: NCCL selects by message size, "
                "and a fixed choice is usually slower"
            )
            remedy = "unset it, or see docs/guides/nccl.md"
            yield Problem(name, None, text, remedy, severity="warning")


def describe_missing(path: Path) -> str:
    """Return a statement that a path does not exist. It names the folder of a relative path."""
    missing = f"there is nothing at {path}"
    return missing if path.is_absolute() else f"{missing} below {Path.cwd()}"


def check_folders(config: JobConfig) -> Iterator[Problem]:
    """Check that the run directory can be written."""
    folder = Path(config.job.dump_folder)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "is not writable" if existing.is_dir() else "is a file"
        expected = f"a folder that can be written; {existing} {reason}"
        yield Problem("job.dump_folder", None, expected, severity="training_error")
    if config.job.save_config_file and (folder / config.job.save_config_file).is_dir():
        expected = "the name of a file; there is a folder of that name"
        yield Problem("job.save_config_file", None, expected)


def check_initial_checkpoint(config: JobConfig) -> Iterator[Problem]:
    """Check the checkpoint that the run starts from, and the settings that may differ from it."""
    section = config.checkpoint
    if not section.enable:
        return
    if section.start in ("auto", "resume"):
        yield from _check_allowed_changes(section.allow_change)
    steps_folder = Path(config.job.dump_folder) / section.folder
    assets = Path(config.model.hf_assets_path)
    has_steps = section.start == "auto" and bool(numbered_folders(steps_folder))
    needs_initial = section.load_step < 0 and section.start != "resume" and not has_steps
    path = section.initial_load_path
    if needs_initial and path and not Path(path).is_dir():
        yield Problem(
            "checkpoint.initial_load_path",
            None,
            f"the folder of one checkpoint (.../step-N); {describe_missing(Path(path))}",
            severity="training_error",
            involves=("checkpoint.start", "job.dump_folder"),
        )
    has_assets = any(assets.glob("*.safetensors"))
    if needs_initial and not path and section.initial_load_in_hf and not has_assets:
        yield Problem(
            "checkpoint.initial_load_in_hf",
            None,
            f"*.safetensors in model.hf_assets_path = {assets}, "
            "as checkpoint.initial_load_path is unset; there are none",
            "set checkpoint.initial_load_path, or download the weights with `titan download`",
            severity="training_error",
            involves=("checkpoint.start", "job.dump_folder", "model.hf_assets_path"),
        )
    if section.load_step >= 0 and not (steps_folder / step_name(section.load_step)).is_dir():
        yield Problem(
            "checkpoint.load_step",
            None,
            f"a saved step; {_list_steps(steps_folder)}",
            severity="training_error",
            involves=("checkpoint.folder", "job.dump_folder"),
        )


def _list_steps(folder: Path) -> str:
    """Return a statement about the newest saved steps in a folder."""
    steps = [number for number, _ in numbered_folders(folder)]
    newest = ", ".join(map(str, steps[:-11:-1]))
    return f"{folder} holds the steps {newest}" if steps else f"{folder} holds none"


def _check_allowed_changes(patterns: list[str]) -> Iterator[Problem]:
    """Check that each pattern of checkpoint.allow_change matches a setting."""
    keys = [setting.key for setting in all_settings()]
    for pattern in patterns:
        is_argument = pattern.startswith("model.args.")  # the model defines the names below it
        is_match = any(
            fnmatchcase(key, pattern) or fnmatchcase(pattern, key.replace("<name>", "*"))
            for key in keys
        )
        if not is_argument and not is_match:
            expected = f'patterns that match a setting; "{pattern}" matches none'
            remedy = did_you_mean(pattern, keys) or 'for example "optimizer.lr" or "model.*"'
            yield Problem("checkpoint.allow_change", None, expected, remedy)
