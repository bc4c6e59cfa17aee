"""What collectives send, and what the host reads, seen from Python; functions that are compiled are not seen."""

from collections import Counter
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}


class Sent(NamedTuple):
    """A collective; elements: those of the whole tensor that is summed, gathered or scattered."""

    kind: str
    dtype: torch.dtype
    elements: int


class Traffic(TorchDispatchMode):
    """Notes each collective, and how often the host waits for a value of the device."""

    def __init__(self):
        super().__init__()
        self.sent = []
        self.num_host_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # first it takes itself apart, and then this is asked again
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.replace("_", "")
        kinds = [kind for key, kind in KINDS.items() if key in name]
        if kinds and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in tree_leaves((out, args)) if isinstance(leaf, torch.Tensor)]
            self.sent.append(Sent(kinds[0], tensors[-1].dtype, max(tensor.numel() for tensor in tensors)))
        self.num_host_reads += func is torch.ops.aten._local_scalar_dense.default
        return out

    def sizes(self):
        """How many of each (kind, elements)."""
        return Counter((sent.kind, sent.elements) for sent in self.sent)
