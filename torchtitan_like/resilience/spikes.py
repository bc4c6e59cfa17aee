"""Spikes of the loss and of the gradient norm: found by a robust score, told of, never a reason to stop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Resilience

logger = logging.getLogger()

WATCHED = ("loss", "grad_norm")


class Window:
    """The last ``size`` values of a quantity, on the device where they are made, and how far above them a new one lies.

    The score is the modified z-score of Iglewicz and Hoaglin (How to Detect and Handle Outliers, 1993, section 3.2), 0.6745
    (value - median) / MAD, upwards alone; a thousandth of the median stands in for a smaller MAD / 0.6745. A window that is not
    full yet finds nothing. What is not finite takes a place and counts for nothing.
    """

    def __init__(self, size: int, device: torch.device, values: Sequence[float | None] = ()) -> None:
        # float64, as the gradient norm: that of finite gradients may be larger than the largest float32
        self._values = torch.full((size,), torch.nan, device=device, dtype=torch.float64)
        known = [torch.nan if value is None else value for value in values[-size:]]
        self._values[: len(known)] = torch.tensor(known, device=device, dtype=torch.float64)
        self._num = len(known)

    @property
    def is_full(self) -> bool:
        return self._num >= len(self._values)

    def limit(self, threshold: float) -> torch.Tensor:
        """The value with a score of ``threshold``: 0-dim, inf as long as the window is not full."""
        if not self.is_full:
            return torch.full_like(self._values[0], torch.inf)
        median = self._values.nanmedian()
        mad = (self._values - median).abs().nanmedian()
        return median + threshold * torch.maximum(mad / 0.6745, 0.001 * median.abs())

    def add(self, value: torch.Tensor, unless: torch.Tensor | None = None) -> None:
        """One more value (0-dim), in the place of the oldest; that stays there where ``unless`` (0-dim) is 1."""
        place, value = self._values[self._num % len(self._values)], torch.where(value.isfinite(), value, torch.nan)
        place.copy_(value if unless is None else torch.where(unless.bool(), place, value))
        self._num += 1

    def tolist(self, num_later: int = 0) -> list[float | None]:
        """As they were before the last ``num_later``, oldest first, for JSON: None is not finite. Waits for the device."""
        num = self._num - num_later
        values: list[float] = self._values.roll(-(num % len(self._values)) * (num >= len(self._values)))[:num].tolist()
        return [value if math.isfinite(value) else None for value in values]


@dataclass
class Spike:
    """A quantity above its limit since ``step``; ``unpin`` lets go of the checkpoint that was pinned for it."""

    step: int
    limit: float
    peak: float
    unpin: Callable[[], None]


class SpikeWatch:
    """Looks at the rows of metrics.jsonl as they are written; for one rank.

    tell: writes an event (kind, fields). bundle: leaves what replays a step, from its row and the
    limits that its spiking quantities exceed.
    pin: keeps the newest checkpoint before a step, and returns what undoes that. A spike
    ends when its quantity is back below the limit of the window before it: fast within an eighth of the window's length, slow
    within all of it; one that lasts longer is a divergence, and the window begins anew. A fast one's pin is undone.
    """

    def __init__(
        self,
        section: Resilience,
        tell: Callable[..., None],
        pin: Callable[[int], Callable[[], None]],
        bundle: Callable[[Mapping[str, Any], dict[str, float]], None],
    ) -> None:
        self._threshold, self._size = section.spike_threshold, section.spike_window
        self._tell, self._pin, self._bundle = tell, pin, bundle
        self._windows = {name: self._new_window() for name in WATCHED}
        self._open: dict[str, Spike] = {}

    def look(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take note of the next steps."""
        for row in rows if self._threshold else ():
            for name in WATCHED:
                self._look(name, row["step"], float(row[name]))
            begun = {n: s.limit for n, s in self._open.items() if s.step == row["step"]}
            if begun:
                self._bundle(row, begun)

    def _new_window(self) -> Window:
        return Window(self._size, torch.device("cpu"))

    def _look(self, name: str, step: int, value: float) -> None:
        window, spike = self._windows[name], self._open.get(name)
        if spike is None:
            limit = float(window.limit(self._threshold))
            if not value > limit:
                window.add(torch.tensor(value, dtype=torch.float64))
                return
            self._open[name] = Spike(step, limit, value, self._pin(step))
            logger.warning(f"Spike: {name} is {value:.4g} at step {step}, above {limit:.4g}")
            self._tell("spike", step=step, quantity=name, value=value, limit=limit)
            return
        lasted = step - spike.step
        spike.peak = max(spike.peak, value)
        if not value <= spike.limit and lasted < self._size:
            return
        del self._open[name]
        kind = "divergence" if not value <= spike.limit else "fast" if lasted <= self._size // 8 else "slow"
        told = f"the spike of {name} at step {spike.step}, with its peak at {spike.peak:.4g}"
        if kind == "divergence":
            logger.error(f"DIVERGENCE: {told}, has lasted for {lasted} steps and {name} is {value:.4g}")
            self._windows[name] = self._new_window()
        else:
            logger.info(f"Over after {lasted} steps ({kind}): {told}")
        if kind == "fast":
            spike.unpin()
        self._tell("spike_end", step=step, quantity=name, began=spike.step, steps=lasted, peak=spike.peak, how=kind)
