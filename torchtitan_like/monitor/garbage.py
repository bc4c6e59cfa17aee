"""Garbage collection at the same step on every rank, instead of when Python's counters overflow.

Python's collector stops each rank at a different step, and all other ranks wait for it in the next
collective. Between two collections, reference cycles accumulate for `training.gc_freq` steps.
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
    """Collects all generations every `freq` steps (`training.gc_freq`). 0: Python's collector decides.

    debug: collect at each step and report the objects in reference cycles (`training.gc_debug`).
    Slow.
    """

    def __init__(
        self, freq: int, debug: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._freq = freq
        self._debug = debug
        self._clock = clock
        if self._freq == 0:
            gc.enable()  # disabled during the imports
            return
        gc.disable()
        self._settle("Initial GC collection")

    def freeze(self) -> None:
        """Exclude all existing objects from later collections. Call it once everything is built."""
        if self._freq > 0:
            self._settle("GC collection before training")

    def run(self, step: int) -> None:
        """Collect if `step` is due. The first step is not: start-up has just collected."""
        if self._freq == 0:
            return
        if self._debug:
            self._report_cycles(step)
        elif step > 1 and step % self._freq == 0:
            self.collect("Performing periodic GC collection")

    def collect(self, reason: str) -> None:
        """Collect now, for example before a checkpoint, and log `reason` with the seconds it took.

        It collects all generations: generations 0 and 1 never free a cycle that survived two
        collections.
        """
        if self._freq == 0:
            return
        started = self._clock()
        gc.collect()
        logger.info(f"[GC] {reason} {self._clock() - started:.2f} seconds")

    def close(self) -> None:
        """Let Python's collector decide again."""
        if self._freq > 0:
            gc.unfreeze()
            gc.enable()

    def _settle(self, reason: str) -> None:
        # The imported modules alone are 170,000 objects. Once frozen, no collection visits them.
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
        gc.collect()  # frees the objects that DEBUG_SAVEALL kept
        logger.info(f"[GC] Step {step}: {text}; {self._clock() - started:.2f} seconds")


def describe_objects(objects: list[object]) -> str:
    """Return the number of objects by type, and the bytes of the tensors among them."""
    if not objects:
        return "no reference cycles"
    counts = Counter(type(obj).__qualname__ for obj in objects)
    shown = ", ".join(f"{count} {name}" for name, count in counts.most_common(NUM_TYPES_SHOWN))
    others = len(counts) - NUM_TYPES_SHOWN
    more = f" and {others} more types" if others > 0 else ""
    text = f"{len(objects)} objects in reference cycles ({shown}{more})"
    tensors = [
        (tuple(tensor.shape), tensor.numel() * tensor.element_size())
        for tensor in filter(_is_tensor, objects)
    ]
    if tensors:
        num_bytes = sum(size for _, size in tensors)
        shapes = ", ".join(str(shape) for shape, _ in tensors[:NUM_TYPES_SHOWN])
        text += f"; {len(tensors)} tensors of {num_bytes:,} bytes, shapes {shapes}"
    return text


def _is_tensor(obj: object) -> TypeGuard[torch.Tensor]:
    import torch

    # isinstance would call `__class__` of objects that imitate another class.
    return issubclass(type(obj), torch.Tensor)
