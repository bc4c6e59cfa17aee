"""scripts/exposed_comm.py measures communication that no kernel overlaps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import exposed_comm


def kernel(name: str, start: float, end: float, **fields: Any) -> dict[str, Any]:
    """Return an event from `start` to `end` in milliseconds."""
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": start * 1000,
        "dur": (end - start) * 1000,
        **fields,
    }


GATHER, SCATTER = (
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_ReduceScatter_Sum_f32",
)
STEP = [
    kernel("ProfilerStep#99", 0, 100, cat="user_annotation"),
    kernel("gemm", 0, 10),
    kernel(GATHER, 5, 25),  # overlapped until 10, and from 15 to 20: 10 ms are exposed
    kernel("gemm", 15, 18),
    kernel("Memcpy HtoD", 17, 20, cat="gpu_memcpy"),
    kernel(GATHER, 22, 30),  # on another stream: 5 ms more are exposed
    kernel(SCATTER, 30, 38),  # overlapped except for the last ms
    kernel("gemm", 28, 37),
    kernel("gemm", 50, 60),  # an idle gap before it, without communication
    kernel("aten::mm", 0, 90, cat="cpu_op"),
    {"ph": "M", "name": "process_name"},
]


def write(folder: Path, name: str, events: list[dict[str, Any]]) -> Path:
    file = folder / name
    text = json.dumps({"traceEvents": events}).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return file


def test_communication_without_a_concurrent_kernel_is_exposed() -> None:
    result = exposed_comm.exposed_in(STEP)
    assert result is not None
    assert (result.num_steps, result.total, result.computed, result.sent) == (1, 60, 34, 33)
    assert result.by_kind == {"AllGather": 13, "ReduceScatter": 1}
    assert result.exposed == 14


def test_output_has_a_line_per_rank_and_a_mean_per_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "rank0_trace.json", STEP)
    second = [kernel("ProfilerStep#100", 100, 200, cat="user_annotation")]
    write(tmp_path, "rank1_trace.json.gz", [*STEP, *second])  # equal work in two steps
    assert exposed_comm.main([str(tmp_path)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["ms", "of", "a", "step", "all", "computing", "sending", "exposed", "of", "all"],
        ["rank0", "60.0", "34.0", "33.0", "14.0", "23.3%"],
        ["rank1", "30.0", "17.0", "16.5", "7.0", "23.3%"],
        ["AllGather", "9.8"],
        ["ReduceScatter", "0.8"],
    ]


@pytest.mark.parametrize("events", [[], [kernel("aten::mm", 0, 9, cat="cpu_op")]])
def test_a_trace_without_kernels_is_refused(
    tmp_path: Path, events: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "rank0_trace.json", events)
    assert exposed_comm.main([str(file)]) == 2
    assert "no trace with GPU kernels" in capsys.readouterr().err


def test_a_file_that_is_not_a_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0_trace.json").write_text('{"traceEvents": [')
    assert exposed_comm.main([str(tmp_path)]) == 2
    assert "rank0_trace.json is not a Chrome trace" in capsys.readouterr().err
