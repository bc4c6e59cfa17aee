"""Rules of [checkpoint], [metrics], [profiling], [resilience] and [debug]."""

from __future__ import annotations

import importlib.util

from torchtitan_like.check.context import RunContext
from torchtitan_like.check.rules.keys import EARLY_STEP, MODEL_KEYS
from torchtitan_like.check.rules.no_effect_rules import idle_keys
from torchtitan_like.config.problems import Rule
from torchtitan_like.models.spec import Upcycling
from torchtitan_like.util.modules import pip_install

UPCYCLE = "checkpoint.initial_load_upcycle"


def _upcycles(run: RunContext) -> bool:
    """Return True if the run starts from a dense checkpoint, unless it has a checkpoint of its own."""
    section = run.config.checkpoint
    reads = section.start in ("auto", "warm") and section.load_step < 0
    return section.enable and reads and section.initial_load_upcycle


def _no_upcycling(run: RunContext) -> str:
    """Return why no dense model can start the model; an empty string if one can."""
    if run.spec is None or run.args is None:
        return ""
    upcycling = run.spec.upcycling(run.args)
    return "" if isinstance(upcycling, Upcycling) else upcycling


CHECKPOINT_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "upcycle-without-dense-model",
        UPCYCLE,
        lambda run: _upcycles(run) and bool(_no_upcycling(run)),
        lambda run: f"false for this {run.config.model.name} model: {_no_upcycling(run)}",
        "remove it, or choose a model with experts whose family has dense models, such as qwen3 30B-A3B",
        MODEL_KEYS,
    ),
    Rule(
        "upcycle-without-normalized-weights",
        UPCYCLE,
        lambda run: (
            _upcycles(run) and not _no_upcycling(run) and not getattr(run.args, "route_norm", True)
        ),
        "starts with other outputs than the dense model: with route_norm = false the weights of a "
        "token's experts add up to less than 1",
        "set model.args.route_norm = true",
        MODEL_KEYS,
        "warning",
    ),
    Rule(
        "seed-on-many-ranks",
        "checkpoint.create_seed_checkpoint",
        lambda run: (
            run.config.checkpoint.enable
            and run.config.checkpoint.create_seed_checkpoint
            and run.world_size not in (None, 1)
        ),
        lambda run: f"one rank, not {run.world_size}",
        "start it with NGPU=1",
    ),
    Rule(
        "pinned-memory-without-gpu",
        "checkpoint.async_mode",
        lambda run: (
            run.config.checkpoint.enable
            and run.config.checkpoint.async_mode == "async_with_pinned_mem"
            and run.device_type == "cpu"
        ),
        'is the same as "async" in this run: without a GPU no memory is page-locked',
        severity="warning",
    ),
)


def _package_rule(key: str, package: str, remedy: str) -> Rule[RunContext]:
    """Return the rule that the package of a setting is installed, if the setting has an effect."""

    def lacks_package(run: RunContext) -> bool:
        is_requested = run.config.value_of(key) and key not in idle_keys(run.config)
        return is_requested and importlib.util.find_spec(package) is None

    return Rule(
        f"{package}-not-installed",
        key,
        lacks_package,
        f"the package {package}, which is not installed",
        remedy,
        severity="training_error",
    )


PACKAGE_RULES: tuple[Rule[RunContext], ...] = (
    _package_rule("metrics.enable_tensorboard", "tensorboard", pip_install("tensorboard")),
    _package_rule("fault_tolerance.enable", "torchft", pip_install("torchft>=0.2,<0.3")),
    _package_rule("metrics.enable_wandb", "wandb", pip_install("wandb")),
    _package_rule(
        "activation_checkpoint.visualize_memory_budget_pareto",
        "matplotlib",
        "pip install matplotlib",
    ),
)

# Values of TorchTitan's custom_config_module whose settings this schema has: none, and the ones of
# [fault_tolerance].
BUILT_IN_MODULES = ("", "torchtitan.components.ft.config")


def _module_rule(key: str) -> Rule[RunContext]:
    """Return the rule that a setting names no module whose JobConfig is to be merged."""
    return Rule(
        f"unavailable-{key}",
        key,
        lambda run: run.config.value_of(key) not in BUILT_IN_MODULES,
        "no module: merging another schema is not available yet",
        "leave it out",
        severity="training_error",
    )


JOB_RULES: tuple[Rule[RunContext], ...] = (
    _module_rule("job.custom_config_module"),
    _module_rule("experimental.custom_args_module"),
    Rule(
        "unavailable-estimation",
        "memory_estimation.disable_fake_mode",
        lambda run: (
            run.config.memory_estimation.enable and run.config.memory_estimation.disable_fake_mode
        ),
        "false: an estimate with real tensors is not available yet",
        "set it to false",
        ("memory_estimation.enable",),
        "training_error",
    ),
)

PROFILING_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "trace-beyond-end",
        "profiling.profile_freq",
        lambda run: (
            run.config.profiling.enable_profiling
            and run.config.training.steps < run.config.profiling.profile_freq
        ),
        lambda run: (
            f"writes no trace: the first one is due at step {run.config.profiling.profile_freq}, "
            f"and the run ends at step {run.config.training.steps}"
        ),
        "lower it, or raise training.steps",
        ("training.steps", "profiling.enable_profiling"),
        "warning",
    ),
)

# With optimizer.early_step_in_backward no update can be skipped.
EARLY_UPDATES = (
    "with optimizer.early_step_in_backward, which updates weights "
    "before the gradient norm is known: no update can be skipped"
)
RESILIENCE_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "skipped-nonfinite-early-step",
        "resilience.on_nonfinite",
        lambda run: (
            run.config.optimizer.early_step_in_backward
            and run.config.resilience.on_nonfinite == "skip"
        ),
        f'"stop" {EARLY_UPDATES}',
        'set optimizer.early_step_in_backward = false, or on_nonfinite = "stop"',
        (EARLY_STEP,),
    ),
    Rule(
        "skipped-spike-early-step",
        "resilience.on_spike",
        lambda run: (
            run.config.optimizer.early_step_in_backward
            and run.config.resilience.spike_threshold > 0
            and run.config.resilience.on_spike == "skip"
        ),
        f'"log" {EARLY_UPDATES}',
        'set optimizer.early_step_in_backward = false, or on_spike = "log"',
        (EARLY_STEP,),
    ),
    Rule(
        "high-norm-early-step",
        "resilience.on_high_norm",
        lambda run: (
            run.config.optimizer.early_step_in_backward
            and run.config.resilience.on_high_norm == "rerun"
        ),
        f'"accept" {EARLY_UPDATES}',
        'set optimizer.early_step_in_backward = false, or on_high_norm = "accept"',
        (EARLY_STEP,),
    ),
    Rule(
        "bounded-exchange-early-step",
        "parallelism.expert_parallel_exchange",
        lambda run: (
            run.config.optimizer.early_step_in_backward
            and run.config.parallelism.expert_parallel_exchange == "bounded"
        ),
        f'"exact" {EARLY_UPDATES}',
        'set optimizer.early_step_in_backward = false, or expert_parallel_exchange = "exact"',
        (EARLY_STEP,),
    ),
    Rule(
        "bounded-exchange-debug",
        "parallelism.expert_parallel_exchange",
        lambda run: (
            (run.config.debug.deterministic or run.config.debug.detect_overflow)
            and run.config.parallelism.expert_parallel_exchange == "bounded"
        ),
        '"exact" with debug.deterministic or debug.detect_overflow: sums may depend on the size of '
        "buffers, which grow, and a buffer may contain NaN until its rows have arrived",
        'set expert_parallel_exchange = "auto"',
    ),
    Rule(
        "gradient-check-early-step",
        "resilience.verify_gradients_freq",
        lambda run: (
            run.config.is_set("resilience.verify_gradients_freq")
            and run.config.resilience.verify_gradients_freq > 0
            and run.config.optimizer.early_step_in_backward
        ),
        "0 with optimizer.early_step_in_backward: a second pass would update the weights",
        "leave it out, or set optimizer.early_step_in_backward = false",
        (EARLY_STEP,),
    ),
)

DEBUG_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "compiled-overflow-detection",
        "debug.detect_overflow",
        lambda run: run.config.debug.detect_overflow and run.config.compile.is_on,
        "false with compile.enable = true: modules inside compiled code cannot be inspected",
        "set compile.enable = false while you search for the non-finite value",
        ("compile.enable",),
    ),
    Rule(
        "launch-blocking",
        "debug.launch_blocking",
        lambda run: run.config.debug.launch_blocking and run.device_type != "cpu",
        "makes the run much slower: the host waits for each kernel",
        severity="warning",
    ),
)
