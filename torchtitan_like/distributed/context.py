"""Context parallelism: the ranks of one group hold different tokens of the same sequences.

All but attention works on each token alone, so only attention's seams are replaced (see `models/layers/kernels`): its `core`,
which must find the keys of all ranks, and the model's `attention_mask`. Nothing is divided by the number of ranks: each
rank's loss is that of its own tokens, and gradients are summed over `cp` as over data-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_like.distributed.collectives import (
    all_to_all_heads_seq,
    all_to_all_seq_heads,
    gather_along,
    gather_whole,
)
from torchtitan_like.distributed.ring import ring_attention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    # As in models/layers/kernels: (q, k, v, mask) -> output; (positions, dtype, number of keys) -> mask.
    Core = Callable[..., Tensor]
    Mask = Callable[[Tensor, torch.dtype, int], Any]

SEQUENCE = 2  # of q, k, v (batch, heads, seq, head_dim)


class ContextParallel:
    """How sequences are cut over the ranks of `group`, and how attention sees the whole of them.

    method: "allgather" gathers all keys and values on every rank, and keeps them for backward; "ring" passes them on while it
    computes; "ulysses" gives each rank some heads of the whole sequence.
    load_balancer: with "headtail" a rank holds one chunk of the head of each sequence and its mirror image of the tail, as
    late tokens see more keys than early ones; None: neighbouring tokens. Ulysses, under which all ranks do the same, never
    needs it and cuts in order.
    """

    def __init__(
        self,
        group: ProcessGroup,
        rank: int,
        size: int,
        method: str = "allgather",
        load_balancer: str | None = "headtail",
    ) -> None:
        self.group, self.rank, self.size, self.method = group, rank, size, method
        is_balanced = load_balancer == "headtail" and method != "ulysses"
        self.chunks = tuple((r, 2 * size - 1 - r) if is_balanced else (r,) for r in range(size))

    @property
    def num_chunks(self) -> int:
        """Into how many equal chunks a sequence is cut."""
        return sum(map(len, self.chunks))

    def shard(self, tokens: Tensor, labels: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's part of tensors (..., seq) that are equal on all ranks of the group: (..., seq / size) each.

        Without positions in documents those returned are the places in the sequence, which the rotary tables need. Raises
        ValueError for a sequence that cannot be cut into equal chunks.
        """
        if tokens.shape[-1] % self.num_chunks:
            raise ValueError(
                f"a sequence of {tokens.shape[-1]} tokens cannot be cut into the {self.num_chunks} equal chunks of "
                f"{self.size} context-parallel ranks: make it a multiple of {self.num_chunks}"
            )
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
        return self._own(tokens), self._own(labels), self._own(positions)

    def _own(self, x: Tensor) -> Tensor:
        pieces = x.chunk(self.num_chunks, dim=-1)
        return torch.cat([pieces[i] for i in self.chunks[self.rank]], dim=-1)

    def ends(self, seq: int) -> list[int]:
        """How many tokens of the sequence there are up to the end of each chunk of this rank, which holds `seq` tokens."""
        mine = self.chunks[self.rank]
        return [(chunk + 1) * seq // len(mine) for chunk in mine]

    def gather(self, x: Tensor) -> Tensor:
        """The whole sequence, in order, from every rank's (batch, heads, local seq, dim); gradients are summed."""
        of_ranks = gather_along(x, 0, self.group).chunk(self.size, dim=0)
        pieces = {
            number: piece
            for numbers, of_rank in zip(self.chunks, of_ranks, strict=True)
            for number, piece in zip(numbers, of_rank.chunk(len(numbers), SEQUENCE), strict=True)
        }
        return torch.cat([pieces[number] for number in sorted(pieces)], SEQUENCE)


def apply_context_parallel(model: nn.Module, context: ContextParallel) -> list[str]:
    """Replace the seams of attention in a model, or in a pipeline stage of one, in place; returns lines for the log.

    Raises ValueError where the method cannot do what the model asks for.
    """
    method = METHODS[context.method]
    seams: Any = [module for module in model.modules() if hasattr(module, "core")]
    # One function for all layers that have the same one now, so that compiled blocks can be shared.
    cores = {module.core: method.core(context, module.core) for module in seams}
    for module in seams:
        module.core = cores[module.core]
    root: Any = model
    if getattr(root, "attention_mask", None) is not None:
        root.attention_mask = method.mask(context, root.attention_mask)
    balance = "head and tail" if context.num_chunks > context.size else "in order"
    return [f"Applied Context Parallelism to the model (over {context.size} ranks, {context.method}, {balance})"]


# ---- all-gather: each chunk of queries against the keys up to its end


def _gathered_core(context: ContextParallel, core: Core) -> Core:
    def gathered(q: Tensor, k: Tensor, v: Tensor, masks: Any = None) -> Tensor:
        sizes = [k.shape[-1], v.shape[-1]]
        k, v = context.gather(torch.cat([k, v], dim=-1)).split(sizes, dim=-1)
        ends = context.ends(q.shape[SEQUENCE])
        # NOTE: a core takes queries as the last of the keys it is given: this is what makes a chunk causal.
        parts = [
            core(part, k[:, :, :end], v[:, :, :end], mask)
            for part, end, mask in zip(q.chunk(len(ends), SEQUENCE), ends, masks or [None] * len(ends), strict=True)
        ]
        return torch.cat(parts, SEQUENCE)

    return gathered


def _gathered_mask(context: ContextParallel, mask: Mask) -> Mask:
    def of_chunks(positions: Tensor, dtype: torch.dtype, num_keys: int) -> tuple[Any, ...]:
        ends = context.ends(num_keys)
        return tuple(mask(part, dtype, end) for part, end in zip(positions.chunk(len(ends), 1), ends, strict=True))

    return of_chunks


# ---- Ulysses (Jacobs et al. 2023, arXiv:2309.14509): all tokens of some heads


def _ulysses_core(context: ContextParallel, core: Core) -> Core:
    def exchanged(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        k, v = (_enough_heads(x, context.size) for x in (k, v))
        q, k, v = _exchanged_together((q, k, v), context)
        return all_to_all_seq_heads(core(q, k, v, mask), context.group)

    return exchanged


def _exchanged_together(heads: Sequence[Tensor], context: ContextParallel) -> tuple[Tensor, ...]:
    """`all_to_all_heads_seq` of several tensors that differ in their number of heads at most, as
    one exchange."""
    per_rank = [x.shape[1] // context.size for x in heads]
    # Of each tensor the heads of the first rank, then those of the second: a cut into equal parts
    # gives each rank its own.
    joined = torch.cat([x.unflatten(1, (context.size, -1)) for x in heads], dim=2).flatten(1, 2)
    exchanged: tuple[Tensor, ...] = all_to_all_heads_seq(joined, context.group).split(per_rank, dim=1)
    return exchanged


def _enough_heads(x: Tensor, num_ranks: int) -> Tensor:
    """Each head as often as it takes for the ranks to have equally many; whoever has a query head then has its keys."""
    times = num_ranks // math.gcd(x.shape[1], num_ranks)
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _ulysses_mask(context: ContextParallel, mask: Mask) -> Mask:
    def of_sequence(positions: Tensor, dtype: torch.dtype, num_keys: int) -> Any:
        whole = gather_whole(positions, 1, context.group)
        return mask(whole, dtype, whole.shape[1])

    return of_sequence


# ---- ring


def _ring_core(context: ContextParallel, core: Core) -> Core:
    def passed_on(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        return ring_attention(q, k, v, context)

    return passed_on


def _no_ring_mask(context: ContextParallel, mask: Mask) -> Mask:
    raise ValueError(
        'context_parallel_rotate_method = "alltoall" passes keys round a ring, which cannot end attention at document '
        'borders: use "allgather" or "ulysses", or attn_mask_type = "causal"'
    )


class Method(NamedTuple):
    """What becomes of the seams: (context, the model's own one) -> the one in its place."""

    core: Callable[[ContextParallel, Core], Core]
    mask: Callable[[ContextParallel, Mask], Mask]


METHODS = {
    "allgather": Method(_gathered_core, _gathered_mask),
    "ring": Method(_ring_core, _no_ring_mask),
    "ulysses": Method(_ulysses_core, _ulysses_mask),
}
