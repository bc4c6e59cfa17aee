"""Rules of [training], [validation], [optimizer], [ema] and [lr_scheduler]."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Literal

from torchtitan_like.check.context import RunContext
from torchtitan_like.check.rules.keys import (
    BALANCER,
    BATCH,
    CP,
    DEGREES,
    EARLY_STEP,
    MODEL_KEYS,
    PP,
    ROTATE,
    SEQUENCE_PARALLEL,
    TP,
)
from torchtitan_like.check.rules.model_rules import UNIT
from torchtitan_like.config.problems import Rule
from torchtitan_like.util.modules import pip_install


def _suggest_batch_sizes(run: RunContext) -> str:
    unit = run.geometry.samples_per_pass
    below = run.config.training.global_batch_size // unit * unit
    sizes = f"{below} or {below + unit}" if below else f"{unit}"
    return f"set it to {sizes}, or change training.local_batch_size"


def _even_length(length: int, num_shards: int) -> int:
    """Return the largest multiple of `num_shards` up to `length`, at least `num_shards`."""
    return max(length // num_shards, 1) * num_shards


def _sequence_rules(section: Literal["training", "validation"]) -> tuple[Rule[RunContext], ...]:
    """Return the rules of the sequence length in training or validation."""
    key = f"{section}.seq_len"
    return (
        Rule(
            f"uneven-{section}-sequence",
            key,
            lambda run: run.seq_len(section) % run.sequence_shards != 0,
            lambda run: f"a multiple of {run.sequence_shards_formula}",
            lambda run: f"set it to {_even_length(run.seq_len(section), run.sequence_shards)}",
            (TP, CP, SEQUENCE_PARALLEL, ROTATE, BALANCER),
        ),
        Rule(
            f"{section}-beyond-rotary-table",
            key,
            lambda run: run.seq_len(section) > run.size("max_seq_len") > 0,
            lambda run: f"at most the model's max_seq_len = {run.size('max_seq_len')}",
            lambda run: f"set model.args.max_seq_len = {run.seq_len(section)}",
            MODEL_KEYS,
        ),
    )


TRAINING_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "uneven-batch",
        "training.global_batch_size",
        lambda run: (
            run.config.training.global_batch_size > 0
            and run.config.training.global_batch_size % run.geometry.samples_per_pass != 0
        ),
        lambda run: (
            "a multiple of local_batch_size x data-parallel ranks = "
            f"{run.config.training.local_batch_size} x {run.geometry.num_data_ranks} = "
            f"{run.geometry.samples_per_pass} "
            "(global_batch_size = local_batch_size x data-parallel ranks x gradient accumulation)"
        ),
        _suggest_batch_sizes,
        ("training.local_batch_size", "fault_tolerance.group_size", *DEGREES),
    ),
    Rule(
        "uneven-ramp",
        "training.batch_ramp",
        lambda run: any(
            size % run.geometry.samples_per_pass for size in run.config.training.batch_ramp[:2]
        ),
        lambda run: (
            "start and increment in multiples of local_batch_size x data-parallel ranks = "
            f"{run.geometry.samples_per_pass}"
        ),
        lambda run: (
            f"set both to multiples of {run.geometry.samples_per_pass}, "
            "or change training.local_batch_size"
        ),
        ("training.local_batch_size", *DEGREES),
    ),
    Rule(
        "bfloat16-reduction",
        "training.mixed_precision_reduce",
        lambda run: (
            run.num_weight_ranks > 1 and run.config.training.mixed_precision_reduce == "bfloat16"
        ),
        "adds the gradients of all ranks with 8 bits of precision, and of all micro-batches if "
        "weights are replicated: small ones are lost, and the numbers depend on the layout",
        'set it to "float32", unless steps wait for the network',
        DEGREES,
        "warning",
    ),
    Rule(
        "float32-compute-of-bfloat16-weights",
        "training.mixed_precision_param",
        lambda run: (
            run.config.training.dtype == "bfloat16"
            and run.config.training.mixed_precision_param == "float32"
        ),
        "computes in float32 with weights stored in bfloat16: "
        "it has the precision of bfloat16 and the speed of float32",
        'set training.dtype = "float32" for mixed precision, or mixed_precision_param = "bfloat16"',
        ("training.dtype",),
        "warning",
    ),
    Rule(
        "emulated-bfloat16",
        "training.mixed_precision_param",
        lambda run: run.emulates_bfloat16,
        "is slow on this CPU, which has no instructions for it: matrix products take about ten "
        "times as long as in float32",
        'set it to "float32"',
        severity="warning",
    ),
    Rule(
        "offload-without-gpu",
        "training.enable_cpu_offload",
        lambda run: run.device_type == "cpu" and run.config.training.enable_cpu_offload,
        "false without a GPU: parameters are already in host memory",
        "set it to false",
    ),
    Rule(
        "unaligned-tokens",
        "training.seq_len",
        lambda run: (
            run.uses_tensor_cores
            and run.config.training.seq_len % run.sequence_shards == 0
            and run.tokens_per_product % UNIT != 0
        ),
        lambda run: (
            f"{run.tokens_per_product} tokens a rank and forward pass are slow on tensor cores: "
            f"multiples of {UNIT} are fast"
        ),
        "change training.seq_len or training.local_batch_size",
        (TP, CP, *BATCH),
        "warning",
    ),
    *_sequence_rules("training"),
)

VALIDATION_RULES = _sequence_rules("validation")


def _other_optimizers(run: RunContext) -> list[str]:
    """Return the optimizers in use for which `models.parametrization` has no learning rates."""
    return sorted(run.config.optimizer.names - {"AdamW", "AdamW8bit"})


OPTIMIZER_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "adamw8bit-without-torchao",
        "optimizer.name",
        lambda run: (
            "AdamW8bit" in run.config.optimizer.names
            and importlib.util.find_spec("torchao") is None
        ),
        "the package torchao for AdamW8bit, which is not installed",
        pip_install("torchao"),
        ("optimizer.groups",),
    ),
    Rule(
        "parametrized-optimizer",
        "optimizer.name",
        lambda run: run.config.model.parametrization != "standard" and bool(_other_optimizers(run)),
        lambda run: (
            "AdamW or AdamW8bit, also in groups, with model.parametrization = "
            f'"{run.config.model.parametrization}": the learning rates of '
            f"{' and '.join(_other_optimizers(run))} do not scale like AdamW's"
        ),
        'set it to "AdamW"',
        ("optimizer.groups", "model.parametrization"),
    ),
    Rule(
        "accumulated-early-step",
        EARLY_STEP,
        lambda run: (
            run.config.optimizer.early_step_in_backward and run.geometry.num_accumulated > 1
        ),
        lambda run: (
            f"false with gradient accumulation over {run.geometry.num_accumulated} passes: "
            "each backward pass updates the weights"
        ),
        lambda run: f"set training.global_batch_size to {run.geometry.samples_per_pass} or -1",
        (*BATCH, *DEGREES),
    ),
    Rule(
        "pipelined-early-step",
        EARLY_STEP,
        lambda run: run.dims.pp > 1 and run.config.optimizer.early_step_in_backward,
        "false with pipeline parallelism: each backward pass of a step would update the weights",
        "set it to false",
        (PP,),
    ),
    Rule(
        "muon-early-step",
        EARLY_STEP,
        lambda run: (
            run.config.optimizer.early_step_in_backward and "Muon" in run.config.optimizer.names
        ),
        "false with Muon: its step is a collective over the matrices of all layers",
        "set it to false",
        ("optimizer.name",),
    ),
    Rule(
        "own-optimizer-early-step",
        EARLY_STEP,
        lambda run: run.config.optimizer.early_step_in_backward and run.has_own_optimizer,
        "false with your own optimizer, which may need the gradients of all parameters",
        "set it to false",
        ("optimizer.name",),
    ),
)


# An average that keeps a larger part of the first weights at the end of the run causes a warning.
INITIAL_PART = 0.05


def _initial_part(run: RunContext) -> float:
    """Return the part of the first weights in the average after the last step, without warm-up."""
    ema = run.config.ema
    return 0.0 if ema.warmup else float(ema.decay**run.config.training.steps)


def _saves(run: RunContext) -> bool:
    return run.config.checkpoint.enable and not run.config.checkpoint.load_only


EMA_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "average-of-initial-weights",
        "ema.decay",
        lambda run: run.config.ema.enable and _initial_part(run) > INITIAL_PART,
        lambda run: (
            f"keeps {_initial_part(run):.0%} of the first weights in the average after "
            f"training.steps = {run.config.training.steps}, because ema.warmup = false"
        ),
        "lower it, or set ema.warmup = true",
        ("ema.warmup", "training.steps"),
        "warning",
    ),
    Rule(
        "unused-average",
        "ema.enable",
        lambda run: (
            run.config.ema.enable
            and not _saves(run)
            and not (run.config.ema.validation and run.config.validation.enable)
        ),
        "averages weights that are neither saved nor validated",
        "set checkpoint.enable = true, or ema.validation = true",
        ("checkpoint.enable", "checkpoint.load_only", "ema.validation", "validation.enable"),
        "warning",
    ),
    Rule(
        "last-save-without-average",
        "checkpoint.last_save_in_hf",
        lambda run: run.config.ema.enable and _saves(run) and run.config.checkpoint.last_save_in_hf,
        "false with ema.enable = true: safetensors files hold one copy of the weights, and the "
        "average of the last step would be lost",
        "set it to false, and export the last step with `titan ckpt export`, with and without --ema",
        ("ema.enable",),
    ),
)


def _horizon(run: RunContext) -> int:
    """Return the step at which the learning rate schedule ends."""
    return run.config.lr_scheduler.total_steps or run.config.training.steps


def _decay_steps(run: RunContext) -> int | None:
    """Return the steps of the decay; None if it takes all steps after the warmup."""
    ratio = run.config.lr_scheduler.decay_ratio
    return None if ratio is None else round(_horizon(run) * ratio)


def _has_long_warmup(run: RunContext) -> bool:
    return run.config.lr_scheduler.warmup_steps > _horizon(run)


def _overlaps_decay(run: RunContext) -> bool:
    """Return True if warmup and decay together are longer than the schedule."""
    phases = run.config.lr_scheduler.warmup_steps + (_decay_steps(run) or 0)
    has_ratio = run.config.lr_scheduler.decay_ratio is not None
    return has_ratio and not _has_long_warmup(run) and phases > _horizon(run)


def _describe_overlap(run: RunContext) -> str:
    warmup_steps = run.config.lr_scheduler.warmup_steps
    return (
        f"Warmup steps ({warmup_steps}) and decay steps ({_decay_steps(run)}) exceed "
        f"total training steps ({_horizon(run)}). The decay starts after the warmup and takes "
        f"{_horizon(run) - warmup_steps} steps."
    )


def _describe_early_end(run: RunContext) -> str:
    section = run.config.lr_scheduler
    decays = section.warmup_steps < _horizon(run) and _decay_steps(run) != 0
    decayed = f"min_lr_factor = {section.min_lr_factor} of its peak"
    final = decayed if decays else "its peak, without a decay"
    steps = run.config.training.steps
    return (
        f"ends the schedule at step {_horizon(run)} of {steps}; "
        f"then the learning rate stays at {final}"
    )


def _of_wsd(rule: Rule[RunContext]) -> Rule[RunContext]:
    """Return the rule for the schedule of this package only: user code ignores its settings."""
    return replace(rule, when=lambda run: run.config.lr_scheduler.name == "wsd" and rule.when(run))


_WSD_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "warmup-beyond-schedule",
        "lr_scheduler.warmup_steps",
        _has_long_warmup,
        lambda run: (
            f"Warmup steps ({run.config.lr_scheduler.warmup_steps}) exceed total training steps "
            f"({_horizon(run)}). Adjusting warmup steps to {_horizon(run)}."
        ),
        involves=("lr_scheduler.total_steps", "training.steps"),
        severity="warning",
    ),
    Rule(
        "decay-overlaps-warmup",
        "lr_scheduler.decay_ratio",
        _overlaps_decay,
        _describe_overlap,
        involves=("lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "training.steps"),
        severity="warning",
    ),
    Rule(
        "decay-below-one-step",
        "lr_scheduler.decay_ratio",
        lambda run: bool(run.config.lr_scheduler.decay_ratio) and _decay_steps(run) == 0,
        lambda run: f"is less than one of {_horizon(run)} steps: the learning rate does not decay",
        involves=("lr_scheduler.total_steps", "training.steps"),
        severity="warning",
    ),
    Rule(
        "schedule-ends-early",
        "lr_scheduler.total_steps",
        lambda run: _horizon(run) < run.config.training.steps,
        _describe_early_end,
        involves=("training.steps",),
        severity="warning",
    ),
)
LR_SCHEDULER_RULES = tuple(map(_of_wsd, _WSD_RULES))
