"""Divide the time of each recorded step of a rank into compute, communication, data wait and idle."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from torchtitan_like.report.trace.files import Event, TraceFile
from torchtitan_like.report.trace.spans import SpanList, Spans, clip, length, union, without
from torchtitan_like.util.run_directory import DATA_WAIT

STEP = "ProfilerStep#"
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
MESSAGES = ("c10d::", "_c10d_functional::")  # operators that send messages or wait for them
CALLS = "calls and waits"  # the kind of their times
GLOO = "gloo:"
# Collectives that end on no rank before all ranks have started them.
JOINT = (
    *("AllReduce", "AllGather", "ReduceScatter"),
    *("all_reduce", "all_gather", "reduce_scatter", "barrier"),
)
NUM_GAPS = 3
MAX_TIME = 1e18  # microseconds; a larger number is damage
MAX_DIGITS = 18  # of the number of a step

Thread = tuple[str, str]


class Key(NamedTuple):
    """Collectives that ranks start in the same order.

    group: the ranks of the process group, "" if unknown. size: elements or dimensions, as text.
    """

    group: str
    kind: str
    size: str


@dataclass(frozen=True)
class StepTimes:
    """Times of one step of one rank, microseconds.

    number: of torch's annotation, which counts from the start of the process. start, end: on the
    rank's own clock. exposed: communication while nothing computes. idle: the rest. by_kind: exposed
    time by kind of collective; kinds that overlap both count.
    """

    rank: int
    number: int
    start: float
    end: float
    compute: float
    exposed: float
    data_wait: float
    idle: float
    by_kind: dict[str, float]


@dataclass(frozen=True)
class Gap:
    """A time without computation and communication, on the rank's own clock, microseconds."""

    rank: int
    number: int
    start: float
    end: float

    @property
    def middle(self) -> float:
        """The middle of the gap."""
        return (self.start + self.end) / 2


@dataclass
class RankTimes:
    """What the trace of one rank contains.

    first: time of the first event on the rank's own clock, microseconds. gaps: the longest ones.
    collectives: start and end of each, float64 (collectives, 2), by start.
    main_thread: of the training loop; None if no step is recorded. has_stacks: the trace has Python frames.
    """

    rank: int
    first: float
    steps: list[StepTimes]
    gaps: list[Gap]
    collectives: dict[Key, Spans]
    main_thread: Thread | None
    has_stacks: bool
    is_damaged: bool


def span_of(event: Event) -> tuple[float, float] | None:
    """Return start and end of a complete event, microseconds; None for other events."""
    if event.get("ph") != "X" or not isinstance(event.get("name"), str):
        return None
    start, duration = time_of(event, "ts"), time_of(event, "dur")
    return None if start is None or duration is None else (start, start + max(0.0, duration))


def time_of(event: Event, key: str) -> float | None:
    """Return a time of an event, microseconds; None if it is not a finite number."""
    value = event.get(key)
    if isinstance(value, int | float) and abs(value) < MAX_TIME:
        return float(value)
    return None


def thread_of(event: Event) -> Thread:
    """Return the process and the thread, or the device and the stream, of an event."""
    return str(event.get("pid")), str(event.get("tid"))


def kind_of(kernel: str) -> str:
    """Return the kind of collective: AllGather for `ncclDevKernel_AllGather_RING_LL(...)`."""
    words = kernel.partition("(")[0].split("_")
    return words[1] if len(words) > 1 else kernel


@dataclass
class _Thread:
    """Operators of one CPU thread, and the spans in which it waits or sends."""

    compute: SpanList = field(default_factory=SpanList)
    waits: SpanList = field(default_factory=SpanList)


class _Collector:
    """Collects the spans of one trace. A trace with kernels is measured on its GPU, else on its CPU."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._threads: dict[Thread, _Thread] = {}
        self._kernels = SpanList()
        self._nccl: dict[str, SpanList] = {}
        self._gloo: dict[str, SpanList] = {}
        self._data_waits = SpanList()
        self._joint: dict[Key, SpanList] = {}
        self._steps: dict[int, tuple[float, float]] = {}
        self._device_ends: dict[int, float] = {}
        self._main_thread: Thread | None = None
        self._has_stacks = False
        self._first = math.inf

    def add(self, event: Event) -> None:
        """Add an event of the trace."""
        time = time_of(event, "ts")
        if event.get("ph") != "M" and time is not None:
            self._first = min(self._first, time)
        span = span_of(event)
        if span is None:
            return
        name: str = event["name"]
        category = event.get("cat")
        if category == "cpu_op":
            self._add_operator(name, event, span)
        elif category in KERNELS:
            self._add_kernel(name, event, span)
        elif category == "user_annotation":
            self._add_annotation(name, event, span)
        elif category == "gpu_user_annotation" and name.startswith(STEP):
            number = _step_number(name)
            self._device_ends[number] = max(span[1], self._device_ends.get(number, span[1]))
        elif category == "python_function":
            self._has_stacks = True

    def _add_operator(self, name: str, event: Event, span: tuple[float, float]) -> None:
        thread = self._thread(event)
        if name.startswith(MESSAGES):
            thread.waits.add(*span)
            self._gloo.setdefault(CALLS, SpanList()).add(*span)
        else:
            thread.compute.add(*span)

    def _add_kernel(self, name: str, event: Event, span: tuple[float, float]) -> None:
        if not name.lower().startswith("nccl"):
            self._kernels.add(*span)
            return
        kind = kind_of(name)
        self._nccl.setdefault(kind, SpanList()).add(*span)
        arguments = _arguments(event)
        group_name = str(arguments.get("Process Group Name", ""))
        ranks = self._file.header.groups.get(group_name)
        group = str(arguments.get("Process Group Ranks", "")) if ranks is None else str(ranks)
        self._add_joint(Key(group, kind, str(arguments.get("In msg nelems", ""))), span)

    def _add_annotation(self, name: str, event: Event, span: tuple[float, float]) -> None:
        if name.startswith(STEP):
            self._steps[_step_number(name)] = span
            self._main_thread = thread_of(event)
        elif name.startswith(GLOO):
            kind = name.removeprefix(GLOO)
            self._gloo.setdefault(kind, SpanList()).add(*span)
            self._add_joint(Key("", kind, str(_arguments(event).get("Input Dims", ""))), span)
        elif name == DATA_WAIT:
            self._data_waits.add(*span)
            self._thread(event).waits.add(*span)

    def _add_joint(self, key: Key, span: tuple[float, float]) -> None:
        if key.kind in JOINT:
            self._joint.setdefault(key, SpanList()).add(*span)

    def _thread(self, event: Event) -> _Thread:
        return self._threads.setdefault(thread_of(event), _Thread())

    def result(self) -> RankTimes:
        """Return the times of all events that were added."""
        computes, messages = self._spans()
        communicates = union(*messages.values())
        waits = self._data_waits.merged()
        steps, gaps = [], []
        for number, (start, end) in self._windows().items():
            compute = clip(computes, start, end)
            exposed = without(clip(communicates, start, end), compute)
            free = without(np.array([[start, end]]), union(compute, exposed))
            idle = without(free, waits)
            by_kind = {
                kind: length(without(clip(spans, start, end), compute))
                for kind, spans in messages.items()
            }
            steps.append(
                StepTimes(
                    self._file.rank,
                    number,
                    start,
                    end,
                    compute=length(compute),
                    exposed=length(exposed),
                    data_wait=length(free) - length(idle),
                    idle=length(idle),
                    by_kind=by_kind,
                )
            )
            largest = np.argsort(free[:, 0] - free[:, 1], kind="stable")[:NUM_GAPS]
            gaps += [Gap(self._file.rank, number, *map(float, free[index])) for index in largest]
        joint = {key: spans.raw() for key, spans in self._joint.items()}
        return RankTimes(
            rank=self._file.rank,
            first=self._first,
            steps=steps,
            gaps=longest(gaps),
            collectives={key: spans[spans[:, 0].argsort()] for key, spans in joint.items()},
            main_thread=self._main_thread,
            has_stacks=self._has_stacks,
            is_damaged=bool(self._file.problem),
        )

    def _spans(self) -> tuple[Spans, dict[str, Spans]]:
        """Return when the rank computes, and when it communicates, by kind of collective."""
        kernels = self._kernels.merged()
        if len(kernels) or self._nccl:
            return kernels, {kind: spans.merged() for kind, spans in self._nccl.items()}
        # An operator may contain a message, for which its thread waits.
        computes = [
            without(thread.compute.merged(), thread.waits.merged())
            for thread in self._threads.values()
        ]
        return union(*computes), {kind: spans.merged() for kind, spans in self._gloo.items()}

    def _windows(self) -> dict[int, tuple[float, float]]:
        """Return start and end of each step, without gaps between them.

        A step starts when the CPU starts it and the GPU has finished the step before it.
        """
        numbers = sorted(self._steps)
        starts = [self._steps[number][0] for number in numbers]
        for index, previous in enumerate(numbers[:-1], start=1):
            starts[index] = max(starts[index], self._device_ends.get(previous, starts[index]))
        ends = starts[1:]
        for number in numbers[-1:]:
            end = self._steps[number][1]
            ends.append(max(end, self._device_ends.get(number, end)))
        return dict(zip(numbers, zip(starts, ends, strict=True), strict=True))


def measure(file: TraceFile) -> RankTimes:
    """Read a trace once and return its times. Raises OSError."""
    collector = _Collector(file)
    for event in file.events():
        collector.add(event)
    return collector.result()


def longest(gaps: Iterable[Gap]) -> list[Gap]:
    """Return the `NUM_GAPS` longest gaps, the longest first."""
    return sorted(gaps, key=lambda gap: gap.start - gap.end)[:NUM_GAPS]


def _step_number(name: str) -> int:
    digits = name.removeprefix(STEP)
    return int(digits) if digits.isdecimal() and len(digits) <= MAX_DIGITS else 0


def _arguments(event: Event) -> dict[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}
