"""Older spellings of settings (2025 files of TorchTitan) and what they are called today."""

from __future__ import annotations

from typing import Any

from torchtitan_like.config.problems import Problem, show
from torchtitan_like.config.sections_scale import Parallelism

Path = tuple[str, ...]
Leaves = list[tuple[Path, Any]]

RENAMED: dict[Path, Path] = {
    ("checkpoint", "enable_checkpoint"): ("checkpoint", "enable"),
    ("checkpoint", "last_save_model_weights_only"): ("checkpoint", "last_save_model_only"),
    ("checkpoint", "initial_load_model_weights_only"): ("checkpoint", "initial_load_model_only"),
    ("checkpoint", "last_save_in_safetensors_format"): ("checkpoint", "last_save_in_hf"),
    ("training", "batch_size"): ("training", "local_batch_size"),
    ("training", "compile"): ("compile", "enable"),
    ("training", "seed"): ("debug", "seed"),
    ("training", "deterministic"): ("debug", "deterministic"),
    ("lr_scheduler", "lr_min"): ("lr_scheduler", "min_lr_factor"),
    ("validation", "enabled"): ("validation", "enable"),
}
MOVED_SECTIONS: dict[Path, Path] = {("float8",): ("quantize", "linear", "float8")}
RENAMED_CONVERTERS = {"float8": "quantize.linear.float8"}


def current_path(path: Path) -> Path:
    """Today's place of a setting; ``path`` itself if it has not moved."""
    if path in RENAMED:
        return RENAMED[path]
    # Parallelism had no section of its own: its keys lay in [training], the newest ones in [experimental].
    if path[0] in ("experimental", "training") and path[1:] and path[1] in Parallelism.model_fields:
        return ("parallelism", *path[1:])
    for old, new in MOVED_SECTIONS.items():
        if path[: len(old)] == old:
            return (*new, *path[len(old) :])
    return path


def _current_value(path: Path, value: Any) -> Any:
    if path == ("model", "converters") and isinstance(value, list):
        return [RENAMED_CONVERTERS.get(item, item) if isinstance(item, str) else item for item in value]
    return value


def modernise(leaves: Leaves, origin: str) -> tuple[Leaves, list[Problem]]:
    """Translate older names. Returns the leaves and one warning for each translation.

    Giving a setting under two names is an error unless the values agree.
    """
    given = {path: value for path, value in leaves if current_path(path) == path}
    renewed: Leaves = []
    findings = []
    for path, value in leaves:
        new_path, new_value = current_path(path), _current_value(path, value)
        old_key, new_key = ".".join(path), ".".join(new_path)
        if [given.setdefault(new_path, value)] != [value]:  # in lists, as nan is itself only there
            expected = f"no value under an older name of {new_key}, which has another value here"
            findings.append(Problem(old_key, value, expected, f"remove {old_key}", origin))
            continue
        if new_path != path or [new_value] != [value]:
            text = f"is the older name of {new_key}" if new_path != path else f"is read as {show(new_value)}"
            findings.append(Problem(old_key, value, text, "write the new name", origin, severity="warning"))
        renewed.append((new_path, new_value))
    return renewed, findings
