"""Run a module and write down every line that it executes: where is a rank that hangs, or that does what others do not?

    TRACE_TO=trace ./run_train.sh --job.config_file X.toml                      # every rank
    TRACE_TO=trace python scripts/trace_lines.py -m torchtitan_like.train --job.config_file X.toml
    python scripts/trace_ranks.py trace                                         # then: who is where

Each process writes trace-<host>-<rank>-<pid>.txt in the folder TRACE_TO, line by line, so that the last one is where it is:
seconds since the start, thread, file:line, the source. Only lines of the packages in TRACE_PACKAGES are written (default:
torchtitan_like; for example torchtitan_like,torch.distributed). It is slow, and the files grow fast: for a few steps.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


def folders_of(packages: str) -> tuple[str, ...]:
    """Where the modules of packages lie, or the files of modules. ValueError for one that is not there."""
    found = []
    for name in packages.split(","):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"TRACE_PACKAGES: there is no package {name!r}")
        found.append(f"{Path(spec.origin).parent}{os.sep}" if spec.submodule_search_locations else spec.origin)
    return tuple(found)


class Tracer:
    """What Python calls for each frame and line; writes the lines of files below ``folders``."""

    def __init__(self, file: Path, folders: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._folders, self._clock, self._begin = folders, clock, clock()
        self._is_ours: dict[CodeType, bool] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Tracer | None:
        code = frame.f_code
        if (is_ours := self._is_ours.get(code)) is None:
            is_ours = self._is_ours[code] = code.co_filename.startswith(self._folders)
        if not is_ours:
            return None
        if event == "line":
            source = linecache.getline(code.co_filename, frame.f_lineno).strip()
            where = f"{os.path.relpath(code.co_filename)}:{frame.f_lineno}"
            thread = threading.current_thread().name
            text = f"{self._clock() - self._begin:12.6f} {thread} {where} | {source}\n"
            os.write(self._file, text.encode())  # one write: it is there at once, and whole
        return self


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    folder = os.environ.get("TRACE_TO")
    if arguments[:1] != ["-m"] or len(arguments) < 2 or not folder:
        print("expected -m MODULE [its arguments], and a folder in TRACE_TO", file=sys.stderr)
        return 2
    Path(folder).mkdir(parents=True, exist_ok=True)
    sys.path[0] = os.getcwd()  # as python -m has it
    try:
        folders = folders_of(os.environ.get("TRACE_PACKAGES") or "torchtitan_like")
    except (ModuleNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    name = f"trace-{socket.gethostname().partition('.')[0]}-{os.environ.get('RANK', '0')}-{os.getpid()}.txt"
    tracer = Tracer(Path(folder).absolute() / name, folders)
    sys.argv = arguments[1:]
    threading.settrace(tracer)
    sys.settrace(tracer)
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
