"""Divide each profiled step of a rank into compute, communication, data wait and idle time."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.util.run_directory import DATA_WAIT

STEP = "ProfilerStep#"
MESSAGES = ("c10d::", "_c10d_functional::")  # operators that send messages or wait for them
NCCL = "nccl"  # start of the names of its kernels
ANNOTATIONS = (STEP, "nccl:")  # on the GPU; not kernels
GLOO = "gloo:"  # start of the names of its collectives

# (spans, 2): start and end in milliseconds. The spans of a set are disjoint and sorted.
Spans = NDArray[np.float64]


class Event(NamedTuple):
    """An event of a profile. start, end: milliseconds. on_device: on the GPU, else on `thread`."""

    name: str
    start: float
    end: float
    thread: int = 0
    on_device: bool = False
    is_annotation: bool = False


class StepTimes(NamedTuple):
    """Times of one step or the mean of several, in milliseconds.

    exposed: communication while nothing computes. data_wait: wait for the batch, and neither of the
    above. idle: the rest.
    """

    compute: float
    exposed: float
    data_wait: float
    idle: float


def read_events(profile: Any) -> Iterator[Event]:
    """Yield the events of a `torch.profiler.profile` that has a trace."""
    from torch.autograd import DeviceType

    results = profile.profiler.kineto_results
    origin = results.trace_start_ns()
    for event in results.events():
        if event.is_python_function():
            continue
        yield Event(
            event.name(),
            (event.start_ns() - origin) / 1e6,
            (event.end_ns() - origin) / 1e6,
            event.start_thread_id(),
            event.device_type() != DeviceType.CPU,
            event.is_user_annotation(),
        )


def mean_times(events: Iterable[Event]) -> StepTimes | None:
    """Return the mean times of the recorded steps; None without any."""
    steps = step_times(events)
    if not steps:
        return None
    return StepTimes(*(sum(values) / len(steps) for values in zip(*steps, strict=True)))


def step_times(events: Iterable[Event]) -> list[StepTimes]:
    """Return the times of each recorded step. The four times add up to the time of the step.

    A profile with kernels is measured on the GPU, else on the CPU.
    """
    collector = _Collector()
    for event in events:
        collector.add(event)
    return collector.result()


class SpanList:
    """Spans in any order, which may overlap. Takes 16 bytes for each."""

    def __init__(self) -> None:
        self._bounds = array("d")

    def add(self, event: Event) -> None:
        """Add the span of an event."""
        self._bounds.append(event.start)
        self._bounds.append(event.end)

    def merged(self) -> Spans:
        """Return the set that the spans cover."""
        return merge(np.array(self._bounds, dtype=np.float64).reshape(-1, 2))


@dataclass
class _Thread:
    """Operators of one CPU thread, and the spans in which it waits or sends."""

    compute: SpanList = field(default_factory=SpanList)
    waits: SpanList = field(default_factory=SpanList)


class _Collector:
    """Collects the spans of one profile."""

    def __init__(self) -> None:
        self._threads: dict[int, _Thread] = {}
        self._kernels = SpanList()
        self._nccl = SpanList()
        self._cpu_messages = SpanList()
        self._data_waits = SpanList()
        self._steps: dict[str, tuple[float, float]] = {}
        self._device_ends: dict[str, float] = {}

    def add(self, event: Event) -> None:
        """Add an event."""
        if event.on_device:
            self._add_device_event(event)
        elif event.is_annotation:
            self._add_annotation(event)
        elif event.name.startswith(MESSAGES):
            self._thread(event).waits.add(event)
            self._cpu_messages.add(event)
        else:
            self._thread(event).compute.add(event)

    def _add_device_event(self, event: Event) -> None:
        if event.name.startswith(STEP):
            self._device_ends[event.name] = event.end
        elif event.is_annotation or event.name.startswith(ANNOTATIONS):
            return
        elif event.name.lower().startswith(NCCL):
            self._nccl.add(event)
        else:
            self._kernels.add(event)

    def _add_annotation(self, event: Event) -> None:
        if event.name.startswith(STEP):
            self._steps[event.name] = (event.start, event.end)
        elif event.name.startswith(GLOO):
            self._cpu_messages.add(event)
        elif event.name == DATA_WAIT:
            self._data_waits.add(event)
            self._thread(event).waits.add(event)

    def _thread(self, event: Event) -> _Thread:
        return self._threads.setdefault(event.thread, _Thread())

    def result(self) -> list[StepTimes]:
        """Return the times of all steps that were added."""
        computes, communicates = self._spans()
        waits = self._data_waits.merged()
        steps = []
        for start, end in self._windows():
            compute = clip(computes, start, end)
            exposed = without(clip(communicates, start, end), compute)
            free = without(np.array([[start, end]]), union(compute, exposed))
            idle = length(without(free, waits))
            steps.append(StepTimes(length(compute), length(exposed), length(free) - idle, idle))
        return steps

    def _spans(self) -> tuple[Spans, Spans]:
        """Return when the rank computes, and when it communicates."""
        kernels, nccl = self._kernels.merged(), self._nccl.merged()
        if len(kernels) or len(nccl):
            return kernels, nccl
        # An operator may contain a message, for which its thread waits.
        computes = [
            without(thread.compute.merged(), thread.waits.merged())
            for thread in self._threads.values()
        ]
        return union(*computes), self._cpu_messages.merged()

    def _windows(self) -> list[tuple[float, float]]:
        """Return start and end of each step, without gaps between them.

        A step starts when the CPU starts it and the GPU has finished the step before it.
        """
        names = sorted(self._steps, key=lambda name: self._steps[name])
        starts = [self._steps[name][0] for name in names]
        for index, previous in enumerate(names[:-1], start=1):
            starts[index] = max(starts[index], self._device_ends.get(previous, starts[index]))
        ends = starts[1:]
        for name in names[-1:]:
            end = self._steps[name][1]
            ends.append(max(end, self._device_ends.get(name, end)))
        return list(zip(starts, ends, strict=True))


# ---- sets of spans


def merge(spans: Spans) -> Spans:
    """Return the set that spans in any order cover."""
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    is_first = np.concatenate([[True], spans[1:, 0] > ends[:-1]])
    is_last = np.concatenate([is_first[1:], [True]])
    merged = np.stack([spans[is_first, 0], ends[is_last]], axis=1)
    return merged[merged[:, 1] > merged[:, 0]]


def union(*sets: Spans) -> Spans:
    """Return what any of the sets covers."""
    return merge(np.concatenate([np.empty((0, 2)), *sets]))


def without(spans: Spans, covers: Spans) -> Spans:
    """Return what `spans` covers and `covers` does not."""
    points = np.unique(np.concatenate([spans.ravel(), covers.ravel()]))
    if len(points) < 2:
        return np.empty((0, 2))
    pieces = np.stack([points[:-1], points[1:]], axis=1)
    return merge(pieces[_covers(spans, points[:-1]) & ~_covers(covers, points[:-1])])


def clip(spans: Spans, start: float, end: float) -> Spans:
    """Return the part of a set between two times."""
    clipped = spans.clip(start, end)
    return clipped[clipped[:, 1] > clipped[:, 0]]


def length(spans: Spans) -> float:
    """Return the total time of a set."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def _covers(spans: Spans, points: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return for each point whether a set covers it."""
    if not len(spans):
        return np.zeros(len(points), dtype=np.bool_)
    index = np.searchsorted(spans[:, 0], points, "right") - 1
    covered: NDArray[np.bool_] = (index >= 0) & (points < spans[index, 1])
    return covered
