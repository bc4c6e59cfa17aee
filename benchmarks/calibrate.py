"""Measure a machine, and write the cluster and device files that `titan plan --cluster` reads.

Start one process per GPU, or per CPU rank:

    torchrun --nproc_per_node=8 -m benchmarks.calibrate -o my_cluster.toml --gpu h100-80g

The device file of a GPU is its data sheet with what was measured: the shares of the peaks and of the
memory bandwidth that kernels reach, and the time in which the host issues an operator. The cluster
has the bandwidth between nodes. A CPU has no data sheet: its peaks are the measured rates.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch.nn import functional as F

from torchtitan_like.config.toml_text import toml_value
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.monitor.memory import cpu_model
from torchtitan_like.node.machine import host_name
from torchtitan_like.node.ranks import join_ranks, launched_ranks
from torchtitan_like.plan.clusters import Cluster, load_cluster
from torchtitan_like.plan.durations import NETWORK_SHARE, fill_share, sent_bytes, traffic
from torchtitan_like.plan.gpus import COLLECTIVES, Gpu, load_gpu
from torchtitan_like.plan.record import Progress, Recorder
from torchtitan_like.resilience.end import end_process
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.host import host_memory, num_cores
from torchtitan_like.util.output import ProgressLine
from torchtitan_like.util.units import GIB, MIB

JOIN_SECONDS = 300
MIN_REPEAT, MAX_REPEAT = 5, 100
FEW_NUMBERS = (8, 64)  # shape of tensors whose kernels take no time
# Nobody has compared times of GPUs that are calibrated by kernels alone. These are the errors of
# clusters without calibration.
GPU_ERROR_PERCENT = 30.0
GPU_ERROR_SOURCE = "no step was measured: the band is that of clusters without calibration"
# The largest error of two small models on one machine was 8 %. Twice that, for others.
CPU_ERROR_PERCENT = 16.0
CPU_ERROR_SOURCE = "steps of small models on 2 CPU cores (docs/benchmarks/2026-11-25-plan-cpu.md)"


class Sizes(NamedTuple):
    """What is measured.

    products: (m, k, n) of linear layers, see `Product`. dtypes: of their operands. kernels: shape of
    the float32 tensors of kernels that are limited by memory. No cache holds all of them, as in a
    step. messages: bytes of a small and of a large collective. attention: (sequence length, size of
    a head) of attention with 8 heads.
    """

    products: tuple[tuple[int, int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    kernels: tuple[int, int]
    messages: tuple[int, int]
    attention: tuple[tuple[int, int], ...] = ((256, 16), (256, 64), (1024, 16), (1024, 64))


# By type of device. The products are those of blocks with a width of 4096, or of 256 and 512.
SIZES: Mapping[str, Sizes] = {
    "cuda": Sizes(
        ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (4096, 8192, 8192)),
        (torch.bfloat16, torch.float32),
        (2**16, 2**12),
        (2**16, 2**28),
    ),
    "cpu": Sizes(
        ((1024, 256, 256), (1024, 256, 768), (2048, 512, 512), (1024, 512, 1536)),
        (torch.float32, torch.bfloat16),
        (2**11, 2**9),
        (2**12, 2**23),
    ),
}


class Product(NamedTuple):
    """The measured matrix products of a linear layer from k to n for m tokens.

    seconds: of all three. Forward is (m, k) x (k, n), the input's gradient (m, n) x (n, k), and the
    weight's (n, m) x (m, k).
    """

    shape: tuple[int, int, int]
    dtype: str
    seconds: float

    @property
    def operands(self) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
        """The shapes of the operands of each product."""
        m, k, n = self.shape
        return ((m, k), (k, n)), ((m, n), (n, k)), ((n, m), (m, k))

    @property
    def flops(self) -> int:
        """The FLOPs of all three."""
        return len(self.operands) * 2 * math.prod(self.shape)


class Kernels(NamedTuple):
    """Measured kernels that are limited by memory: bytes read and written, number, seconds."""

    num_bytes: int
    number: int
    seconds: float


class Attention(NamedTuple):
    """A measured causal attention: visible FLOPs and scores, rows of queries, and seconds."""

    flops: float
    scores: float
    rows: int
    seconds: float


class Collective(NamedTuple):
    """A small and a large collective of one kind: bytes, and seconds."""

    small: tuple[int, float]
    large: tuple[int, float]


@dataclass(frozen=True)
class Measured:
    """Seconds of the slowest rank.

    operator: of a kernel on few numbers; of a GPU, in which the host issues one.
    attention: "forward" and "backward", only of a CPU.
    collectives: by kind, of all ranks; of GPUs only all-reduces between nodes. ranks_per_node: that
    were started. memory_gib: of the device, for each rank. outside_gib: of a rank without tensors.
    """

    products: tuple[Product, ...]
    kernels: Kernels
    operator: float
    attention: Mapping[str, tuple[Attention, ...]]
    collectives: Mapping[str, Collective]
    num_ranks: int
    ranks_per_node: int
    memory_gib: float
    outside_gib: float

    def lines(self) -> list[str]:
        """Return a line for each measurement."""
        lines = []
        for product in self.products:
            title = f"{' x '.join(map(str, product.shape))}, {product.dtype}"
            lines.append(f"{title:46}{product.flops / product.seconds / 1e9:12,.1f} GFLOP/s")
        kernels = self.kernels
        lines.append(
            f"{'kernels limited by memory':46}{kernels.num_bytes / kernels.seconds / 1e9:12,.1f} GB/s"
        )
        lines.append(f"{'small operator':46}{self.operator * 1e6:12,.1f} us")
        for pass_, attentions in self.attention.items():
            for each in attentions:
                title = f"attention {pass_}, {each.rows:,} rows, {each.flops / each.scores:.0f} FLOPs a score"
                lines.append(f"{title:46}{each.flops / each.seconds / 1e9:12,.1f} GFLOP/s")
        for kind, collective in self.collectives.items():
            for num_bytes, seconds in (collective.small, collective.large):
                title = f"{kind}, {self.num_ranks} ranks, {num_bytes:,} B"
                lines.append(f"{title:46}{seconds * 1e6:12,.0f} us")
        if not self.collectives:
            lines.append(
                f"{'collectives':46}{'skipped':>12}: start several ranks, or nodes of GPUs"
            )
        return lines


# ---- constants


def describe_cpu(measured: Measured, key: str, name: str) -> Gpu:
    """Return the description of a CPU rank, whose peaks are the measured rates.

    Raises ValueError if the measurements contradict each other, as on a busy machine.
    """
    rates: dict[str, list[float]] = {}
    for product in measured.products:
        computing = product.seconds - len(product.operands) * measured.operator
        if computing <= 0:
            raise _contradiction("matrix products", "tiny operators")
        rates.setdefault(product.dtype, []).append(product.flops / computing)
    peaks = {dtype: statistics.median(each) for dtype, each in rates.items()}
    kernels = measured.kernels
    # Operators are small here, so some of their time is that of issuing them.
    seconds = kernels.seconds - kernels.number * measured.operator
    if seconds <= 0:
        raise _contradiction("kernels", "tiny operators")
    peak = peaks[measured.products[0].dtype]
    return Gpu(
        key=key,
        name=name,
        memory_gib=_rounded(measured.memory_gib),
        hbm_tb_s=_rounded(kernels.num_bytes / seconds / 1e12),
        multiprocessors=0,
        link_gb_s=_rounded(_link_gb_s(measured)),
        cublas_workspace_mib=0,
        peak_tflops={dtype: _rounded(rate / 1e12) for dtype, rate in peaks.items()},
        device_type="cpu",
        outside_gib=_rounded(measured.outside_gib),
        launch_us=_rounded(measured.operator * 1e6),
        host_operator_us=0.0,
        attention={
            1: {
                pass_: _attention(each, measured.operator, peak)
                for pass_, each in measured.attention.items()
            }
        },
        collectives={
            kind: _collective(kind, each, measured.num_ranks)
            for kind, each in measured.collectives.items()
        },
    )


ASSUMED_LINK_GB_S = 1.0  # between the ranks of a CPU, if there is only one rank to measure


def _link_gb_s(measured: Measured) -> float:
    """Return the rate that orders layouts before their dry runs."""
    if "all_gather" not in measured.collectives:
        return ASSUMED_LINK_GB_S
    return _collective("all_gather", measured.collectives["all_gather"], measured.num_ranks)[1]


def _attention(
    measured: Sequence[Attention], operator: float, peak: float
) -> tuple[float, float, float]:
    """Return the share of the peak, and the nanoseconds of a score and of a row.

    They have the least squares of relative errors. A cost that would be negative is 0.
    """
    seconds = torch.tensor([each.seconds - operator for each in measured], dtype=torch.float64)
    counts = torch.tensor([each[:3] for each in measured], dtype=torch.float64)
    relative = counts / seconds.unsqueeze(1)
    costs = [0.0, 0.0, 0.0]
    kept = [0, 1, 2]
    while kept:
        ones = torch.ones(len(measured), 1, dtype=torch.float64)
        solution = torch.linalg.lstsq(relative[:, kept], ones).solution.flatten().tolist()
        if min(solution) >= 0:
            for index, cost in zip(kept, solution, strict=True):
                costs[index] = cost
            break
        del kept[solution.index(min(solution))]
    if min(seconds) <= 0 or costs[0] == 0:
        raise _contradiction("attention with small heads", "attention with large heads")
    return _rounded(1 / (costs[0] * peak)), _rounded(costs[1] * 1e9), _rounded(costs[2] * 1e9)


def _collective(kind: str, measured: Collective, num_ranks: int) -> tuple[float, float]:
    """Return microseconds, and GB/s of the bytes that a rank sends."""
    (small, small_seconds), (large, large_seconds) = measured
    if large_seconds <= small_seconds:
        raise _contradiction(f"{kind} of {small:,} B", f"{kind} of {large:,} B")
    sent = [sent_bytes(kind, num_bytes, num_ranks) for num_bytes in (small, large)]
    rate = (sent[1] - sent[0]) / (large_seconds - small_seconds)
    return _rounded(max(0.0, small_seconds - sent[0] / rate) * 1e6), _rounded(rate / 1e9)


def _contradiction(first: str, second: str) -> ValueError:
    return ValueError(
        f"{first} took as long as {second}. Expected less: end other programs, and measure again, "
        "with more --seconds"
    )


def describe_gpu(measured: Measured, gpu: Gpu, key: str) -> Gpu:
    """Return a GPU with the measured shares. gpu: by its data sheet."""
    shares: dict[str, list[float]] = {}
    for product in measured.products:
        flops = product.flops / len(product.operands)
        at_peak = sum(
            flops / fill_share(each, gpu.multiprocessors, product.dtype)
            for each in product.operands
        )
        share = at_peak / (gpu.peak_tflops[product.dtype] * 1e12) / product.seconds
        shares.setdefault(product.dtype, []).append(share)
    kernels = measured.kernels
    bandwidth = kernels.num_bytes / kernels.seconds
    return replace(
        gpu,
        key=key,
        name=f"{gpu.name}, measured",
        matmul_share={
            **gpu.matmul_share,
            **{
                dtype: min(1.0, _rounded(statistics.median(each))) for dtype, each in shares.items()
            },
        },
        memory_share=min(1.0, _rounded(bandwidth / (gpu.hbm_tb_s * 1e12))),
        host_operator_us=_rounded(measured.operator * 1e6),
    )


def network_gb_s(measured: Measured) -> float | None:
    """Return the bandwidth of a GPU's network card; None on one node."""
    if "all_reduce" not in measured.collectives:
        return None
    # An all-reduce sends each byte twice, over all network cards of a node.
    _, gb_s = _collective("all_reduce", measured.collectives["all_reduce"], measured.num_ranks)
    return _rounded(2 * gb_s / measured.ranks_per_node / NETWORK_SHARE)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


# ---- measurement

HEADS = 8  # of the measured attention


class _Bench:
    """Measures one thing after another on all ranks. The slowest rank counts.

    seconds: of all measurements. total: their number.
    """

    def __init__(self, device: str, seconds: float, total: int, progress: Progress) -> None:
        self._device = device
        self._budget = seconds / total
        self._total = total
        self._progress = progress
        self._num_done = 0
        self._started = time.monotonic()
        # Other processes do not change the CPU time of a thread. That of several is not their duration.
        has_one_thread = device == "cpu" and torch.get_num_threads() == 1
        self._clock = time.process_time if has_one_thread else time.perf_counter

    def median(self, name: str, work: Callable[[], object]) -> float:
        """Return the median seconds of `work`, which does not communicate."""
        self._report(name)
        _barrier()
        self._timed(work)  # libraries and caches
        end = time.perf_counter() + self._budget
        values = [self._timed(work)]
        while len(values) < MAX_REPEAT and time.perf_counter() < end:
            values.append(self._timed(work))
        return _slowest(statistics.median(values))

    def median_together(self, name: str, work: Callable[[], object]) -> float:
        """Return the median seconds of `work`, which all ranks call equally often."""
        self._report(name)
        for _ in range(MIN_REPEAT):  # connections and caches
            work()
        started = time.perf_counter()
        self._timed(work)
        once = _slowest(time.perf_counter() - started)
        repeat = max(MIN_REPEAT, min(MAX_REPEAT, int(self._budget / once)))
        _barrier()
        return _slowest(statistics.median(self._timed(work) for _ in range(repeat)))

    def finish(self) -> None:
        """Report that all is done."""
        self._report("done")

    def _report(self, name: str) -> None:
        seconds = time.monotonic() - self._started
        self._progress(name, self._num_done, self._total, seconds)
        self._num_done += 1

    def _timed(self, work: Callable[[], object]) -> float:
        start = self._clock()
        work()
        if self._device != "cpu":
            torch.cuda.synchronize()
        return self._clock() - start


def measure_machine(
    device: str, sizes: Sizes, seconds: float, progress: Progress = lambda *_: None
) -> Measured:
    """Measure this rank's device, and the collectives of all ranks, if a group exists.

    Call it on all ranks: they work at the same time, as in training. seconds: of all measurements.
    """
    outside = max(_gather(psutil.Process().memory_info().rss))
    _settle_allocator()
    hosts = _gather(host_name())
    per_node = min(Counter(hosts).values())
    is_cpu = device == "cpu"
    kinds: tuple[str, ...] = COLLECTIVES if is_cpu and len(hosts) > 1 else ()
    if not is_cpu and len(set(hosts)) > 1:
        kinds = ("all_reduce",)
    shapes = sizes.attention if is_cpu else ()
    # All shapes of the first dtype, one of each other: CPUs without its instructions take long.
    wanted = [(shape, sizes.dtypes[0]) for shape in sizes.products]
    wanted += [(sizes.products[0], dtype) for dtype in sizes.dtypes[1:]]
    total = len(wanted) + 2 + 2 * len(shapes) + 2 * len(kinds)
    bench = _Bench(device, seconds, total, progress)
    products = [
        Product(shape, _name(dtype), bench.median(*_product(shape, dtype, device)))
        for shape, dtype in wanted
    ]
    num_bytes, number, work = (_block_kernels if is_cpu else _one_kernel)(sizes.kernels, device)
    kernels = Kernels(num_bytes, number, bench.median("kernels limited by memory", work))
    if is_cpu:
        _, number, work = _block_kernels(FEW_NUMBERS, device)
    else:
        number, work = _model_operators(device)
    operator = bench.median("small operators", work) / number
    attention: dict[str, list[Attention]] = {}
    for seq_len, dim in shapes:
        scores = HEADS * seq_len**2 / 2
        for (pass_, flops), work in _attention_works(seq_len, dim).items():
            seconds_of_pass = bench.median(f"attention {pass_}, {seq_len} x {dim}", work)
            attention.setdefault(pass_, []).append(
                Attention(flops * dim * scores, scores, HEADS * seq_len, seconds_of_pass)
            )
    collectives: dict[str, Collective] = {}
    with warnings.catch_warnings():
        # Newer names of these collectives are missing in older releases.
        warnings.simplefilter("ignore", FutureWarning)
        for kind in kinds:
            timed = []
            for size in sizes.messages:
                work = _communication(kind, size, device)
                timed.append((size, bench.median_together(f"{kind} of {size:,} B", work)))
            collectives[kind] = Collective(*timed)
    bench.finish()
    return Measured(
        products=tuple(products),
        kernels=kernels,
        operator=operator,
        attention={pass_: tuple(each) for pass_, each in attention.items()},
        collectives=collectives,
        num_ranks=len(hosts),
        ranks_per_node=per_node,
        memory_gib=_memory_bytes(device, per_node) / GIB,
        outside_gib=outside / GIB,
    )


def _settle_allocator() -> None:
    """Let the C library keep freed memory, as it does after the first steps of a training.

    glibc returns blocks to the kernel above a threshold, which the largest block freed so far
    raises, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). Each page of a new block costs a fault.
    """
    torch.zeros(31 * MIB, dtype=torch.uint8)


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _slowest(seconds: float) -> float:
    return max(map(float, _gather(seconds)))


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _product(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> tuple[str, Callable[[], object]]:
    m, k, n = shape
    x, weight, grad = (
        torch.ones(size, dtype=dtype, device=device).normal_() for size in ((m, k), (n, k), (m, n))
    )

    def work() -> object:
        return x @ weight.T, grad @ weight, grad.T @ x

    return f"matrix products {m} x {k} x {n}, {_name(dtype)}", work


def _one_kernel(shape: tuple[int, int], device: str) -> tuple[int, int, Callable[[], object]]:
    """Return a kernel that reads two tensors and writes one: its bytes, 1, and the kernel."""
    a, b, out = (torch.ones(shape, device=device) for _ in range(3))
    return 3 * a.nbytes, 1, lambda: torch.add(a, b, out=out)


def _block_kernels(shape: tuple[int, int], device: str) -> tuple[int, int, Callable[[], object]]:
    """Return the kernels of a block between its matrix products, forward and backward.

    A norm, a transposed copy, SwiGLU and a residual. Returns the bytes that `traffic` counts, the
    number of kernels, and a function that runs them.
    """
    x, gate, up = (torch.ones(shape, device=device, requires_grad=True) for _ in range(3))
    weight = torch.ones(shape[1], device=device, requires_grad=True)
    grad = torch.ones(shape, device=device)

    def work() -> object:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
        heads = normed.view(shape[0], HEADS, -1).transpose(0, 1).contiguous()
        out = x + F.silu(gate) * up
        leaves = (x, gate, up, weight)
        return torch.autograd.grad((heads, out), leaves, (grad.view_as(heads), grad))

    recorder = Recorder("cpu")
    with recorder:
        work()
    items = [item for item in recorder.recording.work if item.kind == "memory"]
    return sum(map(traffic, items)), len(items), work


def _model_operators(device: str) -> tuple[int, Callable[[], object]]:
    """Return the number of operators of a small model's forward and backward, and both as a function.

    The host's time of a model is mostly that of modules and autograd, which a kernel alone has not.
    """
    spec = get_spec("llama3")
    model = spec.build(resolve_args(spec, "debugmodel", {"dim": 64, "n_heads": 4}))
    model.to(device, torch.bfloat16)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device)

    def work() -> None:
        model(tokens).sum().backward()

    recorder = Recorder("cpu")
    with recorder:
        work()
    return len(recorder.recording.work), work


def _attention_works(seq_len: int, head_dim: int) -> dict[tuple[str, int], Callable[[], object]]:
    """Return causal attention by (pass, FLOPs of a score and element).

    Its operands are transposed, as those of a model: (batch, seq, heads, head_dim) in memory.
    """
    shape = (1, seq_len, HEADS, head_dim)
    q, k, v = (torch.ones(shape).normal_().transpose(1, 2).requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.ones_like(out)

    def forward() -> object:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return {("forward", 4): forward, ("backward", 10): backward}


def _communication(kind: str, num_bytes: int, device: str) -> Callable[[], object]:
    """Return a collective of float32 numbers, or one message: half of sending and receiving one."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(num_bytes // 4 // num_ranks * num_ranks, device=device)
    part = torch.zeros(len(whole) // num_ranks, device=device)
    received = torch.zeros_like(whole)

    def exchange() -> None:
        sending = dist.isend(whole, (rank + 1) % num_ranks)
        receiving = dist.irecv(received, (rank - 1) % num_ranks)
        for request in (sending, receiving):
            assert request is not None
            request.wait()

    works: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "message": exchange,
    }
    return works[kind]


def _memory_bytes(device: str, per_node: int) -> float:
    if device == "cpu":
        return host_memory().total / per_node
    return float(torch.cuda.get_device_properties(device).total_memory)


# ---- files


def calibrate(
    output: Path, gpu: Gpu | None, seconds: float, progress: Progress
) -> tuple[Measured, dict[Path, str]]:
    """Measure on all ranks that a launcher started. Returns the files to write, by path.

    gpu: the data sheet of the GPU; None on a CPU. progress: called on rank 0. Raises ValueError if
    the measurements contradict each other.
    """
    ranks = launched_ranks(os.environ)
    device = "cpu" if gpu is None else "cuda:0"
    if ranks.world_size > 1:
        _, device = join_ranks("gloo" if gpu is None else None, JOIN_SECONDS)
    kind = device.partition(":")[0]
    reported = progress if ranks.rank == 0 else (lambda *_: None)
    measured = measure_machine(device, SIZES[kind], seconds, reported)
    return measured, files_of(measured, gpu, output)


def files_of(measured: Measured, gpu: Gpu | None, output: Path) -> dict[Path, str]:
    """Return the device file and the cluster file. gpu: by its data sheet; None on a CPU."""
    device_path = output.with_name(f"{output.stem}_device.toml")
    made = f"Measured by benchmarks/calibrate.py with torch {torch.__version__}"
    ranks = f"{measured.num_ranks} {'CPU rank' if gpu is None else 'GPU'}"
    cluster = replace(
        load_cluster("default"),
        key=output.stem,
        name=f"{ranks}{'s' if measured.num_ranks > 1 else ''}, measured",
        gpu=device_path.name,
        matmul_factor=1.0,
        fitted_rows=("kernels",),
    )
    if gpu is None:
        num_threads = torch.get_num_threads()
        name = f"{cpu_model()}, {num_threads} thread{'s' if num_threads > 1 else ''} of a rank"
        device = describe_cpu(measured, device_path.stem, name)
        cluster = replace(
            cluster,
            gpus_per_node=max(num_cores(), measured.ranks_per_node),
            error_percent=CPU_ERROR_PERCENT,
            error_source=CPU_ERROR_SOURCE,
        )
        network = "and the network is not used"
    else:
        device = describe_gpu(measured, gpu, device_path.stem)
        gb_s = network_gb_s(measured)
        cluster = replace(
            cluster,
            gpus_per_node=measured.ranks_per_node,
            inter_node_gb_s=gb_s or cluster.inter_node_gb_s,
            error_percent=GPU_ERROR_PERCENT,
            error_source=GPU_ERROR_SOURCE,
        )
        network = "that of the network is " + ("assumed" if gb_s is None else "here")
    comment = f"{made}. Its rates are in {device_path.name}, {network}."
    return {
        device_path: description_text(device, f"{made}."),
        output: description_text(cluster, comment),
    }


def description_text(description: Gpu | Cluster, comment: str) -> str:
    """Return the TOML of a GPU or a cluster. comment: its first lines, without "#"."""
    lines = [f"# {line}" for line in comment.splitlines()]
    tables = []
    for name, value in vars(description).items():
        if isinstance(value, Mapping):
            rows = (f"{key} = {_toml(entry)}" for key, entry in value.items())
            tables += ["", f"[{name}]", *rows] if value else []
        elif name != "key":
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        value = {key: list(each) for key, each in value.items()}
    return toml_value(list(value) if isinstance(value, tuple) else value)


# ---- command line


def output_path(text: str) -> Path:
    """Parse the path of a cluster file. Raises argparse.ArgumentTypeError."""
    path = Path(text)
    if path.suffix != ".toml" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: expected a .toml file in an existing folder")
    return path


def write_files(files: dict[Path, str]) -> None:
    """Write cluster and device files. The cluster file is the last."""
    for path, text in files.items():
        write_atomically(path, text)
    *_, cluster = files
    names = " and ".join(map(str, files))
    print(f"Wrote {names}. Use it: titan plan X.toml --world-size N --cluster {cluster}")


def load_measured_gpu(name: str) -> Gpu:
    """Load the data sheet of the GPU to measure. Raises ValueError if it is not here."""
    gpu = load_gpu(name)
    if gpu.device_type != "cuda":
        raise ValueError(
            f"{name} describes a CPU. Expected a GPU: leave --gpu out to measure a CPU"
        )
    if not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} finds no GPU: leave --gpu out to measure the CPU"
        )
    return gpu


def main(argv: Sequence[str] | None = None) -> None:
    """Measure this machine and write its files."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Measures matrix products, kernels limited by memory, and collectives; on a CPU also\n"
        "attention and small operators, for FILE_device.toml, which the cluster file names.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", type=output_path, required=True, metavar="FILE")
    parser.add_argument(
        "--gpu", help="name or TOML file of a data sheet (default: measure the CPU)"
    )
    parser.add_argument("--seconds", type=float, default=60, help="to measure (default: 60)")
    arguments = parser.parse_args(argv)
    try:
        gpu = None if arguments.gpu is None else load_measured_gpu(arguments.gpu)
        progress = ProgressLine("measurements")
        measured, files = calibrate(arguments.output, gpu, arguments.seconds, progress)
    except ValueError as error:
        parser.error(str(error))
    if launched_ranks(os.environ).rank == 0:
        print("\n".join(measured.lines()))
        write_files(files)


if __name__ == "__main__":
    main()
    end_process(0)
