"""The degrees of parallelism against the ranks, the model, the schedule and float8."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_like.config.availability import KEEPING_ALL
from torchtitan_like.config.layout import SPLIT_BACKWARD, Layout
from torchtitan_like.config.layout_rules import COMPILE, DEGREES, IMPL, PIPELINE_KEYS, broken_rules, text_of
from torchtitan_like.distributed.dims import resolve_degrees
from torchtitan_like.preflight import torch_release
from torchtitan_like.preflight.host_memory import check_host_memory

if TYPE_CHECKING:
    from torchtitan_like.config.findings import Findings
    from torchtitan_like.config.schema import JobConfig
    from torchtitan_like.config.sections_scale import Parallelism
    from torchtitan_like.models.spec import ModelSpec

DeviceType = Literal["cpu", "cuda"]


def check_layout(
    findings: Findings, world_size: int | None, spec: ModelSpec | None, args: Any, device_type: DeviceType | None
) -> None:
    """Every problem of the layout. ``spec`` and ``args``: the model and its sizes, None where there is no such model."""
    layout, reasons = layout_of(findings.config, world_size, spec, args, device_type)
    for reason in reasons:
        findings.error(
            "parallelism",
            f"degrees whose product is the number of ranks: {reason}",
            "change a degree or the number of ranks (NGPU); data_parallel_shard_degree = -1 takes all left-over ranks",
            involves=DEGREES,
        )
    for rule in broken_rules(layout):
        findings.add(
            rule.key,
            text_of(rule.expected, layout),
            text_of(rule.remedy, layout),
            rule.severity,
            rule.involves,
            rule.name,
        )
    if spec is not None:
        _check_pipeline(findings, layout, spec)
        check_host_memory(findings, layout, spec)
    if "quantize.linear.float8" in findings.config.model.converters:
        _check_float8(findings, layout)
    _check_recomputation(findings, layout.compiles_model)


def _check_pipeline(findings: Findings, layout: Layout, spec: ModelSpec) -> None:
    """Layers, schedule and micro-batches against the stages."""
    from torchtitan_like.distributed.stages import problems

    section, size = layout.parallelism, layout.config.training.local_batch_size
    faults = [
        fault
        for number in layout.accumulations
        for fault in problems(spec, layout.args, section, local_batch_size=size, num_accumulation=number)
    ]
    for fault in dict.fromkeys(faults):
        findings.error(fault.key, fault.expected, fault.remedy, involves=PIPELINE_KEYS)


def _check_float8(findings: Findings, layout: Layout) -> None:
    """Hardware, recipe and data parallelism against float8."""
    from torchtitan_like.distributed.float8 import Run, problems

    training, parallelism = layout.config.training, layout.parallelism
    rows = parallelism.pipeline_parallel_microbatch_size if layout.pp > 1 else training.local_batch_size
    run = Run(
        layout.device_type,
        layout.compiles_model,
        capability=_capability(layout.device_type),
        num_tokens=rows * training.seq_len // layout.cp,
        data_parallel_impl=parallelism.data_parallel_impl,
    )
    for finding in problems(layout.config.quantize.linear.float8, run):
        findings.add(
            finding.key, finding.expected, finding.remedy, finding.severity, ("model.converters", *COMPILE, IMPL)
        )


def _check_recomputation(findings: Findings, compiled: bool) -> None:
    """What is kept for the backward pass: by the compiler, by operation, block by block."""
    section, backend = findings.config.activation_checkpoint, findings.config.compile.backend
    if section.mode == "memory_budget" and not compiled:
        findings.error(
            "activation_checkpoint.mode",
            'a compiled model with "memory_budget": the compiler decides what is kept',
            'set compile.enable = true with "model" among compile.components',
            involves=("compile.enable", "compile.components"),
        )
    elif section.mode == "memory_budget" and backend in KEEPING_ALL:
        findings.error(
            "compile.backend",
            'a backend that chooses what is kept, as activation_checkpoint.mode = "memory_budget" asks for: this keeps all',
            'set it to "inductor" or "aot_eager"',
            involves=("activation_checkpoint.mode", "compile.enable"),
        )
    if section.debug and compiled and section.mode in ("selective", "full"):
        findings.error(
            "activation_checkpoint.debug",
            "false with a compiled model: inside compiled code no operations are recorded",
            "set it to false, or compile.enable = false while you look",
            involves=("activation_checkpoint.mode", "compile.enable", "compile.components"),
        )
    elif section.debug and section.mode == "selective" and section.selective_ac_option == "op":
        findings.error(
            "activation_checkpoint.debug",
            'false with selective_ac_option = "op": torch records the operations of blocks that are recomputed whole',
            'set it to false, or selective_ac_option = "1"',
            involves=("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"),
        )


def _capability(device_type: DeviceType | None) -> tuple[int, int] | None:
    """Of this rank's GPU, which torch has found already."""
    if device_type != "cuda":
        return None
    import torch

    # By its number: no rank has chosen its GPU yet, and all of them would ask the first. One that sees a single GPU has that.
    number = min(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count() - 1)
    return torch.cuda.get_device_capability(number) if number >= 0 else None


def layout_of(
    config: JobConfig,
    world_size: int | None,
    spec: ModelSpec | None = None,
    args: Any = None,
    device_type: DeviceType | None = None,
) -> tuple[Layout, list[str]]:
    """What the rules look at, and why the degrees do not fit the ranks, one sentence each."""
    parallelism = config.parallelism
    dims, reasons = (None, []) if world_size is None else resolve_degrees(parallelism, world_size)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    layout = Layout(
        config,
        world_size,
        pp=parallelism.pipeline_parallel_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=dims.dp_shard if dims else 1,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        is_resolved=dims is not None,
        limits=spec.constraints(args) if spec else None,
        args=args,
        device_type=device_type,
        local_world_size=int(local) if local.isdecimal() else None,
        splits_backward=parallelism.pipeline_parallel_degree > 1 and _splits_backward(parallelism),
        torch_release=torch_release.installed_release(),
    )
    return layout, reasons


def _splits_backward(section: Parallelism) -> bool:
    """By its name, or by what its file says; a file that cannot be read is a fault that `_check_pipeline` finds."""
    from torchtitan_like.distributed.schedule_view import read_csv

    if not section.pipeline_parallel_schedule_csv:
        return section.pipeline_parallel_schedule in SPLIT_BACKWARD
    with suppress(OSError, ValueError):
        return any(action.kind in "IW" for row in read_csv(section.pipeline_parallel_schedule_csv) for action in row)
    return False
