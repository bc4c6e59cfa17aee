"""The checkpoint thread. It has a process group of its own, separate from training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class SavingThread:
    """Runs submitted calls one after the other. All ranks must submit them in the same order.

    A daemon thread, so that a crashing process does not wait for peers that are dead.
    """

    def __init__(self, device: torch.device, at_start: Callable[[], None]) -> None:
        self._device = device
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()
        self.run(at_start)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue `call` and return its future."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def run(self, call: Callable[[], T]) -> T:
        """Run `call` after all queued calls, and wait for its result."""
        return self.submit(call).result()

    def close(self) -> None:
        """End the thread after all queued calls."""
        self._calls.put(None)

    @torch.no_grad()
    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:  # DCP raises a BaseException
                future.set_exception(error)
            del item, call, future  # free the state that they may reference
