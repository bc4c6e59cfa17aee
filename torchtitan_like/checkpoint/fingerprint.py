"""The numeric fingerprint: everything that determines bitwise equality of a repeated step.

A checkpoint stores it, and a resumed run compares it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torchtitan_like.config import JobConfig


def numeric_fingerprint(
    config: JobConfig, device: torch.device, layout: Mapping[str, int]
) -> dict[str, str]:
    """Return the fingerprint, whose keys are stored in checkpoints.

    layout: degrees by mesh dimension.
    """
    training, optimizer, resilience = config.training, config.optimizer, config.resilience
    dtypes = (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce)
    compiled = f"{', '.join(config.compile.components)} by {config.compile.backend}"
    on_cpu = " on CPU" if training.enable_cpu_offload else ""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fingerprint = {
        "torch": torch.__version__,
        "device": "cpu",
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": "yes" if deterministic else "no",
        "layout": " ".join(f"{name} {degree}" for name, degree in layout.items()) or "one rank",
        "micro-batch": str(training.local_batch_size),
        "dtypes": "/".join(dtypes),
        "loss chunk": f"{config.loss.chunk_mib} MiB",
        "optimizer": f"{optimizer.name} {optimizer.implementation}{on_cpu}",
        "compile": compiled if config.compile.enable else "no",
    }
    defaults = type(config.parallelism)()
    options = [
        f"{name} {value}"
        for name, value in config.parallelism
        if value != getattr(defaults, name) and not name.endswith("_degree")
    ]
    if options:
        fingerprint["parallelism"] = ", ".join(options)
    if resilience.on_spike == "skip" and resilience.spike_threshold:
        fingerprint["spikes left out"] = (
            f"above {resilience.spike_threshold} in {resilience.spike_window} steps"
        )
    if device.type == "cuda":
        fingerprint["device"] = torch.cuda.get_device_name(device)
        fingerprint["CUDA"] = str(torch.version.cuda)
        fingerprint["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return fingerprint


def compare(stored: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return each difference as text, such as `threads 1 -> 2`."""
    return [
        f"{name} {stored.get(name, 'none')} -> {current.get(name, 'none')}"
        for name in dict.fromkeys((*stored, *current))
        if stored.get(name) != current.get(name)
    ]


def resume_line(
    stored: Mapping[str, str] | None,
    current: Mapping[str, str],
    other_differences: Sequence[str] = (),
) -> str:
    """Describe whether a resumed run is bitwise equal to an uninterrupted run, and if not, why.

    other_differences: reasons in addition to the fingerprint, such as state that is not loaded.
    """
    if stored is None:
        return "bit-exact: unknown (the checkpoint has no numeric fingerprint)"
    reasons = [*compare(stored, current), *other_differences]
    if current["device"] != "cpu" and current["deterministic"] == "no":
        reasons.append("debug.deterministic is false")
    return f"bit-exact: no ({'; '.join(reasons)})" if reasons else "bit-exact: yes"
