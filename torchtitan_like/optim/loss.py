"""Chunked cross-entropy: computes the loss of a large vocabulary without storing all logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtitan_like.models.layers.head import LossWithTokens
from torchtitan_like.util.compile import compile_function
from torchtitan_like.util.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Logits that the CPU softmax processes at a time. They fit in a core's cache.
TILE = 131_072

# (logits, labels) -> losses (tokens,) and gradients of the logits. May overwrite the logits.
SoftmaxBody = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# (logits in the dtype of the softmax, labels) -> losses (tokens,), differentiable.
TokenLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class VocabShards:
    """A vocabulary of `vocab_size` entries, sharded over the ranks of `group` like `torch.chunk`.

    The last shards may be smaller or empty.
    """

    group: ProcessGroup
    vocab_size: int

    @property
    def max_size(self) -> int:
        """Number of entries of the largest shard."""
        return -(-self.vocab_size // self.group.size())

    @property
    def offset(self) -> int:
        """Index of this rank's first entry."""
        return min(self.group.rank() * self.max_size, self.vocab_size)

    @property
    def size(self) -> int:
        """Number of this rank's entries. May be 0."""
        return min(self.max_size, self.vocab_size - self.offset)


def chunked_cross_entropy(
    chunk_mib: int,
    compile_backend: str | None = None,
    shards: VocabShards | None = None,
    *,
    gathers_logits: bool = False,
    with_tokens: bool = False,
    token_loss: TokenLoss | None = None,
) -> Callable[[Tensor, Tensor, Tensor], Tensor | LossWithTokens]:
    """Build a loss, by default cross-entropy, that processes a few tokens at a time.

    The loss takes hidden (tokens, dim), weight (vocab, dim), and labels (tokens,). It returns the
    0-dim sum over all labels other than -100. Forward also computes the gradients of each chunk, so
    that backward does not compute the logits again.

    Logits have the dtype of `hidden`. The softmax is float64 for float64 logits, else fp32. Weight
    gradients are summed over chunks in fp32 or float64.

    Each chunk of c tokens after the first reads and writes this sum once more: 8 vocab dim bytes. Of a
    step of T tokens and P parameters, on a device of B bytes/s that computes F FLOP/s in practice,
    these additions take the fraction

        (ceil(T / c) - 1) 8 vocab dim / B / (6 P T / F).

    With the default chunk it is 0.7 % for 1.5B parameters (vocab 128,256, dim 2,048, T 8,192) and
    0.3 % for 8B (dim 4,096) on an H100 (B = 3.35e12, F = 4e14).

    chunk_mib: memory limit of a chunk's logits in fp32, in MiB. 0 means one chunk.
    compile_backend: compiles the operations between the matrix products.
    shards: `weight` is this rank's shard of the vocabulary. Hidden states, labels, and the loss are
        equal on all ranks of the group. The gradient of `hidden` is a partial sum.
    gathers_logits: all-gather the logits, so that every rank computes the whole loss. By default,
        logits stay sharded: the ranks reduce one maximum and two sums per token.
    with_tokens: also return the detached loss of each token (`LossWithTokens`).
    token_loss: the loss instead of cross-entropy. It is not compiled, and it reads all logits of a
        token, as with `gathers_logits`. Its gradients come from autograd.
    """
    body: SoftmaxBody = _softmax_in_tiles
    if token_loss is not None:
        body = partial(_differentiated, token_loss)
        compile_backend = None
        gathers_logits = True
    if compile_backend is not None:
        # Dynamo of torch 2.11 rejects the compiled function without `partial`.
        body = partial(compile_function(_softmax, backend=compile_backend))
    logits_per_token: int | None = None
    if shards is not None and gathers_logits:
        body = partial(_softmax_of_gathered, shards, body)
        logits_per_token = shards.vocab_size
    elif shards is not None:
        local_softmax: Callable[..., Any] = _local_softmax
        gradient: Callable[..., Any] = _softmax_gradient
        if compile_backend is not None:
            local_softmax = compile_function(local_softmax, backend=compile_backend)
            gradient = compile_function(gradient, backend=compile_backend)
        body = partial(_softmax_over_ranks, shards, local_softmax, gradient)
        logits_per_token = shards.max_size

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor | LossWithTokens:
        # Each chunk has collectives, so all ranks must have the same number of chunks.
        chunk = _tokens_per_chunk(hidden.shape[0], logits_per_token or weight.shape[0], chunk_mib)
        if not torch.is_grad_enabled():  # `requires_grad` stays set under torch.no_grad()
            hidden, weight = hidden.detach(), weight.detach()
        total, tokens = _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk, body, with_tokens)
        return LossWithTokens(total, tokens) if with_tokens else total

    return loss


def _tokens_per_chunk(num_tokens: int, vocab_size: int, chunk_mib: int) -> int:
    """Return the chunk size that gives the fewest, nearly equal chunks within the limit."""
    max_tokens = max((chunk_mib << 20) // (4 * vocab_size), 1) if chunk_mib else max(num_tokens, 1)
    num_chunks = max(-(-num_tokens // max_tokens), 1)
    return max(-(-num_tokens // num_chunks), 1)


def _softmax_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _softmax(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses (tokens,) of logits (tokens, vocab) at labels, and the logits' gradients.

    The gradient is softmax minus one-hot, rounded once.
    """
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=_softmax_dtype(logits))
    labels = labels.unsqueeze(-1)
    losses = -log_probabilities.gather(-1, labels).squeeze(-1)
    gradients = log_probabilities.exp_().scatter_add_(
        -1, labels, _minus_one(labels, log_probabilities.dtype)
    )
    return losses, gradients.to(logits.dtype)


def _differentiated(token_loss: TokenLoss, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses (tokens,) of `token_loss`, and the logits' gradients."""
    with torch.enable_grad():
        inputs = logits.detach().requires_grad_()
        losses = token_loss(inputs.to(_softmax_dtype(inputs)), labels)
        (gradients,) = torch.autograd.grad(losses.sum(), inputs)
    return losses.detach(), gradients


def _softmax_in_tiles(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `_softmax`. On CPU, gradients overwrite the logits tile by tile.

    Only one tile at a time is converted to the softmax's dtype.
    """
    if not logits.is_cpu:
        return _softmax(logits, labels)
    all_losses = []
    tokens_per_tile = max(TILE // logits.shape[-1], 1)
    tiles = zip(logits.split(tokens_per_tile), labels.split(tokens_per_tile), strict=True)
    for tile, tile_labels in tiles:
        losses, p, total = _losses(tile, tile_labels)
        index = tile_labels.unsqueeze(-1)
        tile.copy_(p.mul_(total.reciprocal_()).scatter_add_(-1, index, _minus_one(index, p.dtype)))
        all_losses.append(losses)
    return torch.cat(all_losses), logits


def _losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (tokens,), softmax (tokens, vocab), and the sum of the softmax (tokens, 1).

    The caller must divide the softmax by its sum. On CPU, torch's softmax kernel sums a row
    vector by vector, with an error of 1e-5 at 128,000 entries. `sum` is more exact and corrects it.

    The log-sum-exp follows from the largest entry: log p_max = logit_max - logsumexp. This takes
    half the time of log_softmax and exp.
    """
    fp32_logits = logits.to(_softmax_dtype(logits))
    p = torch.softmax(fp32_logits, dim=-1)
    total = p.sum(-1, keepdim=True)
    log_p_max = (p.amax(-1, keepdim=True) / total).log_()
    log_sum_exp = fp32_logits.amax(-1, keepdim=True) - log_p_max
    target = fp32_logits.gather(-1, labels.unsqueeze(-1))
    return (log_sum_exp - target).squeeze(-1), p, total


def _minus_one(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full_like(like, -1, dtype=dtype)


def _softmax_over_ranks(
    shards: VocabShards,
    local_softmax: Callable[..., Any],
    gradient: Callable[..., Any],
    logits: Tensor,
    labels: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute `_softmax` over the whole vocabulary from the local logits (tokens, local entries).

    The ranks first reduce the maximum logit of each token. Relative to it, they then sum the
    exponentials and the label's logit. exp(logit - maximum) / sum is as exact as on one rank.
    """
    if shards.size == 0:  # take part in the collectives with a logit that contributes nothing
        logits = logits.new_full((len(logits), 1), torch.finfo(logits.dtype).min)
    local_labels = labels.unsqueeze(-1) - shards.offset
    is_local = (local_labels >= 0) & (local_labels < shards.size)
    index = local_labels.where(is_local, 0)
    local_max, target, p, total = local_softmax(logits, index)
    global_max = local_max.clone()
    dist.all_reduce(global_max, dist.ReduceOp.MAX, group=shards.group)
    # A label outside of the vocabulary raises the same error as on one rank.
    global_max.expand(-1, shards.vocab_size).gather(-1, labels.unsqueeze(-1))
    factor = (local_max - global_max).exp_()
    sums = torch.stack([total * factor, (target - global_max).where(is_local, 0)])
    dist.all_reduce(sums, group=shards.group)
    gradients = gradient(p, factor / sums[0], index, is_local).to(logits.dtype)
    return (sums[0].log() - sums[1]).squeeze(-1), gradients[:, : shards.size]


def _local_softmax(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the maximum, the logit at `index`, exp(logits - maximum), and the sum of the latter.

    All are (tokens, 1), except the exponentials (tokens, entries).
    """
    fp32_logits = logits.to(_softmax_dtype(logits))
    # If all local logits of a token are -inf, another rank has its maximum.
    local_max = fp32_logits.amax(-1, keepdim=True).clamp(min=torch.finfo(fp32_logits.dtype).min)
    target = fp32_logits.gather(-1, index)
    p = fp32_logits.sub_(local_max).exp_()
    return local_max, target, p, p.sum(-1, keepdim=True)


def _softmax_gradient(p: Tensor, factor: Tensor, index: Tensor, is_local: Tensor) -> Tensor:
    """Return softmax minus one-hot."""
    return p.mul_(factor).scatter_add_(-1, index, -is_local.to(p.dtype))


def _softmax_of_gathered(
    shards: VocabShards, body: SoftmaxBody, logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """All-gather the logits, apply `body`, and return the losses and this rank's gradients."""
    padded = F.pad(logits, (0, shards.max_size - shards.size))
    pieces = [torch.empty_like(padded) for _ in range(shards.group.size())]
    dist.all_gather(pieces, padded, group=shards.group)
    losses, gradients = body(torch.cat(pieces, dim=-1)[:, : shards.vocab_size], labels)
    return losses, gradients[:, shards.offset : shards.offset + shards.size]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Forward also computes the gradients; backward multiplies them by the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        body: SoftmaxBody,
        with_tokens: bool,
    ) -> tuple[Tensor, Tensor]:
        needs_d_hidden, needs_d_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if needs_d_hidden else None
        d_weight = torch.zeros_like(weight) if needs_d_weight and len(hidden) == 0 else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        token_losses = hidden.new_empty(
            len(hidden) if with_tokens else 0, dtype=_softmax_dtype(hidden)
        )
        is_valid = labels != IGNORED_LABEL
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            is_valid_row = is_valid[rows]
            losses, d_logits = body(hidden[rows] @ weight.t(), labels[rows] * is_valid_row)
            losses = losses.where(is_valid_row, 0)
            total += losses.sum()
            if with_tokens:
                token_losses[rows] = losses
            # Mask ignored tokens in (tokens, dim), which is much smaller than (tokens, vocab).
            mask = is_valid_row.unsqueeze(-1)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[rows]).mul_(mask)
            if needs_d_weight:
                factors = d_logits.t(), hidden[rows] * mask
                d_weight = _add_product(d_weight, *factors, is_only=chunk >= len(hidden))
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(token_losses)
        # Return a copy: a compiled graph of torch 2.11 loses the gradient of `total` itself.
        return total.to(_softmax_dtype(hidden), copy=True), token_losses

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, _token_grad: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        # CUDA rounds a factor without dimensions to the dtype of the other one. In bfloat16 that
        # would change the gradients of all layers below by up to 0.4 %.
        grad = grad.reshape(1)
        if d_hidden is not None:
            d_hidden = torch.mul(d_hidden, grad, out=torch.empty_like(d_hidden))
        if d_weight is not None:
            d_weight = torch.mul(
                d_weight, grad, out=torch.empty_like(d_weight, dtype=ctx.weight_dtype)
            )
        return d_hidden, d_weight, None, None, None, None


def sum_by_source(token_losses: Tensor, sources: Tensor, num_sources: int) -> Tensor:
    """Sum the token losses of each source. Returns (num_sources,) float64.

    The result is deterministic on every device.
    token_losses: rows * seq elements, in any shape. sources (rows,): the source of each row.
    """
    rows = token_losses.view(len(sources), -1).sum(-1, dtype=torch.float64)
    numbers = torch.arange(num_sources, device=rows.device).unsqueeze(-1)
    return rows.where(sources == numbers, 0).sum(-1)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, *, is_only: bool) -> Tensor:
    """Add `a @ b` to `total` in fp32 or float64. The only term of a sum keeps its dtype.

    CUDA's products of half precision add in fp32 themselves. A separate addition would move three
    times the bytes, and it would round each product.
    """
    if is_only:
        return a @ b
    dtype = _softmax_dtype(a)
    if not _adds_in_product(a):
        term = a @ b
        return term.to(dtype) if total is None else total.add_(term)
    if total is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)


def _adds_in_product(factor: Tensor) -> bool:
    is_half = factor.dtype in (torch.float16, torch.bfloat16)
    is_cuda = factor.is_cuda and torch.version.hip is None
    return is_half and is_cuda and not torch.compiler.is_compiling()
