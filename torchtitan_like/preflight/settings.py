"""Settings of several sections against each other, the hardware and the installed packages."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING, Any

from torchtitan_like.config.availability import value_of, without_effect
from torchtitan_like.config.layout_rules import MODEL_KEYS
from torchtitan_like.config.problems import NO_EFFECT

if TYPE_CHECKING:
    from torchtitan_like.config.findings import Findings
    from torchtitan_like.preflight.layout import DeviceType


def check_schedule(findings: Findings) -> None:
    """Warm-up and decay against the horizon; they are fitted into it, which the user should know."""
    section, steps = findings.config.lr_scheduler, findings.config.training.steps
    total = section.total_steps or steps
    involves = ("lr_scheduler.total_steps", "training.steps")
    if section.warmup_steps > total:
        findings.warning(
            "lr_scheduler.warmup_steps",
            f"Warmup steps ({section.warmup_steps}) exceed total training steps ({total}). "
            f"Adjusting warmup steps to {total}.",
            involves=involves,
        )
    elif section.decay_ratio is not None and section.warmup_steps + round(total * section.decay_ratio) > total:
        findings.warning(
            "lr_scheduler.decay_ratio",
            f"Warmup steps ({section.warmup_steps}) and decay steps ({round(total * section.decay_ratio)}) exceed "
            f"total training steps ({total}). The decay begins after the warmup: {total - section.warmup_steps} steps.",
            involves=("lr_scheduler.warmup_steps", *involves),
        )
    if section.decay_ratio and not round(total * section.decay_ratio):
        findings.warning(
            "lr_scheduler.decay_ratio", f"is less than one of {total} steps: nothing decays", involves=involves
        )
    if total < steps:
        decays = section.warmup_steps < total and (section.decay_ratio is None or round(total * section.decay_ratio))
        rest = f"min_lr_factor = {section.min_lr_factor} of its peak" if decays else "its peak, as nothing decays"
        findings.warning(
            "lr_scheduler.total_steps",
            f"the schedule ends at step {total} of {steps}; after it the learning rate stays at {rest}",
            involves=("training.steps",),
        )


def check_profiling(findings: Findings) -> None:
    """A trace is written at the end of a cycle."""
    section, steps = findings.config.profiling, findings.config.training.steps
    if section.enable_profiling and steps < section.profile_freq:
        findings.warning(
            "profiling.profile_freq",
            f"no trace is written: the first one would be at step {section.profile_freq}, and the run ends at step {steps}",
            "lower it, or raise training.steps",
            involves=("training.steps", "profiling.enable_profiling"),
        )


def check_numerics(findings: Findings) -> None:
    """Combinations of types, compilation and recomputation."""
    config = findings.config
    training = config.training
    if training.dtype == "bfloat16" and training.mixed_precision_param == "float32":
        findings.warning(
            "training.mixed_precision_param",
            "weights stored in bfloat16 are computed with in float32: the memory of one, the speed of the other",
            'set training.dtype = "float32" for mixed precision, or mixed_precision_param = "bfloat16"',
            involves=("training.dtype",),
        )
    if config.compile.enable and not config.compile.components:
        text = f"{NO_EFFECT}: compile.components is empty"
        findings.warning("compile.enable", text, involves=("compile.components",))
    if config.debug.detect_overflow and config.compile.is_on:
        findings.error(
            "debug.detect_overflow",
            "false with compile.enable = true: modules inside compiled code cannot be looked at",
            "set compile.enable = false while you look for the bad number",
            involves=("compile.enable",),
        )
    if config.optimizer.early_step_in_backward and config.is_set("training.max_norm"):
        findings.warning(
            "training.max_norm",
            f"{NO_EFFECT}: with optimizer.early_step_in_backward weights are updated before the gradient "
            "norm is known",
            involves=("optimizer.early_step_in_backward",),
        )
    resilience = config.resilience
    skips = {
        "on_nonfinite": ("stop", True),
        "on_spike": ("log", resilience.spike_threshold > 0),
    }
    for name, (other, is_on) in skips.items():
        is_skipped = is_on and getattr(resilience, name) == "skip"
        if config.optimizer.early_step_in_backward and is_skipped:
            findings.error(
                f"resilience.{name}",
                f'"{other}" with optimizer.early_step_in_backward: weights are updated before the gradient norm is known, and '
                "cannot be left as they were",
                f'set optimizer.early_step_in_backward = false, or {name} = "{other}"',
                involves=("optimizer.early_step_in_backward",),
            )


def check_hardware(findings: Findings, device_type: DeviceType | None, args: Any) -> None:
    """What this kind of device cannot do. ``args``: the model's; None where there is none."""
    config = findings.config
    if device_type is not None and hasattr(args, "attn_type"):
        from torchtitan_like.models.attention_rules import unsupported_attention

        reason = unsupported_attention(
            args.attn_type,
            device_type=device_type,
            dtype=config.training.mixed_precision_param,
            head_dim=args.head_dim,
        )
        if reason:
            findings.error("model.args", f"attention that can be computed here; {reason}", involves=MODEL_KEYS)
        if device_type == "cpu" and args.attn_type != "sdpa":
            findings.warning(
                "model.args" if "attn_type" in config.model.args else "model.flavor",
                f'attn_type = "{args.attn_type}" needs a GPU. On CPU, scaled_dot_product_attention with the '
                f'same {args.attn_mask_type} mask computes attention (attn_type = "sdpa")',
                involves=MODEL_KEYS,
            )
    if config.debug.launch_blocking:
        slow = "makes the run much slower: the host waits for each kernel"
        findings.warning(
            "debug.launch_blocking", f"{NO_EFFECT}: there is no GPU" if device_type == "cpu" else slow
        )
    if device_type == "cuda" and not config.debug.deterministic:  # which sets both itself
        for name in ("NCCL_ALGO", "NCCL_PROTO"):
            if value := os.environ.get(name):
                text = f"{name}={value} is set: NCCL chooses by message size, a forced choice is mostly slower"
                findings.warning(name, text, "unset it, or see docs/guides/nccl.md")
    if device_type != "cpu":
        return
    if config.training.enable_cpu_offload:
        findings.error(
            "training.enable_cpu_offload",
            "false without a GPU: parameters are in host memory anyway",
            "set it to false",
        )
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if config.compile.is_on and config.compile.backend == "inductor" and not any(map(shutil.which, compilers)):
        findings.error(
            "compile.enable", "a C++ compiler, which torch.compile needs on CPU", "install g++, or set it to false"
        )


def check_packages(findings: Findings) -> None:
    """Packages that only some settings need."""
    rules: tuple[tuple[str, str, str], ...] = (
        ("metrics.enable_tensorboard", "tensorboard", "pip install tensorboard"),
        ("metrics.enable_wandb", "wandb", "pip install 'torchtitan_like[wandb]'"),
        ("activation_checkpoint.visualize_memory_budget_pareto", "matplotlib", "pip install matplotlib"),
    )
    idle = {problem.key for problem in without_effect(findings.config, every_layer=True)}
    for key, package, remedy in rules:
        if key not in idle and value_of(findings.config, key) and importlib.util.find_spec(package) is None:
            findings.missing_file(key, f"the package {package}, which is not installed", remedy)
