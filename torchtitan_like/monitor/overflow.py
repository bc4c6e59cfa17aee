"""Find the module in which the first inf or nan occurs.

Measures the smallest and largest absolute value of each module's weights, inputs, and outputs. The
method is DebugUnderflowOverflow of Stas Bekman (Hugging Face transformers, debug_utils.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchtitan_like.monitor.log import logger
from torchtitan_like.util.shards import local_shard

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Debug


# Measurements kept on a device before they are evaluated: about 100 MiB.
MOST_OBSERVATIONS = 200_000


class NonFiniteError(RuntimeError):
    """A weight, an input, or an output of a module holds an inf or nan."""


def abs_min_max(tensor: Tensor) -> Tensor:
    """Return the smallest and the largest absolute value (2,); nan if the tensor holds one.

    For a DTensor, they are the values of this rank's shard.
    """
    local = local_shard(tensor)
    if local.numel() == 0:
        return torch.zeros(2, dtype=torch.float32, device=local.device)
    if local.element_size() < 4:
        local = local.float()
    return torch.stack(torch.aminmax(local.abs()))


def detect_overflow(tensor: Tensor, name: str) -> bool:
    """Return True, and log an error, if a tensor holds an inf or nan. Waits for the device."""
    smallest, largest = abs_min_max(tensor).tolist()
    if math.isfinite(largest):
        return False
    logger.error(
        f"{name} has an inf or nan: abs min {smallest:.2e}, abs max {largest:.2e}, "
        f"{tuple(tensor.shape)}"
    )
    return True


class Observation(NamedTuple):
    """An event of a forward pass: a module starts, one of its tensors is measured, or it ends."""

    event: Literal["start", "tensor", "end"]
    step: int
    micro_batch: int
    module: str
    tensor: str = ""
    abs_min_max: Tensor | None = None  # (2,)


class OverflowDetector:
    """Measures weights, inputs, and outputs of all modules of `parts` while they run.

    At the first inf or nan, it logs the last modules of the micro-batch and raises NonFiniteError,
    on this rank only. Values on the CPU are checked inside the module. Values on other devices are
    checked by `evaluate`, which waits for the device once for all modules. Call it at log steps and
    before the run ends.

    position: returns the step and the micro-batch.
    """

    def __init__(
        self, parts: Iterable[nn.Module], section: Debug, position: Callable[[], tuple[int, int]]
    ) -> None:
        self._section = section
        self._position = position
        self._observations: list[Observation] = []
        self._is_on_device = False  # whether a measured tensor is not on the host
        self._frames: deque[list[str]] = deque(maxlen=section.detect_overflow_frames)
        self._open_frames: dict[str, list[str]] = {}
        self._now = (0, 0)
        self._num_frames = 0
        self._hooks: list[Any] = []
        for fqn, module in (named for part in parts for named in part.named_modules()):
            name = f"{fqn or 'the whole model'} ({type(module).__name__})"
            # Weights are measured before the module runs, after FSDP's own hook has gathered them.
            self._hooks += [
                module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True),
                module.register_forward_hook(partial(self._after, name)),
            ]

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()

    def evaluate(self) -> None:
        """Log the traced modules. Raises NonFiniteError, and logs it, at the first inf or nan."""
        observations = self._observations
        self._observations = []
        pairs = [each.abs_min_max.double() for each in observations if each.abs_min_max is not None]
        numbers = iter(torch.stack(pairs).tolist() if pairs else [])
        for each in observations:
            if (each.step, each.micro_batch) != self._now:
                self._now = (each.step, each.micro_batch)
                self._num_frames = 0
                self._frames.clear()
            if each.event == "start":
                self._open_frames[each.module] = [each.module]
            elif each.event == "end":
                self._end(each.module)
            else:
                smallest, largest = next(numbers)
                line = f"{smallest:.2e}  {largest:.2e}  {each.tensor}"
                self._open_frames[each.module].append(line)
                if not math.isfinite(largest):
                    self._end(each.module)
                    raise NonFiniteError(self._report(each.module, each.tensor))

    def _before(self, name: str, module: nn.Module, *inputs: Any) -> None:
        step, micro_batch = self._position()
        last_step = self._section.abort_after_batch_num
        if 0 < last_step < step:
            self.evaluate()
            raise RuntimeError(f"debug.abort_after_batch_num = {last_step} ends the run")
        self._observations.append(Observation("start", step, micro_batch, name))
        self._measure(name, module.named_parameters(recurse=False))
        self._measure(name, _numbered("input", inputs))
        self._judge_on_host()

    def _after(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._measure(name, _numbered("output", output))
        self._observations.append(Observation("end", *self._position(), name))
        self._judge_on_host()

    def _judge_on_host(self) -> None:
        if not self._is_on_device or len(self._observations) > MOST_OBSERVATIONS:
            self.evaluate()

    @torch.no_grad()
    def _measure(self, module: str, tensors: Iterable[tuple[str, Any]]) -> None:
        """Measure the floating-point tensors among `tensors`."""
        for name, tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                pair = abs_min_max(tensor)
                self._is_on_device = self._is_on_device or not pair.is_cpu
                event = Observation("tensor", *self._position(), module, name, pair)
                self._observations.append(event)

    def _end(self, module: str) -> None:
        self._frames.append(self._open_frames.pop(module))
        self._num_frames += 1
        step, micro_batch = self._now
        if step in self._section.trace_batch_nums:
            frame = "\n    ".join(self._frames[-1])
            logger.info(f"Step {step}, micro-batch {micro_batch}: {frame}")

    def _report(self, module: str, tensor: str) -> str:
        step, micro_batch = self._now
        message = (
            f"step {step}, micro-batch {micro_batch}: the first inf or nan is in {module}, {tensor}"
        )
        frames = "\n".join("\n    ".join(frame) for frame in self._frames)
        logger.error(
            f"{message}\nThe last {len(self._frames)} of {self._num_frames} modules, abs min and max:\n"
            f"{frames}"
        )
        return message


def _numbered(name: str, values: Any) -> list[tuple[str, Any]]:
    return [(f"{name} {i}", value) for i, value in enumerate(tree_leaves(values))]
