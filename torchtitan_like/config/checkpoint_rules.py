"""Settings of [checkpoint] that contradict each other: all of them, in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torchtitan_like.config.sections_scale import Checkpoint


def _is_on(section: Checkpoint) -> bool:
    return section.enable


def _saves(section: Checkpoint) -> bool:
    return section.enable and not section.load_only


def _loads_initial(section: Checkpoint) -> bool:
    """True if `initial_load_path` or the model's assets may be read."""
    return section.enable and section.start != "resume" and section.load_step < 0


class Rule(NamedTuple):
    """A contradiction between settings of [checkpoint].

    applies: whether the feature that the rule is about is on; a rule never refuses settings of
    a feature that is off. key: the setting to blame. involves: the other settings it looks at.
    """

    applies: Callable[[Checkpoint], bool]
    is_broken: Callable[[Checkpoint], bool]
    key: str
    expected: str
    remedy: str
    involves: tuple[str, ...]


def is_uri(path: str | None) -> bool:
    """True for what names an object store rather than a folder."""
    return path is not None and "://" in path


A_FOLDER = "a folder, no URI: a checkpoint is committed by renaming it, which needs a POSIX file system"
COPY_LATER = "save to a local or shared folder; scripts/checkpoint.py offload copies finished steps elsewhere"
_NO_OPTIMIZER = "safetensors files hold no optimizer state"
_SEED = "while create_seed_checkpoint = true, which saves new weights as step-0 and ends"

CHECKPOINT_RULES: tuple[Rule, ...] = (
    Rule(
        _saves,
        lambda c: c.last_save_in_hf and not c.last_save_model_only,
        "last_save_in_hf",
        f"false while last_save_model_only = false: {_NO_OPTIMIZER}",
        "set checkpoint.last_save_model_only = true, or checkpoint.last_save_in_hf = false",
        ("last_save_model_only",),
    ),
    Rule(
        _saves,
        lambda c: c.export_dtype != "float32" and not (c.last_save_model_only or c.hf_interval),
        "export_dtype",
        '"float32" while last_save_model_only = false and hf_interval = 0: only weights saved alone are converted',
        "set checkpoint.last_save_model_only = true, or leave export_dtype out",
        ("last_save_model_only", "hf_interval"),
    ),
    Rule(
        _loads_initial,
        lambda c: c.initial_load_in_hf and not c.initial_load_model_only,
        "initial_load_model_only",
        f"true while initial_load_in_hf = true: {_NO_OPTIMIZER}",
        "set checkpoint.initial_load_model_only = true",
        ("initial_load_in_hf",),
    ),
    Rule(
        _loads_initial,
        lambda c: c.initial_load_in_hf_quantized and not c.initial_load_in_hf,
        "initial_load_in_hf_quantized",
        "false while initial_load_in_hf = false",
        "set checkpoint.initial_load_in_hf = true",
        ("initial_load_in_hf",),
    ),
    Rule(
        _is_on,
        lambda c: c.start == "warm" and not c.initial_load_path and not c.initial_load_in_hf,
        "start",
        'a checkpoint.initial_load_path, whose weights "warm" takes',
        "set checkpoint.initial_load_path to the path of a checkpoint",
        ("initial_load_path", "initial_load_in_hf"),
    ),
    Rule(
        _is_on,
        lambda c: c.start == "warm" and not c.initial_load_model_only,
        "initial_load_model_only",
        'true while start = "warm", which takes the weights alone',
        'set checkpoint.start = "auto" to continue the run of initial_load_path, or leave initial_load_model_only out',
        ("start",),
    ),
    Rule(
        _is_on,
        lambda c: c.start == "warm" and "model" in c.exclude_from_loading,
        "exclude_from_loading",
        'no "model" while start = "warm", which loads the weights and nothing else',
        'take "model" out, or set checkpoint.start = "scratch" to begin with new weights',
        ("start",),
    ),
    Rule(
        _is_on,
        lambda c: c.start == "scratch" and (bool(c.initial_load_path) or c.initial_load_in_hf),
        "start",
        'neither checkpoint.initial_load_path nor initial_load_in_hf: "scratch" begins with new weights',
        'set checkpoint.start = "warm" to use those weights, or remove them',
        ("initial_load_path", "initial_load_in_hf"),
    ),
    Rule(
        _is_on,
        lambda c: c.load_step >= 0 and c.start in ("warm", "scratch"),
        "load_step",
        '-1 while start is "warm" or "scratch": no step of this run is loaded',
        'set checkpoint.start = "resume", or remove load_step',
        ("start",),
    ),
    Rule(
        lambda c: c.create_seed_checkpoint,
        lambda c: not c.enable,
        "create_seed_checkpoint",
        "false while enable = false: nothing is saved",
        "set checkpoint.enable = true",
        ("enable",),
    ),
    Rule(
        _is_on,
        lambda c: c.create_seed_checkpoint and c.load_only,
        "load_only",
        f"false {_SEED}",
        "remove one of the two",
        ("create_seed_checkpoint",),
    ),
    Rule(
        _is_on,
        lambda c: c.create_seed_checkpoint and c.start in ("resume", "warm"),
        "start",
        f'"auto" or "scratch" {_SEED}',
        "remove one of the two",
        ("create_seed_checkpoint",),
    ),
    Rule(
        _is_on,
        lambda c: c.create_seed_checkpoint and (bool(c.initial_load_path) or c.initial_load_in_hf),
        "initial_load_path",
        f"unset, and initial_load_in_hf = false, {_SEED}",
        "remove one of the two",
        ("create_seed_checkpoint", "initial_load_in_hf"),
    ),
    Rule(
        _is_on,
        lambda c: c.create_seed_checkpoint and c.load_step >= 0,
        "load_step",
        f"-1 {_SEED}",
        "remove one of the two",
        ("create_seed_checkpoint",),
    ),
    Rule(
        _saves,
        lambda c: bool(c.keep_latest_k and c.keep_every % c.interval),
        "keep_every",
        "a multiple of checkpoint.interval: only steps that are saved can be kept",
        "set it to a multiple, or to 0",
        ("interval",),
    ),
    Rule(_is_on, lambda c: is_uri(c.folder), "folder", A_FOLDER, COPY_LATER, ()),
    Rule(
        _loads_initial,
        lambda c: is_uri(c.initial_load_path),
        "initial_load_path",
        A_FOLDER,
        "copy that checkpoint here first",
        (),
    ),
)
