"""All that decides whether the same step gives the same bits: stored with a checkpoint, compared on resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torchtitan_like.config import JobConfig


def numeric_fingerprint(
    config: JobConfig, device: torch.device, layout: Mapping[str, int]
) -> dict[str, str]:
    """What decides about bits, in words. `layout`: degrees by the mesh's names."""
    training, optimizer, resilience = config.training, config.optimizer, config.resilience
    dtypes = (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce)
    parts = f"{', '.join(config.compile.components)} by {config.compile.backend}"
    deterministic = torch.are_deterministic_algorithms_enabled()
    found = {
        "torch": torch.__version__,
        "device": "cpu",
        "vector level": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": "yes" if deterministic else "no",
        "layout": " ".join(f"{name} {degree}" for name, degree in layout.items()) or "one rank",
        "micro-batch": str(training.local_batch_size),
        "dtypes": "/".join(dtypes),
        "loss chunk": f"{config.loss.chunk_mib} MiB",
        "optimizer": f"{optimizer.name} {optimizer.implementation}{' on CPU' if training.enable_cpu_offload else ''}",
        "compile": parts if config.compile.enable else "no",
    }
    defaults = type(config.parallelism)()
    chosen = [
        (name, value) for name, value in config.parallelism if value != getattr(defaults, name)
    ]
    if used := [f"{name} {value}" for name, value in chosen if not name.endswith("_degree")]:
        found["parallelism"] = ", ".join(used)
    if resilience.on_spike == "skip" and resilience.spike_threshold:
        found["spikes left out"] = (
            f"above {resilience.spike_threshold} in {resilience.spike_window} steps"
        )
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def compare(stored: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Each difference in words: `threads 1 -> 2`."""
    return [
        f"{name} {stored.get(name, 'none')} -> {current.get(name, 'none')}"
        for name in dict.fromkeys((*stored, *current))
        if stored.get(name) != current.get(name)
    ]


def resume_line(
    stored: Mapping[str, str] | None, current: Mapping[str, str], besides: Sequence[str] = ()
) -> str:
    """`bit-exact: yes`, or why the resumed run will not repeat the bits of one that never stopped.

    `besides`: reasons of other kinds, such as parts that are not loaded.
    """
    if stored is None:
        return "bit-exact: unknown (the checkpoint does not say how it was computed)"
    reasons = [*compare(stored, current), *besides]
    if current["device"] != "cpu" and current["deterministic"] == "no":
        reasons.append("debug.deterministic is false")
    return f"bit-exact: no ({'; '.join(reasons)})" if reasons else "bit-exact: yes"
