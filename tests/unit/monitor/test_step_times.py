"""The times of a profiled step: compute, exposed communication, data wait and idle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_like.monitor.step_times import (
    Event,
    clip,
    length,
    mean_times,
    merge,
    step_times,
    union,
    without,
)
from torchtitan_like.util.run_directory import DATA_WAIT

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, start: float, end: float) -> Event:
    return Event(name, start, end, on_device=True)


def annotation(name: str, start: float, end: float, thread: int = 0) -> Event:
    return Event(name, start, end, thread, is_annotation=True)


def step_marks(number: int, start: float, cpu_end: float, device_end: float) -> list[Event]:
    name = f"ProfilerStep#{number}"
    return [
        annotation(name, start, cpu_end),
        Event(name, start, device_end, on_device=True, is_annotation=True),
    ]


def test_a_step_on_a_gpu_is_divided_into_four_parts() -> None:
    """30 ms of communication, of which 14 ms are exposed."""
    events = [
        *step_marks(41, 0, 60, 95),
        annotation(DATA_WAIT, 0, 8),
        kernel("gemm", 5, 10),  # the wait for data is exposed until 5
        kernel(GATHER, 8, 25),  # overlapped until 10, and from 15 to 20: 10 ms are exposed
        kernel("gemm", 15, 18),
        kernel("Memcpy HtoD (Pinned -> Device)", 17, 20),
        Event("nccl:reduce_scatter", 20, 60, on_device=True, is_annotation=True),
        kernel(SCATTER, 30, 43),  # overlapped from 30 to 39
        kernel("gemm", 28, 39),
        kernel("gemm", 60, 95),  # an idle gap before it
        Event("aten::mm", 0, 60),
    ]
    assert step_times(events) == [(56, 14, 5, 20)]


def test_a_step_starts_when_its_gpu_has_finished_the_step_before() -> None:
    events = [
        *step_marks(9, 0, 10, 30),
        kernel("gemm", 2, 30),
        *step_marks(10, 10, 20, 50),
        kernel("gemm", 32, 50),
    ]
    assert step_times(events) == [(28, 0, 0, 2), (18, 0, 0, 2)]
    assert mean_times(events) == (23, 0, 0, 2)


def test_a_step_on_a_cpu_is_divided_into_four_parts() -> None:
    events = [
        annotation("ProfilerStep#3", 0, 100),
        annotation(DATA_WAIT, 0, 10),
        Event("aten::stack", 2, 4),  # of the data
        Event("autograd::engine::evaluate_function: Mm", 20, 60),
        Event("_c10d_functional::wait_tensor", 40, 50),  # in the operator
        annotation("gloo:all_reduce", 35, 50, thread=7),
        annotation("gloo:all_gather", 70, 80, thread=7),
        Event("aten::add", 75, 90),
        annotation("Optimizer.step#AdamW.step", 90, 100),
    ]
    assert step_times(events) == [(45, 15, 10, 30)]


def test_without_a_step_there_are_no_times() -> None:
    assert mean_times([kernel("gemm", 0, 5)]) is None


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
    a, b = (merge(pairs[pairs[:, 0] < pairs[:, 1]]) for pairs in (a, b))
    assert points(union(a, b)) == points(a) | points(b)
    assert points(without(a, b)) == points(a) - points(b)
    assert points(clip(a, 5, 20)) == points(a) & set(range(5, 20))
    for result in (union(a, b), without(a, b)):
        assert length(result) == pytest.approx(len(points(result)))
        assert (np.diff(result.ravel()) > 0).all()
