"""Find and read the Chrome traces of a run, as streams: a trace may be larger than memory."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from torchtitan_like.config.sections_run import Profiling
from torchtitan_like.util.modules import pip_install
from torchtitan_like.util.run_directory import read_config

Event = dict[str, Any]

CHUNK = 2**16  # bytes
MAX_HEADER = 2**26  # bytes; process groups of thousands of ranks take megabytes
_FOLDER = re.compile(r"iteration_(\d+)")
_FILE = re.compile(r"rank(\d+)_trace\.json(?:\.gz)?")
_EVENTS = b'"traceEvents"'


@dataclass(frozen=True)
class Header:
    """What a trace states before its events.

    base: Unix time in nanoseconds at which the clock of the trace is 0. host: "" if unknown.
    groups: ranks of each process group, by its name.
    """

    base: int = 0
    host: str = ""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)


class TraceFile:
    """The trace of one rank. problem: why `events` ended before the end of the file; "" if not."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank = rank
        self.path = path
        self.problem = ""
        self.header = self._read_header()

    def events(self) -> Iterator[Event]:
        """Yield the events. Sets `problem` if the file is truncated or damaged. Raises OSError."""
        import ijson

        num_events = 0
        try:
            with self._open() as stream:
                for event in ijson.items(stream, "traceEvents.item", use_float=True):
                    num_events += 1
                    if isinstance(event, dict):
                        yield event
        except (ijson.JSONError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.problem = f"{self.path.name}: damaged after {num_events:,} events: {reason}"

    def _open(self) -> IO[bytes]:
        if self.path.suffix == ".gz":
            return cast(IO[bytes], gzip.open(self.path))
        return self.path.open("rb")

    def _read_header(self) -> Header:
        """Return what stands before the events; an empty header if it cannot be read."""
        text = b""
        with suppress(EOFError, gzip.BadGzipFile, zlib.error), self._open() as stream:
            while _EVENTS not in text and len(text) < MAX_HEADER:
                chunk = stream.read(CHUNK)
                if not chunk:
                    break
                text += chunk
        try:
            content = dict(json.loads(text.partition(_EVENTS)[0] + _EVENTS + b": []}"))
            configs = content.get("distributedInfo", {}).get("pg_config", [])
            return Header(
                base=int(content.get("baseTimeNanoseconds", 0)),
                host=str(content.get("host_name", "")),
                groups={str(group["pg_name"]): tuple(group["ranks"]) for group in configs},
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return Header()


def require_ijson() -> None:
    """Raise ValueError if ijson is not installed."""
    try:
        import ijson  # noqa: F401
    except ImportError:
        raise ValueError(
            "Traces are read with ijson, which is not installed. Expected the package: "
            f"{pip_install('ijson')}"
        ) from None


def find_traces(run: Path, step: int | None) -> tuple[int, list[TraceFile]]:
    """Return the last step of a folder with traces, and the traces of its ranks.

    step: None chooses the newest folder. Raises OSError, and ValueError if there are no traces.
    """
    folder = run / _traces_folder(run)
    steps = {
        int(match[1]): path
        for path in folder.glob("iteration_*")
        if (match := _FOLDER.fullmatch(path.name))
    }
    if not steps:
        raise ValueError(
            f"{run} has no profiler traces: {folder} contains no iteration_<step>. Expected a run "
            "with profiling.enable_profiling. Train with --profiling.enable_profiling."
        )
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        available = ", ".join(map(str, sorted(steps)))
        raise ValueError(
            f"{run} has no traces of step {chosen}. Expected one of: {available}. Choose one of them."
        )
    ranks = {
        int(match[1]): path
        for path in sorted(steps[chosen].iterdir())
        if (match := _FILE.fullmatch(path.name))
    }
    if not ranks:
        raise ValueError(
            f"{steps[chosen]} contains no trace. Expected rank<r>_trace.json of each rank. "
            "Choose another step."
        )
    return chosen, [TraceFile(rank, path) for rank, path in sorted(ranks.items())]


def _traces_folder(run: Path) -> str:
    """Return `profiling.save_traces_folder`; its default if the configuration cannot be read."""
    section: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        section = read_config(run).get("profiling", {})
    return str(section.get("save_traces_folder", Profiling().save_traces_folder))
