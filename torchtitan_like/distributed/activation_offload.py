"""Keep what blocks save for their backward pass in host memory.

`torch.autograd.graph.save_on_cpu` would also copy the weights, copy a tensor once for each operation
that saves it, and change its strides, on which the rounding of a product can depend. Here each
storage is copied once, as it is. Copies of a GPU use pinned memory and run in order on the current
stream, so that the host waits for none of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchtitan_like.util.host_memory import GIB, available_bytes

SMALLEST = 1024  # bytes; smaller storages stay where they are
_PLAIN = (Tensor, nn.Parameter)


class ActivationOffload:
    """The activations of this process in host memory, and how many bytes they have.

    local_ranks: ranks that allocate host memory on this node at the same time.
    """

    def __init__(self, local_ranks: int = 1) -> None:
        self.num_bytes = 0
        self.peak_bytes = 0
        self.checks_memory = True  # until the need has been measured
        self._local_ranks = local_ranks

    def apply(self, blocks: Iterable[nn.Module]) -> str:
        """Offload what these blocks save, in place; returns a line for the log."""
        for block in blocks:
            self._wrap_forward(block)
        return "Applied activation offload to the model: each block's activations wait in host memory"

    def _wrap_forward(self, block: nn.Module) -> None:
        forward = block.forward

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            resident = _storages([*block.parameters(), *block.buffers()])
            # By address and version. No address is used again while its storage is held here.
            copies: dict[tuple[int, int], tuple[_HostCopy, torch.UntypedStorage]] = {}

            def pack(tensor: Tensor) -> Tensor | _Saved:
                if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
                    return tensor
                storage = tensor.untyped_storage()
                if storage.data_ptr() in resident or storage.nbytes() < SMALLEST:
                    return tensor
                key = (storage.data_ptr(), tensor._version)
                if key not in copies:
                    copies[key] = (_HostCopy(storage, self), storage)
                copy = copies[key][0]
                copy.num_unread += 1
                return _Saved(
                    copy, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
                )

            try:
                with saved_tensors_hooks(pack, _unpack):
                    return forward(*args, **kwargs)
            finally:
                copies.clear()  # autograd keeps `pack`, which would keep the storages

        block.forward = offloaded

    def add(self, num_bytes: int) -> None:
        """Count host memory that is about to be allocated. Raises MemoryError if it is not there."""
        if self.checks_memory and num_bytes * self._local_ranks > (free := available_bytes()):
            raise MemoryError(
                f"Activation offload needs {num_bytes / GIB:.2f} GiB more of host memory on each of "
                f"{self._local_ranks} ranks. Available on this node: {free / GIB:.2f} GiB, with "
                f"{self.num_bytes / GIB:.2f} GiB of activations of this rank there already. Use "
                'activation_checkpoint.mode = "full", a smaller training.local_batch_size, or '
                "nodes with more host memory"
            )
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


class _HostCopy:
    """The bytes of one storage in host memory."""

    def __init__(self, storage: torch.UntypedStorage, offload: ActivationOffload) -> None:
        self.num_unread = 0  # saved tensors of this storage that backward has not read yet
        self._device = storage.device
        self._restored: Tensor | None = None
        self._offload = offload
        is_pinned = storage.device.type == "cuda"
        # The allocator of pinned memory rounds up to a power of two.
        self._num_bytes = 1 << (storage.nbytes() - 1).bit_length() if is_pinned else storage.nbytes()
        offload.add(self._num_bytes)
        self._host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_pinned)
        self._host.copy_(_as_bytes(storage), non_blocking=True)

    def read(self) -> torch.UntypedStorage:
        """The storage on its device again: one for all saved tensors that share it."""
        restored = self._restored
        if restored is None:
            restored = torch.empty_like(self._host, device=self._device)
            restored.copy_(self._host, non_blocking=True)
        self.num_unread -= 1  # below zero where backward reads a second time
        self._restored = restored if self.num_unread > 0 else None
        return restored.untyped_storage()

    def __del__(self) -> None:
        self._offload.num_bytes -= self._num_bytes


class _Saved(NamedTuple):
    """A saved tensor as a view of a copied storage."""

    copy: _HostCopy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@torch.no_grad()
def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    storage = saved.copy.read()
    tensor = torch.empty(0, dtype=saved.dtype, device=storage.device)
    return tensor.set_(storage, saved.offset, saved.size, saved.stride)


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of what stays on the device: weights, which FSDP2 gathers again, and buffers."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return {tensor.untyped_storage().data_ptr() for tensor in local if type(tensor) in _PLAIN}
