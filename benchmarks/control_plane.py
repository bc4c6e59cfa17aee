"""Cost of the control plane on many ranks, by simulation: no cluster is used.

    python -m benchmarks.control_plane measure COSTS.json
    python -m benchmarks.control_plane table COSTS.json

`measure` measures, on this machine, what one rank, message, file or checkpoint item costs. Seconds
are CPU time of the process that does the work, so that a busy machine does not distort them, except
for `hop_s`. `table` scales the costs to thousands of ranks with the order of each operation in
the number of ranks (`ROWS`), and compares them with limits.

The checkpoint is the full state of llama3 405B with pp 16 x tp 8 and FSDP over all other ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_like.util.units import GIB, MIB

Costs = dict[str, float]

SIZES = (1024, 4096, 16384)
RANKS_PER_NODE = 8
# The default group, the group of the steps, and the group of the checkpoints.
NUM_GLOO_GROUPS = 3

# The checkpoint.
PARAMS = 405_853_388_800
NUM_TENSORS = 1138  # 126 blocks of 9 weights, the last norm, the head and the embedding
HEARTBEAT_OPS = 4  # mkdir, stat of the folder, create, rename
SHARD_OPS = 5  # create, fsync, fsync of the folder, stat by rank 0; unlink when it is deleted
START_OPS = 5  # log, heartbeat, torchrun's folder and its two files
LAUNCHER_POLLS_PER_S = 5  # `rendezvous.POLL_S`

STATE_COPIES = 3  # weights and both averages of Adam, float32
PIPELINE_RANKS = 16

# Limits. Files and processes: defaults of systemd and of this package. File server: assumed.
OPEN_FILES = 1024.0
INIT_TIMEOUT_S = 300.0
CHECKPOINT_TIMEOUT_S = 1800.0
METADATA_OPS_PER_S = 10_000.0
FILE_SERVER_BYTES_PER_S = 100e9
NETWORK_BYTES_PER_S = 1e9  # of one TCP stream of gloo, or of the store
STEP_S = 5.0
HOST_MEMORY = 64.0 * GIB  # for rank 0, of a node with 8 ranks


# ---- measurements


@contextmanager
def cpu_time(seconds: list[float]) -> Iterator[None]:
    """Append the CPU seconds of this process in the block."""
    start = time.process_time()
    yield
    seconds.append(time.process_time() - start)


def cpu_seconds(call: Callable[[], object], rounds: int = 3) -> float:
    """Return the smallest CPU time of a call."""
    seconds: list[float] = []
    for _ in range(rounds):
        gc.collect()
        with cpu_time(seconds):
            call()
    return min(seconds)


IMPORT = """
import json, os, sys, time
opened = set()
def hook(event, args):
    if event == "open" and isinstance(args[0], str):
        opened.add(args[0])
sys.addaudithook(hook)
import torchtitan_like.train
libraries = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
paths = [path for path in opened | libraries if os.path.isfile(path)]
print(json.dumps({"import_files": len(paths), "import_bytes": sum(map(os.path.getsize, paths)),
    "import_s": time.process_time()}))
"""


def measure_imports() -> Costs:
    """Return the files, bytes and CPU seconds of a rank's imports, and its file operations.

    strace counts the operations. A node's cache serves repeated ones, so that about one for each
    path (`import_paths`) reaches the file server.
    """
    command = [sys.executable, "-c", IMPORT]
    costs: Costs = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        command = [sys.executable, "-c", "import torchtitan_like.train"]
        subprocess.check_call(["strace", "-f", "-qq", "-e", "trace=%file", "-o", trace, *command])
        lines = trace.read_text(errors="replace").splitlines()
    costs["import_ops"] = len(lines)
    costs["import_paths"] = len(
        {path for line in lines for path in re.findall(r'"(/[^"]*)"', line)}
    )
    return costs


SERVER = """
import os, sys, time
from datetime import timedelta
from torchtitan_like.distributed.store import host_store
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
store = host_store("127.0.0.1", 0, timedelta(seconds=60))
print(store.port, flush=True)
for _ in sys.stdin:
    print(time.process_time(), resident(), len(os.listdir("/proc/self/fd")), flush=True)
"""


def measure_store(num_clients: int = 1000, num_requests: int = 20_000) -> Costs:
    """Return the costs of the process that hosts the store: per connection and per request."""
    import torch.distributed as dist

    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    port = int(server.stdout.readline())

    def state() -> list[float]:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write("\n")
        server.stdin.flush()
        return [float(word) for word in server.stdout.readline().split()]

    try:
        before = state()
        clients = [
            dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
            for _ in range(num_clients)
        ]
        connected = state()
        for number in range(num_requests):
            clients[number % num_clients].add("here", 0)
        requested = state()
        value = "x" * 2**20
        clients[0].set("large", value)
        stored = state()
        for number in range(200):
            clients[number].get("large")
        read = state()
        del clients
    finally:
        server.stdin.close()
        server.wait()
    seconds, resident, files = (
        after - start for after, start in zip(connected, before, strict=True)
    )
    return {
        "store_connect_s": seconds / num_clients,
        "store_connection_bytes": resident / num_clients,
        "store_connection_files": files / num_clients,
        "store_request_s": (requested[0] - connected[0]) / num_requests,
        "store_byte_s": (read[0] - stored[0]) / 200 / 2**20,
    }


def _counting_store(store: Any) -> Any:
    """Wrap a store, and count the requests and bytes that pass."""
    import torch.distributed as dist

    class Counting(dist.Store):
        def __init__(self) -> None:
            super().__init__()
            self.num_requests = 0
            self.num_bytes = 0

        def count(self, value: bytes = b"") -> None:
            self.num_requests += 1
            self.num_bytes += len(value)

        def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
            self.count(value)
            store.set(key, value)

        def get(self, key: str) -> bytes:
            value: bytes = store.get(key)
            self.count(value)
            return value

        def wait(self, *arguments: Any) -> None:
            self.count()
            store.wait(*arguments)

    return Counting()


class GlooGroup(NamedTuple):
    """One group of n ranks. Requests and bytes of the store, and sockets, are of one rank."""

    requests: float
    nbytes: float
    files: float
    files_used: float  # after an all-reduce and a broadcast
    reduce_s: float  # wall time of an all-reduce of one number; shortest


def open_gloo_group(size: int, rounds: int = 10) -> GlooGroup:
    """Make a gloo group of threads of this process, and use it."""
    import torch
    import torch.distributed as dist

    inner = dist.HashStore()
    stores = [_counting_store(inner) for _ in range(size)]
    groups: list[Any] = [None] * size

    def count_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def on_all(action: Callable[[int], object]) -> None:
        threads = [threading.Thread(target=action, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(stores[rank], rank, size, timedelta(seconds=60))

    seconds: list[float] = []

    def use(rank: int) -> None:
        tensor = torch.zeros(1, dtype=torch.int64)
        for _ in range(rounds):
            start = time.perf_counter()
            groups[rank].allreduce([tensor]).wait()
            seconds.append(time.perf_counter() - start)
        groups[rank].broadcast([tensor]).wait()

    before = count_files()
    on_all(make)
    made = count_files()
    on_all(use)
    return GlooGroup(
        sum(store.num_requests for store in stores) / size,
        sum(store.num_bytes for store in stores) / size,
        (made - before) / size,
        (count_files() - before) / size,
        min(seconds),
    )


def slope(points: dict[int, float]) -> tuple[float, float]:
    """Return the slope and the intercept of the least-squares line through {x: y}."""
    mean_x, mean_y = sum(points) / len(points), sum(points.values()) / len(points)
    spread = sum((x - mean_x) ** 2 for x in points)
    gain = sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / spread
    return gain, mean_y - gain * mean_x


def measure_gloo(sizes: tuple[int, ...] = (4, 8, 16, 32)) -> Costs:
    """Return the growth of a gloo group's costs with its size.

    Each rank publishes an address of `address_bytes` + n x `address_bytes_per_rank` bytes and reads
    those of all ranks.
    """
    groups = {size: open_gloo_group(size) for size in sizes}
    requests, requests_at_0 = slope({n: group.requests for n, group in groups.items()})
    # One address is written and n are read.
    address = {n: group.nbytes / (n + 1) for n, group in groups.items()}
    per_rank, fixed = slope(address)
    sockets, files_at_0 = slope({n: group.files for n, group in groups.items()})
    hop, _ = slope({2 * (n - 1): group.reduce_s for n, group in groups.items()})
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    lazy = open_gloo_group(sizes[-1])
    del os.environ["TORCH_GLOO_LAZY_INIT"]
    return {
        "gloo_requests_per_rank": requests,
        "gloo_requests_fixed": requests_at_0,
        "gloo_address_bytes": fixed,
        "gloo_address_bytes_per_rank": per_rank,
        "gloo_files_per_rank": sockets,
        "gloo_files_fixed": files_at_0,
        "gloo_hop_s": hop,
        "lazy_requests": lazy.requests,
        "lazy_bytes": lazy.nbytes,
        "lazy_files": lazy.files_used,
    }


def measure_heartbeats(num_ranks: int = 2000) -> Costs:
    """Return the costs of a heartbeat of a rank, and of reading it."""
    from torchtitan_like.resilience.heartbeat import Heartbeat, RankPosition
    from torchtitan_like.util.run_directory import read_heartbeats

    with tempfile.TemporaryDirectory() as folder:
        attempt = Path(folder)
        beats = [Heartbeat(attempt, RankPosition(), rank) for rank in range(num_ranks)]
        written: list[float] = []
        with cpu_time(written):
            for beat in beats:
                beat.check()
        read = cpu_seconds(lambda: read_heartbeats(attempt))
    return {
        "heartbeat_write_s": written[0] / num_ranks,
        "heartbeat_read_s": read / num_ranks,
    }


def measure_manifest(num_files: int = 2000, num_extents: int = 50) -> Costs:
    """Return the costs of file records, per file and per extent of 4 MiB."""
    from torchtitan_like.checkpoint.step_folders import write_manifest
    from torchtitan_like.checkpoint.verification import check_sizes
    from torchtitan_like.util.extents import EXTENT, FileRecord, hash_extent

    def records(files: int, extents: int) -> dict[str, FileRecord]:
        return {
            f"shard-{rank:05d}.bin": FileRecord(
                extents * EXTENT,
                tuple(hash_extent(b"%d %d" % (rank, each)) for each in range(extents)),
            )
            for rank in range(files)
        }

    def costs_of(files: int, extents: int) -> tuple[float, float, float, float]:
        each = [{name: record} for name, record in records(files, extents).items()]
        pickles = [pickle.dumps(record) for record in each]
        merged = {name: record for part in each for name, record in part.items()}
        with tempfile.TemporaryDirectory() as folder:
            loaded = cpu_seconds(lambda: [pickle.loads(text) for text in pickles])
            content = {"files": dict(sorted(merged.items()))}
            written = cpu_seconds(lambda: write_manifest(Path(folder), content))
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
        return sum(map(len, pickles)), loaded, written, size

    few, many = costs_of(num_files, 1), costs_of(num_files, num_extents)
    names = ("record_pickle_bytes", "record_load_s", "manifest_s", "manifest_bytes")
    costs: Costs = {}
    for name, one, all_of_them in zip(names, few, many, strict=True):
        per_extent = (all_of_them - one) / (num_extents - 1) / num_files
        costs[f"{name}_per_extent"] = per_extent
        costs[f"{name}_per_file"] = one / num_files - per_extent
    with tempfile.TemporaryDirectory() as folder:
        empty = {f"{rank}": FileRecord(0, ()) for rank in range(num_files)}
        for name in empty:
            (Path(folder) / name).touch()
        costs["check_size_s"] = cpu_seconds(lambda: check_sizes(Path(folder), empty)) / num_files
    return costs


def measure_plans(num_ranks: int = 64, num_tensors: int = 213) -> Costs:
    """Return the costs of an item (the shard of a tensor on a rank) in DCP's plan of a checkpoint.

    The planner of rank 0 gathers the plans of all ranks, merges them and returns each rank its own.
    """
    import torch
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    from torchtitan_like.checkpoint.dcp_metadata import load_metadata

    rows = 128

    def item(tensor: int, rank: int) -> WriteItem:
        offset, shape = torch.Size([rank * rows, 0]), torch.Size([rows, 16384])
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offset, shape),
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size([num_ranks * rows, 16384]),
        )
        name = f"optimizer.state.layers.{tensor}.feed_forward.w1.weight.exp_avg"
        return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)

    plan = SavePlan([item(tensor, 0) for tensor in range(num_tensors)])
    num_items = num_ranks * num_tensors
    content = pickle.dumps(plan)
    load_s = cpu_seconds(lambda: [pickle.loads(content) for _ in range(num_ranks)])
    tracemalloc.start()
    loaded = [pickle.loads(content) for _ in range(num_ranks)]
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del loaded
    plans = [
        SavePlan([item(tensor, rank) for tensor in range(num_tensors)]) for rank in range(num_ranks)
    ]
    seconds: list[float] = []
    with cpu_time(seconds):
        merged, metadata = create_default_global_save_plan(dedup_save_plans(plans))
        for each in merged:
            pickle.dumps(each)
    results = [
        [
            WriteResult(one.index, 1, _StorageInfo(f"shard-{rank:05d}.bin", 0, 1))
            for one in each.items
        ]
        for rank, each in enumerate(merged)
    ]
    result_bytes = len(pickle.dumps(results[0])) / num_tensors
    with cpu_time(seconds):
        for each_rank in results:
            pickle.loads(pickle.dumps(each_rank))
        metadata.storage_data = {
            result.index: result.storage_data for each_rank in results for result in each_rank
        }
        text = pickle.dumps(metadata)
    read_s = cpu_seconds(lambda: load_metadata(text, Path(".metadata")), rounds=1)
    return {
        "plan_bytes": len(content) / num_tensors,
        "plan_memory": memory / num_items,
        "plan_s": (load_s + sum(seconds)) / num_items,
        "result_bytes": result_bytes,
        "metadata_bytes": len(text) / num_items,
        "metadata_read_s": read_s / num_items,
    }


MEASUREMENTS: tuple[Callable[[], Costs], ...] = (
    measure_imports,
    measure_store,
    measure_gloo,
    measure_heartbeats,
    measure_manifest,
    measure_plans,
)


# ---- scaling


def num_items(num_ranks: int) -> float:
    """Return the items of all ranks in the plan: each rank has a shard of each tensor of its stage."""
    return num_ranks * STATE_COPIES * NUM_TENSORS / PIPELINE_RANKS


def num_extents(num_ranks: int) -> float:
    """Return the extents of 4 MiB of the checkpoint; the last one of each file is half full."""
    return 4 * STATE_COPIES * PARAMS / (4 * MIB) + num_ranks / 2


def gloo_bytes(costs: Costs, num_ranks: int) -> float:
    """Return the bytes that the store sends and receives for the gloo groups."""
    address = costs["gloo_address_bytes"] + costs["gloo_address_bytes_per_rank"] * num_ranks
    return NUM_GLOO_GROUPS * num_ranks * (num_ranks + 1) * address


def gloo_store_s(costs: Costs, num_ranks: int) -> float:
    """Return the CPU seconds of the store for the gloo groups."""
    of_rank = costs["gloo_requests_per_rank"] * num_ranks + costs["gloo_requests_fixed"]
    requests = NUM_GLOO_GROUPS * num_ranks * of_rank * costs["store_request_s"]
    return requests + gloo_bytes(costs, num_ranks) * costs["store_byte_s"]


def gloo_files(costs: Costs, num_ranks: int) -> float:
    """Return the open files of a rank for the gloo groups."""
    of_group = costs["gloo_files_per_rank"] * num_ranks + costs["gloo_files_fixed"]
    return NUM_GLOO_GROUPS * of_group


def record_bytes(costs: Costs, num_ranks: int) -> float:
    """Return the bytes of file records that each rank receives in a checkpoint."""
    of_files = num_ranks * costs["record_pickle_bytes_per_file"]
    return of_files + num_extents(num_ranks) * costs["record_pickle_bytes_per_extent"]


def per_file_and_extent(costs: Costs, name: str, num_ranks: int) -> float:
    """Return the cost `name` of all files and extents of a checkpoint."""
    files = num_ranks * costs[f"{name}_per_file"]
    return files + num_extents(num_ranks) * costs[f"{name}_per_extent"]


def poll_share(costs: Costs, num_ranks: int) -> float:
    """Return the share of a core that polls take while ranks wait for the last one.

    `world._wait_for_ranks` polls each max(0.05, n/20,000) seconds.
    """
    return num_ranks / max(0.05, num_ranks / 20_000) * costs["store_request_s"]


def heartbeat_ops_per_s(num_ranks: int) -> float:
    """Return the file operations per second of heartbeats, if each rank moves all the time."""
    from torchtitan_like.resilience.heartbeat import INTERVAL, MAX_PAUSE, MAX_WRITES_PER_SECOND

    pause = min(num_ranks // MAX_WRITES_PER_SECOND, MAX_PAUSE)
    return HEARTBEAT_OPS * num_ranks / max(INTERVAL, pause)


class Row(NamedTuple):
    """A cost that grows with the number of ranks. limit: of the value; None without one."""

    part: str
    order: str
    value: Callable[[Costs, int], float]
    unit: str
    limit: float | None = None
    reason: str = ""


ROWS = (
    Row("Imports: paths looked up by all nodes", "n",
        lambda c, n: n / RANKS_PER_NODE * c["import_paths"] / METADATA_OPS_PER_S, "s",
        INIT_TIMEOUT_S, "`init_timeout_seconds`, at 10,000 operations/s"),
    Row("Imports: bytes read by all nodes", "n",
        lambda c, n: n / RANKS_PER_NODE * c["import_bytes"] / FILE_SERVER_BYTES_PER_S, "s",
        INIT_TIMEOUT_S, "the same, at 100 GB/s"),
    Row("Start: files of all ranks", "n", lambda c, n: START_OPS * n / METADATA_OPS_PER_S, "s",
        INIT_TIMEOUT_S, "the same, at 10,000 operations/s"),
    Row("Store: CPU of the launchers' polls", "n",
        lambda c, n: n / RANKS_PER_NODE * LAUNCHER_POLLS_PER_S * c["store_request_s"], "core", 1.0,
        "the store has one thread"),
    Row("Store: open files of launcher 0", "n",
        lambda c, n: (n + n / RANKS_PER_NODE) * c["store_connection_files"], "", OPEN_FILES,
        "soft limit of open files"),
    Row("Store: CPU of all connections", "n", lambda c, n: n * c["store_connect_s"], "s",
        INIT_TIMEOUT_S, "`init_timeout_seconds`"),
    Row("Store: CPU of polls until all ranks have joined", "1",
        lambda c, n: poll_share(c, n), "core", 1.0, "the store has one thread"),
    Row("Gloo groups: CPU of the store", "n³", gloo_store_s, "s", INIT_TIMEOUT_S,
        "`init_timeout_seconds`"),
    Row("Gloo groups: bytes through the store", "n³",
        lambda c, n: gloo_bytes(c, n) / NETWORK_BYTES_PER_S, "s", INIT_TIMEOUT_S,
        "the same, at 1 GB/s"),
    Row("Gloo groups: open files of a rank", "n", gloo_files, "", OPEN_FILES,
        "soft limit of open files"),
    Row("Gloo groups, lazy: CPU of the store", "n",
        lambda c, n: NUM_GLOO_GROUPS * n * c["lazy_requests"] * c["store_request_s"], "s",
        INIT_TIMEOUT_S, "`init_timeout_seconds`"),
    Row("Agreement: longest hop that a step of 5 s hides", "1/n",
        lambda c, n: STEP_S / (2 * (n - 1)), "s"),
    Row("Agreement: all-reduce with this machine's hops", "n",
        lambda c, n: 2 * (n - 1) * c["gloo_hop_s"], "s", STEP_S, "a step of 5 s"),
    Row("Checkpoint: records that each rank receives", "n", lambda c, n: record_bytes(c, n), "B"),
    Row("Checkpoint: CPU of each rank to read them", "n",
        lambda c, n: per_file_and_extent(c, "record_load_s", n), "s", CHECKPOINT_TIMEOUT_S,
        "`checkpoint_timeout_seconds`"),
    Row("Checkpoint: plans and results at rank 0", "n",
        lambda c, n: num_items(n) * (c["plan_bytes"] + c["result_bytes"]), "B"),
    Row("Checkpoint: memory of the plans at rank 0", "n",
        lambda c, n: num_items(n) * c["plan_memory"], "B", HOST_MEMORY, "64 GiB for rank 0"),
    Row("Checkpoint: CPU of rank 0 to plan", "n", lambda c, n: num_items(n) * c["plan_s"], "s",
        CHECKPOINT_TIMEOUT_S, "`checkpoint_timeout_seconds`"),
    Row("Checkpoint: size of manifest.json", "n",
        lambda c, n: per_file_and_extent(c, "manifest_bytes", n), "B"),
    Row("Checkpoint: CPU of rank 0 to write it", "n",
        lambda c, n: per_file_and_extent(c, "manifest_s", n), "s", CHECKPOINT_TIMEOUT_S,
        "`checkpoint_timeout_seconds`"),
    Row("Checkpoint: file operations", "n",
        lambda c, n: SHARD_OPS * n / METADATA_OPS_PER_S, "s", CHECKPOINT_TIMEOUT_S, "the same, at 10,000 operations/s"),
    Row("Load: size of .metadata", "n", lambda c, n: num_items(n) * c["metadata_bytes"], "B"),
    Row("Load: CPU of each rank to read it", "n",
        lambda c, n: num_items(n) * c["metadata_read_s"], "s", CHECKPOINT_TIMEOUT_S,
        "`checkpoint_timeout_seconds`"),
    Row("Load: .metadata of all ranks", "n²",
        lambda c, n: n * num_items(n) * c["metadata_bytes"] / FILE_SERVER_BYTES_PER_S, "s",
        CHECKPOINT_TIMEOUT_S, "the same, at 100 GB/s"),
    Row("Heartbeats: file operations per second", "1 above 15,000",
        lambda c, n: heartbeat_ops_per_s(n), "/s", METADATA_OPS_PER_S, "10,000 operations/s"),
    Row("Heartbeats: CPU to read all (`titan run status`)", "n",
        lambda c, n: n * c["heartbeat_read_s"], "s"),
)  # fmt: skip


def passed_at(row: Row, costs: Costs, largest: int = 2**24) -> int | None:
    """Return the fewest ranks above whose number the row's limit is exceeded; None if never.

    The value must not decrease with the number of ranks.
    """
    if row.limit is None or row.value(costs, largest) <= row.limit:
        return None
    low, high = 1, largest  # the limit is kept at `low`, and exceeded at `high`
    if row.value(costs, low) > row.limit:
        return low
    while high - low > 1:
        middle = (low + high) // 2
        if row.value(costs, middle) > row.limit:
            high = middle
        else:
            low = middle
    return high


def show(value: float, unit: str) -> str:
    """Format a value with two or three digits."""
    steps = {"B": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))}
    if unit == "s":
        steps["s"] = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    for factor, name in steps.get(unit, ()):
        if value >= factor:
            return f"{_digits(value / factor)} {name}"
    return f"{_digits(value)} {unit}".strip()


def _digits(value: float) -> str:
    if value >= 100:
        return f"{round(value, 2 - math.floor(math.log10(value))):,.0f}"
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def lines(costs: Costs) -> list[str]:
    """Return the Markdown table of `ROWS`."""
    head = ["part", "order", *(f"{size:,} ranks" for size in SIZES), "limit", "passed at"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in ROWS:
        values = [show(row.value(costs, size), row.unit) for size in SIZES]
        limit = "" if row.limit is None else f"{row.limit:,.0f} {row.unit}".strip()
        first = passed_at(row, costs)
        passed = (
            "" if row.limit is None else "never" if first is None else f"{_digits(first)} ranks"
        )
        limit += f": {row.reason}" if row.reason else ""
        rows.append("| " + " | ".join([row.part, row.order, *values, limit, passed]) + " |")
    return rows


def cost_lines(costs: Costs) -> list[str]:
    """Return the Markdown table of the measured costs."""
    return [
        "| measured | value |",
        "|---|---|",
        *(f"| `{name}` | {value:.4g} |" for name, value in costs.items()),
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("measure", "table"))
    parser.add_argument("costs", type=Path, help="JSON file of the measured costs")
    arguments = parser.parse_args(argv)
    if arguments.command == "measure":
        costs: Costs = {}
        for measure in MEASUREMENTS:
            costs |= measure()
            print(f"{measure.__name__} is done", file=sys.stderr)
        arguments.costs.write_text(
            json.dumps({name: float(f"{value:.6g}") for name, value in costs.items()}, indent=1)
            + "\n"
        )
    costs = json.loads(arguments.costs.read_text())
    print("\n".join([*cost_lines(costs), "", *lines(costs)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
