"""Steps with bad numbers: their update is left out on the device, and the host learns of them without waiting."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import torch

from torchtitan_like.resilience.host_copy import HostCopy

Place = TypeVar("Place")


class BadNumbers(Generic[Place]):
    """Decides which updates are left out, equally on every rank, as it looks at the global gradient norm alone.

    ``limit``: so many steps in a row may be left out. One more, and from there on every update is, so that no weight changes
    any more before the host has seen it and all ranks stop. ``place`` is where the run was before the first step.
    """

    def __init__(self, limit: int, device: torch.device, place: Place, num_in_a_row: int = 0) -> None:
        self._limit = limit
        self._in_a_row = torch.full((), float(num_in_a_row), device=device)
        self._halted = torch.zeros((), device=device)
        self._recent = deque([(place, HostCopy(self._halted), HostCopy(self._in_a_row))], maxlen=4)

    def gate(self, grad_norm: torch.Tensor) -> torch.Tensor:
        """1 where this step's update is to be left out, else 0; all 0-dim. A non-finite loss has reached the norm."""
        is_bad = grad_norm.isfinite().logical_not().float()
        self._in_a_row = (self._in_a_row + 1) * is_bad
        # Sticky: the weights stay as they are from here on.
        self._halted = torch.maximum(self._halted, (self._in_a_row > self._limit).float())
        return torch.maximum(is_bad, self._halted)

    def passed(self, place: Place) -> None:
        """The step that was gated last has led here."""
        self._recent.append((place, HostCopy(self._halted), HostCopy(self._in_a_row)))

    def have_halted(self) -> bool:
        """Had the run halted two steps ago? By now the device is done with that step: this does not wait."""
        return len(self._recent) > 1 and bool(self._recent[-2][1].read())

    def last_good(self) -> Place | None:
        """Where the run was before it halted; None when it has not. Waits for the device."""
        good = self._good()
        return None if len(good) == len(self._recent) else good[-1][0]

    def num_in_a_row(self) -> int:
        """How many steps had been left out in a row when the run was last good. Waits for the device."""
        return int(self._good()[-1][1].read())

    def _good(self) -> list[tuple[Place, HostCopy]]:
        return [(place, in_a_row) for place, halted, in_a_row in self._recent if not halted.read()]
