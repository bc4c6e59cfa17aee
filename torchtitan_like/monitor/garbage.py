"""Python's garbage collector, taken over: every rank collects at the same step instead of whenever a counter overflows.

Left alone, each rank's collector stops that rank at a step of its own, and all others wait for it in the next
collective. Collecting by hand is a risk only to code that makes reference cycles faster than ``training.gc_freq`` steps
can hold.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard

from torchtitan_like.monitor.log import logger

if TYPE_CHECKING:
    import torch


NUM_TYPES_SHOWN = 8


class GarbageCollection:
    """Collects every ``freq`` steps (``training.gc_freq``), all generations; 0 leaves Python's collector alone.

    ``debug`` (``training.gc_debug``) collects at each step instead and reports what stood in reference cycles: slow.
    """

    def __init__(self, freq: int, debug: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._freq = freq
        self._debug = debug
        self._clock = clock
        if self._freq == 0:
            gc.enable()  # it rests during the imports
            return
        gc.disable()
        self._settle("Initial GC collection")

    def freeze(self) -> None:
        """Call once everything is built: what lives then lives to the end, and later collections do not walk it."""
        if self._freq > 0:
            self._settle("GC collection before training")

    def run(self, step: int) -> None:
        """Collect if ``step`` is due. The first step is not: start-up has just collected."""
        if self._freq == 0:
            return
        if self._debug:
            self._report_cycles(step)
        elif step > 1 and step % self._freq == 0:
            self.collect("Performing periodic GC collection")

    def collect(self, reason: str) -> None:
        """A full collection now (before or after a checkpoint, say). NOTE: generations 0 and 1 alone would leave every
        cycle that survived two collections in memory until the process ends."""
        if self._freq == 0:
            return
        started = self._clock()
        gc.collect()
        logger.info(f"[GC] {reason} {self._clock() - started:.2f} seconds")

    def close(self) -> None:
        """Give the collector back to Python."""
        if self._freq > 0:
            gc.unfreeze()
            gc.enable()

    def _settle(self, reason: str) -> None:
        # The imported modules alone are 170,000 objects: walked once here, and never again.
        self.collect(reason)
        gc.freeze()

    def _report_cycles(self, step: int) -> None:
        started = self._clock()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
        finally:
            gc.set_debug(0)
        text = describe_objects(gc.garbage)
        gc.garbage.clear()
        gc.collect()  # SAVEALL kept them alive: now they really go
        logger.info(f"[GC] Step {step}: {text}; {self._clock() - started:.2f} seconds")


def describe_objects(objects: list[object]) -> str:
    """How many objects of which types, and the bytes of their tensors: memory that only the collector frees."""
    if not objects:
        return "no reference cycles"
    counts = Counter(type(obj).__qualname__ for obj in objects)
    shown = ", ".join(f"{count} {name}" for name, count in counts.most_common(NUM_TYPES_SHOWN))
    others = len(counts) - NUM_TYPES_SHOWN
    text = f"{len(objects)} objects in reference cycles ({shown}{f' and {others} more types' if others > 0 else ''})"
    tensors = [(tuple(tensor.shape), tensor.numel() * tensor.element_size()) for tensor in filter(_is_tensor, objects)]
    if tensors:
        num_bytes = sum(size for _, size in tensors)
        shapes = ", ".join(str(shape) for shape, _ in tensors[:NUM_TYPES_SHOWN])
        text += f"; {len(tensors)} tensors of {num_bytes:,} bytes, shapes {shapes}"
    return text


def _is_tensor(obj: object) -> TypeGuard[torch.Tensor]:
    import torch

    # By the type alone: isinstance would ask objects that pretend to be of another class.
    return issubclass(type(obj), torch.Tensor)
