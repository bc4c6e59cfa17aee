"""Merge the traces of all ranks into one, as a stream, and collect what ran during gaps."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from torchtitan_like.report.trace.files import Event, TraceFile
from torchtitan_like.report.trace.times import (
    Gap,
    RankTimes,
    Thread,
    span_of,
    thread_of,
    time_of,
)
from torchtitan_like.util.files import atomic_file

FRAMES = ("python_function", "user_annotation", "cpu_op")
FLOWS = ("s", "t", "f")  # phases of events that connect two events by their `id`
PROCESS = ("process_name", "process_labels", "process_sort_index")
COMPRESSION = 3  # of gzip: larger levels take longer than reading

Frame = tuple[float, str]  # duration in microseconds, name


class GapStacks:
    """Collects what the main thread of a rank did in the middle of each gap, outermost first."""

    def __init__(self, gaps: Sequence[Gap], ranks: Sequence[RankTimes]) -> None:
        self._main_threads = {times.rank: times.main_thread for times in ranks}
        self._frames: dict[Gap, list[Frame]] = {gap: [] for gap in gaps}

    def add(self, rank: int, event: Event) -> None:
        """Add an event of a rank."""
        if event.get("cat") not in FRAMES:
            return
        span = span_of(event)
        if span is None or thread_of(event) != self._main_threads[rank]:
            return
        for gap, frames in self._frames.items():
            if gap.rank == rank and span[0] <= gap.middle < span[1]:
                frames.append((span[1] - span[0], event["name"]))

    def of(self, gap: Gap) -> list[str]:
        """Return the names of the frames of a gap, outermost first."""
        frames = sorted(self._frames[gap], key=lambda frame: -frame[0])
        return [name for _, name in frames]


class MergedTrace:
    """Writes one trace in which each rank is a process with its threads and streams.

    Times start at 0, in microseconds.
    """

    def __init__(self, output: BinaryIO, num_ranks: int) -> None:
        self._output = output
        self._num_ranks = num_ranks
        self._threads: dict[tuple[int, Thread], int] = {}
        self._output.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
        self._separator = b"\n"

    def start(self, file: TraceFile) -> None:
        """Name the process of a rank."""
        host = f" on {file.header.host}" if file.header.host else ""
        arguments: dict[str, Event] = {
            "process_name": {"name": f"rank {file.rank}{host}"},
            "process_sort_index": {"sort_index": file.rank},
        }
        for name, values in arguments.items():
            self._write({"ph": "M", "name": name, "pid": file.rank, "tid": 0, "args": values})

    def add(self, rank: int, event: Event, shift: float) -> None:
        """Write an event of a rank. shift: to add to its time, microseconds."""
        if event.get("ph") == "M":
            if event.get("name") in PROCESS:
                return
            event.pop("ts", None)
        thread = self._threads.setdefault((rank, thread_of(event)), len(self._threads) + 1)
        event |= {"pid": rank, "tid": thread}
        time = time_of(event, "ts")
        if time is not None:
            event["ts"] = round(time + shift, 3)
        if event.get("ph") in FLOWS and isinstance(event.get("id"), int):
            event["id"] = event["id"] * self._num_ranks + rank  # ids of ranks are the same
        self._write(event)

    def close(self) -> None:
        """Write the end of the trace."""
        self._output.write(b"\n]}\n")

    def _write(self, event: Event) -> None:
        self._output.write(self._separator + json.dumps(event, separators=(",", ":")).encode())
        self._separator = b",\n"


@contextmanager
def open_output(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends; compressed if its suffix is .gz."""
    with atomic_file(path, durable=False) as file:
        if path.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile("", "wb", COMPRESSION, fileobj=file, mtime=0) as compressed:
            yield cast(BinaryIO, compressed)


def merge_traces(
    files: Sequence[TraceFile], shifts: Mapping[int, float], path: Path, stacks: GapStacks
) -> None:
    """Write the events of all traces into one file, and collect the stacks. Raises OSError.

    shifts: by rank, what to add to its times, microseconds. One event at a time is in memory.
    """
    with open_output(path) as output:
        merged = MergedTrace(output, 1 + max(file.rank for file in files))
        for file in files:
            merged.start(file)
            for event in file.events():
                stacks.add(file.rank, event)
                merged.add(file.rank, event, shifts[file.rank])
        merged.close()


def read_stacks(files: Sequence[TraceFile], stacks: GapStacks) -> None:
    """Collect the stacks without a merged trace. Raises OSError."""
    for file in files:
        for event in file.events():
            stacks.add(file.rank, event)
