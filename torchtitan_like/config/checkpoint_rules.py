"""Settings of [checkpoint] that contradict each other. A rule applies if its feature is enabled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan_like.config.rules import Rule

if TYPE_CHECKING:
    from torchtitan_like.config.sections_scale import Checkpoint

LOCAL_FOLDER = (
    "a folder, not a URI: a checkpoint is committed by renaming its folder, "
    "which needs a POSIX file system"
)
COPY_LATER = "save to a local or shared folder, and copy finished checkpoints from there with rclone or rsync"


def is_uri(path: str | None) -> bool:
    """Return True for a path that names an object store, such as s3://bucket/run."""
    return path is not None and "://" in path


def _saves(section: Checkpoint) -> bool:
    return section.enable and not section.load_only


def _loads_initial(section: Checkpoint) -> bool:
    """Return True if `initial_load_path` or the model's assets may be read."""
    return section.enable and section.start != "resume" and section.load_step < 0


def _saves_seed(section: Checkpoint) -> bool:
    return section.enable and section.create_seed_checkpoint


def _names_weights(section: Checkpoint) -> bool:
    """Return True if the section names weights to start from."""
    return bool(section.initial_load_path) or section.initial_load_in_hf


NO_OPTIMIZER_STATE = "safetensors files hold no optimizer state"
WITH_SEED = "with create_seed_checkpoint = true, which saves new weights as step-0 and ends the run"
REMOVE_ONE = "remove one of the two settings"

CHECKPOINT_RULES: tuple[Rule[Checkpoint], ...] = (
    Rule(
        "hf-save-of-optimizer",
        "last_save_in_hf",
        lambda c: _saves(c) and c.last_save_in_hf and not c.last_save_model_only,
        f"false with last_save_model_only = false: {NO_OPTIMIZER_STATE}",
        "set checkpoint.last_save_model_only = true, or checkpoint.last_save_in_hf = false",
        ("last_save_model_only",),
    ),
    Rule(
        "converted-optimizer",
        "export_dtype",
        lambda c: (
            _saves(c)
            and c.export_dtype != "float32"
            and not (c.last_save_model_only or c.hf_interval)
        ),
        '"float32" with last_save_model_only = false and hf_interval = 0: '
        "only checkpoints without optimizer state are converted",
        "set checkpoint.last_save_model_only = true, or leave export_dtype out",
        ("last_save_model_only", "hf_interval"),
    ),
    Rule(
        "optimizer-from-hf",
        "initial_load_model_only",
        lambda c: _loads_initial(c) and c.initial_load_in_hf and not c.initial_load_model_only,
        f"true with initial_load_in_hf = true: {NO_OPTIMIZER_STATE}",
        "set checkpoint.initial_load_model_only = true",
        ("initial_load_in_hf",),
    ),
    Rule(
        "quantized-without-hf",
        "initial_load_in_hf_quantized",
        lambda c: _loads_initial(c) and c.initial_load_in_hf_quantized and not c.initial_load_in_hf,
        "false with initial_load_in_hf = false",
        "set checkpoint.initial_load_in_hf = true",
        ("initial_load_in_hf",),
    ),
    Rule(
        "upcycle-without-weights",
        "initial_load_upcycle",
        lambda c: _loads_initial(c) and c.initial_load_upcycle and not _names_weights(c),
        "false without weights to start from: it names no dense model",
        "set checkpoint.initial_load_path to the path of a dense checkpoint",
        ("initial_load_path", "initial_load_in_hf"),
    ),
    Rule(
        "upcycle-with-optimizer",
        "initial_load_model_only",
        lambda c: _loads_initial(c) and c.initial_load_upcycle and not c.initial_load_model_only,
        "true with initial_load_upcycle = true: the optimizer state of a dense model fits no experts",
        "set checkpoint.initial_load_model_only = true",
        ("initial_load_upcycle",),
    ),
    Rule(
        "warm-without-weights",
        "start",
        lambda c: c.enable and c.start == "warm" and not _names_weights(c),
        'a checkpoint.initial_load_path: "warm" loads its weights',
        "set checkpoint.initial_load_path to the path of a checkpoint",
        ("initial_load_path", "initial_load_in_hf"),
    ),
    Rule(
        "warm-with-optimizer",
        "initial_load_model_only",
        lambda c: c.enable and c.start == "warm" and not c.initial_load_model_only,
        'true with start = "warm", which loads only the weights',
        'set checkpoint.start = "auto" to continue the run of initial_load_path, '
        "or leave initial_load_model_only out",
        ("start",),
    ),
    Rule(
        "warm-without-model",
        "exclude_from_loading",
        lambda c: c.enable and c.start == "warm" and "model" in c.exclude_from_loading,
        'no "model" with start = "warm", which loads only the weights',
        'remove "model", or set checkpoint.start = "scratch" to start with new weights',
        ("start",),
    ),
    Rule(
        "scratch-with-weights",
        "start",
        lambda c: c.enable and c.start == "scratch" and _names_weights(c),
        "neither checkpoint.initial_load_path nor initial_load_in_hf: "
        '"scratch" starts with new weights',
        'set checkpoint.start = "warm" to use those weights, or remove them',
        ("initial_load_path", "initial_load_in_hf"),
    ),
    Rule(
        "step-of-no-run",
        "load_step",
        lambda c: c.enable and c.load_step >= 0 and c.start in ("warm", "scratch"),
        '-1 with start = "warm" or "scratch": no step of this run is loaded',
        'set checkpoint.start = "resume", or remove load_step',
        ("start",),
    ),
    Rule(
        "seed-without-checkpoints",
        "create_seed_checkpoint",
        lambda c: c.create_seed_checkpoint and not c.enable,
        "false with enable = false: this run saves no checkpoints",
        "set checkpoint.enable = true",
        ("enable",),
    ),
    Rule(
        "seed-with-load-only",
        "load_only",
        lambda c: _saves_seed(c) and c.load_only,
        f"false {WITH_SEED}",
        REMOVE_ONE,
        ("create_seed_checkpoint",),
    ),
    Rule(
        "seed-with-start",
        "start",
        lambda c: _saves_seed(c) and c.start in ("resume", "warm"),
        f'"auto" or "scratch" {WITH_SEED}',
        REMOVE_ONE,
        ("create_seed_checkpoint",),
    ),
    Rule(
        "seed-with-weights",
        "initial_load_path",
        lambda c: _saves_seed(c) and _names_weights(c),
        f"unset, and initial_load_in_hf = false, {WITH_SEED}",
        REMOVE_ONE,
        ("create_seed_checkpoint", "initial_load_in_hf"),
    ),
    Rule(
        "seed-with-step",
        "load_step",
        lambda c: _saves_seed(c) and c.load_step >= 0,
        f"-1 {WITH_SEED}",
        REMOVE_ONE,
        ("create_seed_checkpoint",),
    ),
    Rule(
        "kept-step-never-saved",
        "keep_every",
        lambda c: _saves(c) and c.keep_latest_k > 0 and c.keep_every % c.interval != 0,
        "a multiple of checkpoint.interval: only saved steps can be kept",
        "set it to a multiple, or to 0",
        ("interval",),
    ),
    Rule(
        "checkpoint-folder-uri",
        "folder",
        lambda c: c.enable and is_uri(c.folder),
        LOCAL_FOLDER,
        COPY_LATER,
    ),
    Rule(
        "initial-checkpoint-uri",
        "initial_load_path",
        lambda c: _loads_initial(c) and is_uri(c.initial_load_path),
        LOCAL_FOLDER,
        "copy that checkpoint to a local or shared folder first",
    ),
)
