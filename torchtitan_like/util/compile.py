"""`torch.compile`, with a barrier that Inductor's kernels lack.

A Triton kernel of Inductor may store a tensor in one loop and load it in its next loop. The loops can
give the same element to different threads, for example when a kernel reads bfloat16 and stores
float32. In torch 2.11 to 2.14 the threads do not wait for each other in between
(pytorch/pytorch#190517), so a thread may load what the memory contained before. Compiled MoE models
in bfloat16 had gradients of a hundred times the right norm, with the right loss
(`docs/benchmarks/2026-11-26-moe-gradients-h200.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

# Part of the key of compiled graphs on disk: those without barriers are not used.
_CACHE_TAG = "barrier-before-load"


def compile_function(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `torch.compile(function, **options)`. On a GPU its kernels have the missing barriers."""
    if torch.accelerator.is_available():
        _add_barriers()
    return torch.compile(function, **options)


def _add_barriers() -> None:
    """Change Inductor's code generator, once a process."""
    config: Any = torch.compiler.config
    if _CACHE_TAG in config.cache_key_tag:
        return
    from torch._inductor.codegen.triton import TritonKernel

    TritonKernel.load = _after_barrier(TritonKernel.load)  # type: ignore[method-assign]
    config.cache_key_tag += _CACHE_TAG


def _after_barrier(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `TritonKernel.load`: a barrier precedes the loop that loads what an earlier loop stored."""

    @wraps(load)
    def load_after_barrier(kernel: Any, name: str, index: Any) -> Any:
        # The names of the tensors that finished loops of this kernel have stored.
        if name in kernel.cse.invalidated_stores:
            kernel.body.writeline("tl.debug_barrier()")
        return load(kernel, name, index)

    return load_after_barrier
