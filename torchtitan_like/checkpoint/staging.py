"""Copies of the run's state on the host, for saves that are written while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Staging:
    """One reusable set of host buffers: the state of a step, safe from the next update of the weights.

    With `pinned` and a GPU the copies run beside the next step's forward and backward, on a stream of their own, and
    `order_updates` must come before the weights change. Otherwise they are complete when `copy` returns.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, torch.Tensor] = {}
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` with every tensor replaced by one in host memory (DTensors keep their layout); the rest as it is.

        The last copy's buffers are written again: its save must be over.
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
        """Let the current stream change the weights only after the copies. The host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Block until the copies are complete: for any number of threads, each of which needs to know."""
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

        # Not `from_local`, which would move the buffer back to the mesh's device.
        return DTensor(buffer, value._spec, requires_grad=False)  # type: ignore[attr-defined]
