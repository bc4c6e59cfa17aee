"""What keeps wrong numbers out of the weights. A part whose setting is off does nothing."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import nn

from torchtitan_like.build import build_update_gate
from torchtitan_like.checkpoint.stateful import Progress
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.monitor.log import logger
from torchtitan_like.monitor.metrics import Metrics
from torchtitan_like.monitor.overflow import OverflowDetector
from torchtitan_like.optim.optimization import Optimization
from torchtitan_like.replay_bundle import ReplayBundleWriter
from torchtitan_like.resilience.agreement import Request
from torchtitan_like.resilience.corruption import GradientCheck, Replicas, WrongGradientsError
from torchtitan_like.resilience.nonfinite import Reruns
from torchtitan_like.resilience.spikes import SpikeDetector
from torchtitan_like.resolved import RankRun

Input = TypeVar("Input")


class Guard(Generic[Input]):
    """Skips, holds or stops updates by wrong numbers.

    | part | what it guards against |
    | --- | --- |
    | `update_gate` | non-finite numbers and spikes: the update is skipped or held |
    | `reruns` | a held step, which runs again from its own inputs |
    | `gradient_check` | wrong kernels: the same passes must give the same gradients |
    | `replicas` | weights that differ where they should be equal |
    | `check_overflow` | an inf or nan in a module, which it names (`debug.detect_overflow`) |

    progress: after the loaded step.
    """

    def __init__(
        self,
        run: RankRun,
        parts: nn.ModuleList,
        optim: Optimization,
        batches: TrainBatches,
        metrics: Metrics,
        progress: Progress,
    ) -> None:
        self._run = run
        self._optim = optim
        self._attempt = run.attempt
        config, world = run.config, run.world
        self.restore(progress, run.origin.stored("numbers") or {})
        self.reruns: Reruns[Input] = Reruns(run.attempt.event)
        self.gradient_check: GradientCheck | None = None
        if optim.optimizer.is_atomic:
            self.gradient_check = GradientCheck(
                config.resilience.verify_gradients_freq,
                world.step_group,
                optim.optimizer.named,
                first_step=progress.step + 1,
                measures=world.device.type == "cuda",
            )
        self.replicas = Replicas(
            config.resilience.replica_check_freq, world, optim.replicated(), progress.step
        )
        self._overflow: OverflowDetector | None = None
        if config.debug.detect_overflow:
            self._overflow = OverflowDetector(
                parts, config.debug, run.position.step_and_micro_batch
            )
        self._bundles: ReplayBundleWriter | None = None
        if world.rank == 0:
            self._bundles = ReplayBundleWriter(run, batches)
            spikes = SpikeDetector(
                config.resilience,
                write_event=run.attempt.event,
                pin_before=run.checkpointer.pin_before,
                write_bundle=self._bundles.write_spike,
            )
            metrics.observers += [self._bundles.observe, spikes.observe, self.reruns.observe]

    def write_bundle(self, step: int) -> None:
        """Write the replay bundle of the non-finite step that ends the run. On rank 0."""
        if self._bundles is not None:
            self._bundles.write(step)

    def restore(self, progress: Progress, numbers: dict[str, Any]) -> None:
        """Continue from the progress and numbers of a checkpoint, or of another replica group."""
        section = self._run.config.resilience
        self.update_gate = build_update_gate(section, self._optim, progress, numbers)

    def gate(
        self, grad_norm: torch.Tensor, *, has_labels: bool, overflow: torch.Tensor | None
    ) -> torch.Tensor:
        """Return 1 if this step's update is to be skipped, else 0: see `UpdateGate.gate`."""
        return self.update_gate.gate(grad_norm, has_labels=has_labels, overflow=overflow)

    def requests(self) -> list[Request]:
        """Return what this rank asks of all ranks. Does not wait for the device."""
        wanted = {
            Request.BAD_NUMBERS: self.update_gate.was_frozen(),
            Request.RUN_AGAIN: self.update_gate.was_held(),
        }
        return [request for request, is_wanted in wanted.items() if is_wanted]

    def are_gradients_right(self, step: int) -> bool:
        """Compare the passes of a step whose gradients are checked. A collective of such steps.

        Raises WrongGradientsError if they differ and `resilience.on_nonfinite` is "stop".
        """
        check = self.gradient_check
        if check is None or not check.num_passes(step):
            return True
        try:
            check.compare(step)
        except WrongGradientsError as error:
            if self._run.world.rank == 0:
                self._attempt.event("wrong_gradients", step=step, parameters=error.by_rank)
            if self._run.config.resilience.on_nonfinite == "stop":
                raise
            logger.error(str(error))
            return False
        return True

    def check_overflow(self) -> None:
        """Raise NonFiniteError if a module has had an inf or nan. Waits for the device."""
        if self._overflow is not None:
            self._overflow.evaluate()
