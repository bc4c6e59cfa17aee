"""`titan run trace`: times, clocks, gaps and the merged trace of all ranks."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.runner import ROOT
from tests.unit.report.trace_folder import (
    GATHER,
    SCATTER,
    Event,
    cpu,
    kernel,
    nccl,
    shifted,
    step_marks,
    write_trace,
)
from torchtitan_like.cli import main
from torchtitan_like.report.trace import spans
from torchtitan_like.report.trace.files import TraceFile, find_traces
from torchtitan_like.report.trace.table import analyze, trace_lines
from torchtitan_like.report.trace.times import measure
from torchtitan_like.util.run_directory import DATA_WAIT

GROUPS = {"2": [0, 1]}
# One step of a GPU from 0 to 100 ms: 30 ms of communication, of which 14 ms are exposed.
GPU_STEP = [
    *step_marks(41, 0, 60, 95),
    cpu("user_annotation", DATA_WAIT, 0, 8),
    kernel("gemm", 5, 10),  # the wait for data is exposed until 5
    nccl(GATHER, 8, 25),  # overlapped until 10, and from 15 to 20: 10 ms are exposed
    kernel("gemm", 15, 18),
    kernel("Memcpy HtoD (Pinned -> Device)", 17, 20),
    nccl(SCATTER, 30, 43),  # overlapped from 30 to 39
    kernel("gemm", 28, 39),
    kernel("gemm", 60, 95),  # an idle gap before it
    cpu("cpu_op", "aten::mm", 0, 60),
]


def times_of(run: Path, rank: int = 0) -> dict[str, float]:
    """Return the times of the first step of a rank, in milliseconds."""
    step = analyze(run, None, None).ranks[rank].steps[0]
    names = ("compute", "exposed", "data_wait", "idle")
    return {name: getattr(step, name) / 1000 for name in names}


# ---- times


def test_a_step_on_a_gpu_is_divided_into_four_parts(tmp_path: Path) -> None:
    write_trace(tmp_path, 0, GPU_STEP, groups=GROUPS)
    analysis = analyze(tmp_path, 8, None)
    (step,) = analysis.ranks[0].steps
    assert (step.start, step.end) == (0, 95_000)
    assert times_of(tmp_path) == {"compute": 56, "exposed": 14, "data_wait": 5, "idle": 20}
    assert {kind: time / 1000 for kind, time in step.by_kind.items()} == {
        "AllGather": 10,
        "ReduceScatter": 4,
    }
    lines = list(trace_lines(analysis))
    assert "     8     0      95.00      56.00      14.00       5.00      20.00" in lines
    assert "exposed by kind, ms per step and rank: AllGather 10.00, ReduceScatter 4.00" in lines
    mean = "compute 56.00 ms, exposed communication 14.00 ms, idle 20.00 ms"
    assert f"mean of a step and rank: {mean}" in lines
    assert lines[4] == "gap of 17.00 ms on rank 0 in step 8, 43.00 ms after its start"


def test_a_step_starts_when_its_gpu_has_finished_the_step_before(tmp_path: Path) -> None:
    events = [
        *step_marks(1, 0, 10, 30),
        kernel("gemm", 2, 30),
        *step_marks(2, 10, 20, 50),
        kernel("gemm", 32, 50),
    ]
    write_trace(tmp_path, 0, events)
    analysis = analyze(tmp_path, 8, None)
    windows = [(number, step.start, step.end) for number, step in analysis.steps()]
    assert windows == [(7, 0, 30_000), (8, 30_000, 50_000)]
    assert [step.compute for _, step in analysis.steps()] == [28_000, 18_000]


def test_a_step_on_a_cpu_is_divided_into_four_parts(tmp_path: Path) -> None:
    worker = 4720
    events = [
        cpu("user_annotation", "ProfilerStep#3", 0, 100),
        cpu("user_annotation", DATA_WAIT, 0, 10),
        cpu("cpu_op", "aten::stack", 2, 4),  # of the data
        cpu("cpu_op", "autograd::engine::evaluate_function: Mm", 20, 60),
        cpu("cpu_op", "_c10d_functional::wait_tensor", 40, 50),  # in the operator
        cpu("user_annotation", "gloo:all_reduce", 35, 50, tid=worker),
        cpu("user_annotation", "gloo:all_gather", 70, 80, tid=worker),
        cpu("cpu_op", "aten::add", 75, 90),
        cpu("user_annotation", "Optimizer.step#AdamW.step", 90, 100),
    ]
    write_trace(tmp_path, 0, events)
    assert times_of(tmp_path) == {"compute": 45, "exposed": 15, "data_wait": 10, "idle": 30}


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8),
)
def test_sets_of_spans_equal_sets_of_points(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    def points(pairs: Any) -> set[int]:
        return {point for start, end in pairs for point in range(int(start), int(end))}

    a, b = (np.array(pairs, dtype=float).reshape(-1, 2) for pairs in (first, second))
    # A span that ends before it starts is empty.
    a, b = (spans.merge(pairs[pairs[:, 0] < pairs[:, 1]]) for pairs in (a, b))
    assert points(spans.union(a, b)) == points(a) | points(b)
    assert points(spans.without(a, b)) == points(a) - points(b)
    assert points(spans.clip(a, 5, 20)) == points(a) & set(range(5, 20))
    for result in (spans.union(a, b), spans.without(a, b)):
        assert spans.length(result) == len(points(result))
        assert (np.diff(result.ravel()) > 0).all()


# ---- clocks and the straggler


def gathers(
    starts: list[float], end_of: Any = lambda start: start + 5, group: str = "2"
) -> list[Event]:
    """Return all-gathers that end at the same times on all ranks, except for microseconds."""
    return [nccl(GATHER, start, end_of(index), group) for index, start in enumerate(starts)]


def write_two_ranks(run: Path, clock: float = 0.0, base: int = 0) -> None:
    """Two ranks with four all-gathers. Rank 1 starts three of them last. Its clock is ahead."""
    ends = [20, 40, 60, 80]
    early, late = [10, 30, 50, 75], [18, 38, 58, 70]
    for rank, starts in enumerate((early, late)):
        noise = [0.0, 0.0, 0.002, -0.5] if rank else [0.0] * 4
        gather = gathers(starts, lambda index, noise=noise: ends[index] + noise[index])
        events = [*step_marks(7, 0, 100, 100), *gather, kernel("gemm", 0, 10)]
        write_trace(run, rank, shifted(events, clock * rank), groups=GROUPS)
    if base:
        file = run / "profile_traces/iteration_8/rank1_trace.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, "baseTimeNanoseconds": base}))


@pytest.mark.parametrize("clock", [0.0, 5.0, -3_600_000.0])
def test_clocks_are_aligned_by_the_ends_of_collectives(tmp_path: Path, clock: float) -> None:
    write_two_ranks(tmp_path, clock)
    analysis = analyze(tmp_path, None, None)
    aligned = analysis.clocks[1]
    assert aligned.reference == 0 and aligned.num_collectives == 4
    assert aligned.offset == pytest.approx(-1000 * clock, abs=1.0)  # of microseconds: the noise
    assert 0 < aligned.error <= 1.0
    (line,) = [line for line in trace_lines(analysis) if line.startswith("clock")]
    assert line.startswith(f"clock of rank 1: {-clock + 0.0:+.3f} ms, aligned to rank 0 by 4 coll")
    assert line.endswith("half of them end within 0.001 ms of each other")


def test_ranks_are_aligned_through_the_groups_of_other_ranks(tmp_path: Path) -> None:
    """Ranks 0 and 3 have no group in common, and group 5 of ranks 2 and 3 is another one."""
    groups = {0: {"2": [0, 1]}, 1: {"2": [0, 1], "5": [1, 3]}, 2: {"5": [2]}, 3: {"5": [1, 3]}}
    for rank, own in groups.items():
        collectives = [event for name in own for event in gathers([10, 30], group=name)]
        ends = [{**event, "dur": 5000.0} for event in collectives]
        events = [*step_marks(7, 0, 50, 50), *ends]
        write_trace(tmp_path, rank, shifted(events, 10 * rank), groups=own)
    clocks = analyze(tmp_path, None, None).clocks
    assert [clocks[rank].reference for rank in range(4)] == [None, 0, None, 1]
    assert [clocks[rank].offset for rank in (0, 1, 3)] == [0, -10_000, -30_000]
    lines = list(trace_lines(analyze(tmp_path, None, None)))
    assert "clock of rank 2: not aligned, because it has no collective with other ranks" in lines


def test_the_base_of_each_trace_counts(tmp_path: Path) -> None:
    """Rank 1 has no collective in common, so only the base tells its time."""
    write_trace(tmp_path, 0, [*step_marks(7, 0, 50, 50)], base=10**18)
    write_trace(tmp_path, 1, [*step_marks(7, 0, 50, 50)], base=10**18 + 2_000_000)
    assert analyze(tmp_path, None, None).clocks[1].offset == 2000


@pytest.mark.parametrize("clock", [0.0, 5.0])
def test_the_straggler_starts_collectives_last(tmp_path: Path, clock: float) -> None:
    write_two_ranks(tmp_path, clock)
    analysis = analyze(tmp_path, None, None)
    late = analysis.straggler
    assert late is not None and (late.rank, late.num_last, late.num_collectives) == (1, 3, 4)
    assert late.waited == pytest.approx(3 * 8000, abs=5)  # three all-gathers start 8 ms later
    assert list(trace_lines(analysis))[-1].startswith(
        "straggler: rank 1 was the last to start 3 of"
    )


def test_collectives_of_unknown_groups_that_do_not_overlap_are_not_compared(tmp_path: Path) -> None:
    for rank in (0, 1):
        starts = (10, 30, 50 + 20 * rank)  # the last ones are of different groups
        gloo = [cpu("user_annotation", "gloo:all_reduce", at, at + 5, tid=9) for at in starts]
        mark = cpu("user_annotation", "ProfilerStep#7", 0, 100)
        write_trace(tmp_path, rank, [mark, *gloo])
    analysis = analyze(tmp_path, None, None)
    assert analysis.clocks[1].offset == 0 and analysis.clocks[1].error == 0
    assert analysis.straggler is not None and analysis.straggler.num_collectives == 2


# ---- gaps


def frames(names: list[str], start: float, end: float) -> list[Event]:
    return [
        cpu("python_function", name, start - 10 + depth, end + 10 - depth)
        for depth, name in enumerate(names)
    ]


def test_the_longest_gaps_have_the_call_stack(tmp_path: Path) -> None:
    stack = ["train.py(491): train", "train.py(546): train_step", "data.py(7): read"]
    events = [
        *GPU_STEP,
        *frames(stack, 45, 55),
        cpu("python_function", "elsewhere.py(1): run", 0, 90, tid=99),
        cpu("python_function", "train.py(600): save", 61, 80),
    ]
    write_trace(tmp_path, 0, events, groups=GROUPS)
    analysis = analyze(tmp_path, None, None)
    (gap, names), *others = analysis.gaps
    assert (gap.start, gap.end) == (43_000, 60_000)
    assert names == ["ProfilerStep#41", "aten::mm", *stack]
    assert [other.end - other.start for other, _ in others] == [5000, 3000]
    lines = list(trace_lines(analysis))
    start = lines.index("gap of 17.00 ms on rank 0 in step 8, 43.00 ms after its start")
    assert lines[start + 3 : start + 6] == [f"    {name}" for name in stack]


# ---- the merged trace


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_ranks_are_processes_on_one_clock(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_two_ranks(tmp_path, clock=5.0)
    output = tmp_path / name
    assert main(["run", "trace", str(tmp_path), "-o", str(output)]) == 0
    assert f"Wrote {output}" in capsys.readouterr().out
    content = output.read_bytes()
    events = json.loads(gzip.decompress(content) if name.endswith("gz") else content)["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 on node0", 1: "rank 1 on node1"}
    ends = {
        rank: [e["ts"] + e["dur"] for e in events if e["pid"] == rank and e["name"] == GATHER]
        for rank in (0, 1)
    }
    assert ends[0] == [20_000, 40_000, 60_000, 80_000]
    assert ends[1] == pytest.approx([20_000, 40_000, 60_002, 79_500], abs=1.1)
    assert min(event["ts"] for event in events if event["ph"] != "M") == 0
    # Threads and streams keep their names and stay apart; arrows stay within their rank.
    threads = {
        (e["pid"], e["tid"]) for e in events if e.get("cat") in ("kernel", "user_annotation")
    }
    assert len(threads) == 4
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == {(e["pid"], e["tid"]) for e in events if e.get("cat") == "user_annotation"}
    arrows = {e["id"]: e["pid"] for e in events if e["ph"] in ("s", "f")}
    assert sorted(arrows.values()) == [0, 1]
    assert len(events) == 2 * (1 + 2 + 2 + 4 + 1 + 2)  # without process_name of torch


def test_compressed_traces_are_read(tmp_path: Path) -> None:
    write_trace(tmp_path, 0, GPU_STEP, groups=GROUPS, suffix="json.gz")
    assert times_of(tmp_path)["compute"] == 56


# ---- damaged and missing traces


def test_a_truncated_trace_is_used_up_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_two_ranks(tmp_path)
    file = tmp_path / "profile_traces/iteration_8/rank1_trace.json"
    content = file.read_text()
    file.write_text(content[: content.index('"gemm"')])
    assert main(["run", "trace", str(tmp_path), "-o", str(tmp_path / "all.json")]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("rank1_trace.json: damaged after 8 events: ")
    assert "aligned to rank 0 by 4 collectives" in printed.out
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert len([e for e in events if e["pid"] == 1]) == 1 + 8  # process_name of torch is replaced


@pytest.mark.parametrize("content", [b"", b"{", b"\0\xff", b"[]", b'{"traceEvents": 3}', b"{}"])
def test_an_unusable_trace_leaves_the_others(tmp_path: Path, content: bytes) -> None:
    write_trace(tmp_path, 0, GPU_STEP, groups=GROUPS)
    (tmp_path / "profile_traces/iteration_8/rank1_trace.json").write_bytes(content)
    assert times_of(tmp_path)["compute"] == 56


@given(st.binary(max_size=40), st.integers(0, 4000))
def test_bytes_may_be_overwritten_anywhere(noise: bytes, offset: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = write_trace(Path(folder), 0, GPU_STEP, groups=GROUPS)
        content = file.read_bytes()
        file.write_bytes(content[:offset] + noise + content[offset + len(noise) :])
        measure(TraceFile(0, file))


def test_events_with_wrong_values_are_ignored(tmp_path: Path) -> None:
    wrong: list[Any] = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": "x", "dur": 5},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 50},
        {"ph": "X", "cat": "kernel", "name": None, "ts": 50, "dur": 5},
        {"ph": "X", "cat": "kernel", "name": GATHER, "ts": 8000.0, "dur": 17000.0, "args": 3},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5, "pid": {}, "tid": []},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1e300, "dur": 1e300},
        {"cat": ["kernel"], "id": None},
        3,
    ]
    write_trace(tmp_path, 0, [*GPU_STEP, *wrong], groups=GROUPS)
    assert times_of(tmp_path)["compute"] == 56
    output = tmp_path / "all.json"
    analyze(tmp_path, None, output)
    assert len(json.loads(output.read_text())["traceEvents"]) == len(GPU_STEP) + 4 + 8


@pytest.mark.parametrize("words", [[], ["--step", "4"]])
def test_a_run_without_traces_is_refused(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "trace", str(tmp_path), *words]) == 2
    assert "has no profiler traces" in capsys.readouterr().err
    file = write_trace(tmp_path, 0, GPU_STEP, step=6)
    assert main(["run", "trace", str(tmp_path), "--step", "7"]) == 2
    assert "has no traces of step 7. Expected one of: 6. " in capsys.readouterr().err
    file.write_bytes(b"")
    assert main(["run", "trace", str(tmp_path)]) == 2
    assert (
        "iteration_6 contains no complete step: rank0_trace.json: damaged"
        in capsys.readouterr().err
    )
    file.unlink()
    assert main(["run", "trace", str(tmp_path)]) == 2
    assert "iteration_6 contains no trace" in capsys.readouterr().err


def test_the_folder_of_the_traces_is_configured(tmp_path: Path) -> None:
    write_trace(tmp_path, 0, GPU_STEP, groups=GROUPS)
    (tmp_path / "profile_traces").rename(tmp_path / "elsewhere")
    (tmp_path / "config.toml").write_text("[profiling]\nsave_traces_folder = 'elsewhere'\n")
    assert times_of(tmp_path)["compute"] == 56


# ---- size


def write_large_trace(run: Path, rank: int, num_bytes: int) -> None:
    """Write a trace of at least `num_bytes` with one step, event by event."""
    file = run / f"profile_traces/iteration_8/rank{rank}_trace.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as output:
        output.write('{"schemaVersion": 1, "traceEvents": [')
        for event in large_events(num_bytes):
            output.write(json.dumps(event) + ",\n")
        output.write(json.dumps(cpu("user_annotation", "ProfilerStep#3", 0, 1e9)) + "]}")


def large_events(num_bytes: int) -> Iterator[Event]:
    arguments = {"External id": 1, "Input Dims": [[8, 1024, 4096], [4096, 4096]], "pad": "x" * 150}
    size = len(json.dumps(cpu("cpu_op", "aten::mm", 0, 0, args=arguments)))
    for number in range(num_bytes // size):
        is_collective = number % 100 == 0
        category = "user_annotation" if is_collective else "cpu_op"
        name = "gloo:all_reduce" if is_collective else "aten::mm"
        yield cpu(category, name, number, number + 0.7, args=arguments)


def test_a_trace_is_read_event_by_event(tmp_path: Path) -> None:
    """Only the times of its events remain in memory, less than the text of the file."""
    num_bytes = 1_500_000
    write_large_trace(tmp_path, 0, num_bytes)
    (file,) = find_traces(tmp_path, None)[1]
    measure(file)  # imports
    tracemalloc.start()
    try:
        measure(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < num_bytes


@pytest.mark.nightly
def test_traces_of_300_mb_take_little_memory(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_large_trace(tmp_path, rank, 300_000_000)
    code = (
        "import sys; from tests.harness.memory import peak_resident_bytes; "
        "from torchtitan_like.cli import main; code = main(sys.argv[1:]); "
        "print(peak_resident_bytes(), code)"
    )
    output = tmp_path / "all.json.gz"
    command = [sys.executable, "-c", code, "run", "trace", str(tmp_path), "-o", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, returned = map(int, done.stdout.splitlines()[-1].split())
    assert returned == 0 and peak < 300_000_000
    num_events = 0
    with gzip.open(output) as merged:
        num_events = sum(1 for _ in merged)
    num_written = 1 + sum(1 for _ in large_events(300_000_000))
    assert num_events == 2 * (num_written + 2) + 2  # two names of each rank, first and last line
