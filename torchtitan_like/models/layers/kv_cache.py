"""Keys and values of earlier tokens, so that generation computes every token once.

`CachedModel` replaces the seams of a model's attention (see `kernels`), so models contain no code
about it. A core treats its queries as the last tokens of the keys' sequence, which is all that a
cache needs: windows, chunks, and sinks work unchanged.

The rows of a batch are sequences of different lengths without padding. Adjacent rows of equal
length share a call of the core. So each row attends to the same keys as alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_like.models.layers.kernels import Core

# Tokens of all rows in one forward pass. It bounds the memory of the logits.
MAX_TOKENS = 2048


class CachedModel:
    """Runs a model on the new tokens of each row. A context manager: its end restores the model.

    The model reads `positions` and has the seam `core` in each attention; `attention_mask` is
    removed, since each row is one document.

    num_rows: sequences of the batch. capacity: maximum number of tokens of a row.

    Latent attention is cached as the keys and values of all heads, which its core receives.

    Raises ValueError if the model has no attention core.
    """

    def __init__(self, model: nn.Module, num_rows: int, capacity: int) -> None:
        self.model = model
        self.lengths = [0] * num_rows
        root: Any = model
        self._mask = getattr(root, "attention_mask", None)
        self._attentions: list[Any] = [
            module for module in model.modules() if hasattr(module, "core")
        ]
        if not self._attentions:
            raise ValueError(
                f"{type(model).__name__} has no attention module with the attribute `core`. "
                "Expected one in each layer, as docs/guides/models.md describes: call it there"
            )
        self._layers = [
            _CachedLayer(attention.core, num_rows, capacity) for attention in self._attentions
        ]

    def __enter__(self) -> CachedModel:
        self._set_mask(None)
        for attention, layer in zip(self._attentions, self._layers, strict=True):
            attention.core = layer.attend
        return self

    def __exit__(self, *_unused: object) -> None:
        self._set_mask(self._mask)
        for attention, layer in zip(self._attentions, self._layers, strict=True):
            attention.core = layer.core

    def append(self, tokens: Tensor, first_row: int = 0) -> Tensor:
        """Append tokens to adjacent rows. Return the logits after the last one (rows, vocab).

        tokens: int64 (rows, seq).
        """
        size = max(1, MAX_TOKENS // tokens.shape[0])
        for chunk in tokens.split(size, dim=1):
            logits = self._append_chunk(chunk, first_row)
        return logits

    def _append_chunk(self, tokens: Tensor, first_row: int) -> Tensor:
        num_rows, seq = tokens.shape
        rows = range(first_row, first_row + num_rows)
        groups = [
            Group(rows_of_group[0], rows_of_group[-1] + 1, length)
            for length, rows_of_group in (
                (length, list(equal)) for length, equal in groupby(rows, self.lengths.__getitem__)
            )
        ]
        for layer in self._layers:
            layer.groups = groups
        starts = torch.tensor([self.lengths[row] for row in rows], device=tokens.device)
        positions = starts[:, None] + torch.arange(seq, device=tokens.device)
        logits: Tensor = self.model(tokens, positions=positions)
        for row in rows:
            self.lengths[row] += seq
        return logits[:, -1]

    def keep(self, rows: Sequence[int]) -> None:
        """Remove all other rows."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self._layers:
            layer.keep(rows)

    def _set_mask(self, mask: Any) -> None:
        if self._mask is not None:
            root: Any = self.model
            root.attention_mask = mask


class Group(NamedTuple):
    """Adjacent rows, from `start` to before `stop`, with `length` cached tokens each."""

    start: int
    stop: int
    length: int


class _CachedLayer:
    """The keys and values of a layer, (rows, heads, capacity, head_dim) after the first call.

    groups: the rows of the next call, in the order of its batch.
    """

    def __init__(self, core: Core, num_rows: int, capacity: int) -> None:
        self.core = core
        self.num_rows = num_rows
        self.capacity = capacity
        self.groups: list[Group] = []
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: None = None) -> Tensor:
        """Store the new keys and values; attend to all of each row. It replaces the core."""
        if self.keys is None or self.values is None:
            self.keys = self._allocate(k)
            self.values = self._allocate(v)
        outputs = []
        first = 0
        for group in self.groups:
            batch = slice(first, first + group.stop - group.start)
            end = group.length + k.shape[2]
            keys = self.keys[group.start : group.stop, :, :end]
            values = self.values[group.start : group.stop, :, :end]
            keys[:, :, group.length :] = k[batch]
            values[:, :, group.length :] = v[batch]
            outputs.append(self.core(q[batch], keys, values, None))
            first = batch.stop
        return torch.cat(outputs)

    def keep(self, rows: Sequence[int]) -> None:
        """Remove all other rows."""
        assert self.keys is not None and self.values is not None
        index = torch.tensor(rows, device=self.keys.device)
        self.keys = self.keys[index]
        self.values = self.values[index]

    def _allocate(self, x: Tensor) -> Tensor:
        return x.new_empty(self.num_rows, x.shape[1], self.capacity, x.shape[3])
