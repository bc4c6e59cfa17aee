"""`torch.compile` with a barrier that Inductor's kernels lack, functions that fuse on GPUs, and
buffers that change in a compiled backward.

A Triton kernel of Inductor may store a tensor in one loop and load it in its next loop. The loops can
give the same element to different threads, for example when a kernel reads bfloat16 and stores
float32. In torch 2.11 to 2.14 the threads do not wait for each other in between
(pytorch/pytorch#190517), so a thread may load what the memory contained before. Compiled MoE models
in bfloat16 had gradients of a hundred times the right norm, with the right loss
(`docs/benchmarks/2026-11-26-moe-gradients-h200.md`).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

logger = logging.getLogger()

Function = TypeVar("Function", bound=Callable[..., Any])

# Part of the key of compiled graphs on disk: those without barriers are not used.
_CACHE_TAG = "barrier-before-load"
MAX_GRAPHS = 64  # of a compiled function


def compile_function(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `torch.compile(function, **options)`. On a GPU its kernels have the missing barriers.

    A function may have `MAX_GRAPHS` graphs. A block of the model has one for each capacity of
    bounded buffers, and ends the run beyond the limit. The update of an optimizer has one for each
    group and block of parameters, and runs unfused beyond it. torch's default, 8, is too small.
    """
    if torch.accelerator.is_available():
        _add_barriers()
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    return torch.compile(function, **options)


def fused_on_gpu(function: Function) -> Function:
    """Compile `function` for tensors on a GPU, where it then runs as few kernels instead of many.

    Other tensors run its operators one by one, and so do tensors without values, distributed ones,
    and those of a GPU that Triton does not support. Inside a compiled graph the operators are part
    of that graph. The first call on a GPU compiles. A size that changes compiles once more, for any
    size. Measured times never decide how a sum is divided, so runs of equal sizes add in one order.
    Values are rounded where the operators round them.
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or not (_are_on_gpu(args) and _can_compile()):
            return function(*args)
        return _compiled(function)(*args)

    return cast(Function, call)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    options = {"deterministic": True, "emulate_precision_casts": True}
    return compile_function(function, options=options)


def _are_on_gpu(args: tuple[Any, ...]) -> bool:
    """Return True if all tensors among `args` are plain ones on a GPU."""
    if not torch.cuda.is_initialized():
        return False  # without a look at every tensor
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return all(type(tensor) in (Tensor, nn.Parameter) and tensor.is_cuda for tensor in tensors)


@cache
def _can_compile() -> bool:
    """Return True if Triton supports the GPU and finds a C compiler, with which it loads kernels."""
    from torch.utils._triton import has_triton

    problem = None
    if not has_triton():
        problem = "Triton does not support this GPU (it needs compute capability 7.0)"
    elif not any(shutil.which(name) for name in (os.environ.get("CC"), "gcc", "clang") if name):
        problem = "there is no C compiler (install gcc, or set CC)"
    if problem:
        logger.warning(f"Kernels are not fused, so steps take longer: {problem}")
    return problem is None


def update_in_backward(
    total: Tensor, value: Tensor, grad: Tensor, operation: Literal["sum", "max"]
) -> None:
    """Add `value` to `total`, or raise `total` to it, in a backward of which `grad` is a gradient.

    Where `value` does not depend on a gradient, a compiled graph could compute the new total in
    forward, in which that of another micro-batch is missing, and store it in backward. So there it
    is an operator that takes the gradient.
    """
    if torch.compiler.is_compiling():
        torch.ops.torchtitan_like.update_in_backward(total, value, grad, operation)
    else:
        _update(total, value, operation)


def _update(total: Tensor, value: Tensor, operation: str) -> None:
    if operation == "sum":
        total.add_(value)
    else:
        total.clamp_(min=value)


@torch.library.custom_op("torchtitan_like::update_in_backward", mutates_args=("total",))
def _update_operator(total: Tensor, value: Tensor, grad: Tensor, operation: str) -> None:
    _update(total, value, operation)


@_update_operator.register_fake
def _(total: Tensor, value: Tensor, grad: Tensor, operation: str) -> None:
    return None


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
