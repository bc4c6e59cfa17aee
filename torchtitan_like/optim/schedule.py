"""The learning rate as a pure function of the step: warm-up, stable, decay (WSD; Hu et al. 2024, arXiv 2404.06395)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import LRScheduler

logger = logging.getLogger()

# Share of the way down from the peak, left at `progress` in [0, 1] of the decay.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


@dataclass(frozen=True)
class Schedule:
    """Multiplies the peak learning rate.

    Steps count from 1. With w warm-up steps, horizon T and d decay steps (T - w, or round(T * decay_ratio)):
    step s <= w has s / w; then 1; the last d steps up to T fall along the decay curve to `min_lr_factor`, where the
    rate stays beyond T. The horizon does not depend on how many steps this run makes, so that a run may be extended.
    """

    warmup_steps: int
    decay_steps: int
    horizon: int
    decay_type: str
    min_lr_factor: float

    def factor(self, step: int) -> float:
        """The multiplier of step `step` >= 1."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        into_decay = step - (self.horizon - self.decay_steps)
        if into_decay <= 0 or self.decay_steps == 0:
            return 1.0
        left = DECAYS[self.decay_type](min(1.0, into_decay / self.decay_steps))
        return self.min_lr_factor + (1.0 - self.min_lr_factor) * left


def build_schedule(section: LRScheduler, training_steps: int) -> Schedule:
    """Make the schedule of `[lr_scheduler]`; `total_steps` unset means this run's length.

    A warm-up longer than the horizon is cut to it, and a decay that would start within the warm-up starts after it
    (preflight has warned of both).
    """
    horizon = section.total_steps or training_steps
    warmup = min(section.warmup_steps, horizon)
    decay = horizon - warmup
    if section.decay_ratio is not None:
        decay = min(decay, round(horizon * section.decay_ratio))
    return Schedule(warmup, decay, horizon, section.decay_type, section.min_lr_factor)


@dataclass(frozen=True)
class SavedSchedule:
    """The schedule in a checkpoint: only compared on load, since the config's own is what counts.

    `first_step` tells the first one that will be made, `peak_lr` is the rate that the schedule multiplies.
    """

    schedule: Schedule
    first_step: Callable[[], int]
    peak_lr: float

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(asdict(self.schedule))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Warn, with the learning rate under both, when the checkpoint was made under another schedule."""
        old = Schedule(**json.loads(state_dict["json"]))
        step = self.first_step()
        if old != self.schedule:
            logger.warning(
                f"The learning-rate schedule has changed: at step {step} the old one (horizon {old.horizon} steps) "
                f"gives {self.peak_lr * old.factor(step):.3e}, the new one (horizon {self.schedule.horizon}) "
                f"{self.peak_lr * self.schedule.factor(step):.3e}. Set lr_scheduler.total_steps to keep the horizon "
                "of a run that grows"
            )
