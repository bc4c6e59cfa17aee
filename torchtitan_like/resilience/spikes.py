"""Detect spikes of the loss and of the gradient norm by a robust score.

A spike never stops a run. Its update may be skipped: see `nonfinite.UpdateGate`.
"""

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

QUANTITIES = ("loss", "grad_norm")  # keys of metrics.jsonl
FAST_FRACTION = 8  # a spike is fast if it ends within 1 / FAST_FRACTION of the window


class SpikeWindow:
    """The last `size` values of a quantity, on their device, and the limit that a spike exceeds.

    The score is the modified z-score of Iglewicz and Hoaglin (How to Detect and Handle Outliers,
    1993, section 3.2), 0.6745 (value - median) / MAD. Only values above the median are spikes.
    MAD / 0.6745 is at least a thousandth of the median.

    A window that is not full has no limit. Non-finite values fill it but do not count.

    values: of `tolist`, oldest first.
    """

    def __init__(
        self, size: int, device: torch.device, values: Sequence[float | None] = ()
    ) -> None:
        # float64, like the norm: the norm of finite gradients may exceed the largest float32.
        self._values = torch.full((size,), torch.nan, device=device, dtype=torch.float64)
        newest = [torch.nan if value is None else value for value in values[-size:]]
        self._values[: len(newest)] = torch.tensor(newest, device=device, dtype=torch.float64)
        self.num_added = len(newest)

    @property
    def is_full(self) -> bool:
        return self.num_added >= len(self._values)

    def median(self) -> torch.Tensor:
        """Return the median of the finite values so far; NaN without any. 0-dim."""
        return self._values.nanmedian()

    def limit(self, threshold: float) -> torch.Tensor:
        """Return the value whose score is `threshold`; inf until the window is full. 0-dim."""
        if not self.is_full:
            return torch.full_like(self._values[0], torch.inf)
        median = self.median()
        mad = (self._values - median).abs().nanmedian()
        return median + threshold * torch.maximum(mad / 0.6745, 0.001 * median.abs())

    def add(self, value: torch.Tensor, unless: torch.Tensor | None = None) -> None:
        """Replace the oldest value by `value`, unless `unless` is 1. Both are 0-dim."""
        oldest = self._values[self.num_added % len(self._values)]
        value = torch.where(value.isfinite(), value, torch.nan)
        oldest.copy_(value if unless is None else torch.where(unless.bool(), oldest, value))
        self.num_added += 1

    def forget(self, num: int) -> None:
        """Undo the last `num` calls of `add`, whose `unless` was 1."""
        self.num_added -= num

    def tolist(self, num_later: int = 0) -> list[float | None]:
        """Return the values before the last `num_later`, oldest first. Waits for the device.

        A non-finite value becomes None, because JSON has no notation for it.
        """
        size = len(self._values)
        num = self.num_added - num_later
        ordered = self._values.roll(-(num % size)) if num >= size else self._values
        values: list[float] = ordered[:num].tolist()
        return [value if math.isfinite(value) else None for value in values]


@dataclass
class Spike:
    """A quantity that exceeds its limit since `step`. unpin: releases the checkpoint before it."""

    step: int
    limit: float
    peak: float
    unpin: Callable[[], None]


class SpikeDetector:
    """Detects spikes in the rows of metrics.jsonl. On rank 0.

    A spike ends when its quantity is at most the limit that it exceeded.

    | kind | lasts at most | checkpoint before it |
    | --- | --- | --- |
    | fast | an eighth of the window | unpinned |
    | slow | the window | stays pinned |
    | divergence | longer; a new window starts | stays pinned |

    write_event: (kind, **fields), to events.jsonl. pin_before: pins the newest checkpoint before a
    step, and returns a function that unpins it. write_bundle: (row, limits that its quantities
    exceed), for the first step of a spike.
    """

    def __init__(
        self,
        section: Resilience,
        write_event: Callable[..., None],
        pin_before: Callable[[int], Callable[[], None]],
        write_bundle: Callable[[Mapping[str, Any], dict[str, float]], None],
    ) -> None:
        self._threshold = section.spike_threshold
        self._size = section.spike_window
        self._write_event = write_event
        self._pin_before = pin_before
        self._write_bundle = write_bundle
        self._windows = {quantity: self._new_window() for quantity in QUANTITIES}
        self._spikes: dict[str, Spike] = {}

    def observe(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check the rows of the next steps. Does nothing if `resilience.spike_threshold` is 0."""
        if not self._threshold:
            return
        for row in rows:
            step = row["step"]
            if row["loss"] is None:  # a step without labels
                continue
            for quantity in QUANTITIES:
                self._check(quantity, step, float(row[quantity]))
            limits = {
                quantity: spike.limit
                for quantity, spike in self._spikes.items()
                if spike.step == step
            }
            if limits:
                self._write_bundle(row, limits)

    def _new_window(self) -> SpikeWindow:
        return SpikeWindow(self._size, torch.device("cpu"))

    def _check(self, quantity: str, step: int, value: float) -> None:
        spike = self._spikes.get(quantity)
        if spike is None:
            self._check_start(quantity, step, value)
        else:
            self._check_end(quantity, spike, step, value)

    def _check_start(self, quantity: str, step: int, value: float) -> None:
        window = self._windows[quantity]
        limit = float(window.limit(self._threshold))
        if not value > limit:  # also NaN
            window.add(torch.tensor(value, dtype=torch.float64))
            return
        self._spikes[quantity] = Spike(step, limit, value, self._pin_before(step))
        logger.warning(f"Spike: {quantity} is {value:.4g} at step {step}, above {limit:.4g}")
        self._write_event("spike", step=step, quantity=quantity, value=value, limit=limit)

    def _check_end(self, quantity: str, spike: Spike, step: int, value: float) -> None:
        num_steps = step - spike.step
        spike.peak = max(spike.peak, value)
        is_below = value <= spike.limit
        if not is_below and num_steps < self._size:
            return
        del self._spikes[quantity]
        description = (
            f"the spike of {quantity} at step {spike.step}, with its peak at {spike.peak:.4g}"
        )
        if not is_below:
            kind = "divergence"
            self._windows[quantity] = self._new_window()
            logger.error(
                f"DIVERGENCE: {description}, has lasted for {num_steps} steps "
                f"and {quantity} is {value:.4g}"
            )
        else:
            is_fast = num_steps <= self._size // FAST_FRACTION
            kind = "fast" if is_fast else "slow"
            logger.info(f"Spike over after {num_steps} steps ({kind}): {description}")
            if is_fast:
                spike.unpin()
        self._write_event(
            "spike_end",
            step=step,
            quantity=quantity,
            began=spike.step,
            steps=num_steps,
            peak=spike.peak,
            how=kind,
        )
