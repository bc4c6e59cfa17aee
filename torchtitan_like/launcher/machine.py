"""Inspect this machine: GPUs, cores, name."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

AMD_DRIVER = Path("/dev/kfd")


class Machine(NamedTuple):
    """The hardware of this machine, which determines the number of ranks and their settings."""

    host: str  # without its domain
    num_cores: int  # that this process may use
    gpu_list: list[str]  # one line of `nvidia-smi -L` for each GPU, with its UUID
    num_gpus: int  # NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible
    has_amd_gpus: bool

    @property
    def has_gpus(self) -> bool:
        """Return True if ranks can train on GPUs."""
        return self.num_gpus > 0 or self.has_amd_gpus


def inspect_machine(environ: Mapping[str, str]) -> Machine:
    """Return the hardware of this machine."""
    gpu_list = _list_gpus()
    return Machine(
        host=os.uname().nodename.partition(".")[0],
        num_cores=_count_cores(),
        gpu_list=gpu_list,
        num_gpus=count_visible(len(gpu_list), environ.get("CUDA_VISIBLE_DEVICES")),
        has_amd_gpus=AMD_DRIVER.exists(),
    )


def count_visible(num_gpus: int, visible: str | None) -> int:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES. None: all GPUs; "-1" and "": no GPU."""
    if num_gpus == 0 or visible is None:
        return num_gpus
    return sum(re.match(r" *[0-9A-Za-z]", item) is not None for item in visible.split(","))


def _list_gpus() -> list[str]:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace"
        )
    except OSError:
        return []
    return [line for line in listing.stdout.splitlines() if line.startswith("GPU ")]


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
