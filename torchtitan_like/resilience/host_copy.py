"""Copy a device value to the host without blocking the device."""

from __future__ import annotations

import torch


class HostCopy:
    """An asynchronous copy of a 0-dim device value. It is complete one or two steps later."""

    def __init__(self, value: torch.Tensor) -> None:
        self._host = value
        self._event: torch.cuda.Event | None = None
        if value.is_cuda:
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> float:
        """Block until the copy is complete and return the value."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)
