"""Inspect this machine: GPUs, cores, name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from torchtitan_like.util.host import num_cores

# AMD's compute driver lists CPUs and GPUs, each with a file `properties` of lines "name value".
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
RENDER_DEVICES = Path("/dev/dri")  # a container has only the devices of its own GPUs


class Machine(NamedTuple):
    """The hardware of this machine, which determines the number of ranks and their settings."""

    host: str  # without its domain
    num_cores: int  # that this process may use
    gpu_list: list[str]  # one line of `nvidia-smi -L` for each GPU, with its UUID
    num_nvidia_gpus: int  # that are visible to ranks
    num_amd_gpus: int

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that ranks can train on. A build of torch supports one vendor."""
        return self.num_nvidia_gpus or self.num_amd_gpus


def inspect_machine(environ: Mapping[str, str]) -> Machine:
    """Return the hardware of this machine."""
    gpu_list = _list_gpus()
    return Machine(
        host=os.uname().nodename.partition(".")[0],
        num_cores=num_cores(),
        gpu_list=gpu_list,
        num_nvidia_gpus=_count_nvidia_gpus(len(gpu_list), environ),
        num_amd_gpus=_count_amd_gpus(environ),
    )


# Prints the number of devices that CUDA sees.
ASK_DRIVER = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
print(count.value)
"""


def _count_nvidia_gpus(num_gpus: int, environ: Mapping[str, str]) -> int:
    """Return the number of NVIDIA devices that ranks see.

    Only the driver knows what a name such as GPU-8932f937 or MIG-<uuid> selects. It shows no more
    than one part of a divided GPU to a process. Without a driver, each name counts.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if num_gpus and visible is not None and any(character.isalpha() for character in visible):
        asked = subprocess.run(
            [sys.executable, "-c", ASK_DRIVER], env=environ, capture_output=True, text=True
        )
        if asked.returncode == 0:
            return int(asked.stdout)
    return count_visible(num_gpus, visible)


def count_visible(num_gpus: int, visible: str | None) -> int:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES. None: all GPUs.

    CUDA ignores an invalid item, such as -1, and all items after it. With a duplicate it sees no
    GPU.
    """
    if num_gpus == 0 or visible is None:
        return num_gpus
    items = [item.strip() for item in visible.split(",")]
    chosen = list(takewhile(lambda item: _is_valid(item, num_gpus), items))
    return len(chosen) if len(set(chosen)) == len(chosen) else 0


def _is_valid(item: str, num_gpus: int) -> bool:
    """Return True for an index below `num_gpus`, or a name such as GPU-8932f937."""
    return int(item) < num_gpus if item.isdecimal() else item[:1].isalpha()


def _count_amd_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of AMD GPUs that ROCm would use, without importing torch.

    ROCR_VISIBLE_DEVICES selects GPUs first; HIP_VISIBLE_DEVICES, else CUDA_VISIBLE_DEVICES, selects
    among them.
    """
    num_gpus = sum(_is_usable_gpu(path) for path in AMD_NODES.glob("*/properties"))
    num_gpus = count_visible(num_gpus, environ.get("ROCR_VISIBLE_DEVICES"))
    visible = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    return count_visible(num_gpus, visible)


def _is_usable_gpu(properties: Path) -> bool:
    """Return True if a node of AMD's driver is a GPU whose device this process can open."""
    try:
        lines = [line.split() for line in properties.read_text().splitlines()]
    except OSError:  # the GPU belongs to another container
        return False
    values = {line[0]: line[1] for line in lines if len(line) == 2}
    device = RENDER_DEVICES / f"renderD{values.get('drm_render_minor')}"
    return values.get("simd_count", "0") != "0" and device.exists()


def _list_gpus() -> list[str]:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace"
        )
    except OSError:
        return []
    return [line for line in listing.stdout.splitlines() if line.startswith("GPU ")]
