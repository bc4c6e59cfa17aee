"""Copy the run's state to the host, so that checkpoints are written while training continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Staging:
    """One reusable set of host buffers for the state of a step.

    With `pinned` and a GPU, copies run on a separate stream during the next forward and backward.
    Call `order_updates` before the weights change. Otherwise `copy` is synchronous.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, torch.Tensor] = {}
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state` with every tensor copied to host memory. DTensors keep their layout.

        Overwrites the buffers of the last copy, so its checkpoint must be complete.
        """
        on_gpu = any(
            isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in state.values()
        )
        if not (self._pinned and on_gpu):
            return {name: self._copy_of(name, value, pinned=False) for name, value in state.items()}
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = {
                name: self._copy_of(name, value, pinned=True) for name, value in state.items()
            }
            self._event = self._stream.record_event()
        return copies

    def order_updates(self) -> None:
        """Make the current stream wait for the copies. The host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Block until the copies are complete. Any number of threads may call it."""
        if self._event is not None:
            self._event.synchronize()

    @torch.no_grad()
    def _copy_of(self, name: str, value: Any, *, pinned: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        local = getattr(value, "_local_tensor", value)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(
                local.shape, dtype=local.dtype, pin_memory=pinned and local.is_cuda
            )
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=pinned)
        if local is value:
            return buffer
        from torch.distributed.tensor import DTensor

        # `from_local` would move the buffer back to the mesh's device.
        return DTensor(buffer, value._spec, requires_grad=False)  # type: ignore[attr-defined]
