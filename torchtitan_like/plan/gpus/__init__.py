"""Descriptions of GPUs and other devices: one TOML file for each, with its sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torchtitan_like.plan.descriptions import create, read_description

FOLDER = Path(__file__).parent
DEFAULT_GPU = "h100-80g"
DEVICE_TYPES = ("cuda", "cpu")

PASSES = ("forward", "backward")
# Rates of attention by the size of a head: share of the rate of matrix products for its visible FLOPs,
# and nanoseconds of each visible score and of each row of queries. Heads are padded to the smallest
# size that holds them; larger ones are as fast as the largest.
Attention = Mapping[int, Mapping[str, tuple[float, ...]]]
# FlashAttention-2 on an H100 (arXiv:2407.08608, figures 5 and 6: 350 to 400 TFLOP/s forward, 300 to
# 340 backward).
FLASH_ATTENTION: Attention = MappingProxyType(
    {1: {"forward": (0.58, 0.0, 0.0), "backward": (0.45, 0.0, 0.0)}}
)
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "message")


@dataclass(frozen=True)
class Gpu:
    """A GPU, or the cores of a CPU rank.

    memory_gib: total memory as PyTorch reports it. peak_tflops: dense, by dtype. hbm_tb_s: bandwidth
    of its memory. link_gb_s: of its links to the GPUs of the same node, per direction.
    matmul_share: of the peak, by dtype, that a large matrix product reaches on one card with nothing
    else to do; 1 for other dtypes. memory_share: of the memory's bandwidth, for a large kernel.
    multiprocessors: over which the tiles of a matrix product are distributed; 0 for a CPU.
    cublas_workspace_mib: what PyTorch allocates for each cuBLAS handle.
    promoting_share: speed of float8 products that add partial sums in float32 every 128 products
    (`use_fast_accum=False`, pytorch/pytorch 147971), relative to others.
    device_type: "cuda" or "cpu", whose code paths a dry run takes.
    outside_gib: memory of a rank outside of its tensors. On a GPU, the CUDA context and NCCL's
    buffers: an assumption, because it depends on the driver and on the number of communicators.
    launch_us: of the device between two kernels of a stream. host_operator_us: in which the host
    issues an operator while the device works; 0 for a CPU rank, whose launch_us contains it.
    attention: of the kernel that torch chooses, see `Attention`.
    collectives: of a CPU, kind -> (microseconds, GB/s of the bytes that a rank sends); empty if not
    measured. A GPU has the latencies and algorithms of NCCL.
    """

    key: str
    name: str
    memory_gib: float
    hbm_tb_s: float
    multiprocessors: int
    link_gb_s: float
    cublas_workspace_mib: float
    peak_tflops: dict[str, float]
    matmul_share: Mapping[str, float] = field(default_factory=dict)
    memory_share: float = 1.0
    promoting_share: float = 1.0
    device_type: Literal["cuda", "cpu"] = "cuda"
    outside_gib: float = 2.0
    launch_us: float = 4.0
    host_operator_us: float = 40.0  # the debug model on an H200: 22.9 ms for 566 operators
    attention: Attention = field(default_factory=lambda: FLASH_ATTENTION)
    collectives: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def load_gpu(name: str) -> Gpu:
    """Read a GPU by name, or from a TOML file of the same form.

    Raises ValueError if there is neither, or if a field is missing, unknown or malformed.
    """
    path, fields = read_description(name, FOLDER, "GPU")
    if fields.get("device_type", "cuda") not in DEVICE_TYPES:
        raise ValueError(
            f"{path}: device_type = {fields['device_type']!r}. Expected one of "
            f"{', '.join(DEVICE_TYPES)}: correct the file"
        )
    gpu = create(Gpu, fields, path, "GPU")
    shares = {f"matmul_share {dtype}": share for dtype, share in gpu.matmul_share.items()}
    for label, share in {**shares, "memory_share": gpu.memory_share}.items():
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise ValueError(
                f"{path}: {label} = {share!r}. Expected a share above 0 and at most 1: correct it"
            )
    changed: dict[str, Any] = {}
    if "collectives" in fields:
        changed["collectives"] = _checked(gpu.collectives, COLLECTIVES, 2, f"{path}: [collectives]")
    if "attention" in fields:
        label = f"{path}: [attention]"
        if not isinstance(gpu.attention, dict) or not all(map(str.isdecimal, gpu.attention)):
            raise ValueError(f"{label} = {gpu.attention!r}. Expected sizes of heads: correct it")
        changed["attention"] = {
            int(size): _checked(rates, PASSES, 3, f"{label} {size}")
            for size, rates in gpu.attention.items()
        }
    return replace(gpu, **changed)


def _checked(
    table: Any, keys: tuple[str, ...], size: int, label: str
) -> dict[str, tuple[float, ...]]:
    """Return a table that has `size` numbers, 0 or above, for each of `keys`.

    label: the table's name in an error.
    """
    if not isinstance(table, dict) or table.keys() != set(keys):
        raise ValueError(f"{label} = {table!r}. Expected a table of {', '.join(keys)}: correct it")
    for key, values in table.items():
        is_list = isinstance(values, list) and len(values) == size
        if not is_list or not all(type(value) in (int, float) and value >= 0 for value in values):
            raise ValueError(
                f"{label} {key} = {values!r}. Expected {size} numbers, 0 or above: correct it"
            )
    return {key: tuple(map(float, values)) for key, values in table.items()}
