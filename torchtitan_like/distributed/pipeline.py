"""Pipeline parallelism: one schedule of torch.distributed.pipelining runs all micro-batches of a step.

Micro-batches of gradient accumulation and of the pipeline are the same. Only this module decides
what is accumulated, and that gradients are reduced once, after the last micro-batch. Stages pass on
local tensors: hidden states (rows, positions, width), then the `stage_tensors` of the `ModelSpec`.
All shapes are known before anything is sent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from torchtitan_like.distributed.schedule_view import timeline_lines
from torchtitan_like.distributed.stages import SCHEDULES, StagePlan

if TYPE_CHECKING:
    from torchtitan_like.models.spec import ModelSpec, StageTensor


HIDDEN = "hidden states"  # the name of the first tensor that stages pass on


class _Shape(NamedTuple):
    """Sizes of one call of the pipeline: micro-batches of `rows` samples with `seq` positions."""

    num_micro_batches: int
    rows: int
    seq: int
    trains: bool


def hidden_width(model: nn.Module, spec: ModelSpec) -> int:
    """Return the width of hidden states, from the weight of the embedding or the head."""
    patterns = [pattern for pattern, role in spec.sharding if role in ("vocab_embedding", "output")]
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return parameter.shape[-1]
    raise ValueError(
        f'{spec.name!r} has no "vocab_embedding" or "output" weight, which gives the width of hidden '
        "states: add the role to its sharding table"
    )


class Pipeline:
    """This rank's stages, and the schedules that run them."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        plan: StagePlan,
        group: dist.ProcessGroup,
        *,
        neighbor_groups: Mapping[int, dist.ProcessGroup],
        device: torch.device,
        microbatch_size: int,
        width: int,
        dtype: torch.dtype,
        stage_tensors: Sequence[StageTensor] = (),
        sequence_shards: int = 1,
    ) -> None:
        """Prepare the stages `parts`, in the order of `plan.ranks[rank in group]`.

        They must be parallelized and materialized before the first step.

        width, dtype: of the hidden states between stages.
        stage_tensors: what stages pass on in addition to hidden states.
        sequence_shards: number of shards of the positions of hidden states (sequence parallelism).
        """
        self.parts = list(parts)
        self.plan = plan
        self.group = group
        self.device = device
        self.neighbor_groups = neighbor_groups
        self.microbatch_size = microbatch_size
        self.sequence_shards = sequence_shards
        for part in self.parts:
            part.sequence_shards = sequence_shards  # type: ignore[assignment]
        self.width = width
        self.dtype = dtype
        self.stage_tensors = stage_tensors
        self.stage_numbers = plan.ranks[dist.get_rank(group)]
        self.has_first = 0 in self.stage_numbers
        self.has_last = plan.num_stages - 1 in self.stage_numbers
        self._num_valid = 1
        self._schedules: dict[_Shape, _Runner] = {}

    def connect(self) -> None:
        """Create the group's communicator before the first step. A collective.

        NCCL creates it at the first use, on all ranks together. A schedule's first use is a message
        between two ranks, which would wait forever for the others.
        """
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def lines(self, num_micro_batches: int) -> list[str]:
        """Return the timeline and bubble of a step, for the log."""
        name = self.plan.csv or self.plan.schedule
        return timeline_lines(name, self.plan.order(num_micro_batches))

    def step(
        self, tokens: Tensor, labels: Tensor, positions: Tensor | None, num_valid: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run forward and backward of all micro-batches.

        Gradients are accumulated, and reduced over data-parallel ranks once. tokens, labels, and
        positions (rows, seq) cover the whole step and are equal on every rank of the pipeline; rows
        is a multiple of the micro-batch size.

        Returns this rank's share of the loss: sum of token losses / `num_valid`, 0-dim, detached;
        zero without the last stage. A micro-batch with a non-finite loss makes every gradient of
        every stage NaN. Also returns the loss of each token (rows * seq,), or None if this rank
        lacks the last stage or its head does not return them.
        """
        self._num_valid = num_valid
        loss, token_losses = self._run(tokens, labels, positions, self.microbatch_size, trains=True)
        return loss, torch.cat(token_losses) if token_losses else None

    @torch.no_grad()
    def evaluate(
        self, tokens: Tensor, labels: Tensor, positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the sum of token losses, 0-dim; zero without the last stage.

        Also returns the loss of each token (rows * seq,), if this rank's head returns them. Numbers of
        rows and positions may differ from training.
        """
        self._num_valid = 1
        rows = math.gcd(tokens.shape[0], self.microbatch_size)
        loss, token_losses = self._run(tokens, labels, positions, rows, trains=False)
        return (loss, torch.cat(token_losses)) if token_losses else loss

    def _run(
        self, tokens: Tensor, labels: Tensor, positions: Tensor | None, rows: int, *, trains: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the sum of the losses of all micro-batches, and the token losses of each."""
        shape = _Shape(tokens.shape[0] // rows, rows, tokens.shape[1], trains)
        kwargs = {"labels": labels} if self.has_last else {}
        if positions is not None:
            kwargs["positions"] = positions
        losses: list[Tensor] = []
        token_losses = self._runner(shape).run(
            *([tokens] if self.has_first else []),
            target=labels if self.has_last else None,
            losses=losses,
            return_outputs=False,
            **kwargs,
        )
        dtype = torch.promote_types(self.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=self.device)
        for loss in losses:
            total += loss.detach()
        return total, token_losses

    def _runner(self, shape: _Shape) -> _Runner:
        """Return the schedule of this shape; the newest for training and for evaluation are cached."""
        if shape not in self._schedules:
            self._schedules = {
                cached: runner
                for cached, runner in self._schedules.items()
                if cached.trains != shape.trains
            }
            self._schedules[shape] = self._build(shape)
        return self._schedules[shape]

    def _build(self, shape: _Shape) -> _Runner:
        name = self.plan.schedule
        if not shape.trains:  # a schedule of the same stages for any number of micro-batches
            name = "ZBVZeroBubble" if SCHEDULES[name].is_v_shaped else "LoopedBFS"
        follows_file = shape.trains and self.plan.text != ""
        kind: Any = _PipelineScheduleRuntime if follows_file else get_schedule_class(name)
        stages = [
            self._stage(part, number, shape)
            for part, number in zip(self.parts, self.stage_numbers, strict=True)
        ]
        schedule = kind(
            stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
            shape.num_micro_batches,
            loss_fn=self._share,
            scale_grads=False,
        )
        if follows_file:
            lines = [line for line in self.plan.text.splitlines() if line.strip()]
            rows = [[_Action.from_str(cell) for cell in line.split(",")] for line in lines]
            has_messages = re.search("SEND_|RECV_", self.plan.text) is not None
            schedule._prepare_schedule_with_comms(
                dict(enumerate(rows)), format="compute_comms" if has_messages else "compute_only"
            )
        return _Runner(schedule, stages, shape.trains)

    def _stage(self, part: nn.Module, number: int, shape: _Shape) -> _Stage:
        passed = self._passed(shape)
        tokens = torch.empty((shape.rows, shape.seq), dtype=torch.int64, device="meta")
        is_last = number == self.plan.num_stages - 1
        loss = torch.empty((), dtype=torch.promote_types(self.dtype, torch.float32), device="meta")
        stage = _Stage(
            part,
            number,
            self.plan.num_stages,
            self.device,
            input_args=tokens if number == 0 else tuple(passed.values()),
            output_args=loss if is_last else tuple(passed.values()),
            group=self.group,
        )
        stage.passed = passed
        stage.token_losses = []
        stage.neighbor_groups = self.neighbor_groups
        return stage

    def _passed(self, shape: _Shape) -> dict[str, Tensor]:
        """Return the tensors that a stage passes to the next one, on meta, by name."""
        hidden_seq = shape.seq // self.sequence_shards
        sizes = {"batch": shape.rows, "seq": shape.seq, "hidden_seq": hidden_seq}
        passed = {
            HIDDEN: torch.empty(
                (shape.rows, hidden_seq, self.width),
                dtype=self.dtype,
                device="meta",
                requires_grad=shape.trains,
            )
        }
        for tensor in self.stage_tensors:
            passed[tensor.name] = torch.empty(
                [sizes[size] if isinstance(size, str) else size for size in tensor.shape],
                dtype=getattr(torch, tensor.dtype) if tensor.dtype else self.dtype,
                device="meta",
                requires_grad=tensor.requires_grad and shape.trains,
            )
        return passed

    def _share(self, loss: Tensor, _labels: Tensor) -> Tensor:
        """Return a micro-batch's share of the loss; a non-finite share makes all gradients NaN."""
        share = loss / self._num_valid
        if share.requires_grad:
            factor = share.detach() * 0 + 1  # 1, or NaN
            share.register_hook(lambda grad: grad * factor)
        return share


class _Runner(NamedTuple):
    schedule: Any
    stages: list[_Stage]
    trains: bool

    def run(self, *args: Tensor, **kwargs: Any) -> list[Tensor]:
        """Run all micro-batches. Returns their token losses in order, if the head returns them."""
        (self.schedule.step if self.trains else self.schedule.eval)(*args, **kwargs)
        token_losses = [losses for stage in self.stages for losses in stage.token_losses]
        for stage in self.stages:
            stage.token_losses = []
            stage.clear_runtime_states()
        return token_losses


class _Stage(PipelineStage):
    """Torch's stage with seven corrections.

    1. Receive buffers exist only while their micro-batch is in progress. Torch allocates them for
       every micro-batch of a step, so that memory grows with gradient accumulation.
    2. Outputs are checked, because the next stage has allocated memory of a fixed shape.
    3. Evaluation works with two adjacent stages on one rank.
    4. A backward in two parts gathers weights that forward passes in between have resharded. Torch
       would silently omit their gradients.
    5. Messages use the group of their two ranks (`World.neighbor_groups`), so that they do not wait
       for other pairs.
    6. No messages are exchanged to agree on shapes.
    7. The module receives the tensors after the hidden states by keyword.
    """

    passed: dict[str, Tensor]  # what it passes to the next stage, on meta, by name
    # By rank within the pipeline's group; may be empty.
    neighbor_groups: Mapping[int, dist.ProcessGroup]
    # of all micro-batches so far, in order
    token_losses: list[Tensor]

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Tensor:
        """Skip torch's vote on whether stages exchange their shapes, which are known here.

        The vote sends one number from stage to stage, as NCCL messages on the group of all stages,
        and reads it on the host.
        """
        return torch.tensor([1], dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.tensor([1], dtype=torch.int32)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._allocating_nothing():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._allocating_nothing():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _allocating_nothing(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._move(self.args_recv_info[fwd_chunk_id], self.device)
        return self._between_neighbors(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._between_neighbors(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward:
            self._move(self.grad_recv_info[bwd_chunk_id], self.device)
        return self._between_neighbors(super().get_bwd_recv_ops(bwd_chunk_id))

    def _between_neighbors(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Return the messages, each in the group of its two ranks if it exists."""
        groups = [self.neighbor_groups.get(op.group_peer, op.group) for op in ops]
        return [
            dist.P2POp(op.op, op.tensor, op.peer, group, op.tag)
            for op, group in zip(ops, groups, strict=True)
        ]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:  # otherwise backward will read the input's gradient
            self._move(self.args_recv_info[fwd_chunk_id], "meta")
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            self._move(self.args_recv_info[bwd_chunk_id], "meta")
            self._move(self.grad_recv_info[bwd_chunk_id], "meta")

    @staticmethod
    def _move(infos: Sequence[Any], device: torch.device | str) -> None:
        """Replace receive buffers by empty ones on another device."""
        for info in infos:
            buffer = getattr(info, "buffer", None)
            if buffer is not None and buffer.device.type != torch.device(device).type:
                info.buffer = torch.empty_like(
                    buffer, device=device, requires_grad=buffer.requires_grad
                )

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. After the hidden states, it receives what stages pass on by keyword."""
        stage_tensors = dict(zip(list(self.passed)[1:], args[1:], strict=not self.is_first))
        output = super().forward_maybe_with_nosync(args[0], **stage_tensors, **kwargs)
        if self.is_last:
            if isinstance(output, tuple):  # torch would send further outputs on
                output, token_losses = output
                self.token_losses.append(token_losses)
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        self._check_outputs(outputs)
        # A backward in two parts detaches its outputs in place, which is impossible for views.
        contiguous = [tensor.contiguous() for tensor in outputs]
        return tuple(tensor.clone() if tensor._is_view() else tensor for tensor in contiguous)

    def _check_outputs(self, outputs: tuple[Any, ...]) -> None:
        """Raise ValueError unless the outputs are what the next stage has allocated memory for."""
        if len(outputs) != len(self.passed) or not all(isinstance(o, Tensor) for o in outputs):
            types = ", ".join(type(output).__name__ for output in outputs)
            raise ValueError(
                f"Pipeline stage {self.stage_index} returned {len(outputs)} values ({types}). "
                f"Expected {len(self.passed)} tensors ({', '.join(self.passed)}): return the hidden "
                "states, then the tensors of ModelSpec.stage_tensors in their order"
            )
        for (name, expected), output in zip(self.passed.items(), outputs, strict=True):
            if (output.shape, output.dtype) != (expected.shape, expected.dtype):
                remedy = "the hidden states are (samples, positions, width) in the compute dtype"
                if name != HIDDEN:
                    remedy = "correct the model or its ModelSpec.stage_tensors"
                raise ValueError(
                    f"Pipeline stage {self.stage_index} returned {name} as {tuple(output.shape)}, "
                    f"{output.dtype}. The next stage expects {tuple(expected.shape)}, "
                    f"{expected.dtype}: {remedy}"
                )
            if output.requires_grad and not expected.requires_grad:
                raise ValueError(
                    f"Pipeline stage {self.stage_index} returned {name} with a gradient, which "
                    f"ModelSpec.stage_tensors declares without one. The gradient would be lost: "
                    f"set requires_grad = True there, or detach the tensor"
                )

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        if backward_type != "full":
            for module in self.submod.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
        return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:
            # The other gradients belong to keyword arguments.
            grads = self.bwd_cache[bwd_chunk_id][: len(self.passed)]
            self.bwd_cache[bwd_chunk_id] = tuple(
                grad if grad is None else grad.contiguous() for grad in grads
            )
        return self._between_neighbors(super().get_bwd_send_ops(bwd_chunk_id))

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if not self.has_backward:
            return
        # Torch zeroes the buffer of a missing gradient in place: it needs memory first.
        for info, grad in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            if grad is None:
                self._move([info], self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
