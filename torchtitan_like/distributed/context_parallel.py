"""Context parallelism: the ranks of one group hold different tokens of the same sequences.

Only attention mixes tokens, so only its two seams are replaced (see `models/layers/kernels`):
`core`, which needs the keys of all ranks, and the model's `attention_mask`. Each rank's loss covers
its own tokens; gradients are summed over `cp` as over data-parallel ranks.
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

    # As in models/layers/kernels: (q, k, v, mask) -> output; (positions, dtype, number of keys) ->
    # mask.
    Core = Callable[..., Tensor]
    Mask = Callable[[Tensor, torch.dtype, int], Any]

SEQUENCE = 2  # of q, k, v (batch, heads, seq, head_dim)


class ContextParallel:
    """Shards sequences over the ranks of `group`, and gathers what attention needs.

    method: "allgather" gathers all keys and values on every rank, and keeps them for backward;
        "ring" rotates them while it computes; "ulysses" gives each rank some heads of the whole
        sequence.
    load_balancer: "headtail" gives a rank a chunk from the start of each sequence and its mirror
        image from the end. This balances the work, since late tokens attend to more keys. None:
        contiguous tokens. Ulysses is balanced without it and always uses contiguous tokens.
    """

    def __init__(
        self,
        group: ProcessGroup,
        rank: int,
        size: int,
        method: str = "allgather",
        load_balancer: str | None = "headtail",
    ) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.method = method
        is_balanced = load_balancer == "headtail" and method != "ulysses"
        self.chunks: tuple[tuple[int, ...], ...] = tuple(
            (r, 2 * size - 1 - r) if is_balanced else (r,) for r in range(size)
        )

    @property
    def num_chunks(self) -> int:
        """Number of equal chunks of a sequence."""
        return sum(map(len, self.chunks))

    def shard(
        self, tokens: Tensor, labels: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's shards (..., seq / size) of tensors (..., seq) that all ranks have.

        Without positions in documents it returns indices in the sequence, which the rotary tables
        need. Raises ValueError for a sequence that does not divide into equal chunks.
        """
        if tokens.shape[-1] % self.num_chunks:
            raise ValueError(
                f"a sequence of {tokens.shape[-1]} tokens cannot be divided into the "
                f"{self.num_chunks} equal chunks of {self.size} context-parallel ranks: make it a "
                f"multiple of {self.num_chunks}"
            )
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
        return self._local_chunks(tokens), self._local_chunks(labels), self._local_chunks(positions)

    def _local_chunks(self, x: Tensor) -> Tensor:
        chunks = x.chunk(self.num_chunks, dim=-1)
        return torch.cat([chunks[i] for i in self.chunks[self.rank]], dim=-1)

    def ends(self, seq: int) -> list[int]:
        """Return the end of each chunk of this rank in the whole sequence; the rank has `seq` tokens."""
        chunks = self.chunks[self.rank]
        return [(chunk + 1) * seq // len(chunks) for chunk in chunks]

    def gather(self, x: Tensor) -> Tensor:
        """Gather (batch, heads, local seq, dim) of every rank into sequence order; gradients are summed."""
        of_ranks = gather_along(x, 0, self.group).chunk(self.size, dim=0)
        chunks = {
            number: chunk
            for numbers, of_rank in zip(self.chunks, of_ranks, strict=True)
            for number, chunk in zip(numbers, of_rank.chunk(len(numbers), SEQUENCE), strict=True)
        }
        return torch.cat([chunks[number] for number in sorted(chunks)], SEQUENCE)


def apply_context_parallel(model: nn.Module, context: ContextParallel) -> list[str]:
    """Replace the attention seams of a model or pipeline stage in place; return lines for the log.

    Raises ValueError if the method does not support the model's attention mask.
    """
    method = METHODS[context.method]
    seams: Any = [module for module in model.modules() if hasattr(module, "core")]
    # One function for all layers that share one, so that they can share one compilation.
    cores = {module.core: method.core(context, module.core) for module in seams}
    for module in seams:
        module.core = cores[module.core]
    root: Any = model
    if getattr(root, "attention_mask", None) is not None:
        root.attention_mask = method.mask(context, root.attention_mask)
    balance = "head and tail" if context.num_chunks > context.size else "in order"
    return [
        f"Applied Context Parallelism to the model (over {context.size} ranks, {context.method}, "
        f"{balance})"
    ]


# ---- all-gather: each chunk of queries attends to the keys up to its end


def _gathered_core(context: ContextParallel, core: Core) -> Core:
    def gathered(q: Tensor, k: Tensor, v: Tensor, masks: Any = None) -> Tensor:
        sizes = [k.shape[-1], v.shape[-1]]
        k, v = context.gather(torch.cat([k, v], dim=-1)).split(sizes, dim=-1)
        ends = context.ends(q.shape[SEQUENCE])
        masks = masks or [None] * len(ends)
        # NOTE: a core treats the queries as the last of the given keys. That makes a chunk causal.
        outputs = [
            core(chunk, k[:, :, :end], v[:, :, :end], mask)
            for chunk, end, mask in zip(q.chunk(len(ends), SEQUENCE), ends, masks, strict=True)
        ]
        return torch.cat(outputs, SEQUENCE)

    return gathered


def _gathered_mask(context: ContextParallel, mask: Mask) -> Mask:
    def of_chunks(positions: Tensor, dtype: torch.dtype, num_keys: int) -> tuple[Any, ...]:
        ends = context.ends(num_keys)
        chunks = positions.chunk(len(ends), 1)
        return tuple(mask(chunk, dtype, end) for chunk, end in zip(chunks, ends, strict=True))

    return of_chunks


# ---- Ulysses (Jacobs et al. 2023, arXiv:2309.14509): all tokens of some heads


def _ulysses_core(context: ContextParallel, core: Core) -> Core:
    def exchanged(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        k, v = (_repeat_heads(x, context.size) for x in (k, v))
        q, k, v = _exchange_heads((q, k, v), context)
        return all_to_all_seq_heads(core(q, k, v, mask), context.group)

    return exchanged


def _exchange_heads(heads: Sequence[Tensor], context: ContextParallel) -> tuple[Tensor, ...]:
    """Run `all_to_all_heads_seq` of several tensors as one exchange.

    Their numbers of heads may differ, all other sizes are equal.
    """
    per_rank = [x.shape[1] // context.size for x in heads]
    # Order the heads by rank, then by tensor, so that equal slices go to the ranks.
    joined = torch.cat([x.unflatten(1, (context.size, -1)) for x in heads], dim=2).flatten(1, 2)
    exchanged: tuple[Tensor, ...] = all_to_all_heads_seq(joined, context.group).split(
        per_rank, dim=1
    )
    return exchanged


def _repeat_heads(x: Tensor, num_ranks: int) -> Tensor:
    """Repeat each head until the ranks have equally many; a rank then has the keys of its queries."""
    times = num_ranks // math.gcd(x.shape[1], num_ranks)
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _ulysses_mask(context: ContextParallel, mask: Mask) -> Mask:
    def of_sequence(positions: Tensor, dtype: torch.dtype, num_keys: int) -> Any:
        whole = gather_whole(positions, 1, context.group)
        return mask(whole, dtype, whole.shape[1])

    return of_sequence


# ---- ring


def _ring_core(context: ContextParallel, core: Core) -> Core:
    def rotated(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        return ring_attention(q, k, v, context)

    return rotated


def _no_ring_mask(context: ContextParallel, mask: Mask) -> Mask:
    raise ValueError(
        'context_parallel_rotate_method = "alltoall" rotates keys, which cannot end attention at '
        'document borders: use "allgather" or "ulysses", or attn_mask_type = "causal"'
    )


class Method(NamedTuple):
    """Replacements of the two seams: (context, the model's function) -> the replacement."""

    core: Callable[[ContextParallel, Core], Core]
    mask: Callable[[ContextParallel, Mask], Mask]


METHODS = {
    "allgather": Method(_gathered_core, _gathered_mask),
    "ring": Method(_ring_core, _no_ring_mask),
    "ulysses": Method(_ulysses_core, _ulysses_mask),
}
