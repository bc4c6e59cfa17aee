"""The run directory, and the checkpoint that a run starts from."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.problems import nearest

if TYPE_CHECKING:
    from torchtitan_like.config.findings import Findings
    from torchtitan_like.preflight.layout import DeviceType


def check_folders(findings: Findings) -> None:
    """The run directory can be written."""
    config = findings.config
    folder = Path(config.job.dump_folder)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        kind = "is not writable" if existing.is_dir() else "is a file"
        findings.missing_file("job.dump_folder", f"a folder that can be written; {existing} {kind}")
    if config.job.save_config_file and (folder / config.job.save_config_file).is_dir():
        findings.error("job.save_config_file", "the name of a file; there is a folder of that name")


def check_checkpoint(findings: Findings, world_size: int | None, device_type: DeviceType | None) -> None:
    """[checkpoint] against the rest: other sections, ranks, hardware, what is on disk. See also CHECKPOINT_RULES."""
    config, section = findings.config, findings.config.checkpoint
    if not section.enable:
        return
    if section.create_seed_checkpoint and world_size not in (None, 1):
        findings.error("checkpoint.create_seed_checkpoint", f"one rank, not {world_size}", "start it with NGPU=1")
    keys = [setting.key for setting in all_settings()]
    for pattern in section.allow_change if section.start in ("auto", "resume") else ():
        of_model = pattern.startswith("model.args.")  # the names below it are the model's
        if not of_model and not any(
            fnmatchcase(key, pattern) or fnmatchcase(pattern, key.replace("<name>", "*")) for key in keys
        ):
            remedy = nearest(pattern, keys) or 'for example "optimizer.lr" or "model.*"'
            findings.error(
                "checkpoint.allow_change", f'patterns that match a setting; "{pattern}" matches none', remedy
            )
    if section.async_mode == "async_with_pinned_mem" and device_type == "cpu":
        findings.warning(
            "checkpoint.async_mode", 'is the same as "async" in this run: without a GPU no memory is page-locked'
        )
    _check_what_is_loaded(findings, Path(config.job.dump_folder) / section.folder)


def _check_what_is_loaded(findings: Findings, steps: Path) -> None:
    """The checkpoint to start from is there. ``steps``: the folder of the run's own."""
    config, section = findings.config, findings.config.checkpoint
    start, assets = section.initial_load_path, Path(config.model.hf_assets_path)
    has_own_steps = section.start == "auto" and any(steps.glob("step-*"))
    needs_start = section.load_step < 0 and section.start != "resume" and not has_own_steps
    if needs_start and start and not Path(start).is_dir():
        findings.missing_file(
            "checkpoint.initial_load_path",
            f"the folder of one checkpoint (.../step-N); {missing_at(Path(start))}",
            involves=("checkpoint.start", "job.dump_folder"),
        )
    if needs_start and not start and section.initial_load_in_hf and not any(assets.glob("*.safetensors")):
        findings.missing_file(
            "checkpoint.initial_load_in_hf",
            f"*.safetensors in model.hf_assets_path = {assets}, as checkpoint.initial_load_path is unset; it holds none",
            "set checkpoint.initial_load_path, or fetch the weights with scripts/download_assets.py",
            involves=("checkpoint.start", "job.dump_folder", "model.hf_assets_path"),
        )
    if section.load_step >= 0 and not (steps / f"step-{section.load_step}").is_dir():
        known = sorted((int(p.name[5:]) for p in steps.glob("step-*") if p.name[5:].isdigit()), reverse=True)
        found = f"{steps} holds the steps {', '.join(map(str, known[:10]))}" if known else f"{steps} holds none"
        involves = ("checkpoint.folder", "job.dump_folder")
        findings.missing_file("checkpoint.load_step", f"a saved step; {found}", involves=involves)


def missing_at(path: Path) -> str:
    return f"there is nothing at {path}" if path.is_absolute() else f"there is nothing at {path} below {Path.cwd()}"
