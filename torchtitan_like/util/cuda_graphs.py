"""Forward and backward of a micro-batch as a CUDA graph: one launch for all of its kernels.

A graph repeats the kernels of its capture with the same arguments. So it reads its inputs from fixed
buffers, and its gradients and losses have fixed addresses. Everything else of a step stays eager:
clipping, the decision to skip, and the update, whose learning rate is thus no part of a graph. The
host launches them while the graph runs.

| micro-batch | what it runs |
| --- | --- |
| of the first `WARMUP_STEPS` sums of gradients | the kernels, launched on a stream of their own |
| that starts a sum of gradients (`grad` is None) | the graph that writes gradients |
| every other one | the graph that adds to them |

The first steps are the warm-up that torch requires before a capture: they compile, choose kernels, and
allocate workspaces. They are steps of the run, and a capture executes nothing, so neither changes a
number. torch's default generators are part of a graph: each replay starts from their seed of that
moment. Both graphs share the memory of their activations. Eager work, such as a validation, has memory
of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

logger = logging.getLogger()

# The first step may compile, and the second one may choose kernels for tensors that now exist.
WARMUP_STEPS = 2

Tensor = torch.Tensor
# A NamedTuple of tensors, or None, whose first one is the loss.
Losses = TypeVar("Losses", bound=tuple[Any, ...])


class _Graph(NamedTuple):
    """losses: read them after a replay and before the next one."""

    graph: torch.cuda.CUDAGraph
    losses: Any


class CapturedPass(Generic[Losses]):
    """Runs `compute` eagerly, and from step `WARMUP_STEPS + 1` of this process on as CUDA graphs.

    compute: (tensors or None, `divide`) -> losses; runs forward and backward without reading a tensor
        on the host. `divide` divides a sum by the number of valid tokens.
    parameters: of which `compute` computes gradients.
    """

    def __init__(self, compute: Callable[..., Losses], parameters: Iterable[Tensor]) -> None:
        self._compute = compute
        self._parameters = list(parameters)
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._num_sums = 0
        self._inputs: list[Tensor | None] = []
        self._reciprocal: Tensor | None = None
        self._gradients: list[Tensor | None] = []
        self._graphs: dict[bool, _Graph] = {}

    def __call__(self, *inputs: Tensor | None, num_valid: int) -> Losses:
        """Run one micro-batch. inputs: on the device, always of the same shapes.

        num_valid: valid tokens of the step, at least 1.
        """
        starts_sum = self._parameters[0].grad is None
        self._num_sums += starts_sum
        if self._num_sums <= WARMUP_STEPS:
            return self._run_eagerly(inputs, num_valid)
        self._copy(inputs, num_valid)
        if starts_sum not in self._graphs:
            self._graphs[starts_sum] = self._capture()
        if starts_sum:
            self._restore_gradients()
        graph, losses = self._graphs[starts_sum]
        graph.replay()
        copies: Losses = type(losses)(*(x if x is None else x.clone() for x in losses))
        return copies

    def _run_eagerly(self, inputs: tuple[Tensor | None, ...], num_valid: int) -> Losses:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            losses = self._compute(*inputs, lambda total: total / num_valid)
        current.wait_stream(self._stream)
        self._reciprocal = torch.empty_like(losses[0])
        return losses

    def _copy(self, inputs: tuple[Tensor | None, ...], num_valid: int) -> None:
        """Copy the inputs into the buffers that the graphs read."""
        assert self._reciprocal is not None
        # CUDA divides by a number of the host in this way: it multiplies by the reciprocal, rounded.
        one = torch.ones((), dtype=self._reciprocal.dtype)
        self._reciprocal.fill_((one / num_valid).item())
        if not self._inputs:
            self._inputs = [None if tensor is None else tensor.clone() for tensor in inputs]
            return
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            if buffer is not None and tensor is not None:
                assert buffer.shape == tensor.shape, (buffer.shape, tensor.shape)
                buffer.copy_(tensor)

    def _capture(self) -> _Graph:
        """Capture one micro-batch: it reads the buffers, and nothing is executed."""
        graph = torch.cuda.CUDAGraph()
        reciprocal = self._reciprocal
        # "thread_local": a thread that writes a checkpoint may wait for its own copies meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            losses = self._compute(*self._inputs, lambda total: total * reciprocal)
        if not self._gradients:
            self._gradients = [parameter.grad for parameter in self._parameters]
        logger.info("Captured forward and backward of a micro-batch as a CUDA graph")
        return _Graph(graph, losses)

    def _restore_gradients(self) -> None:
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
