"""Steps with bad numbers: their update is left out on the device, and the host learns of them without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from torchtitan_like.resilience.host_copy import HostCopy
from torchtitan_like.resilience.spikes import Window

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Resilience

Place = TypeVar("Place")


class NonFiniteStateError(Exception):
    """The state to save holds an inf or nan: no run can go on from it."""


@torch.no_grad()
def nonfinite_names(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the tensors with an inf or nan in this rank's shard. Waits for the device.

    A 2-norm is the cheapest pass over a tensor, but it may overflow. Only tensors whose norm is not
    finite are searched element by element.
    """
    groups: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, tensor in named:
        local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.is_floating_point():
            groups.setdefault((local.device, local.dtype), {})[name] = local.detach()
    names = []
    for tensors in groups.values():
        norms = torch.stack(torch._foreach_norm(list(tensors.values())))
        are_finite = norms.isfinite().tolist()
        for (name, tensor), is_finite in zip(tensors.items(), are_finite, strict=True):
            if not is_finite and not tensor.isfinite().all():
                names.append(name)
    return names


class BadNumbers(Generic[Place]):
    """Decides which updates are left out, equally on every rank, as it looks at the global gradient norm alone.

    With ``on_nonfinite = "skip"`` so many steps in a row may be left out as `max_nonfinite_in_a_row`. One more, and from there
    on every update is, so that no weight changes any more before the host has seen it and all ranks stop. With ``on_spike =
    "skip"`` spikes of the norm are left out too; they end no run. ``place`` is where the run was before the first step,
    ``state`` what `state_dict` was there.
    """

    def __init__(self, section: Resilience, device: torch.device, place: Place, state: Mapping[str, Any]) -> None:
        self._limit = section.max_nonfinite_in_a_row if section.on_nonfinite == "skip" else 0
        self._in_a_row = torch.full((), float(state.get("nonfinite_in_a_row", 0)), device=device)
        skips = section.on_spike == "skip" and section.spike_threshold > 0
        self._threshold = section.spike_threshold
        self._norms = Window(section.spike_window, device, state.get("grad_norms", ())) if skips else None
        self._halted = torch.zeros((), device=device)
        self._recent = deque([(place, HostCopy(self._halted), HostCopy(self._in_a_row))], maxlen=4)

    def gate(self, grad_norm: torch.Tensor) -> torch.Tensor:
        """1 where this step's update is to be left out, else 0; all 0-dim. A non-finite loss has reached the norm."""
        is_bad = (grad_norm * 0).ne(0)  # a product that is 0 or NaN; `isfinite` takes more kernels
        self._in_a_row = (self._in_a_row + 1) * is_bad
        # Sticky: the weights stay as they are from here on.
        self._halted = torch.maximum(self._halted, self._in_a_row > self._limit)
        left_out = torch.maximum(is_bad, self._halted)
        if self._norms is not None:
            left_out = torch.maximum(left_out, (grad_norm > self._norms.limit(self._threshold)).float())
            self._norms.add(grad_norm, unless=self._halted)
        return left_out

    def passed(self, place: Place) -> None:
        """The step that was gated last has led here."""
        if len(self._recent) == self._recent.maxlen:
            self._recent.popleft()  # first, so that its page-locked memory serves the new copies
        self._recent.append((place, HostCopy(self._halted), HostCopy(self._in_a_row)))

    def have_halted(self) -> bool:
        """Had the run halted two steps ago? By now the device is done with that step: this does not wait."""
        return len(self._recent) > 1 and bool(self._recent[-2][1].read())

    def last_good(self) -> Place | None:
        """Where the run was before it halted; None when it has not. Waits for the device."""
        good = self._good()
        return None if len(good) == len(self._recent) else good[-1][0]

    def state_dict(self) -> dict[str, Any]:
        """What later decisions depend on, of where the run was last good. Waits for the device."""
        good = self._good()
        norms = {} if self._norms is None else {"grad_norms": self._norms.tolist(len(self._recent) - len(good))}
        return {"nonfinite_in_a_row": int(good[-1][1].read()), **norms}

    def _good(self) -> list[tuple[Place, HostCopy]]:
        return [(place, in_a_row) for place, halted, in_a_row in self._recent if not halted.read()]
