"""One training step of one rank: forward, backward, clipping, update.

`Trainer` runs it on data, and `plan` under fake tensors. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchtitan_like.data.batches.batch import Batch
from torchtitan_like.distributed.data_parallel import GradientSync
from torchtitan_like.distributed.determinism import derive_seed, seed_device
from torchtitan_like.distributed.parallelize import ShardedModel
from torchtitan_like.distributed.world import World
from torchtitan_like.models.layers.head import LossWithMTP, total_of
from torchtitan_like.models.layers.kernels import documents_of
from torchtitan_like.optim.loss import sum_by_source
from torchtitan_like.optim.optimization import Optimization
from torchtitan_like.resilience.corruption import GradientCheck
from torchtitan_like.util.cuda_graphs import CapturedPass

if TYPE_CHECKING:
    from torchtitan_like.distributed.context_parallel import ContextParallel

# Tokens, labels, and the tokens' positions in their documents (None if not requested).
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class Feed:
    """Copies batches to this rank's device.

    context: shards sequences over the ranks of context parallelism; None: whole sequences.
    """

    def __init__(self, world: World, context: ContextParallel | None) -> None:
        self._to_device = world.to_device
        self._context = context

    def shard(self, batch: Batch) -> Tokens:
        """Return the batch (num_micro, local_batch, seq), sharded by context parallelism."""
        tensors = batch.tokens, batch.labels, batch.positions
        return tensors if self._context is None else self._context.shard(*tensors)

    def run(
        self,
        model: Callable[..., Any],
        batch: Batch,
        local: Tokens,
        micro: int | slice,
        *arguments: Any,
    ) -> Any:
        """Call a model, or a pipeline, with one micro-batch (rows, seq) on the device.

        local: `shard` of the batch. micro: a slice gives some micro-batches as one. arguments: more
        of the call.
        """
        tokens, labels, positions = (
            None if x is None else self._to_device(x[micro].view(-1, x.shape[-1])) for x in local
        )
        with documents_of(None if batch.positions is None else batch.positions[micro]):
            return model(tokens, labels, positions, *arguments)


class StepLosses(NamedTuple):
    """This rank's shares of a step's losses: sums over its tokens / valid tokens of all ranks.

    loss: 0-dim. by_source: (sources,) float64. mtp: of multi-token prediction, 0-dim, or None.
    """

    loss: torch.Tensor
    by_source: torch.Tensor
    mtp: torch.Tensor | None


class Update(NamedTuple):
    """grad_norm: before clipping. skip: 1 if the update was skipped, else 0. 0-dim, equal on all ranks."""

    grad_norm: torch.Tensor
    skip: torch.Tensor


@dataclass
class StepRunner:
    """The parts of a rank that a step uses, and the order in which it uses them.

    gate: decides from the gradient norm whether to skip the update; see `UpdateGate.gate`.
    num_sources: of the data whose losses are wanted separately; 0: none.
    on_micro_batch: is called with the number of each micro-batch before its forward.
    order_updates: is called before weights change; see `Checkpointer.order_updates`.
    gradient_check: None if no gradients are computed twice.
    captures: run forward and backward as CUDA graphs. One rank, without a pipeline.
    updating: is entered around clipping, and again around the update of weights and averages.
    """

    world: World
    seed: int
    model: ShardedModel
    optim: Optimization
    gate: Callable[..., torch.Tensor]
    max_norm: float
    num_sources: int
    on_micro_batch: Callable[[int], None]
    order_updates: Callable[[], None]
    gradient_check: GradientCheck | None = None
    captures: bool = False
    updating: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        self.feed = Feed(self.world, self.model.context)
        self.gradient_sync = GradientSync(self.model.parts[0], self.world.dims)
        self._pass: Callable[..., StepLosses] = self._run_eagerly
        if self.captures:
            self._pass = CapturedPass(self._compute_losses, self.optim.optimizer.parameters)

    def compute_gradients(
        self, step: int, batch: Batch, num_valid: int, *, num_tokens: int
    ) -> tuple[StepLosses, Tokens]:
        """Run forward and backward of every micro-batch of a step.

        num_valid: labels of the step on all ranks that are not ignored.
        num_tokens: of the step on all ranks.
        Returns the losses, and the batch on the host as this rank has used it.
        """
        optimizer = self.optim.optimizer
        self.optim.prepare(step, num_tokens)
        if not optimizer.is_atomic:  # the backward updates
            self.order_updates()
            if num_valid == 0:
                optimizer.step(skip=torch.ones((), device=self.world.device))
        local = self.feed.shard(batch)
        num_valid = max(1, num_valid)
        check = self.gradient_check
        if check is None or not check.num_passes(step):
            return self._run_micro_batches(batch, local, num_valid), local
        # With one micro-batch, or a pipeline, which runs all of them, the step itself is a pass.
        is_one_pass = self.model.pipeline is not None or len(batch.first_samples) == 1
        first = replace(batch, first_samples=batch.first_samples[:1])
        for _ in range(check.num_passes(step) - is_one_pass):
            self._run_micro_batches(first, local, num_valid)
            check.add_pass()
            self.optim.forget_pass()
        losses = self._run_micro_batches(batch, local, num_valid)
        if is_one_pass:
            check.add_pass()
        return losses, local

    def update(self, num_valid: int, *, is_logged: bool, is_trusted: bool = True) -> Update:
        """Clip the gradients, and update the weights unless the gate skips it.

        num_valid: see `compute_gradients`. is_logged: the step's metrics of experts are read.
        is_trusted: False if the gradients are known to be wrong, which skips the update.
        """
        optimizer = self.optim.optimizer
        with self.updating():
            grad_norm = optimizer.clip_gradients(self.max_norm)
        overflow = self.model.exchange.take_overflow(self.world.all_ranks)
        decision = self.gate(grad_norm, has_labels=num_valid > 0, overflow=overflow)
        # Without labels, momentum and weight decay alone would move the weights.
        skip = decision if num_valid and is_trusted else torch.ones_like(decision)
        self.order_updates()
        with self.updating():
            # Updates in the backward have been skipped; here they learn of the next steps.
            optimizer.step(skip=skip if optimizer.is_atomic else decision)
            self.optim.update_averages(skip)
        self.optim.finish_update(skip, is_logged=is_logged)
        return Update(grad_norm, skip)

    def _run_micro_batches(self, batch: Batch, local: Tokens, num_valid: int) -> StepLosses:
        """Run forward and backward of all micro-batches.

        The loss of a micro-batch is the sum of its token losses over the *global* number of valid
        tokens of the step. Gradients are summed over ranks. The update therefore equals the update
        for one mean over all tokens, on any topology. The loss of multi-token prediction is divided
        by the same number; `loss` does not contain it.

        The model computes the loss in chunks, so that no logits outlive the forward pass.
        """
        device = self.world.device
        by_source = torch.zeros(self.num_sources, dtype=torch.float64, device=device)
        sources = self.world.to_device(batch.sources) if self.num_sources else None
        if self.model.pipeline is not None:
            pipeline = self.model.pipeline
            seed = derive_seed(self.seed, batch.first_samples[0], pipeline.stage_numbers)
            seed_device(seed, device)
            loss, token_losses = self.feed.run(pipeline.step, batch, local, slice(None), num_valid)
            if sources is not None and token_losses is not None:
                by_source = sum_by_source(token_losses, sources.flatten(), self.num_sources)
            return StepLosses(loss, by_source, None)
        losses: list[StepLosses] = []
        for micro in range(len(batch.first_samples)):
            self.gradient_sync.prepare(is_last=micro == len(batch.first_samples) - 1)
            self.on_micro_batch(micro)
            seed_device(derive_seed(self.seed, batch.first_samples[micro]), device)
            own_sources = None if sources is None else sources[micro]
            losses.append(
                self.feed.run(
                    partial(self._pass, num_valid=num_valid), batch, local, micro, own_sources
                )
            )
        mtp_losses = [micro.mtp for micro in losses if micro.mtp is not None]
        return StepLosses(
            sum((micro.loss for micro in losses[1:]), start=losses[0].loss),
            sum((micro.by_source for micro in losses), start=by_source),
            sum(mtp_losses[1:], start=mtp_losses[0]) if mtp_losses else None,
        )

    def _run_eagerly(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor | None,
        sources: torch.Tensor | None,
        *,
        num_valid: int,
    ) -> StepLosses:
        return self._compute_losses(
            tokens, labels, positions, sources, lambda total: total / num_valid
        )

    def _compute_losses(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor | None,
        sources: torch.Tensor | None,
        divide: Callable[[torch.Tensor], torch.Tensor],
    ) -> StepLosses:
        """Run forward and backward of one micro-batch, whose tensors are on the device.

        sources: (rows,), of the rows; None if losses by source are not wanted.
        divide: divides a sum of token losses by the step's valid tokens.
        """
        output = self.model.parts[0](tokens, labels, positions)
        mtp = None
        if isinstance(output, LossWithMTP):
            output, mtp, mtp_weight = output
        total = total_of(output)
        if sources is None:
            by_source = total.new_zeros(0, dtype=torch.float64)
        else:
            by_source = sum_by_source(output.tokens, sources, self.num_sources)
        share = divide(total)
        loss = share.detach()
        if mtp is not None:
            mtp = divide(mtp)
            share = share + mtp_weight * mtp
        # A non-finite loss must reach every gradient, and so the global norm, on every rank.
        share.backward(share.detach() * 0 + 1)  # 1, or NaN
        return StepLosses(loss, by_source, None if mtp is None else mtp.detach())
