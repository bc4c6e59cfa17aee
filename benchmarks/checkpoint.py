"""Save and load native checkpoints, compared with a lower bound and with torch's format (DCP).

    python benchmarks/checkpoint.py [--rounds 9] [--gb 2] [--folder DIR]

The state has weights and two moments, sharded by rows over 2 CPU ranks. Each round measures every
variant once, so that noise affects all variants equally. The table has medians of the times, and of
the ratios within a round.

- save: the lower bound is `safetensors.torch.save_file` with fsync of each rank's shards.
- load: files are in the page cache, and every extent is verified. The other variant is `dcp.load`
  of the same state. Layouts: the same, 2 ranks -> 1, 2 ranks -> 4, and sharded by columns.
- background: the trainer's checkpoints with `async_mode = "async"`: the time that training waits,
  and the time until the step is published.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
LOADS = {
    "same layout": (2, 0),
    "2 ranks -> 1": (1, 0),
    "2 ranks -> 4": (4, 0),
    "sharded by columns": (2, 1),
}


def shapes(gigabytes: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of Llama weights of width 1,024 and of their moments."""
    layer = {
        "wq": (1024, 1024),
        "wk": (256, 1024),
        "wv": (256, 1024),
        "wo": (1024, 1024),
        "norm": (1024,),
    }
    layer |= {"w1": (2816, 1024), "w2": (1024, 2816), "w3": (2816, 1024)}
    num_layers = max(1, round((gigabytes * 1e9 / 12 - 2 * 32000 * 1024) / 11.3e6))
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        for end in ("tok_embeddings", "output"):
            yield f"{end}.{kind}", (32000, 1024)
        for index in range(num_layers):
            for name, shape in layer.items():
                yield f"layers.{index}.{name}.{kind}", shape


def make_state(gigabytes: float, dim: int, fill: bool) -> dict[str, Any]:
    """Return the state as DTensors, sharded along `dim` over all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, shape in shapes(gigabytes):
        state[name] = empty(shape, device_mesh=mesh, placements=[Shard(min(dim, len(shape) - 1))])
        local = state[name].to_local()
        torch.randn(local.shape, out=local) if fill else local.zero_()
    return state


class Memory:
    """Growth of the peak resident memory of this process in a `with` block, in MiB."""

    def __enter__(self) -> Memory:
        self._stop = threading.Event()
        self._first = self._peak = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _now(self) -> float:
        return (
            int(Path("/proc/self/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 2**20
        )

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._peak = max(self._peak, self._now())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = self._peak - self._first


def measure_times(action: Callable[[], object]) -> tuple[float, float]:
    """Return (seconds until the last rank is done, CPU seconds of this rank)."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start, cpu = time.monotonic(), time.process_time()
    action()
    used = time.process_time() - cpu
    seconds = torch.tensor(time.monotonic() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), used


def rank_saves(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Measure native, lower bound and DCP in each round. Keep only the last round's files."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    from torchtitan_like.checkpoint.dcp_storage import ExtentWriter, _as_bytes
    from torchtitan_like.util.extents import EXTENT, hash_extent

    rank, folder = dist.get_rank(), Path(arguments.folder)
    state = make_state(arguments.gb, 0, fill=True)
    shards: dict[str, torch.Tensor] = {name: tensor.to_local() for name, tensor in state.items()}

    def native() -> None:
        writer = ExtentWriter(folder / "native", rank)
        dcp.save(state, storage_writer=writer)
        records = {name: (record.size, record.extents) for name, record in writer.records.items()}
        (folder / f"records-{rank}.json").write_text(json.dumps(records))

    def floor() -> None:
        path = folder / "floor" / f"shard-{rank}.safetensors"
        save_file(shards, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def plain() -> None:
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(folder / "plain", thread_count=1, sync_files=True),
        )

    def hashing() -> None:
        for shard in shards.values():
            data = _as_bytes(shard)
            for start in range(0, len(data), EXTENT):
                hash_extent(data[start : start + EXTENT])

    variants = {"native": native, "floor": floor, "plain": plain}
    figures: dict[str, list[float]] = {}
    for index in range(arguments.rounds):
        for name in sorted(variants, reverse=index % 2 == 1):
            if rank == 0:
                shutil.rmtree(folder / name, ignore_errors=True)
                (folder / name).mkdir()
                os.sync()  # writes of the previous variant must not count
            with Memory() as memory:
                seconds, cpu = measure_times(variants[name])
            for key, value in (("s", seconds), ("cpu_s", cpu), ("mib", memory.extra)):
                figures.setdefault(f"{name} {key}", []).append(value)
        figures.setdefault("hashing cpu_s", []).append(measure_times(hashing)[1])
    figures["largest shard mib"] = [max(shard.nbytes for shard in shards.values()) / 2**20]
    return figures


def rank_saves_in_background(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Measure foreground and background checkpoints, and a copy of the state, in each round."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from torchtitan_like.build import identify
    from torchtitan_like.checkpoint.checkpointer import Checkpointer
    from torchtitan_like.checkpoint.saving import RunRecord, Save
    from torchtitan_like.config.sections_checkpoint import Checkpoint
    from torchtitan_like.config.sections_training import Model
    from torchtitan_like.distributed.world import HostGroup

    rank, ranks, folder = (
        dist.get_rank(),
        list(range(dist.get_world_size())),
        Path(arguments.folder),
    )
    state = make_state(arguments.gb, 0, fill=True)
    copies = {name: torch.zeros_like(tensor.to_local()) for name, tensor in state.items()}

    class BenchmarkState:
        def state_dict(self) -> dict[str, Any]:
            return state

    def make(mode: str) -> Checkpointer:
        section = Checkpoint(enable=True, async_mode=mode, keep_latest_k=0)
        group, identity = HostGroup(ranks, timedelta(hours=1)), identify(Model())
        return Checkpointer(
            section, dump_folder=str(folder / mode), group=group, device=torch.device("cpu"),
            identity=identity,
        )  # fmt: skip

    def save(checkpointer: Checkpointer, step: int) -> None:
        checkpointer.save(
            [Save("full", checkpointer.folder)], RunRecord(step, "", {}),
            {"model": cast(Any, BenchmarkState())},
        )  # fmt: skip

    def copy() -> None:
        for name, tensor in state.items():
            copies[name].copy_(tensor.to_local())

    checkpointers = {mode: make(mode) for mode in ("disabled", "async")}
    for checkpointer in checkpointers.values():
        checkpointer.find_start(last_step=sys.maxsize)  # acquires the folder's lock
    figures: dict[str, list[float]] = {}
    for index in range(
        -1, arguments.rounds
    ):  # the first round allocates buffers and is not counted
        for mode in sorted(checkpointers, reverse=index % 2 == 1):
            if rank == 0:
                for step in checkpointers[mode].folder.glob("step-*"):
                    shutil.rmtree(step)
                os.sync()
            start = time.monotonic()
            blocked = measure_times(partial(save, checkpointers[mode], index + 1))[0]
            checkpointers[mode].wait()
            dist.barrier()
            if index >= 0:
                figures.setdefault(f"{mode} blocked s", []).append(blocked)
                figures.setdefault(f"{mode} s", []).append(time.monotonic() - start)
        seconds = measure_times(copy)[0]
        if index >= 0:
            figures.setdefault("copy s", []).append(seconds)
    for checkpointer in checkpointers.values():
        checkpointer.close()
    return figures


def rank_loads(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Measure native and DCP loads in each round."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from torchtitan_like.checkpoint.dcp_source import StepSource
    from torchtitan_like.util.extents import FileRecord

    folder = Path(arguments.folder)
    records = {
        name: FileRecord(size, tuple(extents))
        for path in folder.glob("records-*.json")
        for name, (size, extents) in json.loads(path.read_text()).items()
    }
    state = make_state(arguments.gb, LOADS[arguments.child][1], fill=False)
    native = folder / "native"
    variants = {
        "native": lambda: StepSource(native, records).fill_tensors(state),
        "plain": lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "plain")),
    }
    figures: dict[str, list[float]] = {}
    checks = set()
    for index in range(
        -1, arguments.rounds
    ):  # the first round fills the page cache and is not counted
        for name in sorted(variants, reverse=index % 2 == 1):
            for tensor in state.values():
                tensor.to_local().zero_()
            with Memory() as memory:
                seconds, _ = measure_times(variants[name])
            checks.add(sum(tensor.to_local().double().sum().item() for tensor in state.values()))
            if index >= 0:
                figures.setdefault(f"{name} s", []).append(seconds)
                figures.setdefault(f"{name} mib", []).append(memory.extra)
    assert len(checks) == 1, (
        f"native and DCP loaded different values: {checks} on rank {dist.get_rank()}"
    )
    return figures


def child(arguments: argparse.Namespace) -> None:
    """Run one rank of one case; rank 0 prints the figures."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = {"save": rank_saves, "background": rank_saves_in_background}
    figures = cases.get(arguments.child, rank_loads)(arguments)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(figures), flush=True)
    dist.destroy_process_group()


def launch(case: str, ranks: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Run a case on `ranks` processes and return the figures of every round."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        __file__,
    ]
    command += ["--child", case, "--gb", str(arguments.gb), "--rounds", str(arguments.rounds)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [*command, "--folder", arguments.folder], env=env, capture_output=True, text=True
    )
    _, marker, result = process.stdout.rpartition("RESULT ")
    if process.returncode or not marker:
        raise SystemExit(
            f"{case} failed ({process.returncode}):\n"
            f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
        )
    figures: dict[str, list[float]] = json.JSONDecoder().raw_decode(result)[0]
    return figures


def spread(values: list[float], digits: int = 2) -> str:
    """Format as median (minimum - maximum)."""
    low, median, high = min(values), statistics.median(values), max(values)
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def ratio(above: list[float], below: list[float]) -> str:
    return spread([a / b for a, b in zip(above, below, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds per case")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state, in 10^9 bytes")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--child", choices=["save", "background", *LOADS], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    parent = arguments.folder
    with tempfile.TemporaryDirectory(dir=parent) as arguments.folder:
        save = launch("save", 2, arguments)
        loads = {case: launch(case, ranks, arguments) for case, (ranks, _) in LOADS.items()}
    with tempfile.TemporaryDirectory(dir=parent) as arguments.folder:
        background = launch("background", 2, arguments)
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {arguments.gb:g} GB, "
        f"medians of {arguments.rounds} rounds\n"
    )
    print(
        "| case | native, s | other, s | ratio | native: extra memory, MiB |\n|---|---|---|---|---|"
    )
    for other, label in (
        ("floor", "save, other = safetensors + fsync"),
        ("plain", "save, other = plain DCP"),
    ):
        native, other_times = save["native s"], save[f"{other} s"]
        print(
            f"| {label} | {spread(native)} | {spread(other_times)} "
            f"| {ratio(native, other_times)} | {max(save['native mib']):.0f} |"
        )
    for case, figures in loads.items():
        native, other_times = figures["native s"], figures["plain s"]
        print(
            f"| load, {case}, other = plain DCP | {spread(native)} | {spread(other_times)} | "
            f"1 / {ratio(other_times, native)} | {max(figures['native mib']):.0f} |"
        )
    for key, other, label in (
        (
            "async blocked s",
            "copy s",
            "background save, time that training waits; other = one copy in memory",
        ),
        (
            "async s",
            "disabled s",
            "background save, until it is published; other = foreground save",
        ),
    ):
        native, other_times = background[key], background[other]
        print(
            f"| {label} | {spread(native)} | {spread(other_times)} "
            f"| {ratio(native, other_times)} | |"
        )
    print(
        f"\nHashing takes {ratio(save['hashing cpu_s'], save['native cpu_s'])} "
        "of a checkpoint's CPU time. "
        f"The largest shard of a tensor has {save['largest shard mib'][0]:.0f} MiB"
    )


if __name__ == "__main__":
    main()
