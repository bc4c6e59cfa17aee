"""Copy device values to the host without blocking the device."""

from __future__ import annotations

import torch


class HostCopy:
    """An asynchronous copy of 1-dim device values. It is complete one or two steps later."""

    def __init__(self, values: torch.Tensor) -> None:
        self._host = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        """Block until the copy is complete and return the values."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values
