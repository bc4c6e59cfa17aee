"""Record device calls: counts of each training step, and the code locations of one step's calls."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

# The order of `enum event_kind` in device/null_cuda.h.
KINDS = (
    "launches",
    "matmuls",
    "collectives",
    "copies",
    "syncs",
    "late_waits",
    "device_allocations",
    "pinned_allocations",
)
ALLOCATIONS = ("device_allocations", "pinned_allocations")
# The innermost frame with an entry in this table determines the phase of a call.
PHASES = {
    ("optim/clipping.py", None): "clip",
    ("optim/loss.py", None): "loss",
    ("optim/optimizer.py", "clip_gradients"): "clip",
    ("optim/optimizer.py", "step"): "optimizer",
    ("modules/module.py", None): "forward",
}
PHASES_BY_FOLDER = {"_fully_shard": "data parallel", "pipelining": "pipeline"}
GENERATED_CODE = re.compile(r"\w\w/c\w{51}\.py")  # of Inductor; the names are hashes
FRAMES_SHOWN = 4
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)


def call_site(frame: FrameType | None) -> tuple[str, str]:
    """Return the phase of the step, and the innermost frames as `folder/file.py:function`."""
    node = torch._C._current_autograd_node()
    phase: str | None = None
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        file = "/".join(code.co_filename.split("/")[-2:])
        if phase is None:
            phase = PHASES.get((file, code.co_name)) or PHASES.get((file, None))
            phase = phase or PHASES_BY_FOLDER.get(file.partition("/")[0])
        if (
            len(names) < FRAMES_SHOWN
            and not code.co_filename.startswith("<")
            and "_ops.py" not in file
        ):
            file = "generated code" if GENERATED_CODE.fullmatch(file) else file
            names.append(f"{file}:{code.co_name}")
        frame = frame.f_back
    if node is not None:
        names.append(f"backward of {node.name()}")
        phase = phase if phase in ("loss", "data parallel") else "backward"
    return phase or "bookkeeping", " < ".join(names)


class Recording:
    """Counts of each step, and the code locations of the calls in step `detailed_step`."""

    def __init__(self, library: str, detailed_step: int) -> None:
        self._library = ctypes.CDLL(library)
        self._counts = (ctypes.c_long * len(KINDS)).in_dll(self._library, "null_cuda_counts")
        self._listener = LISTENER(self._record)
        self._detailed_step = detailed_step
        self._step = 0
        self._before: list[int] = []
        self.steps: dict[int, dict[str, int]] = {}
        self.calls: Counter[tuple[str, str, str, str]] = Counter()

    def _record(self, kind: int, detail: bytes) -> None:
        phase, site = call_site(sys._getframe().f_back)
        self.calls[KINDS[kind], phase, site, detail.decode()] += 1

    def start_step(self, step: int) -> None:
        """End the previous step and start counting for `step`."""
        self.end_step()
        self._step = step
        self._library.null_cuda_start_step(ctypes.c_long(step))
        if step == self._detailed_step:
            self._library.null_cuda_listen(self._listener)
        self._before = list(self._counts)

    def end_step(self) -> None:
        """Store the counts of the current step."""
        after = list(self._counts)
        self._library.null_cuda_listen(None)
        if self._step:
            differences = (now - before for now, before in zip(after, self._before, strict=True))
            self.steps[self._step] = dict(zip(KINDS, differences, strict=True))
        self._step = 0

    def write(self, path: Path) -> None:
        """Write the recording as JSON."""
        content: dict[str, Any] = {
            "torch": torch.__version__.partition("+")[0],
            "steps": self.steps,
            "peak_reserved_mib": torch.cuda.max_memory_reserved() >> 20,
            "calls": [[*key, number] for key, number in sorted(self.calls.items())],
        }
        path.write_text(json.dumps(content), encoding="utf-8")


def recording_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's recording."""
    return folder / f"recording-{rank}.json"


def rank_from_environment() -> int:
    """Return the rank of this process, or 0 without a launcher."""
    return int(os.environ.get("RANK", 0))
