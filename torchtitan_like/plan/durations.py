"""Estimate how long each recorded work item takes on a GPU of a cluster.

All formulas take sizes from the recording, and rates from the descriptions of the GPU and of the
cluster. No constant depends on a model or on a layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from torchtitan_like.plan.clusters import Cluster
from torchtitan_like.plan.fusion import fused_bytes
from torchtitan_like.plan.gpus import FLASH_ATTENTION, PASSES, Gpu
from torchtitan_like.plan.record import Recording, WorkItem

PCIE_GB_S = 25.0  # of pinned copies over 16 lanes of PCIe 4, per direction: 80 % of 32

# Tiles of cuBLAS's kernels (rows, columns), and their speed relative to the largest ones.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92))
SPLIT_SHARE = 0.85  # of the peak, if a kernel splits k, so that all multiprocessors have work
RAMP_BYTES = 512  # the k of a matrix product that takes as long as loading its first and last tiles

# Speed of some kernels relative to a GPU's other memory-bound kernels. These read with strides or
# indices, or reduce in several passes. Measured on one H200 (docs/benchmarks/2026-11-28-plan-card.md).
KERNEL_SHARES: Mapping[str, float] = MappingProxyType(
    {
        "_grouped_mm": 0.62,
        "roll": 0.35,
        "addcmul": 0.55,
        "index_select": 0.5,
        "planned_rms_norm_backward": 0.3,
    }
)

# Shares of the links' data-sheet bandwidth. NVLink: NCCL counts 20.6 of 25 GB/s for each link of an
# H100 (src/graph/topo.h, SM90_NVLINK_BW). Network: an assumption.
LINK_SHARE, NETWORK_SHARE = 0.82, 0.8


def kernel_share(op: str, gpu: Gpu) -> float:
    """Return the share of a kernel's rate that it reaches; 1 on a CPU, where all are measured."""
    return KERNEL_SHARES.get(op, 1.0) if gpu.device_type == "cuda" else 1.0


class _Protocol(NamedTuple):
    """An algorithm and protocol of NCCL: microseconds, in total and for each hop; bandwidth share.

    Source: src/graph/tuning.cc, baseLat and hwLat, in microseconds.
    """

    is_tree: bool
    base: float
    link: float
    network: float
    share: float


_PROTOCOLS = (
    _Protocol(False, 8.4, 3.4, 9.6, 1.0),  # ring, Simple
    _Protocol(False, 3.6, 0.85, 2.7, 0.25),  # ring, LL
    _Protocol(True, 4.4, 0.52, 5.0, 0.12),  # tree, LL
)
# Kind of a collective -> times that each rank sends (n - 1)/n of the tensor.
_PASSES = {"allreduce": 2, "all_reduce": 2}
_MESSAGES = ("send", "recv")
_ALL_TO_ALL = ("alltoall", "all_to_all")


def is_message(item: WorkItem) -> bool:
    """Return True for a message between two ranks."""
    return item.kind == "collective" and item.op.startswith(_MESSAGES)


_ADDING = ("addmm", "baddbmm")  # their first operand is added to the product
_GROUPED = "_grouped_mm"


def matmul_seconds(item: WorkItem, gpu: Gpu, cluster: Cluster) -> float:
    """Return FLOPs / rate, at least the time of its bytes.

    The rate is `matmul_rate`. On a GPU, this is multiplied by the share of the multiprocessors' tiles
    that hold results, and by k / (k + 512 bytes).
    """
    operands = item.shapes[1:] if item.op in _ADDING else item.shapes
    if item.op == _GROUPED:
        operands = _even_groups(*item.shapes[:3])
    share = fill_share(operands, gpu.multiprocessors, item.dtype) * kernel_share(item.op, gpu)
    if item.promotes:
        share *= gpu.promoting_share
    rate = matmul_rate(item.dtype, gpu, cluster) * share
    return max(item.flops / rate, memory_seconds(item.num_bytes, gpu))


def _even_groups(
    first: tuple[int, ...], second: tuple[int, ...], ends: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the operands of a batch of equal matrix products in place of a grouped one.

    (rows, k) and (groups, k, n) is a product for the rows of each group. (m, rows) and (rows, n) is
    a sum over them. ends: (groups,).
    """
    (num_groups,) = ends
    if len(second) == 3:
        rows = math.ceil(first[0] / num_groups)
        return (num_groups, rows, first[1]), second
    rows = math.ceil(first[1] / num_groups)
    return (num_groups, first[0], rows), (num_groups, rows, second[1])


def fill_share(operands: Sequence[tuple[int, ...]], multiprocessors: int, dtype: str) -> float:
    """Return the share of the peak that tiles and waves allow.

    operands: (..., m, k) and (..., k, n) of `dtype`, then anything. 1.0 for others, such as
    convolutions, and without multiprocessors. Products of a batch have tiles of their own, however
    small they are.
    """
    if multiprocessors == 0 or len(operands) < 2 or min(len(operands[0]), len(operands[1])) < 2:
        return 1.0
    (m, k), n = operands[0][-2:], operands[1][-1]
    batch = math.prod(operands[0][:-2])
    element: torch.dtype = getattr(torch, dtype)
    ramp = RAMP_BYTES / element.itemsize
    area = batch * m * n
    tile = 128 * 128
    covered = batch * math.ceil(m / 128) * math.ceil(n / 128) * tile if batch > 1 else area
    splits = max(1.0, multiprocessors * tile / covered)
    shares = [area / covered * SPLIT_SHARE * k / (k + splits * ramp)]
    for rows, columns, speed in TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / multiprocessors)
        filled = area / (waves * multiprocessors * rows * columns)
        shares.append(speed * filled * k / (k + ramp))
    return max(shares)


def matmul_rate(dtype: str, gpu: Gpu, cluster: Cluster) -> float:
    """Return the FLOP/s of a large matrix product."""
    share = gpu.matmul_share.get(_key(dtype), 1.0)
    return peak_flops(dtype, gpu) * share * cluster.matmul_factor


def _key(dtype: str) -> str:
    """Return the name that a dtype of a recording has in a GPU's file."""
    name = "float8" if dtype.startswith("float8") else dtype
    return "bfloat16" if name == "float16" else name


def peak_flops(dtype: str, gpu: Gpu) -> float:
    """Return the peak FLOP/s of a dtype as the recording names it."""
    name = _key(dtype)
    if name not in gpu.peak_tflops:
        raise ValueError(
            f"{gpu.name} has no matrix products in {dtype}. Expected one of "
            f"{', '.join(gpu.peak_tflops)}: change the precision, or add its peak to the GPU's file"
        )
    return gpu.peak_tflops[name] * 1e12


def mfu_peak(dtype: str, gpu: Gpu) -> float:
    """Return the FLOP/s of which MFU is a share: of bfloat16 on any GPU, of `dtype` on a CPU."""
    return peak_flops("bfloat16" if gpu.device_type == "cuda" else dtype, gpu)


def attention_seconds(item: WorkItem, gpu: Gpu, cluster: Cluster) -> float:
    """Return the time of the visible FLOPs, of the visible scores, and of the rows of queries."""
    is_backward = "backward" in item.op
    q, k = item.shapes[is_backward : is_backward + 2]  # the gradient comes first
    # Torch aligns the mask of fewer queries than keys with FlashAttention only.
    rates = gpu.attention if q[-2] == k[-2] else FLASH_ATTENTION
    padded = min((size for size in rates if size >= q[-1]), default=q[-1])
    share, score_ns, row_ns = rates.get(padded, rates[max(rates)])[PASSES[is_backward]]
    visible = visible_share(item)
    rate = matmul_rate(item.dtype, gpu, cluster) * share
    seconds = item.flops * visible * padded / q[-1] / rate
    rows = math.prod(q[:-1])
    return seconds + rows * (k[-2] * visible * score_ns + row_ns) * 1e-9


def visible_share(item: WorkItem) -> float:
    """Return the share of the square that attention computes; the last q tokens of k see less."""
    if not item.is_causal:
        return 1.0
    first = 1 if "backward" in item.op else 0  # the gradient comes first
    queries, keys = item.shapes[first][-2], item.shapes[first + 1][-2]
    return 1 - queries / (2 * keys)


# Kernels that touch only the indexed rows of their largest tensor.
_INDEXED = ("embedding", "gather", "scatter_add_", "index", "index_select")
# Kernels whose name ends with "_", but which only write what others change in place.
_OVERWRITING = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")


def traffic(item: WorkItem) -> int:
    """Return the bytes that a kernel reads and writes in the GPU's memory."""
    if item.op in _INDEXED:
        largest = max((num_bytes for _, num_bytes in item.reads), default=0)
        return 2 * (item.num_bytes - largest)
    if item.op.endswith("_") and item.op not in _OVERWRITING:
        written = sum(num_bytes for _, num_bytes in item.writes)
        return item.num_bytes + (written or item.num_bytes)
    return item.num_bytes


def memory_seconds(num_bytes: float, gpu: Gpu) -> float:
    """Return the time to read and write these bytes in the GPU's memory."""
    return num_bytes / (gpu.hbm_tb_s * 1e12 * gpu.memory_share)


def collective_seconds(item: WorkItem, gpu: Gpu, cluster: Cluster) -> float:
    """Return the time of a collective or message: latency of the hops + bytes / bandwidth.

    A rank of a ring sends (n - 1)/n of the tensor, twice for an all-reduce. A ring that leaves a
    node leaves it once for each of the group's GPUs there: they share their network cards. In an
    all-to-all, each rank sends 1/n of its tensor to every rank, to other nodes through its own card.
    """
    group = item.group
    if group is None or group.size == 1:
        return 0.0
    if gpu.device_type == "cpu":
        return _measured_seconds(item, group.size, gpu)
    link = gpu.link_gb_s * 1e9 * LINK_SHARE
    per_node = max(1, min(group.size, cluster.gpus_per_node // max(1, group.stride)))
    num_nodes = -(-group.size // per_node)
    if item.op.startswith(_ALL_TO_ALL):
        to_other_nodes = item.num_bytes * (group.size - per_node) / group.size
        inside = item.num_bytes * (per_node - 1) / group.size
        card = cluster.inter_node_gb_s * 1e9 * NETWORK_SHARE
        return max(inside / link, to_other_nodes / card) + _message_latency(num_nodes)
    bandwidth = link
    if num_nodes > 1:
        network = per_node * cluster.inter_node_gb_s * 1e9 * NETWORK_SHARE
        bandwidth = min(link, network) if per_node > 1 else network
    if is_message(item):
        return item.num_bytes / bandwidth + _message_latency(num_nodes)
    passes = next((n for name, n in _PASSES.items() if item.op.startswith(name)), 1)
    sent = passes * item.num_bytes * (group.size - 1) / group.size
    return min(
        sent / (bandwidth * protocol.share)
        + _latency(protocol, passes, group.size, num_nodes) * 1e-6
        for protocol in _PROTOCOLS
        if passes == 2 or not protocol.is_tree
    )


def _message_latency(num_nodes: int) -> float:
    """Return the seconds of a message without bytes, and of messages to all ranks of a group."""
    hop = _PROTOCOLS[0].network if num_nodes > 1 else _PROTOCOLS[0].link
    return (_PROTOCOLS[0].base + hop) * 1e-6


# First letters of a recorded collective -> its kind in a device file. All others are all-gathers.
_MEASURED_KINDS = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "send": "message",
    "recv": "message",
}


def _measured_seconds(item: WorkItem, size: int, gpu: Gpu) -> float:
    """Return the time of a collective of `size` ranks at the rate that was measured of its kind."""
    op = item.op.replace("_", "")
    kind = next(
        (kind for name, kind in _MEASURED_KINDS.items() if op.startswith(name)), "all_gather"
    )
    if kind not in gpu.collectives:
        raise ValueError(
            f"{gpu.name} has no measured collectives. Expected [collectives] in its file: run titan plan "
            "calibrate on several ranks"
        )
    microseconds, gb_s = gpu.collectives[kind]
    return microseconds * 1e-6 + sent_bytes(kind, item.num_bytes, size) / (gb_s * 1e9)


def sent_bytes(kind: str, num_bytes: int, size: int) -> float:
    """Return the bytes that a rank sends, of a tensor that `size` ranks gather, reduce or scatter.

    An all-reduce counts like the others, though it sends them twice: its rate is its own.
    """
    return num_bytes if kind == "message" else num_bytes * (size - 1) / size


def _latency(protocol: _Protocol, passes: int, size: int, num_nodes: int) -> float:
    """Return the microseconds of a protocol's hops."""
    if protocol.is_tree:
        inside = size / num_nodes - 1
        hops = inside * protocol.link + math.log2(num_nodes) * protocol.network
    else:
        hops = (size - num_nodes) * protocol.link + (num_nodes - 1) * protocol.network
    return protocol.base + passes * hops


def item_seconds(item: WorkItem, gpu: Gpu, cluster: Cluster) -> float:
    """Return the time of an item; 0 for a wait."""
    if item.kind == "wait":
        return 0.0
    if item.kind == "collective":
        return collective_seconds(item, gpu, cluster)
    if item.kind == "copy":
        return item.num_bytes / (PCIE_GB_S * 1e9) + gpu.launch_us * 1e-6
    if item.kind == "matmul":
        return matmul_seconds(item, gpu, cluster) + gpu.launch_us * 1e-6
    if item.kind == "attention":
        return attention_seconds(item, gpu, cluster) + gpu.launch_us * 1e-6
    num_bytes = traffic(item) / kernel_share(item.op, gpu)
    return memory_seconds(num_bytes, gpu) + gpu.launch_us * 1e-6


def durations(
    recording: Recording, gpu: Gpu, cluster: Cluster, *, fuses: bool = False
) -> list[float]:
    """Return the seconds of each item. fuses: as compiled code (plan/fusion.py)."""
    seconds = [item_seconds(item, gpu, cluster) for item in recording.work]
    if fuses:
        for index, num_bytes in fused_bytes(recording).items():
            kernel = memory_seconds(num_bytes, gpu) + gpu.launch_us * 1e-6
            seconds[index] = kernel if num_bytes else 0.0
    return seconds
