"""Settings that have no effect unless another setting asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.problems import NO_EFFECT, Problem
from torchtitan_like.config.schema import JobConfig


class Switch(NamedTuple):
    """Settings (fnmatch patterns of keys) that do nothing while ``switch`` does not ask for them."""

    keys: tuple[str, ...]
    switch: str
    is_off: Callable[[JobConfig], bool]
    needs: str


def _off_at(keys: tuple[str, ...], switch: str, value: Any, needs: str) -> Switch:
    return Switch(keys, switch, lambda config: bool(config.value_of(switch) == value), needs)


def _degree(name: str, keys: tuple[str, ...]) -> Switch:
    switch = f"parallelism.{name}_parallel_degree"
    return _off_at(tuple(f"parallelism.{key}" for key in keys), switch, 1, f"{switch} > 1")


def _converter(name: str) -> Switch:
    return Switch(
        (f"{name}.*",),
        "model.converters",
        lambda config: name not in config.model.converters,
        f'model.converters = ["{name}"]',
    )


def _mode_is_not(*modes: str) -> Callable[[JobConfig], bool]:
    return lambda config: config.activation_checkpoint.mode not in modes


_AC, _PP = "activation_checkpoint", "parallelism.pipeline_parallel"
_SAVING = (
    "interval", "interval_minutes", "last_save_*", "hf_*", "export_dtype", "async_mode", "on_save_error", "keep_*",
    "enable_first_step_checkpoint",
)  # fmt: skip
SWITCHES: tuple[Switch, ...] = (
    _degree("tensor", ("disable_loss_parallel", "enable_sequence_parallel")),
    _degree("pipeline", ("pipeline_parallel_*", "module_fqns_per_model_part")),
    _degree("context", ("context_parallel_*",)),
    _off_at(
        ("parallelism.context_parallel_load_balancer",),
        "parallelism.context_parallel_rotate_method",
        "ulysses",
        'context_parallel_rotate_method = "allgather" or "alltoall": under "ulysses" all ranks do the same',
    ),
    _degree("expert", ("expert_*",)),
    Switch(
        (f"{_PP}_first_stage_less_layers", f"{_PP}_last_stage_less_layers", f"{_PP}_layers_per_stage"),
        "parallelism.module_fqns_per_model_part",
        lambda config: config.parallelism.module_fqns_per_model_part is not None,
        "parallelism.module_fqns_per_model_part to be unset: it lists the modules of each stage",
    ),
    _off_at(
        ("model.print_after_conversion",), "model.converters", [], "a converter in model.converters"
    ),
    *(
        _off_at(
            (f"{section}.prefetch_factor", f"{section}.persistent_workers"),
            f"{section}.num_workers",
            0,
            f"{section}.num_workers > 0",
        )
        for section in ("training.dataloader", "validation.dataloader")
    ),
    _off_at(
        ("quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",),
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
        False,
        "quantize.linear.float8.enable_fsdp_float8_all_gather = true",
    ),
    _converter("quantize.linear.float8"),
    _converter("quantize.linear.mx"),
    _converter("quantize.grouped_mm.float8"),
    _converter("quantize.grouped_mm.mx"),
    *(
        _off_at((f"{section}.*",), f"{section}.enable", False, f"{section}.enable = true")
        for section in ("checkpoint", "compile", "validation", "fault_tolerance", "memory_estimation")
    ),
    _off_at(
        ("profiling.save_traces_folder", "profiling.profiler_*"),
        "profiling.enable_profiling",
        False,
        "profiling.enable_profiling = true",
    ),
    _off_at(
        ("profiling.save_memory_snapshot_folder",),
        "profiling.enable_memory_snapshot",
        False,
        "profiling.enable_memory_snapshot = true",
    ),
    Switch((f"{_AC}.selective_ac_option",), f"{_AC}.mode", _mode_is_not("selective"), f'{_AC}.mode = "selective"'),
    Switch(
        (f"{_AC}.memory_budget", f"{_AC}.visualize_memory_budget_pareto"),
        f"{_AC}.mode",
        _mode_is_not("memory_budget"),
        f'{_AC}.mode = "memory_budget"',
    ),
    Switch(
        (f"{_AC}.preserve_rng_state", f"{_AC}.determinism_check", f"{_AC}.early_stop", f"{_AC}.debug"),
        f"{_AC}.mode",
        _mode_is_not("selective", "full"),
        f'{_AC}.mode = "selective" or "full"',
    ),
    Switch(
        (f"{_AC}.per_op_sac_force_recompute_mm_shapes_by_fqns",),
        f"{_AC}.selective_ac_option",
        lambda config: _mode_is_not("selective")(config) or config.activation_checkpoint.selective_ac_option != "op",
        f'{_AC}.mode = "selective" with selective_ac_option = "op"',
    ),
    Switch(
        ("checkpoint.initial_load_model_only",),
        "checkpoint.initial_load_path",
        lambda config: not config.checkpoint.initial_load_path,
        "checkpoint.initial_load_path",
    ),
    Switch(
        ("checkpoint.hf_executor", "checkpoint.hf_shard_gb"),
        "checkpoint.last_save_in_hf",
        lambda config: not (config.checkpoint.last_save_in_hf or config.checkpoint.hf_interval),
        "checkpoint.last_save_in_hf = true or checkpoint.hf_interval > 0",
    ),
    _off_at(
        ("checkpoint.keep_every",), "checkpoint.keep_latest_k", 0, "checkpoint.keep_latest_k > 0: nothing is deleted"
    ),
    _off_at(
        tuple(f"checkpoint.{name}" for name in _SAVING),
        "checkpoint.load_only",
        True,
        "checkpoint.load_only = false: nothing is saved",
    ),
    _off_at(
        ("checkpoint.initial_load_*",),
        "checkpoint.start",
        "resume",
        'checkpoint.start = "auto" or "warm": with "resume" there must be a checkpoint of this run',
    ),
    Switch(
        ("checkpoint.initial_load_*",),
        "checkpoint.load_step",
        lambda config: config.checkpoint.load_step >= 0,
        "checkpoint.load_step = -1: that step of this run is loaded",
    ),
    Switch(
        ("checkpoint.allow_change", "checkpoint.exclude_from_loading", "checkpoint.verify"),
        "checkpoint.start",
        lambda config: config.checkpoint.start == "scratch" or config.checkpoint.create_seed_checkpoint,
        'checkpoint.start = "auto" or "resume": nothing is loaded',
    ),
    _off_at(
        ("checkpoint.allow_change",),
        "checkpoint.start",
        "warm",
        'checkpoint.start = "auto" or "resume": no run is resumed',
    ),
    _off_at(
        ("checkpoint.enable_ft_dataloader_checkpoints",),
        "fault_tolerance.enable",
        False,
        "fault_tolerance.enable = true",
    ),
    _off_at(("debug.deterministic_warn_only",), "debug.deterministic", False, "debug.deterministic = true"),
    _off_at(
        ("debug.detect_overflow_frames", "debug.trace_batch_nums", "debug.abort_after_batch_num"),
        "debug.detect_overflow",
        False,
        "debug.detect_overflow = true",
    ),
    Switch(
        ("data.add_bos", "data.add_eos", "data.on_bad_record"),
        "data.sources",
        lambda config: not config.reads_text,
        'a source of text: with format = "tokens" ids are read as they stand',
    ),
    _off_at(
        ("lr_scheduler.decay_type", "lr_scheduler.min_lr_factor"),
        "lr_scheduler.decay_ratio",
        0.0,
        "lr_scheduler.decay_ratio > 0, or unset: nothing decays",
    ),
    _off_at(("optimizer.no_weight_decay",), "optimizer.weight_decay", 0.0, "optimizer.weight_decay > 0"),
    _off_at(
        ("resilience.max_nonfinite_in_a_row",), "resilience.on_nonfinite", "stop", 'resilience.on_nonfinite = "skip"'
    ),
    _off_at(
        ("resilience.spike_window", "resilience.on_spike"),
        "resilience.spike_threshold",
        0.0,
        "resilience.spike_threshold > 0",
    ),
    _off_at(("comm.save_traces_*",), "comm.trace_buf_size", 0, "comm.trace_buf_size > 0"),
    _off_at(("training.gc_debug",), "training.gc_freq", 0, "training.gc_freq > 0"),
    Switch(
        ("metrics.save_for_all_ranks", "metrics.save_tb_folder"),
        "metrics.enable_tensorboard",
        lambda config: not (config.metrics.enable_tensorboard or config.metrics.enable_wandb),
        "metrics.enable_tensorboard = true",
    ),
)


def without_effect(config: JobConfig, *, every_layer: bool = False) -> Iterable[Problem]:
    """Settings that somebody wrote and that change nothing in this run.

    Where the switch was written in the same file or in one on top of it, the writer knows: files
    often list the settings of what they leave off. ``every_layer`` includes those too.
    """
    keys = [setting.key for setting in all_settings() if "<" not in setting.key]
    defaults = JobConfig()
    seen: set[str] = set()
    for switch in SWITCHES:
        if not switch.is_off(config):
            continue
        for key in keys:
            if key == switch.switch or not any(fnmatchcase(key, pattern) for pattern in switch.keys):
                continue
            value = config.value_of(key)
            if value == defaults.value_of(key) or key in seen:
                continue
            if not every_layer and config.layer_of(key) <= config.layer_of(switch.switch):
                continue
            text = f"{NO_EFFECT}; it needs {switch.needs}"
            seen.add(key)
            yield Problem(key, value, text, "", config.origin_of(key), "warning", (switch.switch,))


def idle_keys(config: JobConfig) -> set[str]:
    """Return the keys of settings that differ from their default and have no effect."""
    return {problem.key for problem in without_effect(config, every_layer=True)}
