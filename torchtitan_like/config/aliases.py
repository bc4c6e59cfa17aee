"""Older names of settings, from TorchTitan files of 2025, and their current names."""

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
# TorchTitan has a name of its own for models that are split into fragments.
RENAMED_MODELS = {"llama3_ft": "llama3"}


def current_path(path: Path) -> Path:
    """Return the current path of a setting; the given path if it has not moved."""
    if path in RENAMED:
        return RENAMED[path]
    # Before [parallelism] existed, its keys were in [training] and [experimental].
    is_parallelism = len(path) > 1 and path[1] in Parallelism.model_fields
    if path[0] in ("experimental", "training") and is_parallelism:
        return ("parallelism", *path[1:])
    for old, new in MOVED_SECTIONS.items():
        if path[: len(old)] == old:
            return (*new, *path[len(old) :])
    return path


def _current_value(path: Path, value: Any) -> Any:
    if path == ("model", "converters") and isinstance(value, list):
        names = RENAMED_CONVERTERS
        return [names.get(item, item) if isinstance(item, str) else item for item in value]
    if path == ("model", "name") and isinstance(value, str):
        return RENAMED_MODELS.get(value, value)
    return value


def use_current_names(leaves: Leaves, origin: str) -> tuple[Leaves, list[Problem]]:
    """Replace older names. Returns the leaves, and a warning for each replacement.

    A setting under two names is an error unless the values agree.
    """
    given = {path: value for path, value in leaves if current_path(path) == path}
    renamed: Leaves = []
    problems = []
    for path, value in leaves:
        new_path = current_path(path)
        new_value = _current_value(path, value)
        old_key = ".".join(path)
        new_key = ".".join(new_path)
        if [given.setdefault(new_path, value)] != [value]:  # lists compare nan by identity
            expected = f"no value under an older name of {new_key}, which has another value"
            problems.append(Problem(old_key, value, expected, f"remove {old_key}", origin))
            continue
        if new_path != path:
            text = f"is the older name of {new_key}"
        elif [new_value] != [value]:
            text = f"is read as {show(new_value)}"
        else:
            text = ""
        if text:
            remedy = "write the new name"
            problems.append(Problem(old_key, value, text, remedy, origin, severity="warning"))
        renamed.append((new_path, new_value))
    return renamed, problems
