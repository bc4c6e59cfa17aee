"""Warmup-stable-decay (WSD) learning-rate schedule, a pure function of the step.

Source: Hu et al. 2024, arXiv:2404.06395.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torchtitan_like.extensions.protocols import LearningRateSchedule, Settings
from torchtitan_like.extensions.user_code import ExtensionError, resolve_name
from torchtitan_like.util.modules import is_dotted

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import LRScheduler

logger = logging.getLogger()

# Decay multiplier, from 1 to 0, at `progress` in [0, 1] of the decay steps.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


@dataclass(frozen=True)
class Schedule:
    """Multiplier of the peak learning rate for each step.

    Steps count from 1. Let w be the warmup steps, T the horizon, and d the decay steps, which are
    T - w or round(T * decay_ratio):

    * warmup, step s <= w: s / w;
    * stable, w < s <= T + 1 - d: 1;
    * decay, T + 1 - d < s <= T + 1: falls along the decay curve from 1 to `min_lr_factor`;
    * s > T + 1: `min_lr_factor`, or 1 if d = 0.

    The minimum belongs to step T + 1, as in TorchTitan: the last step must not have a rate of 0.

    The horizon does not depend on `training.steps` if `total_steps` is set. A run can then be
    extended without a change of its schedule.
    """

    warmup_steps: int
    decay_steps: int
    horizon: int
    decay_type: str
    min_lr_factor: float
    end_of_decay: int  # the step at which the decay reaches the minimum

    def saved(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores."""
        return asdict(self)

    def factor(self, step: int) -> float:
        """Return the multiplier of step `step` >= 1."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        decay_step = step - (self.end_of_decay - self.decay_steps)
        if decay_step <= 0 or self.decay_steps == 0:
            return 1.0
        multiplier = DECAYS[self.decay_type](min(1.0, decay_step / self.decay_steps))
        return self.min_lr_factor + (1.0 - self.min_lr_factor) * multiplier


@dataclass(frozen=True)
class UserSchedule:
    """A schedule of user code. Its warmup is unknown."""

    name: str
    function: LearningRateSchedule
    horizon: int
    settings: Settings

    warmup_steps: ClassVar[int] = 0

    def saved(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores. Its configuration has the user's sections."""
        return {"name": self.name, "horizon": self.horizon}

    def factor(self, step: int) -> float:
        """Return the multiplier of step `step` >= 1. Raises ExtensionError for an invalid one."""
        factor = self.function(step, self.horizon, self.settings)
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or not math.isfinite(factor) or factor < 0:
            raise ExtensionError(
                f"the learning-rate schedule {self.name} returns {factor!r} for step {step:,} of "
                f"{self.horizon:,}. Expected a finite number >= 0: correct it"
            )
        return float(factor)


def build_schedule(
    section: LRScheduler, training_steps: int, settings: Settings
) -> Schedule | UserSchedule:
    """Build the schedule of `[lr_scheduler]`. The default horizon is `training_steps`.

    settings: the config sections of user code.

    The warmup is at most as long as the horizon. The decay starts after the warmup. `titan check`
    warns if that shortens the warmup or the decay.
    """
    horizon = section.total_steps or training_steps
    if is_dotted(section.name):
        function = resolve_name(section.name, "learning-rate schedule")
        return UserSchedule(section.name, function, horizon, settings)
    warmup = min(section.warmup_steps, horizon)
    decay = horizon - warmup
    if section.decay_ratio is not None:
        decay = min(decay, round(horizon * section.decay_ratio))
    return Schedule(
        warmup_steps=warmup,
        decay_steps=decay,
        horizon=horizon,
        decay_type=section.decay_type,
        min_lr_factor=section.min_lr_factor,
        end_of_decay=horizon + 1,
    )


@dataclass(frozen=True)
class SavedSchedule:
    """The checkpoint state of the schedule. Loading compares it and never changes the schedule.

    first_step: returns the first step that this run will train.
    peak_lr: the learning rate that the schedule multiplies.
    """

    schedule: Schedule | UserSchedule
    first_step: Callable[[], int]
    peak_lr: float

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(self.schedule.saved())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Log a warning if the checkpoint has another schedule, with both learning rates.

        The learning rates of another schedule of user code are unknown.
        """
        saved = json.loads(state_dict["json"])
        if "name" in saved:
            if saved != self.schedule.saved():
                logger.warning(
                    "The learning-rate schedule has changed since the checkpoint: "
                    f"{saved} before, {self.schedule.saved()} now"
                )
            return
        # Checkpoints without `end_of_decay` reached the minimum at the horizon.
        old = Schedule(**{"end_of_decay": saved["horizon"], **saved})
        step = self.first_step()
        if old != self.schedule:
            logger.warning(
                "The learning-rate schedule has changed since the checkpoint. "
                f"Learning rate at step {step}: {self.peak_lr * old.factor(step):.3e} before "
                f"(horizon {old.horizon} steps), {self.peak_lr * self.schedule.factor(step):.3e} "
                f"now (horizon {self.schedule.horizon} steps). To extend a run without a change of "
                "its horizon, set lr_scheduler.total_steps"
            )
