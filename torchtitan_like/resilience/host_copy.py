"""Reading a device value without making the device wait."""

from __future__ import annotations

import torch


class HostCopy:
    """A 0-dim device value on its way to the host; `read` a step or two later costs nothing."""

    def __init__(self, value: torch.Tensor) -> None:
        self._host, self._event = value, None
        if value.is_cuda:
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> float:
        """Block until the copy is there; the value."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)
