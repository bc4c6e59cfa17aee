"""Where the first inf or nan comes from: abs min and max of what goes into each module, of its weights, and what comes out.

After Stas Bekman's DebugUnderflowOverflow (Hugging Face transformers, debug_utils.py).
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

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Debug


# Measurements that wait on a device to be judged: about 100 MiB there.
MOST_OBSERVATIONS = 200_000


class NonFiniteError(RuntimeError):
    """A module has met, or made, a number that is not finite."""


def abs_min_max(tensor: Tensor) -> Tensor:
    """Smallest and largest absolute value (2,), nan where there is one. Of a DTensor those of this
    rank's shard."""
    local: Any = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    if local.numel() == 0:
        return torch.zeros(2, dtype=torch.float32, device=local.device)
    wide = local.float() if local.element_size() < 4 else local
    return torch.stack(torch.aminmax(wide.abs()))


def detect_overflow(tensor: Tensor, name: str) -> bool:
    """Has ``tensor`` an inf or nan? Then say so, with its abs min and max, under its ``name``. Waits for the device."""
    smallest, largest = abs_min_max(tensor).tolist()
    if not math.isfinite(largest):
        logger.error(f"{name} has an inf or nan: abs min {smallest:.2e}, abs max {largest:.2e}, {tuple(tensor.shape)}")
    return not math.isfinite(largest)


class Observation(NamedTuple):
    """An event in the forward pass: a module starts, one of its tensors was measured, or the module
    ends."""

    event: Literal["start", "tensor", "end"]
    step: int
    micro_batch: int
    module: str
    tensor: str = ""
    abs_min_max: Tensor | None = None  # (2,)


class OverflowDetector:
    """Looks at weights, inputs and outputs of every module of ``parts`` as it runs. At the first
    number that is not finite the last modules of the micro-batch go into the log, and
    NonFiniteError is raised, on this rank alone.

    On the CPU this happens in the module itself. What lies on another device is judged in `judge`,
    which waits for the device once for all modules; call it at log steps and before the run ends.

    ``place`` returns the step and micro-batch. For the fields of ``section`` see there.
    """

    def __init__(self, parts: Iterable[nn.Module], section: Debug, place: Callable[[], tuple[int, int]]) -> None:
        self._section, self._place = section, place
        self._observations: list[Observation] = []
        self._is_on_device = False  # whether a tensor was found elsewhere than on the host
        self._frames: deque[list[str]] = deque(maxlen=section.detect_overflow_frames)
        self._begun: dict[str, list[str]] = {}
        self._now = (0, 0)
        self._num_frames = 0
        self._hooks: list[Any] = []
        for fqn, module in (named for part in parts for named in part.named_modules()):
            name = f"{fqn or 'the whole model'} ({type(module).__name__})"
            # Before it runs, and behind FSDP's own hook, its weights are there; afterwards they may be gone again.
            self._hooks.append(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(partial(self._behind, name)))

    def close(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()

    def judge(self) -> None:
        """Log the traced modules; log and raise NonFiniteError for the first tensor that is not
        finite."""
        observations, self._observations = self._observations, []
        pairs = [seen.abs_min_max.double() for seen in observations if seen.abs_min_max is not None]
        numbers = iter(torch.stack(pairs).tolist() if pairs else [])
        for seen in observations:
            if (now := (seen.step, seen.micro_batch)) != self._now:
                self._now = now
                self._num_frames = 0
                self._frames.clear()
            if seen.event == "start":
                self._begun[seen.module] = [seen.module]
            elif seen.event == "end":
                self._end(seen.module)
            else:
                smallest, largest = next(numbers)
                self._begun[seen.module].append(f"{smallest:.2e}  {largest:.2e}  {seen.tensor}")
                if not math.isfinite(largest):
                    self._end(seen.module)
                    raise NonFiniteError(self._tell(seen.module, seen.tensor))

    def _before(self, name: str, module: nn.Module, *inputs: Any) -> None:
        step, micro_batch = self._place()
        if 0 < self._section.abort_after_batch_num < step:
            self.judge()
            raise RuntimeError(f"debug.abort_after_batch_num = {self._section.abort_after_batch_num} ends the run")
        self._observations.append(Observation("start", step, micro_batch, name))
        self._look(name, module.named_parameters(recurse=False))
        self._look(name, _numbered("input", inputs))
        self._judge_on_host()

    def _behind(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._look(name, _numbered("output", output))
        self._observations.append(Observation("end", *self._place(), name))
        self._judge_on_host()

    def _judge_on_host(self) -> None:
        if not self._is_on_device or len(self._observations) > MOST_OBSERVATIONS:
            self.judge()

    @torch.no_grad()
    def _look(self, name: str, tensors: Iterable[tuple[str, Any]]) -> None:
        """Measure what is floating-point among ``tensors``."""
        for what, tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                measured = abs_min_max(tensor)
                self._is_on_device = self._is_on_device or not measured.is_cpu
                self._observations.append(Observation("tensor", *self._place(), name, what, measured))

    def _end(self, name: str) -> None:
        self._frames.append(self._begun.pop(name))
        self._num_frames += 1
        if self._now[0] in self._section.trace_batch_nums:
            logger.info(f"Step {self._now[0]}, micro-batch {self._now[1]}: " + "\n    ".join(self._frames[-1]))

    def _tell(self, name: str, what: str) -> str:
        step, micro = self._now
        told = f"step {step}, micro-batch {micro}: the first inf or nan is in {name}, {what}"
        shown = "\n".join("\n    ".join(frame) for frame in self._frames)
        logger.error(f"{told}\nThe last {len(self._frames)} of {self._num_frames} modules, abs min and max:\n{shown}")
        return told


def _numbered(what: str, values: Any) -> list[tuple[str, Any]]:
    return [(f"{what} {i}", value) for i, value in enumerate(tree_leaves(values))]
