"""Staging copies tensors, so that a checkpoint is written while training continues."""

from __future__ import annotations

import threading
from typing import Any

from torchtitan_like.checkpoint.staging import Staging


def test_every_thread_waits_for_the_copy() -> None:
    """The checkpoint thread waits before writing, and the trainer before it changes weights."""

    class Copy:
        def __init__(self) -> None:
            self.is_complete = threading.Event()

        def synchronize(self) -> None:
            self.is_complete.wait(10)

    copy: Any = Copy()
    staging = Staging(pinned=True)
    staging._event = copy
    waited: list[bool] = []

    def wait_for_copy() -> None:
        staging.wait()
        waited.append(copy.is_complete.is_set())

    threads = [threading.Thread(target=wait_for_copy) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    copy.is_complete.set()
    for thread in threads:
        thread.join()
    assert waited == [True, True]
