"""Offload the activations that blocks save for backward to host memory.

`torch.autograd.graph.save_on_cpu` would also copy the weights, and copy a tensor once for each
operation that saves it. It would change strides, which can change the rounding of a product. Here
each storage is copied once, unchanged. Copies from a GPU use pinned memory and the current stream,
so that the host does not wait for them.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_like.util.host import available_bytes, host_memory
from torchtitan_like.util.units import GIB

if TYPE_CHECKING:
    from torchtitan_like.distributed.world import HostGroup

SMALLEST = 1024  # bytes; smaller storages stay on the device


class ActivationOffload:
    """Holds this process's activations in host memory and counts their bytes.

    local_ranks: ranks that allocate host memory on this node at the same time.
    """

    def __init__(self, local_ranks: int = 1) -> None:
        self.num_bytes = 0
        self.peak_bytes = 0
        self.checks_memory = True  # set to False after the first step has shown the need
        self._local_ranks = local_ranks

    def apply(self, blocks: Iterable[nn.Module]) -> str:
        """Offload what these blocks save, in place; return a line for the log."""
        for block in blocks:
            self._wrap_forward(block)
        return (
            "Applied activation offload to the model: blocks keep their activations in host memory"
        )

    def describe_peak(self, group: HostGroup) -> str:
        """Return a line on the host memory of the fullest node. A collective of `group`."""
        local = (platform.node(), self.peak_bytes, host_memory().available)
        peaks: dict[str, list[int]] = {}
        free: dict[str, int] = {}
        for node, peak, available in group.gather_objects(local):
            peaks.setdefault(node, []).append(peak)
            free[node] = min(available, free.get(node, available))
        node = max(peaks, key=lambda name: sum(peaks[name]))
        return (
            f"Activation offload took {sum(peaks[node]) / GIB:.2f} GiB of host memory on {node} at "
            f"its peak ({len(peaks[node])} ranks, at most {max(peaks[node]) / GIB:.2f} GiB each). "
            f"At least {min(free.values()) / GIB:.2f} GiB are available on each node"
        )

    def _wrap_forward(self, block: nn.Module) -> None:
        forward = block.forward

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            resident = _storages([*block.parameters(), *block.buffers()])
            # Keyed by address and version. An address is not reused while its storage is held here.
            copies: dict[tuple[int, int], tuple[_HostCopy, torch.UntypedStorage]] = {}

            def pack(tensor: Tensor) -> Tensor | _Saved:
                if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
                    return tensor
                storage = tensor.untyped_storage()
                is_whole = storage.nbytes() % tensor.element_size() == 0
                if storage._cdata in resident or storage.nbytes() < SMALLEST or not is_whole:
                    return tensor
                key = (storage._cdata, tensor._version)
                if key not in copies:
                    copies[key] = (_HostCopy(tensor, self), storage)
                copy = copies[key][0]
                copy.num_unread += 1
                return _Saved(
                    copy, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
                )

            try:
                with saved_tensors_hooks(pack, _unpack):
                    return forward(*args, **kwargs)
            finally:
                copies.clear()  # autograd holds `pack`, which would hold the storages

        block.forward = offloaded

    def add(self, num_bytes: int) -> None:
        """Count host memory before it is allocated. Raises MemoryError if it is not available."""
        if self.checks_memory and num_bytes * self._local_ranks > (free := available_bytes()):
            raise MemoryError(
                f"Activation offload needs {num_bytes / GIB:.2f} GiB more of host memory on each of "
                f"{self._local_ranks} ranks. Available on this node: {free / GIB:.2f} GiB; this rank "
                f"holds {self.num_bytes / GIB:.2f} GiB of activations already. Use "
                'activation_checkpoint.mode = "full", a smaller training.local_batch_size, or '
                "nodes with more host memory"
            )
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


class _HostCopy:
    """The bytes of a tensor's storage in host memory."""

    def __init__(self, tensor: Tensor, offload: ActivationOffload) -> None:
        self.num_unread = 0  # saved tensors of this storage that backward has not read yet
        self._device = tensor.device
        self._restored: Tensor | None = None
        self._offload = offload
        source = _bytes_of_storage(tensor)
        is_pinned = tensor.device.type != "cpu"
        # The allocator of pinned memory rounds up to a power of two.
        self._num_bytes = 1 << (len(source) - 1).bit_length() if is_pinned else len(source)
        offload.add(self._num_bytes)
        host = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._host = host[: len(source)]
        self._host.copy_(source, non_blocking=True)

    def read(self) -> Tensor:
        """Return the bytes on their device; all saved tensors that share them get the same ones."""
        restored = self._restored
        if restored is None:
            restored = torch.empty_like(self._host, device=self._device)
            restored.copy_(self._host, non_blocking=True)
        self.num_unread -= 1  # below zero if backward reads a second time
        self._restored = restored if self.num_unread > 0 else None
        return restored

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
    elements = saved.copy.read().view(saved.dtype)
    return elements.as_strided(saved.size, saved.stride, saved.offset)


def _bytes_of_storage(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor, uint8 (bytes,)."""
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((num_elements,), (1,), 0).view(torch.uint8)


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of storages that stay on the device: weights and buffers."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return {
        tensor.untyped_storage()._cdata
        for tensor in local
        if not is_traceable_wrapper_subclass(tensor)
    }
