"""Write profiler traces with known times, as torch writes them on GPUs and on CPUs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

CPU, GPU, MAIN, STREAM = 4711, 0, 4711, 7  # process and thread of the training loop and the kernels
BASE = 1_700_000_000_000_000_000  # nanoseconds since 1970
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def complete(
    category: str, name: str, start: float, end: float, *, pid: Any, tid: Any, **fields: Any
) -> Event:
    """Return an event from `start` to `end` in milliseconds."""
    times = {"ts": start * 1000, "dur": (end - start) * 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, **fields}


def kernel(name: str, start: float, end: float, **arguments: Any) -> Event:
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return complete(category, name, start, end, pid=GPU, tid=STREAM, args=arguments)


def nccl(name: str, start: float, end: float, group: str = "2") -> Event:
    arguments = {"Process Group Name": group, "In msg nelems": 64}
    return kernel(name, start, end, **arguments)


def cpu(
    category: str, name: str, start: float, end: float, tid: int = MAIN, **fields: Any
) -> Event:
    return complete(category, name, start, end, pid=CPU, tid=tid, **fields)


def step_marks(number: int, start: float, end: float, device_end: float) -> list[Event]:
    """Return the annotations of a step on the CPU and on the GPU."""
    name = f"ProfilerStep#{number}"
    on_gpu = complete("gpu_user_annotation", name, start, device_end, pid=GPU, tid=STREAM)
    return [cpu("user_annotation", name, start, end), on_gpu]


def shifted(events: Iterable[Event], milliseconds: float) -> list[Event]:
    """Return events on a clock that is ahead."""
    return [{**event, "ts": event["ts"] + 1000 * milliseconds} for event in events]


def write_trace(
    run: Path,
    rank: int,
    events: Sequence[Event],
    *,
    step: int = 8,
    groups: dict[str, list[int]] | None = None,
    base: int = BASE,
    suffix: str = "json",
) -> Path:
    """Write the trace of a rank."""
    configs = [{"pg_name": name, "ranks": ranks} for name, ranks in (groups or {}).items()]
    header = {
        "schemaVersion": 1,
        "distributedInfo": {"rank": rank, "pg_config": configs},
        "host_name": f"node{rank}",
        "baseTimeNanoseconds": base,
    }
    names = [
        ("process_name", {"name": "python"}),
        ("thread_name", {"name": "thread 4711 (python)"}),
    ]
    metadata = [
        {"ph": "M", "name": name, "ts": 0.0, "pid": CPU, "tid": MAIN, "args": values}
        for name, values in names
    ]
    start = events[0]["ts"]
    flows = [
        {"ph": phase, "id": 5, "cat": "ac2g", "name": "ac2g", "pid": CPU, "tid": MAIN, "ts": start}
        for phase in "sf"
    ]
    content = json.dumps({**header, "traceEvents": [*metadata, *events, *flows]}).encode()
    file = run / f"profile_traces/iteration_{step}/rank{rank}_trace.{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    return file
