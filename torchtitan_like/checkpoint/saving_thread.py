"""The one thread that works on checkpoints: it owns the checkpoint group, so no save ever meets a training collective."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class SavingThread:
    """Runs what is submitted, one after the other, in the same order on every rank.

    A daemon: a process that crashes must not wait for a save that its dead peers will never finish.
    """

    def __init__(self, device: torch.device, at_start: Callable[[], None]) -> None:
        self._device = device
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()
        self.run(at_start)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue `call`."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def run(self, call: Callable[[], T]) -> T:
        """Run `call` after all that is queued, and wait for its result."""
        return self.submit(call).result()

    def close(self) -> None:
        """End the thread after all that is queued."""
        self._calls.put(None)

    @torch.no_grad()
    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except (
                BaseException
            ) as problem:  # DCP's own is no Exception; whoever waits must hear of any
                future.set_exception(problem)
            del item, call, future  # what they hold may be a copy of the whole state
