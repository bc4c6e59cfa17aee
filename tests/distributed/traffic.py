"""What collectives send, seen from Python; functions that are compiled are not seen."""

from collections import Counter

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """(kind, elements) of each collective: those of the whole tensor that is summed, gathered or scattered."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # first it takes itself apart, and then this is asked again
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.replace("_", "")
        kinds = [kind for kind in ("allreduce", "allgather", "reducescatter") if kind in name]
        if kinds and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
            self.seen[kinds[0], max(t.numel() for t in tensors)] += 1
        return out
