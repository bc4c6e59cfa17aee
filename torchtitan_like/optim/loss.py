"""Chunked cross-entropy: the loss of a large vocabulary without ever holding all logits."""

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
from torchtitan_like.util.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# On CPU the softmax walks through a chunk in pieces of this many logits, which stay in a core's cache.
TILE = 131_072

# (logits, labels) -> losses (tokens,) and gradients, in place of the logits if it likes.
SoftmaxBody = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class VocabShards:
    """A vocabulary of `vocab_size` entries, cut over the ranks of `group` as `torch.chunk` cuts: the last may have less."""

    group: ProcessGroup
    vocab_size: int

    @property
    def largest(self) -> int:
        """Entries of the rank that has most."""
        return -(-self.vocab_size // self.group.size())

    @property
    def first(self) -> int:
        """The first entry of this rank."""
        return min(self.group.rank() * self.largest, self.vocab_size)

    @property
    def size(self) -> int:
        """Entries of this rank, perhaps none."""
        return min(self.largest, self.vocab_size - self.first)


def chunked_cross_entropy(
    chunk_mib: int,
    compile_backend: str | None = None,
    shards: VocabShards | None = None,
    *,
    gathers_logits: bool = False,
    with_tokens: bool = False,
) -> Callable[[Tensor, Tensor, Tensor], Tensor | LossWithTokens]:
    """A loss (hidden (tokens, dim), weight (vocab, dim), labels (tokens,)) -> 0-dim sum over labels other than -100.

    Logits are made for a few tokens at a time, in the dtype of `hidden`, at most `chunk_mib` MiB of them if they were
    fp32 (0: all tokens at once); their softmax is fp32, or float64 for float64. Each chunk's gradients are taken while
    its logits are there, so that nothing is computed twice; those of the weight are summed over chunks in fp32.
    `compile_backend` compiles what happens between the matrix products.

    With `shards` the weight is this rank's part of the vocabulary; hidden and labels are those of all ranks, and so is
    the loss. The gradient of `hidden` is this rank's part of a sum. Logits stay where they are, and two numbers per token
    are summed over the ranks and one is maximised; or, with `gathers_logits`, every rank computes the loss of all logits.

    With `with_tokens` the loss also returns the loss of each token, detached (`LossWithTokens`). The sum is the same.
    """
    body: SoftmaxBody = _softmax_in_tiles
    if compile_backend is not None:
        body = partial(
            torch.compile(_softmax, backend=compile_backend)
        )  # as such, Dynamo of torch 2.11 would not take it
    widest: int | None = None
    if shards is not None and gathers_logits:
        body, widest = partial(_softmax_of_gathered, shards, body), shards.vocab_size
    elif shards is not None:
        begin: Callable[..., Any] = _exponentials
        end: Callable[..., Any] = _normalised
        if compile_backend is not None:
            begin, end = (torch.compile(part, backend=compile_backend) for part in (begin, end))
        body, widest = partial(_softmax_over_ranks, shards, begin, end), shards.largest

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor | LossWithTokens:
        # As many chunks on every rank: the ranks meet in each.
        chunk = _tokens_per_chunk(hidden.shape[0], widest or weight.shape[0], chunk_mib)
        if not torch.is_grad_enabled():  # no gradient is wanted then, whatever the tensors say
            hidden, weight = hidden.detach(), weight.detach()
        total, tokens = _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk, body, with_tokens)
        return LossWithTokens(total, tokens) if with_tokens else total

    return loss


def _tokens_per_chunk(num_tokens: int, vocab_size: int, chunk_mib: int) -> int:
    """The fewest chunks that respect the limit, all of nearly one size."""
    most = max((chunk_mib << 20) // (4 * vocab_size), 1) if chunk_mib else max(num_tokens, 1)
    num_chunks = max(-(-num_tokens // most), 1)
    return max(-(-num_tokens // num_chunks), 1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _softmax(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (tokens,) of logits (tokens, vocab) at labels, and their gradients: softmax minus one-hot, rounded once."""
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=_wide(logits))
    labels = labels.unsqueeze(-1)
    losses = -log_probabilities.gather(-1, labels).squeeze(-1)
    gradients = log_probabilities.exp_().scatter_add_(-1, labels, _minus_one(labels, log_probabilities.dtype))
    return losses, gradients.to(logits.dtype)


def _softmax_in_tiles(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As `_softmax`; on CPU the gradients overwrite the logits and no wide copy of them is ever whole."""
    if not logits.is_cpu:
        return _softmax(logits, labels)
    all_losses, tokens = [], max(TILE // logits.shape[-1], 1)
    for some_logits, some_labels in zip(logits.split(tokens), labels.split(tokens), strict=True):
        losses, p, total = _losses(some_logits, some_labels)
        index = some_labels.unsqueeze(-1)
        some_logits.copy_(p.mul_(total.reciprocal_()).scatter_add_(-1, index, _minus_one(index, p.dtype)))
        all_losses.append(losses)
    return torch.cat(all_losses), logits


def _losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (tokens,), softmax (tokens, vocab) and its sum (tokens, 1), by which the softmax is still to be divided.

    Half the time of log_softmax and exp on CPU, and more exact: torch's kernels add up a row one vector after the other,
    which is off by 1e-5 at 128,000 entries. `sum` is not, so it corrects the kernel. The log-sum-exp follows from the
    largest entry: log p_max = logit_max - logsumexp.
    """
    wide = logits.to(_wide(logits))
    p = torch.softmax(wide, dim=-1)
    total = p.sum(-1, keepdim=True)
    log_sum_exp = wide.amax(-1, keepdim=True) - (p.amax(-1, keepdim=True) / total).log_()
    return (log_sum_exp - wide.gather(-1, labels.unsqueeze(-1))).squeeze(-1), p, total


def _minus_one(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full_like(like, -1, dtype=dtype)


def _softmax_over_ranks(
    shards: VocabShards, begin: Callable[..., Any], end: Callable[..., Any], logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """As `_softmax` for logits (tokens, entries of this rank); losses are those over the whole vocabulary.

    The ranks agree on the highest logit of each token, then on the sum of exponentials and the label's logit, both
    relative to it: exp(logit - highest) / sum is as exact as on one rank.
    """
    if shards.size == 0:  # the ranks meet all the same: a logit so low that it counts for nothing
        logits = logits.new_full((len(logits), 1), torch.finfo(logits.dtype).min)
    local_labels = labels.unsqueeze(-1) - shards.first
    is_here = (local_labels >= 0) & (local_labels < shards.size)
    index = local_labels.where(is_here, 0)
    peak, target, p, total = begin(logits, index)
    highest = peak.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=shards.group)
    # No rank has a label beyond the vocabulary: this look-up into nothing is the error that it is on one rank.
    highest.expand(-1, shards.vocab_size).gather(-1, labels.unsqueeze(-1))
    factor = (peak - highest).exp_()
    sums = torch.stack([total * factor, (target - highest).where(is_here, 0)])
    dist.all_reduce(sums, group=shards.group)
    gradients = end(p, factor / sums[0], index, is_here).to(logits.dtype)
    return (sums[0].log() - sums[1]).squeeze(-1), gradients[:, : shards.size]


def _exponentials(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of logits (tokens, entries): highest, that at `index`, exp(logits - highest) and its sum; (tokens, 1) but one."""
    wide = logits.to(_wide(logits))
    # A token all of whose logits here are -inf has its highest elsewhere.
    peak = wide.amax(-1, keepdim=True).clamp(min=torch.finfo(wide.dtype).min)
    target = wide.gather(-1, index)
    p = wide.sub_(peak).exp_()
    return peak, target, p, p.sum(-1, keepdim=True)


def _normalised(p: Tensor, factor: Tensor, index: Tensor, is_here: Tensor) -> Tensor:
    """Softmax minus one-hot."""
    return p.mul_(factor).scatter_add_(-1, index, -is_here.to(p.dtype))


def _softmax_of_gathered(
    shards: VocabShards, body: SoftmaxBody, logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """`body` for the logits of all ranks, and this rank's columns of their gradients."""
    padded = F.pad(logits, (0, shards.largest - shards.size))
    pieces = [torch.empty_like(padded) for _ in range(shards.group.size())]
    dist.all_gather(pieces, padded, group=shards.group)
    losses, gradients = body(torch.cat(pieces, dim=-1)[:, : shards.vocab_size], labels)
    return losses, gradients[:, shards.first : shards.first + shards.size]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients of the sum too; backward only scales them by what comes from above."""

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
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight) if wants_weight and len(hidden) == 0 else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        token_losses = hidden.new_empty(len(hidden) if with_tokens else 0, dtype=_wide(hidden))
        valid = labels != IGNORED_LABEL
        for start in range(0, len(hidden), chunk):
            some = slice(start, start + chunk)
            counts = valid[some]
            losses, d_logits = body(hidden[some] @ weight.t(), labels[some] * counts)
            losses = losses.where(counts, 0)
            total += losses.sum()
            if with_tokens:
                token_losses[some] = losses
            # Ignored tokens get no gradient by way of the narrow factors: (tokens, dim) is much less than (tokens, vocab).
            mask = counts.unsqueeze(-1)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[some]).mul_(mask)
            if wants_weight:
                part = d_logits.t() @ (hidden[some] * mask)
                d_weight = _add(d_weight, part, is_only=chunk >= len(hidden))
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        # Never `total` itself: what is returned twice, as a result and to be kept, gets no gradient in a graph of torch 2.11.
        ctx.mark_non_differentiable(token_losses)
        return total.to(_wide(hidden), copy=True), token_losses

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, _token_grad: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden is not None:
            d_hidden = d_hidden * grad
        if d_weight is not None:
            d_weight = torch.mul(d_weight, grad, out=torch.empty_like(d_weight, dtype=ctx.weight_dtype))
        return d_hidden, d_weight, None, None, None, None


def sum_by_source(token_losses: Tensor, sources: Tensor, num_sources: int) -> Tensor:
    """Sum the token losses of each source: (num_sources,) float64, the same on every device and run.

    token_losses (rows * seq,), or of any shape with as many elements; sources (rows,): the source of each row.
    """
    rows = token_losses.view(len(sources), -1).sum(-1, dtype=torch.float64)
    numbers = torch.arange(num_sources, device=rows.device).unsqueeze(-1)
    return rows.where(sources == numbers, 0).sum(-1)


def _add(total: Tensor | None, part: Tensor, *, is_only: bool) -> Tensor:
    """`total + part` in fp32 or wider; what is not a sum keeps its dtype."""
    if is_only:
        return part
    return part.to(_wide(part)) if total is None else total.add_(part)
