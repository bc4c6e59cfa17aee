"""What changes the weights of a rank: optimizer, schedule, averages, and the balance of experts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_like.optim.balancing import ExpertBalancer
from torchtitan_like.optim.ema import AveragedWeights
from torchtitan_like.optim.optimizer import Optimizer, kept_bytes
from torchtitan_like.optim.schedule import SavedSchedule, Schedule, UserSchedule

if TYPE_CHECKING:
    from torchtitan_like.util.plan_file import ModuleBytes

logger = logging.getLogger()
Tensor = torch.Tensor


@dataclass(frozen=True)
class Optimization:
    """The parts that a step's update uses, and the state that checkpoints keep of them.

    ema: None without `[ema]`. balancer: None for a dense model. after_update: called after each
    change of the weights, for float8; None without it.
    """

    optimizer: Optimizer
    schedule: Schedule | UserSchedule
    ema: AveragedWeights | None
    balancer: ExpertBalancer | None
    after_update: Callable[[], None] | None

    # ---- a step

    def prepare(self, step: int, num_tokens: int) -> None:
        """Call before the forward of a step. num_tokens: of the step on all ranks."""
        self.optimizer.scale_lr(self.schedule.factor(step))
        self.optimizer.zero_grad()
        if self.balancer is not None:
            self.balancer.prepare(num_tokens)

    def forget_pass(self) -> None:
        """Forget gradients and routing of a pass that is run again."""
        self.optimizer.zero_grad()
        if self.balancer is not None:
            self.balancer.forget_choices()

    def update_averages(self, skip: Tensor) -> None:
        """Add the weights to their averages, unless `skip` (0-dim, 0 or 1) is 1."""
        if self.ema is not None:
            self.ema.update(skip)

    def finish_update(self, skip: Tensor, *, is_logged: bool) -> None:
        """Balance the experts after the weights have changed, unless `skip` is 1.

        is_logged: the step's metrics of experts are read.
        """
        if self.balancer is not None:
            self.balancer.update(skip, is_logged=is_logged)
        self.refresh()

    def refresh(self) -> None:
        """Recompute what depends on the weights, after they have changed."""
        if self.after_update is not None:
            self.after_update()

    @property
    def expert_layers(self) -> list[int]:
        """The numbers of this rank's layers with experts."""
        return [] if self.balancer is None else [layer.number for layer in self.balancer.layers]

    def expert_loads(self) -> dict[str, Any]:
        """Return the routing of a logged step (`ExpertLoads`); {} for a dense model."""
        return {} if self.balancer is None else self.balancer.read()._asdict()

    # ---- state

    def states(self, first_step: Callable[[], int]) -> dict[str, Any]:
        """Return the parts with a state but the averages, by their names in a checkpoint.

        first_step: returns the first step that this run will train.
        """
        schedule = SavedSchedule(self.schedule, first_step, self.optimizer.peak_lr)
        return {"optimizer": self, "lr_scheduler": schedule}

    def average_states(self) -> dict[str, AveragedWeights]:
        """Return the averages with their name in a checkpoint; none without `[ema]`."""
        return {} if self.ema is None else {"ema": self.ema}

    def summary(self) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says of these parts."""
        return {} if self.ema is None else {"ema": self.ema.summary()}

    def after_load(self, loaded: Collection[str], step: int) -> None:
        """Start the averages unless they are `loaded`, and recompute what depends on the weights.

        loaded: names of states. step: of the loaded weights, 0 for new ones.
        """
        if self.ema is not None and "ema" not in loaded:
            self.ema.start()
            logger.info(f"EMA: the average starts from the weights of step {step}")
        self.refresh()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state of the optimizer and of the experts' balance."""
        balance = {} if self.balancer is None else self.balancer.state_dict()
        return {**self.optimizer.state_dict(), **balance}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a loaded state into the live one."""
        self.optimizer.load_state_dict(state_dict)
        if self.balancer is not None:
            self.balancer.load_state_dict(state_dict)

    def named_averages(self) -> Mapping[str, Tensor]:
        """Return the live averages by `average.<parameter>`; none without `[ema]`."""
        return {} if self.ema is None else self.ema.named_averages()

    def replicated(self) -> list[tuple[str, Tensor]]:
        """Return the weights, their averages, and the state that balances experts, by name."""
        balance = {} if self.balancer is None else self.balancer.named_state()
        return [*self.optimizer.named, *self.named_averages().items(), *balance.items()]

    def kept_bytes(self) -> ModuleBytes:
        """Return what this rank keeps in memory between steps."""
        return kept_bytes(self.optimizer, self.named_averages())

    def describe(self) -> list[str]:
        """Return lines for the log."""
        average = [] if self.ema is None else [self.ema.describe()]
        return [*self.optimizer.describe(), *average]
