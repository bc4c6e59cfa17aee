"""Mixture of experts: a router sends each token to its top-k experts, and no token is dropped.

Tokens are gathered into rows, sorted by expert. The experts compute their rows, and a token's
results are gathered again and added in the order of its scores. Forward and backward only gather
and never scatter. So the order of every addition is the same on every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtitan_like.models.layers.balance import (
    NO_BALANCE,
    WHOLE_SEQUENCE,
    Balance,
    Sequence,
    add_router_losses,
    count_in_backward,
    sample_fractions,
)
from torchtitan_like.models.layers.grouped_linear import (
    add_group_bias,
    grouped_linear,
    product_of,
)
from torchtitan_like.util.compile import fused_on_gpu

# Buffers of `MoE`, and whether checkpoints contain them.
BUFFERS = {
    "tokens_per_expert": False,
    "router_sums": False,
    "expert_bias": True,
    "load_fractions": False,
}


class Router(nn.Module):
    """Choose `top_k` experts for each token, and their weights in the combination.

    score_func: "softmax" over the experts' logits, or "sigmoid" of each logit.
    normalize: divide the weights of a token by their sum.
    scale: factor of the weights.
    num_groups, num_limited_groups: the experts form equal groups, and a token chooses among the
        experts of the best groups only. For "sigmoid", a group's score is the sum of its two best
        experts' scores (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). For "softmax", it is its
        best expert's score (DeepSeek-V2, arXiv:2405.04434, section 2.2.2).
    has_bias: add a bias to the logits.

    Scores are computed in fp32 (float64 for a float64 model) whatever the compute dtype is: rounded
    scores would send tokens to other experts.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        score_func: Literal["softmax", "sigmoid"],
        normalize: bool,
        scale: float,
        num_groups: int = 1,
        num_limited_groups: int = 1,
        *,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=has_bias)
        self.top_k = top_k
        self.score_func = score_func
        self.normalize = normalize
        self.scale = scale
        self.num_groups = num_groups
        self.num_limited_groups = num_limited_groups

    def forward(self, tokens: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map tokens (tokens, dim) to weights (tokens, top_k) and expert ids (tokens, top_k), best first.

        expert_bias: (experts,), added to the scores that select experts; the weights do not
            contain it.
        """
        logits = self.logits(tokens)
        expert_ids = self.select(logits.detach(), expert_bias)
        return self.weigh(logits, expert_ids), expert_ids

    def logits(self, tokens: Tensor) -> Tensor:
        """Map tokens (tokens, dim) to logits (tokens, experts)."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        bias = self.gate.bias  # read once: with tensor parallelism a read sums its gradients
        fp32_bias = None if bias is None else bias.to(dtype)
        return F.linear(tokens.to(dtype), self.gate.weight.to(dtype), fp32_bias)

    def weigh(self, logits: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the weights (tokens, top_k) of the chosen experts."""
        return _weigh(logits, expert_ids, self.score_func, self.normalize, self.scale)

    def select(self, logits: Tensor, expert_bias: Tensor | None) -> Tensor:
        """Return the ids of the chosen experts (tokens, top_k), best first."""
        if expert_bias is None and self.num_groups == self.num_limited_groups:
            return logits.topk(self.top_k, dim=-1).indices  # both score functions are monotonic
        scores = logits.softmax(-1) if self.score_func == "softmax" else logits.sigmoid()
        if expert_bias is not None:
            scores = scores + expert_bias
        if self.num_groups != self.num_limited_groups:
            by_group = scores.unflatten(-1, (self.num_groups, -1))
            best = by_group.topk(1 if self.score_func == "softmax" else 2, dim=-1).values.sum(-1)
            groups = best.topk(self.num_limited_groups, dim=-1).indices
            excluded = torch.ones_like(best, dtype=torch.bool).scatter(-1, groups, False)
            scores = by_group.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.top_k, dim=-1).indices


@fused_on_gpu
def _weigh(
    logits: Tensor, expert_ids: Tensor, score_func: str, normalize: bool, scale: float
) -> Tensor:
    """Return the weights (tokens, top_k) of the chosen experts; see `Router`."""
    selected = logits.gather(-1, expert_ids)
    if score_func == "softmax" and normalize:
        weights = selected.softmax(-1)  # the softmax over all experts, divided by the sum
    elif score_func == "softmax":
        weights = (selected - logits.logsumexp(-1, keepdim=True)).exp()
    else:
        weights = selected.sigmoid()
        if normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


class Experts(nn.Module):
    """The experts' SwiGLU networks with stacked weights.

    w1 and w3 (experts, hidden_dim, dim), w2 (experts, dim, hidden_dim).
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def find_routes(self, expert_ids: Tensor, weights: Tensor) -> Routes:
        """Sort the choices and their weights, (tokens, top_k) each, by expert."""
        return sort_by_expert(expert_ids, weights, self.num_experts)

    def send(self, tokens: Tensor, routes: Routes) -> Tensor:
        """Copy tokens (tokens, dim) to rows (rows, dim), the input of `forward`."""
        return dispatch(tokens, routes)

    def forward(self, rows: Tensor, routes: Routes) -> Tensor:
        """Return the weighted sum of each token's experts (tokens, dim) from the output of `send`."""
        return combine(self.compute_rows(rows, routes), routes)

    def compute_rows(self, rows: Tensor, routes: Routes) -> Tensor:
        """Map rows (rows, dim), sorted by expert, to the same shape."""
        ends = routes.ends
        gate = grouped_linear(rows, self.w1, ends)
        hidden: Tensor = _SwiGLU.apply(gate, grouped_linear(rows, self.w3, ends))
        return grouped_linear(hidden, self.w2, ends)


class BiasedExperts(Experts):
    """Experts with biases and a clamped SwiGLU (gpt-oss, arXiv:2508.10925, section 2).

    With h = w1 x + b1 and u = w3 x + b3: `w2 ((u + 1) h sigmoid(1.702 h)) + b2`, where h is at most
    `limit`, and u is within -limit and limit. b1 and b3 (experts, hidden_dim), b2 (experts, dim).
    """

    ALPHA = 1.702

    def __init__(self, num_experts: int, dim: int, hidden_dim: int, limit: float) -> None:
        super().__init__(num_experts, dim, hidden_dim)
        self.limit = limit
        self.b1 = nn.Parameter(torch.empty(num_experts, hidden_dim))
        self.b2 = nn.Parameter(torch.empty(num_experts, dim))
        self.b3 = nn.Parameter(torch.empty(num_experts, hidden_dim))

    def compute_rows(self, rows: Tensor, routes: Routes) -> Tensor:
        ends = routes.ends
        gate = add_group_bias(grouped_linear(rows, self.w1, ends), self.b1, ends)
        up = add_group_bias(grouped_linear(rows, self.w3, ends), self.b3, ends)
        hidden = _clamped_swiglu(gate, up, self.limit, self.ALPHA)
        return add_group_bias(grouped_linear(hidden, self.w2, ends), self.b2, ends)


@fused_on_gpu
def _clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return the hidden units (rows, hidden_dim) of `BiasedExperts`."""
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


class _SwiGLU(torch.autograd.Function):
    """`silu(gate) * up`, each (rows, hidden_dim). It saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _swiglu_gradients(grad, gate, up)


@fused_on_gpu
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@fused_on_gpu
def _swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


class InputWeightedExperts(Experts):
    """Experts whose inputs are multiplied by the weights, not their outputs.

    This is the order of Llama 4 (`modeling_llama4.py` of Hugging Face's transformers).
    """

    def send(self, tokens: Tensor, routes: Routes) -> Tensor:
        return dispatch_weighted(tokens, routes)

    def forward(self, rows: Tensor, routes: Routes) -> Tensor:
        return add_rows(self.compute_rows(rows, routes), routes)


class MoE(nn.Module):
    """Map (batch, seq, dim) to the weighted sum of each token's experts, plus the shared experts.

    Backward counts the choices of each expert. `optim.balancing` reads the counts after each step,
    and updates the state that keeps the loads even.

    | buffer | content |
    | --- | --- |
    | `tokens_per_expert` | (experts,) int64, this rank's choices since the last update |
    | `router_sums` | (2,) float64, see `add_router_losses` |
    | `expert_bias` | (experts,) float32, in checkpoints; None unless has_bias or with "bias" |
    | `load_fractions` | (experts,) float32 with "global", of the step before; 1 if even |

    `sequence` is a seam of `distributed`. is_round_robin: choose experts in turn, by no score.
    loss_scale: 1 / the tokens of a step on all ranks; None: backward adds no router losses.
    """

    changed_in_backward = ("tokens_per_expert", "router_sums")

    expert_bias: Tensor | None
    load_fractions: Tensor | None

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared_experts: nn.Module | None,
        has_bias: bool = False,
        balance: Balance = NO_BALANCE,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared_experts = shared_experts
        self.balance = balance
        self.has_bias = has_bias or balance.method == "bias"
        self.sequence: Sequence = WHOLE_SEQUENCE
        self.is_round_robin = False
        self.loss_scale: Tensor | None = None
        for name, is_saved in BUFFERS.items():
            self.register_buffer(name, None, persistent=is_saved)
        self.init_buffers(experts.w1.device)

    def init_buffers(self, device: torch.device) -> None:
        """Reset the counters and the balancing state on `device`."""
        num_experts = self.experts.num_experts
        self.tokens_per_expert = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.router_sums = torch.zeros(2, dtype=torch.float64, device=device)
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device)
        self.expert_bias = bias if self.has_bias else None
        self.load_fractions = bias + 1 if self.balance.method == "global" else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """Keep the dtypes of the buffers: bfloat16 would round the bias's changes away."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits = self._with_losses(self.router.logits(tokens), x)
        if self.is_round_robin:
            expert_ids = self._in_turn(x)
        else:
            expert_ids = self.router.select(logits.detach(), self.expert_bias)
        weights = self.router.weigh(logits, expert_ids)
        weights = count_in_backward(weights, expert_ids, self.tokens_per_expert)
        routes = self.experts.find_routes(expert_ids, weights)
        rows = self.experts.send(tokens, routes)
        # Before the experts: meanwhile expert-parallel ranks exchange rows, or their numbers.
        shared = None if self.shared_experts is None else self.shared_experts(x)
        out: Tensor = self.experts(rows, routes).view_as(x)
        return out if shared is None else out + shared

    def _in_turn(self, x: Tensor) -> Tensor:
        """Return expert ids (tokens, top_k) that take turns along each sample, on any layout."""
        top_k = self.router.top_k
        positions = self.sequence.positions(x.shape[-2], x.device)
        choices = positions[:, None] * top_k + torch.arange(top_k, device=x.device)
        expert_ids = choices % self.experts.num_experts
        return expert_ids.expand(*x.shape[:-1], top_k).flatten(0, -2)

    def _with_losses(self, logits: Tensor, x: Tensor) -> Tensor:
        """Return `logits`, whose backward adds the gradients of the router's losses."""
        if self.loss_scale is None or not torch.is_grad_enabled():
            return logits
        by_sample = logits.view(-1, x.shape[-2], logits.shape[-1])
        fractions = None
        if self.balance.has_sequence_loss:
            fractions = sample_fractions(by_sample, self.router.top_k, self.sequence)
        elif self.load_fractions is not None:
            fractions = self.load_fractions.to(logits.dtype)
        with_losses = add_router_losses(
            by_sample,
            fractions,
            self.loss_scale,
            self.router_sums,
            coeff=self.balance.loss_coeff,
            z_coeff=self.balance.z_coeff,
            score_func=self.router.score_func,
        )
        return with_losses.view_as(logits)


def describe_experts(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Return the log line on the experts' matrix products in `dtype`; empty for a dense model."""
    experts = next((module for module in model.modules() if isinstance(module, Experts)), None)
    if experts is None:
        return []
    sizes = experts.w1.shape[1:]
    kernels = {
        "kernel": "grouped_mm",
        "padded": "grouped_mm with padded groups",
        "loop": "a loop over experts",
    }
    kernel = kernels[product_of(dtype, *sizes)]
    return [f"Experts: {experts.num_experts} in each layer, computed by {kernel} in {dtype}"]


def force_round_robin_routing(model: nn.Module) -> None:
    """Make all routers choose experts by the position in the sample, not by scores, in place.

    Loads are then even. The scores still weigh the chosen experts.
    """
    for module in model.modules():
        if isinstance(module, MoE):
            module.is_round_robin = True


class Routes(NamedTuple):
    """The rows of each token. A row is a copy of a token for one expert.

    Rows of padding belong to no choice. Their values are arbitrary, and no code reads them.

    weights: (tokens, top_k) of the choices.
    token_of_row: (rows,) index of the token.
    slot_of_row: (rows,) index into the flattened (tokens, top_k) choices.
    row_of_slot: (tokens, top_k) index of the row.
    ends: (experts,) int32, index after the last row of each expert.
    sent_counts, received_counts: with expert parallelism (ranks, local experts) int64, the rows that
        this rank sends to each expert of each rank, and that each rank sends to each expert of this
        one. None if this rank has all experts.
    buffer_size: rows that each rank sends to each other one, with padding. 0: rows have no padding.
    """

    weights: Tensor
    token_of_row: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    ends: Tensor
    sent_counts: Tensor | None = None
    received_counts: Tensor | None = None
    buffer_size: int = 0


def sort_by_expert(expert_ids: Tensor, weights: Tensor, num_experts: int) -> Routes:
    """Sort the choices (tokens, top_k) by expert; an expert's rows keep the order of the tokens."""
    # A GPU sorts 8 bits at a time.
    dtype = torch.uint8 if num_experts <= 256 else torch.int16
    sorted_ids, slot_of_row = expert_ids.flatten().to(dtype).sort(stable=True)
    indices = _index_rows(sorted_ids, slot_of_row, expert_ids.shape[1], num_experts)
    return Routes(weights, *indices)


@fused_on_gpu
def _index_rows(
    sorted_ids: Tensor, slot_of_row: Tensor, top_k: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the indices and the ends of `Routes`. sorted_ids, slot_of_row: (rows,)."""
    indices = torch.arange(slot_of_row.shape[0], device=slot_of_row.device)
    row_of_slot = torch.empty_like(slot_of_row).index_put((slot_of_row,), indices)
    experts = torch.arange(num_experts, dtype=sorted_ids.dtype, device=sorted_ids.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    return slot_of_row // top_k, slot_of_row, row_of_slot.view(-1, top_k), ends


def dispatch(tokens: Tensor, routes: Routes) -> Tensor:
    """Copy tokens (tokens, dim) to rows (rows, dim)."""
    rows: Tensor = _Dispatch.apply(tokens, routes.token_of_row, routes.row_of_slot)
    return rows


def dispatch_weighted(tokens: Tensor, routes: Routes) -> Tensor:
    """Copy tokens (tokens, dim) times their weights to rows (rows, dim).

    Products are computed in the dtype of the weights and rounded once.
    """
    rows: Tensor = _WeightedDispatch.apply(
        tokens, routes.weights, routes.token_of_row, routes.slot_of_row, routes.row_of_slot
    )
    return rows


def add_rows(rows: Tensor, routes: Routes) -> Tensor:
    """Return each token's sum of its rows: (tokens, dim)."""
    out: Tensor = _AddRows.apply(rows, routes.token_of_row, routes.row_of_slot)
    return out


def combine(rows: Tensor, routes: Routes) -> Tensor:
    """Return each token's sum of its rows times their weights: (tokens, dim).

    Sums are accumulated in the dtype of the weights and rounded once.
    """
    out: Tensor = _Combine.apply(
        rows, routes.weights, routes.token_of_row, routes.slot_of_row, routes.row_of_slot
    )
    return out


class _Dispatch(torch.autograd.Function):
    """A plain gather. Its backward adds each token's gradients in the order of its scores.

    Autograd's own backward of a gather scatters, in an order that no one defines.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_slot)
        return tokens.index_select(0, token_of_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_of_slot,) = ctx.saved_tensors
        return _sum_of_slots(grad, row_of_slot, None), None, None


class _WeightedDispatch(torch.autograd.Function):
    """A weighted gather. Its backward adds each token's gradients in the order of its scores."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        token_of_row: Tensor,
        slot_of_row: Tensor,
        row_of_slot: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(tokens, weights, token_of_row, row_of_slot)
        return _weighted_rows(tokens, weights, token_of_row, slot_of_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        tokens, weights, token_of_row, row_of_slot = ctx.saved_tensors
        grad_weights = _weight_gradients(grad, tokens, weights, token_of_row, row_of_slot)
        return _sum_of_slots(grad, row_of_slot, weights), grad_weights, None, None, None


class _AddRows(torch.autograd.Function):
    """The backward of `_Dispatch`, whose own backward is a plain gather."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return _sum_of_slots(rows, row_of_slot, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token_of_row,) = ctx.saved_tensors
        return grad.index_select(0, token_of_row), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        token_of_row: Tensor,
        slot_of_row: Tensor,
        row_of_slot: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, token_of_row, slot_of_row, row_of_slot)
        return _sum_of_slots(rows, row_of_slot, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        return *_combine_gradients(grad, *ctx.saved_tensors), None, None, None


# A GPU runs each of the following functions as one kernel, and one more where a gradient of the
# weights is brought to the order of the slots. A kernel reads and writes each row once.


@fused_on_gpu
def _combine_gradients(
    grad: Tensor,
    rows: Tensor,
    weights: Tensor,
    token_of_row: Tensor,
    slot_of_row: Tensor,
    row_of_slot: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and the weights from that of the sums (tokens, dim)."""
    grad_of_row = grad.index_select(0, token_of_row).to(weights.dtype)
    weight_of_row = weights.flatten().index_select(0, slot_of_row)
    grad_weights = (rows.to(weights.dtype) * grad_of_row).sum(-1)
    grad_rows = (grad_of_row * weight_of_row[:, None]).to(rows.dtype)
    return grad_rows, grad_weights[row_of_slot]


@fused_on_gpu
def _weighted_rows(
    tokens: Tensor, weights: Tensor, token_of_row: Tensor, slot_of_row: Tensor
) -> Tensor:
    """Return tokens (tokens, dim) times weights (tokens, top_k) as rows (rows, dim)."""
    weight_of_row = weights.flatten().index_select(0, slot_of_row)
    rows = tokens.index_select(0, token_of_row).to(weights.dtype)
    return (rows * weight_of_row[:, None]).to(tokens.dtype)


@fused_on_gpu
def _weight_gradients(
    grad: Tensor, tokens: Tensor, weights: Tensor, token_of_row: Tensor, row_of_slot: Tensor
) -> Tensor:
    """Return the gradients (tokens, top_k) of the weights of `_weighted_rows`."""
    rows = tokens.index_select(0, token_of_row).to(weights.dtype)
    return (rows * grad.to(weights.dtype)).sum(-1)[row_of_slot]


@fused_on_gpu
def _sum_of_slots(rows: Tensor, row_of_slot: Tensor, weights: Tensor | None) -> Tensor:
    """Add each token's rows, times their weights: (rows, dim) -> (tokens, dim) in rows' dtype."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_zeros(row_of_slot.shape[0], rows.shape[1], dtype=dtype)
    for slot in range(row_of_slot.shape[1]):
        row = rows.index_select(0, row_of_slot[:, slot]).to(dtype)
        total = (
            total + row if weights is None else torch.addcmul(total, row, weights[:, slot, None])
        )
    if total.dtype == rows.dtype:
        return total  # torch 2.11 compiles `to` without a change of dtype to a wrong gradient
    return total.to(rows.dtype)
