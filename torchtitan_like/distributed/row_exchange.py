"""The exchange of rows between expert-parallel ranks.

A mixture of experts sorts its tokens' copies (*rows*) by expert. Here an all-to-all sends each row
to the rank that has its expert, and a second one sends the result back. Received rows are sorted by
expert, then by the rank that sent them: the order of the tokens in the batch. So the sums over an
expert's rows have the same order as on one rank.

Ranks receive different numbers of rows. `RowExchange` says how they are sent: exactly, for which the
host must know the numbers, or in buffers of a fixed size, for which no one waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtitan_like.distributed.collectives import (
    arrived,
    exchange_rows,
    finish_rows,
    start_exchange,
    start_rows,
)
from torchtitan_like.util.compile import fused_on_gpu, update_in_backward

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RowExchange:
    """How the ranks of an expert-parallel group exchange rows. All layers of a rank share one.

    | exchange | rows sent to each rank |
    | --- | --- |
    | exact | as many as it has experts for; the host waits for their numbers |
    | bounded | a buffer of `capacity` times an even share, with padding; the host does not wait |

    If more rows go to a rank than its buffer holds, the step has computed without some of them. Its
    update must not be made (`take_overflow`), and it runs again with the exact exchange
    (`run_next_exactly`). All that cannot run again is exact: passes without gradients, such as a
    validation, and steps of a caller who has not called `start_bounding`.

    is_bounded: which exchange training uses. capacity: at least 1. device: of this rank.
    """

    # A second overflow within this many steps enlarges the buffers.
    STEPS_BETWEEN_OVERFLOWS = 1000
    GROWTH = 1.1  # of the buffer that would have been large enough

    def __init__(self, is_bounded: bool, capacity: float, device: torch.device) -> None:
        self.is_bounded = is_bounded
        self.capacity = capacity
        self._repeats_steps = False
        self._is_repeated = False
        self._last_overflow: int | None = None
        self._excess = torch.zeros((), dtype=torch.float32, device=device)

    def connect(self, model: nn.Module) -> None:
        """Let the layers of a materialized model record the rows that their buffers cannot hold."""
        for module in model.modules():
            if "excess" in getattr(module, "changed_in_backward", ()):
                module.register_buffer("excess", self._excess, persistent=False)

    def padding(self, num_ranks: int) -> float:
        """Return the rows of all buffers that a rank sends / the rows that it has."""
        return min(self.capacity, num_ranks) if self.is_bounded else 1.0

    def buffer_size(self, num_rows: int, num_ranks: int) -> int:
        """Return the rows of a buffer if a rank has `num_rows`; 0: the exchange is exact."""
        is_training = self._repeats_steps and torch.is_grad_enabled()
        if not (self.is_bounded and is_training) or self._is_repeated:
            return 0
        return max(1, int(self.padding(num_ranks) * num_rows / num_ranks))

    def start_bounding(self) -> None:
        """Use bounded buffers: the caller runs steps with an overflow again."""
        self._repeats_steps = True

    def run_next_exactly(self) -> None:
        """Use the exact exchange for the next step, which runs again."""
        self._is_repeated = True

    def take_overflow(self, all_ranks: ProcessGroup | None) -> Tensor | None:
        """Return by how much the fullest buffer of this step was too small; 0 if all were not.

        0-dim, in even shares; None if no exchange is bounded. Call it once after the backward of
        each step: the next one starts without an overflow, and may be bounded again. A collective,
        which does not wait for the device.
        """
        self._is_repeated = False
        if not self.is_bounded:
            return None
        excess = self._excess.clone()
        self._excess.zero_()
        if all_ranks is not None:
            dist.all_reduce(excess, dist.ReduceOp.MAX, group=all_ranks)
        return excess

    def note_overflow(self, step: int, overflow: float) -> str:
        """Enlarge the buffers if overflows are frequent; return a log line. On all ranks."""
        needed = self.capacity + overflow
        line = (
            f"Step {step} sent {needed:.2f} times an even share of rows to the experts of one rank, "
            f"and buffers hold {self.capacity:.2f} times. Its update was not made"
        )
        last, self._last_overflow = self._last_overflow, step
        if last is not None and step - last < self.STEPS_BETWEEN_OVERFLOWS:
            self.capacity = self.GROWTH * needed
            line += f". Buffers hold {self.capacity:.2f} times an even share from now on"
        return line


def exchange_with_owners(experts: Any, group: ProcessGroup, exchange: RowExchange) -> None:
    """Let `experts` (see `models.layers.moe.Experts`) compute rows of all ranks of `group`.

    `find_routes` starts the exchange of the numbers of rows. With the bounded exchange, `send` starts
    that of the rows, and `compute_rows` waits for both.
    """
    find_routes = experts.find_routes
    send = experts.send
    compute_local_rows = experts.compute_rows
    num_ranks = group.size()
    experts.changed_in_backward = ("excess",) if exchange.is_bounded else ()

    def find_routes_and_count(expert_ids: Tensor, weights: Tensor) -> Any:
        routes = find_routes(expert_ids, weights)
        routes = routes._replace(sent_counts=_count(routes.ends, num_ranks))
        size = exchange.buffer_size(routes.slot_of_row.shape[0], num_ranks)
        if size and weights.requires_grad:  # else no backward would record an overflow
            routes, excess = fill_buffers(routes, num_ranks, size)
            routes = routes._replace(weights=note_excess(routes.weights, excess, experts.excess))
        return routes._replace(received_counts=start_exchange(routes.sent_counts, group))

    def send_bounded(tokens: Tensor, routes: Any) -> Tensor:
        rows = send(tokens, routes)
        return start_rows(rows, group) if routes.buffer_size else rows

    def compute_rows(rows: Tensor, routes: Any) -> Tensor:
        received = arrived(routes.received_counts)
        if routes.buffer_size:
            arriving = finish_rows(rows, group)
            to_send = to_receive = [routes.buffer_size] * num_ranks
        else:
            totals = torch.stack([routes.sent_counts.sum(1), received.sum(1)])
            to_send, to_receive = read_split_sizes(totals, rows.shape[0])
            arriving = exchange_rows(rows, to_send, to_receive, group)
        ends, source, position = _sort_arrivals(received, arriving.shape[0], routes.buffer_size)
        computed = compute_local_rows(
            _permute(arriving, source, position), routes._replace(ends=ends)
        )
        return exchange_rows(_permute(computed, position, source), to_receive, to_send, group)

    experts.find_routes = find_routes_and_count
    experts.send = send_bounded
    experts.compute_rows = compute_rows


def fill_buffers(routes: Any, num_ranks: int, size: int) -> tuple[Any, Tensor]:
    """Give each rank of the group a buffer of `size` rows, which begins with the rows of its experts.

    The rows behind them are padding: copies of any tokens. Rows that do not fit are not sent, and
    their choices read another row.

    routes: of all choices, without padding.
    Returns the routes to and from (num_ranks * size) rows, and how many rows the fullest buffer
    cannot hold, in even shares (0-dim float32).
    """
    *indices, sent_counts, excess = _fill_buffers(
        routes.token_of_row, routes.slot_of_row, routes.row_of_slot, routes.sent_counts, size
    )
    names = ("token_of_row", "slot_of_row", "row_of_slot")
    changes = dict(zip(names, indices, strict=True))
    return routes._replace(**changes, sent_counts=sent_counts, buffer_size=size), excess


@fused_on_gpu
def _fill_buffers(
    token_of_row: Tensor,
    slot_of_row: Tensor,
    row_of_slot: Tensor,
    sent_counts: Tensor,
    size: int,
) -> tuple[Tensor, ...]:
    num_rows, num_ranks = slot_of_row.shape[0], sent_counts.shape[0]
    num_sent = sent_counts.sum(1)
    ends = num_sent.cumsum(0)
    first = ends - num_sent  # of the rows for each rank
    row = (first[:, None] + torch.arange(size, device=first.device)).flatten()
    row = row.clamp(max=num_rows - 1)
    owner = torch.searchsorted(ends, row_of_slot, right=True)
    place = (row_of_slot - first[owner]).clamp(max=size - 1)
    before = sent_counts.cumsum(1) - sent_counts
    kept = torch.minimum(sent_counts, (size - before).clamp(min=0))
    excess = (num_sent.max() - size).clamp(min=0) * (num_ranks / num_rows)
    return (
        token_of_row[row],
        slot_of_row[row],
        owner * size + place,
        kept,
        excess.to(torch.float32),
    )


def note_excess(x: Tensor, excess: Tensor, total: Tensor) -> Tensor:
    """Return `x`. Its backward raises `total` (0-dim) to `excess` where that is larger."""
    noted: Tensor = _MaxInBackward.apply(x, excess, total)
    return noted


class _MaxInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (value,) = ctx.saved_tensors
        update_in_backward(ctx.total, value, grad, "max")
        return grad, None, None


@fused_on_gpu
def _count(ends: Tensor, num_ranks: int) -> Tensor:
    """Return the rows of each expert, (ranks, local experts) int64.

    ends: (experts,), index after the last row of each.
    """
    return torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int64).view(num_ranks, -1)


@fused_on_gpu
def _sort_arrivals(
    counts: Tensor, num_rows: int, buffer_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how received rows are sorted by expert.

    counts: (ranks, experts) int64, rows from each rank for each expert; they arrive in this order.
    buffer_size: rows that arrive from each rank, with padding behind those of `counts`. 0: rows have
        no padding.

    Returns `ends` (experts,) int32, the index after the last row of each expert; for each sorted row
    the index at which it arrives; for each arriving row its index after sorting, (num_rows,) int64
    each. Padding has the index of any row.
    """
    num_received = counts.sum(1)
    if buffer_size:
        first = torch.arange(0, num_rows, buffer_size, device=counts.device)
    else:
        first = num_received.cumsum(0) - num_received
    before = counts.cumsum(1) - counts  # rows from the same rank for other experts
    # A sum of two vectors, because Inductor of torch 2.12 cannot search a view.
    arrival = first[:, None].expand_as(counts).flatten() + before.flatten()
    sorted_counts = counts.T.flatten()
    sorted_ends = sorted_counts.cumsum(0)
    after = (sorted_ends - sorted_counts).view(counts.T.shape).T
    shift = after - arrival.view(counts.shape)  # of the rows from a rank for an expert
    rows = torch.arange(num_rows, device=counts.device)
    block = torch.searchsorted(sorted_ends, rows, right=True).clamp(max=counts.numel() - 1)
    source = rows - shift.T.flatten()[block]
    block = torch.searchsorted(arrival, rows, right=True) - 1
    position = rows + shift.flatten()[block]
    ends = sorted_ends.view(counts.T.shape)[:, -1].to(torch.int32)
    return ends, source.clamp(0, num_rows - 1), position.clamp(0, num_rows - 1)


def _permute(rows: Tensor, source: Tensor, position: Tensor) -> Tensor:
    """Return `rows[source]`; `position` is the inverse permutation."""
    permuted: Tensor = _Permute.apply(rows, source, position)
    return permuted


class _Permute(torch.autograd.Function):
    """A gather whose backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return rows.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (position,) = ctx.saved_tensors
        return grad.index_select(0, position), None, None


def read_split_sizes(counts: Tensor, num_rows: int) -> list[list[int]]:
    """Return how many rows go to each rank and come from each, as integers of the host.

    This is the only time a layer waits for the device. A dry run, whose tensors have no values,
    replaces this function and divides `num_rows` evenly.

    counts: (2, ranks) int64. num_rows: the sum of the first row.
    """
    on_host = torch.ops.torchtitan_like.copy_to_host(counts)
    lists: list[list[int]] = on_host.tolist()
    if torch.compiler.is_compiling():
        for number in (number for row in lists for number in row):
            torch._check(number >= 0)
    return lists


# An operator, so that activation checkpointing can keep its output: recomputation then does not
# wait for the device.
@torch.library.custom_op("torchtitan_like::copy_to_host", mutates_args=())
def _copy_to_host(values: Tensor) -> Tensor:
    return values.to("cpu", copy=True)


@_copy_to_host.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values, device="cpu")
