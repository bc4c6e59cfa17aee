"""Settings without effect: the feature that reads them is off, or the run has no use for them.

Settings of a disabled feature are never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchtitan_like.check.context import RunContext
from torchtitan_like.check.rules.keys import (
    COMPILE,
    DEGREES,
    EARLY_STEP,
    IMPL,
    MODEL_KEYS,
    REPLICATE,
    TP,
)
from torchtitan_like.config import JobConfig, Problem
from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.problems import NO_EFFECT, Rule, no_effect_warning
from torchtitan_like.config.schema import job_config


def find_idle_settings(config: JobConfig, *, every_layer: bool = False) -> Iterable[Problem]:
    """Yield a warning for each setting that differs from its default and whose needs are not met.

    Files often contain the settings of features that they disable. So a setting counts only if it
    was written in a later layer than the unmet need, unless `every_layer` is True.
    """
    defaults = job_config()()
    for setting in all_settings():
        key = setting.key
        if "<name>" in setting.path or config.value_of(key) == defaults.value_of(key):
            continue
        for need in setting.needs:
            is_later = config.layer_of(key) > config.layer_of(need.key)
            if not need.is_met(config.value_of(need.key), config) and (is_later or every_layer):
                yield config.locate(no_effect_warning(key, f"it needs {need}", need.key))
                break


def idle_keys(config: JobConfig) -> set[str]:
    """Return the keys of settings that differ from their default and have unmet needs."""
    return {problem.key for problem in find_idle_settings(config, every_layer=True)}


def _no_effect(
    name: str,
    key: str,
    when: Callable[[RunContext], bool],
    reason: str | Callable[[RunContext], str],
    involves: tuple[str, ...] = (),
) -> Rule[RunContext]:
    """Return the rule that a setting has no effect if `when` returns True. reason: why."""

    def describe(run: RunContext) -> str:
        return f"{NO_EFFECT}: {reason if isinstance(reason, str) else reason(run)}"

    return Rule(name, key, when, describe, involves=involves, severity="warning")


# Settings whose effect depends on the layout, the model or the hardware. What depends on another
# setting only is declared with the setting: `needs` of `config.base.field`.
NO_EFFECT_RULES: tuple[Rule[RunContext], ...] = (
    _no_effect(
        "norm-of-early-step",
        "training.max_norm",
        lambda run: (
            run.config.optimizer.early_step_in_backward and run.config.is_set("training.max_norm")
        ),
        "optimizer.early_step_in_backward updates weights before the gradient norm is known",
        (EARLY_STEP,),
    ),
    _no_effect(
        "reshard-of-replicated-weights",
        "parallelism.fsdp_reshard_after_forward",
        lambda run: (
            run.is_resolved
            and not run.shards_weights
            and run.parallelism.fsdp_reshard_after_forward != "default"
        ),
        "weights are not sharded",
        DEGREES,
    ),
    _no_effect(
        "prefetch-without-shards",
        "parallelism.fsdp_prefetch_depth",
        lambda run: (
            run.is_resolved
            and run.parallelism.fsdp_prefetch_depth > 1
            and (run.parallelism.data_parallel_impl != "fsdp2" or not run.shards_weights)
        ),
        'it needs data_parallel_impl = "fsdp2" and sharded weights',
        (IMPL, *DEGREES),
    ),
    _no_effect(
        "bucketing-without-graph",
        "parallelism.simple_fsdp_bucketing",
        lambda run: run.parallelism.simple_fsdp_bucketing and not run.has_data_parallel_graph,
        'it needs data_parallel_impl = "simple_fsdp" and a model compiled by '
        '"inductor" or "aot_eager", whose graph holds the collectives',
        (IMPL, *COMPILE, "compile.backend"),
    ),
    _no_effect(
        "bucketing-alone",
        "parallelism.simple_fsdp_bucketing",
        lambda run: (
            run.parallelism.simple_fsdp_bucketing
            and run.has_data_parallel_graph
            and run.num_weight_ranks == 1
        ),
        "it needs at least two data-parallel or context-parallel ranks",
        (IMPL, *DEGREES),
    ),
    _no_effect(
        "async-without-tp",
        "parallelism.enable_async_tensor_parallel",
        lambda run: run.parallelism.enable_async_tensor_parallel and run.dims.tp == 1,
        f"it needs {TP} > 1",
        (TP,),
    ),
    _no_effect(
        "no-compiled-component",
        "compile.enable",
        lambda run: run.config.compile.enable and not run.config.compile.components,
        "compile.components is empty",
        ("compile.components",),
    ),
    _no_effect(
        "replica-check-without-replicas",
        "resilience.replica_check_freq",
        lambda run: (
            run.config.is_set("resilience.replica_check_freq")
            and run.config.resilience.replica_check_freq > 0
            and run.dims.dp_replicate == 1
        ),
        f"it needs {REPLICATE} > 1",
        (REPLICATE,),
    ),
    _no_effect(
        "balance-without-experts",
        "debug.moe_force_load_balance",
        lambda run: (
            run.config.debug.moe_force_load_balance
            and run.limits is not None
            and not run.size("n_experts")
        ),
        lambda run: f"{run.config.model.name} has no experts",
        MODEL_KEYS,
    ),
    _no_effect(
        "launch-blocking-without-gpu",
        "debug.launch_blocking",
        lambda run: run.config.debug.launch_blocking and run.device_type == "cpu",
        "there is no GPU",
    ),
    _no_effect(
        "positions-of-groups",
        "checkpoint.enable_ft_dataloader_checkpoints",
        lambda run: (
            run.config.fault_tolerance.enable
            and run.config.checkpoint.enable
            and not run.config.checkpoint.enable_ft_dataloader_checkpoints
        ),
        "every checkpoint has the positions of all groups",
        ("fault_tolerance.enable",),
    ),
)
