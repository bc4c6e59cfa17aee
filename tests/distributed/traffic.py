"""Record collectives and host reads of eager functions. Compiled functions are not recorded."""

from collections import Counter
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


class Sent(NamedTuple):
    """A collective. `elements` counts the full tensor that is reduced, gathered or scattered."""

    kind: str
    dtype: torch.dtype
    elements: int


class Traffic(TorchDispatchMode):
    """Records each collective, and counts how often the host reads a value of the device."""

    def __init__(self):
        super().__init__()
        self.sent = []
        self.num_host_reads = 0
        self.num_row_counts = 0  # copies of the numbers of rows that expert-parallel ranks exchange

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # DTensor first calls the local operation
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.replace("_", "")
        kinds = [kind for key, kind in KINDS.items() if key in name]
        if kinds and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in tree_leaves((out, args)) if isinstance(leaf, torch.Tensor)]
            self.sent.append(
                Sent(kinds[0], tensors[-1].dtype, max(tensor.numel() for tensor in tensors))
            )
        self.num_host_reads += func is torch.ops.aten._local_scalar_dense.default
        self.num_row_counts += str(func) == "torchtitan_like.copy_to_host.default"
        return out

    def sizes(self):
        """Return the number of collectives by (kind, elements)."""
        return Counter((sent.kind, sent.elements) for sent in self.sent)
