"""Copies that a save reads while training continues."""

from __future__ import annotations

import threading
from typing import Any

from torchtitan_like.checkpoint.staging import Staging


def test_every_thread_that_asks_waits_for_the_copy() -> None:
    """The checkpoint thread waits before it writes, the trainer before it changes the weights: neither for the other."""

    class Copy:
        def __init__(self) -> None:
            self.is_complete = threading.Event()

        def synchronize(self) -> None:
            self.is_complete.wait(10)

    copy: Any = Copy()
    staging = Staging(pinned=True)
    staging._event = copy
    waited: list[bool] = []

    def ask() -> None:
        staging.wait()
        waited.append(copy.is_complete.is_set())

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    copy.is_complete.set()
    for thread in threads:
        thread.join()
    assert waited == [True, True]
