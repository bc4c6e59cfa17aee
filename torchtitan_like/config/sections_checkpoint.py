"""The section [checkpoint], and the rules that its settings do not contradict each other."""

from __future__ import annotations

from typing import ClassVar, Literal

from torchtitan_like.config.base import (
    Facts,
    HomePath,
    KeepCount,
    Need,
    Section,
    above,
    enabled,
    field,
)
from torchtitan_like.config.problems import Rule

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

# A rule applies if its feature is enabled.
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


class Checkpoint(Section):
    """Saving checkpoints, and starting from them."""

    facts: ClassVar[Facts] = Facts(affects="nothing", needs=(enabled(),))
    SAVING: ClassVar[Need] = Need(
        "load_only",
        "{key} = false",
        lambda load_only, _: not load_only,
        "the run saves no checkpoints",
    )
    EXPORTING: ClassVar[Need] = Need(
        "last_save_in_hf",
        "{key} = true or checkpoint.hf_interval > 0",
        lambda value, config: value or config.checkpoint.hf_interval > 0,
    )
    LOADING: ClassVar[Need] = Need(
        "start",
        '{key} = "auto" or "resume"',
        lambda start, config: start != "scratch" and not config.checkpoint.create_seed_checkpoint,
        "nothing is loaded",
    )
    LOADING_INITIAL: ClassVar[tuple[Need, ...]] = (
        Need(
            "start",
            '{key} = "auto" or "warm"',
            lambda start, _: start != "resume",
            'with "resume" there must be a checkpoint of this run',
        ),
        Need(
            "load_step", "{key} = -1", lambda step, _: step < 0, "that step of this run is loaded"
        ),
    )

    enable: bool = field(False, "Save checkpoints and resume from them.")
    enable_ft_dataloader_checkpoints: bool = field(
        True,
        "Each replica also saves its own position in the dataset.",
        needs=enabled("fault_tolerance.enable"),
    )
    folder: HomePath = field(
        "checkpoint", "Folder of the checkpoints step-N, below job.dump_folder.", min_length=1
    )
    interval: int = field(500, "Save every this many steps, and at the end.", gt=0, needs=SAVING)
    interval_minutes: float = field(
        0.0,
        "Also save if this many minutes have passed since the last checkpoint. 0: never.",
        ge=0,
        needs=SAVING,
    )
    initial_load_path: HomePath | None = field(
        None,
        "Checkpoint to start from if the run has none of its own. The format is detected: a "
        "step-N of this program, or a folder of Hugging Face safetensors, of "
        "torch.distributed.checkpoint, or of Meta's consolidated.*.pth.",
        needs=LOADING_INITIAL,
    )
    initial_load_model_only: bool = field(
        True,
        "Load only the weights of initial_load_path; optimizer, schedule and data start anew. "
        "false: continue the run of that full checkpoint, from its step, in a folder of its own. "
        "It may be a checkpoint of TorchTitan 0.2.",
        needs=(Need("initial_load_path", "{key}", lambda path, _: bool(path)), *LOADING_INITIAL),
    )
    initial_load_in_hf: bool = field(
        False,
        "Refuse initial weights that are not Hugging Face safetensors. Without initial_load_path "
        "the weights in model.hf_assets_path are loaded.",
        needs=LOADING_INITIAL,
    )
    initial_load_in_hf_quantized: bool = field(
        False,
        "The initial weights are quantized Hugging Face safetensors.",
        needs=LOADING_INITIAL,
    )
    initial_load_upcycle: bool = field(
        False,
        "The initial weights are of a dense model: every expert becomes a copy of its feed-forward "
        "network, routers are new. A resumed run never upcycles again.",
        needs=LOADING_INITIAL,
    )
    last_save_model_only: bool = field(
        True,
        "The last checkpoint holds only the weights. Set it to false to extend a finished run "
        "later.",
        needs=SAVING,
    )
    last_save_in_hf: bool = field(
        False,
        "Write the last checkpoint as Hugging Face safetensors, as fast as a native checkpoint of "
        "the weights. Requires last_save_model_only = true.",
        needs=SAVING,
    )
    hf_interval: int = field(
        0,
        "Export the weights as Hugging Face safetensors every this many steps, to hf/step-N in "
        "checkpoint.folder. Nothing deletes these exports. They are as fast as native "
        "checkpoints (docs/guides/checkpoint.md). 0: never.",
        ge=0,
        needs=SAVING,
    )
    hf_shard_gb: float = field(
        5.0,
        "Maximum size of a file of Hugging Face safetensors in GB (10^9 bytes).",
        gt=0,
        needs=(EXPORTING, SAVING),
    )
    export_dtype: Literal["float16", "bfloat16", "float32"] = field(
        "float32",
        "Type of the weights in Hugging Face safetensors, and in a last checkpoint with "
        "last_save_model_only.",
        needs=SAVING,
    )
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = field(
        "disabled",
        "async: write checkpoints in the background. async_with_pinned_mem: also stage them in "
        "page-locked memory.",
        needs=SAVING,
    )
    on_save_error: Literal["stop", "continue"] = field(
        "stop",
        "After a failed checkpoint, or a failed write to another file of the run. stop: end with "
        "exit code 74. continue: try again later; the last checkpoint of a run must succeed.",
        needs=SAVING,
    )
    keep_latest_k: KeepCount = field(
        10,
        "Number of newest checkpoints to keep, at least 2. Older ones are deleted. 0: keep all.",
        needs=SAVING,
    )
    keep_every: int = field(
        0,
        "Keep checkpoints of steps that are divisible by this number. 0: none. Checkpoints with a "
        "file PIN are always kept.",
        ge=0,
        needs=(above(0, "keep_latest_k", reason="nothing is deleted"), SAVING),
    )
    load_step: int = field(-1, "Step to resume from. -1: the newest.", ge=-1)
    exclude_from_loading: list[
        Literal["model", "optimizer", "ema", "lr_scheduler", "dataloader", "train_state"]
    ] = field([], "States of a checkpoint that are not loaded.", needs=LOADING)
    verify: Literal["read", "full"] = field(
        "read",
        "Compare data with the hashes in the checkpoint. read: the data that ranks read. full: "
        "also the data that no rank needs.",
        needs=LOADING,
    )
    allow_change: list[str] = field(
        [],
        'Patterns of settings that may differ from the resumed run, e.g. ["optimizer.lr"] or '
        '["model.*"]. Without them, changes that affect the result are refused.',
        needs=(
            LOADING,
            Need(
                "start",
                '{key} = "auto" or "resume"',
                lambda start, _: start != "warm",
                "no run is resumed",
            ),
        ),
    )
    enable_first_step_checkpoint: bool = field(
        False, "Also save after the first step, to learn early if saving works.", needs=SAVING
    )
    create_seed_checkpoint: bool = field(
        False, "Save the initial weights as step-0 on one rank and end."
    )
    load_only: bool = field(False, "Load checkpoints but save none.")
    start: Literal["auto", "resume", "warm", "scratch"] = field(
        "auto",
        "auto: newest checkpoint of this run, else initial_load_path, else new weights. resume: a "
        "checkpoint of this run must exist. warm: weights of initial_load_path at step 0. "
        "scratch: new weights.",
    )

    rules: ClassVar[tuple[Rule[Checkpoint], ...]] = CHECKPOINT_RULES
