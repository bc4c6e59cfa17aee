"""What the schema knows and training cannot do yet, and which settings do nothing unless another one is on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.problems import NO_EFFECT, NOT_AVAILABLE_YET, Problem, nearest
from torchtitan_like.config.schema import JobConfig


class Missing(NamedTuple):
    """A feature to come: the setting that asks for it, with which values, and what to do instead."""

    key: str
    is_wanted: Callable[[Any], bool]
    instead: str


NOT_AVAILABLE: tuple[Missing, ...] = (
    Missing("parallelism.expert_parallel_degree", lambda degree: degree > 1, "set it to 1"),
    Missing(
        "model.converters",
        lambda names: not {"quantize.linear.float8"}.issuperset(names),
        'take all but "quantize.linear.float8" out',
    ),
    Missing("fault_tolerance.enable", bool, "set it to false"),
    Missing("memory_estimation.enable", bool, "set it to false"),
    Missing("comm.mode", lambda mode: mode != "default", 'set it to "default"'),
    Missing("debug.moe_force_load_balance", bool, "set it to false"),
    Missing("job.custom_config_module", bool, "leave it out"),
    Missing("experimental.custom_args_module", bool, "leave it out"),
)


# Torch's own backends of torch.compile (torch 2.13), but for those that only its own tests use, and those that cannot compile
# a model of today: "ts" and "aot_ts" (TorchScript), "aot_eager_decomp_partition_with_mode" (wants an argument).
BACKENDS = (
    "inductor", "aot_eager", "eager", "aot_eager_decomp_partition", "aot_eager_default_partitioner", "cudagraphs",
    "eager_debug", "eager_noexcept", "invoke_subgraph", "openxla", "openxla_eval", "pre_dispatch_eager", "tvm",
)  # fmt: skip
# Those of them that torch only passes graphs on to, and the package that it imports for it when the first step begins.
_PACKAGE_OF_BACKEND = {"openxla": "torch_xla", "openxla_eval": "torch_xla", "tvm": "tvm"}
# Those of them that leave to autograd what is kept for the backward pass: all of it.
KEEPING_ALL = ("eager", "aot_eager_default_partitioner", "eager_debug", "eager_noexcept", "pre_dispatch_eager")


class Switch(NamedTuple):
    """Settings (fnmatch patterns of keys) that do nothing while ``switch`` does not ask for them."""

    keys: tuple[str, ...]
    switch: str
    is_off: Callable[[JobConfig], bool]
    needs: str


def _off_at(keys: tuple[str, ...], switch: str, value: Any, needs: str) -> Switch:
    return Switch(keys, switch, lambda config: bool(value_of(config, switch) == value), needs)


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
        lambda config: only_tokens(config),
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


def not_available(config: JobConfig, *, training: bool) -> Iterable[Problem]:
    """Settings that ask for what is not here: always errors; for what is to come: errors in training, else warnings."""
    yield from _unknown_backend(config)
    yield from _missing_backend(config, "error" if training else "warning")
    for key, is_wanted, instead in NOT_AVAILABLE:
        value = value_of(config, key)
        if is_wanted(value):
            value = ", ".join(value) if isinstance(value, dict) else value
            severity: Literal["error", "warning"] = "error" if training else "warning"
            yield Problem(key, value, NOT_AVAILABLE_YET, instead, config.origin_of(key), severity)


def _unknown_backend(config: JobConfig) -> Iterable[Problem]:
    """A backend of torch.compile that is neither torch's nor registered: by a package, or by experimental.custom_import.

    That module is imported by now, and with it, if it registers a backend, torch's list of them.
    """
    name, key = config.compile.backend, "compile.backend"
    if not config.compile.is_on or name in BACKENDS or name in entry_points(group="torch_dynamo_backends").names:
        return
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None and name in registry.list_backends(exclude_tags=()):
        return
    yield Problem(
        key,
        name,
        f"a backend of torch.compile: {', '.join(BACKENDS[:3])}, or one that experimental.custom_import registers",
        nearest(name, BACKENDS) or "set it to inductor, or name a module that calls torch._dynamo.register_backend",
        config.origin_of(key),
        involves=("compile.enable", "experimental.custom_import"),
    )


def _missing_backend(config: JobConfig, severity: Literal["error", "warning"]) -> Iterable[Problem]:
    key, package = "compile.backend", _PACKAGE_OF_BACKEND.get(config.compile.backend)
    if config.compile.is_on and package is not None and find_spec(package) is None:
        text = f"the package {package}, which is not installed"
        text = text if severity == "error" else f"expected {text}"
        remedy = "install it, or set compile.backend to inductor"
        yield Problem(key, config.compile.backend, text, remedy, config.origin_of(key), severity, ("compile.enable",))


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
            value = value_of(config, key)
            if value == value_of(defaults, key) or key in seen:
                continue
            if not every_layer and config.layer_of(key) <= config.layer_of(switch.switch):
                continue
            text = f"{NO_EFFECT}; it needs {switch.needs}"
            seen.add(key)
            yield Problem(key, value, text, "", config.origin_of(key), "warning", (switch.switch,))


def value_of(config: JobConfig, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def sources_of(config: JobConfig, section: str) -> dict[str, Any]:
    """The tables that name the text of "training" or "validation"."""
    return dict(config.data.sources if section == "training" else config.validation.sources)


def only_tokens(config: JobConfig) -> bool:
    """True where this run reads no text: all its sources are files of tokens."""
    used = [sources_of(config, section) for section in ("training", "validation") if is_used(config, section)]
    return all(sources and all(one.format == "tokens" for one in sources.values()) for sources in used)


def is_used(config: JobConfig, section: str) -> bool:
    """False for validation that is switched off."""
    return section == "training" or config.validation.enable
