"""The profiler writes traces and memory snapshots at the right steps, even if the run fails."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_like.config.sections_run import Profiling
from torchtitan_like.monitor.profiler import maybe_profile
from torchtitan_like.util.run_directory import DATA_WAIT


def traces(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0, 8, ["iteration_4/rank1_trace.json", "iteration_8/rank1_trace.json"]),
        (0, 3, []),
        (
            6,
            9,
            ["iteration_8/rank1_trace.json"],
        ),  # resumed: the same steps as in an uninterrupted run
        (7, 9, ["iteration_8/rank1_trace.json"]),
    ],
)
def test_every_rank_writes_traces_at_the_same_steps(
    first: int, last: int, expected: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=1)
    barriers: list[int] = []
    with (
        caplog.at_level(logging.INFO),
        maybe_profile(section, tmp_path, 1, first, barrier=lambda: barriers.append(1)) as profiler,
    ):
        for _ in range(first, last):
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()
    folder = tmp_path / "profile_traces"
    assert traces(folder) == expected
    assert len(expected) == len(barriers) == caplog.text.count("Finished dumping profiler traces")
    assert caplog.text.count(", mean of a step: compute ") == len(expected)
    for name in expected:
        assert "aten::mm" in {
            event.get("name") for event in json.loads((folder / name).read_text())["traceEvents"]
        }


def test_a_failing_loop_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    section = Profiling(enable_profiling=True, profile_freq=3, profiler_warmup=1, profiler_active=2)
    with (
        pytest.raises(ZeroDivisionError),
        maybe_profile(
            section,
            tmp_path,
            0,
            0,
            barrier=lambda: pytest.fail("only this rank entered the barrier"),
        ) as profiler,
    ):
        profiler.step()
        raise ZeroDivisionError


def test_a_trace_names_calls_and_shows_their_stack(tmp_path: Path) -> None:
    section = Profiling(
        enable_profiling=True,
        profile_freq=2,
        profiler_warmup=1,
        profiler_active=1,
        with_stack=True,
    )

    def read() -> int:
        return len("batch")

    with maybe_profile(section, tmp_path, 0, 0) as profiler:
        annotated = profiler.annotate_data(read)
        for _ in range(2):
            assert annotated() == 5
            profiler.step()
    (file,) = tmp_path.glob("profile_traces/iteration_2/*.json")
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "python_function"}
    assert DATA_WAIT in {e["name"] for e in events if e.get("cat") == "user_annotation"}
    assert any(name.endswith(": read") for name in names)
    with maybe_profile(Profiling(), tmp_path, 0, 0) as profiler:
        assert profiler.annotate_data(read) is read


def test_a_disabled_profiler_imports_and_writes_nothing(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys
from torchtitan_like.config.sections_run import Profiling
from torchtitan_like.monitor.profiler import maybe_profile
with maybe_profile(Profiling(), pathlib.Path({str(tmp_path)!r}), 0, 0) as profiler:
    profiler.step()
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_snapshots_need_cuda(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with maybe_profile(Profiling(enable_memory_snapshot=True), tmp_path, 0, 0) as profiler:
        profiler.step()
    assert "enable_memory_snapshot has no effect" in caplog.text and list(tmp_path.iterdir()) == []


@pytest.fixture
def allocator_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Replace the CUDA allocator with a fake that records its calls."""
    calls: list[Any] = []
    fake = SimpleNamespace(
        _record_memory_history=lambda **kwargs: calls.append(kwargs),
        _dump_snapshot=lambda path: Path(path).touch(),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory", fake)
    yield calls


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ["iteration_12/rank2_memory_snapshot.pickle"]),
        (RuntimeError("other"), ["iteration_12/rank2_memory_snapshot.pickle"]),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            [
                "iteration_12/rank2_memory_snapshot.pickle",
                "iteration_13_exit/rank2_memory_snapshot.pickle",
            ],
        ),
    ],
)
def test_snapshots_are_written_periodically_and_on_out_of_memory(
    error: Exception | None, expected: list[str], allocator_calls: list[Any], tmp_path: Path
) -> None:
    section = Profiling(enable_memory_snapshot=True, profile_freq=4, profiler_warmup=1)
    try:
        with maybe_profile(section, tmp_path, 2, 10) as profiler:
            for _ in range(3):
                profiler.step()
            if error is not None:
                raise error
    except RuntimeError as caught:
        assert caught is error
    assert traces(tmp_path / "memory_snapshot") == expected
    assert allocator_calls[0]["max_entries"] > 0 and allocator_calls[-1] == {"enabled": None}
