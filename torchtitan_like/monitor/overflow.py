"""Where the first inf or nan comes from: abs min and max of what goes into each module, of its weights, and what comes out.

After Stas Bekman's DebugUnderflowOverflow (Hugging Face transformers, debug_utils.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchtitan_like.monitor.log import logger

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Debug


class NonFiniteError(RuntimeError):
    """A module has met, or made, a number that is not finite."""


def abs_min_max(tensor: Tensor) -> list[float]:
    """Smallest and largest absolute value, nan where there is one. Of a DTensor those of this rank's part. Waits for the
    device."""
    local: Any = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    if local.numel() == 0:
        return [0.0, 0.0]
    wide = local.float() if local.element_size() < 4 else local
    numbers: list[float] = torch.stack(torch.aminmax(wide.abs())).tolist()
    return numbers


def detect_overflow(tensor: Tensor, name: str) -> bool:
    """Has ``tensor`` an inf or nan? Then say so, with its abs min and max, under its ``name``. Waits for the device."""
    smallest, largest = abs_min_max(tensor)
    if not math.isfinite(largest):
        logger.error(f"{name} has an inf or nan: abs min {smallest:.2e}, abs max {largest:.2e}, {tuple(tensor.shape)}")
    return not math.isfinite(largest)


class OverflowDetector:
    """Looks at weights, inputs and outputs of every module of ``parts`` as it runs; at the first number that is not finite the
    last modules of the micro-batch go into the log, and NonFiniteError is raised, on this rank alone. Slow: each module
    waits for the device.

    ``place`` tells the step and micro-batch. For the fields of ``section`` see there.
    """

    def __init__(self, parts: Iterable[nn.Module], section: Debug, place: Callable[[], tuple[int, int]]) -> None:
        self._section, self._place = section, place
        self._frames: deque[list[str]] = deque(maxlen=section.detect_overflow_frames)
        self._begun: dict[str, list[str]] = {}
        self._now, self._num_frames = (0, 0), 0
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

    def _before(self, name: str, module: nn.Module, *inputs: Any) -> None:
        if (now := self._place()) != self._now:
            self._now, self._num_frames = now, 0
            self._frames.clear()
            if 0 < self._section.abort_after_batch_num < now[0]:
                raise RuntimeError(f"debug.abort_after_batch_num = {self._section.abort_after_batch_num} ends the run")
        self._begun[name] = [name]
        self._look(name, module.named_parameters(recurse=False))
        self._look(name, _numbered("input", inputs))

    def _behind(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._look(name, _numbered("output", output))
        self._end(name)

    @torch.no_grad()
    def _look(self, name: str, tensors: Iterable[tuple[str, Any]]) -> None:
        """Add what is floating-point among ``tensors`` to the module's frame."""
        for what, tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                smallest, largest = abs_min_max(tensor)
                self._begun[name].append(f"{smallest:.2e}  {largest:.2e}  {what}")
                if not math.isfinite(largest):
                    self._end(name)
                    raise NonFiniteError(self._tell(name, what))

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
