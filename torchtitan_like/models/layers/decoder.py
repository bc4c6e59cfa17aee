"""Decoder-only language model: embedding, pre-norm blocks, feed-forward network, final norm, head.

A family's `model.py` builds one of these from its own attention, feed-forward, and rotary modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan_like.models.layers.head import OutputHead
from torchtitan_like.models.layers.kernels import Kernel, Mask, attention_kernel
from torchtitan_like.models.layers.local_attention import local_masks
from torchtitan_like.models.layers.moe import MoE
from torchtitan_like.models.layers.norm import RMSNorm
from torchtitan_like.models.layers.rotary import RotaryEmbedding


class DecoderArgs(Protocol):
    """The sizes and options that every family gives to `Decoder`."""

    @property
    def dim(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def enable_weight_tying(self) -> bool: ...
    @property
    def attn_type(self) -> str: ...
    @property
    def attn_mask_type(self) -> str: ...


class Embedding(nn.Embedding):
    """(batch, seq) int64 token ids -> (batch, seq, dim).

    The init table sets its weights. NOTE: torch's `reset_parameters` would draw a normal on the
    meta device. That imports torch's compiler: 800 modules and one second of every start.
    """

    def reset_parameters(self) -> None:
        """Leave the memory unchanged."""


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): `w2(silu(w1 x) * w3 x)`, (batch, seq, dim) -> same.

    has_bias: add a bias to all three products.
    """

    def __init__(self, dim: int, hidden_dim: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=has_bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias=has_bias)
        self.w3 = nn.Linear(dim, hidden_dim, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class DecoderBlock(nn.Module):
    """Attention, then a feed-forward network or experts. Each reads normed input and adds to the residual.

    attention(x, positions, mask), feed_forward(x), and moe(x) map (batch, seq, dim) to the same
    shape. A block has either `feed_forward` or `moe`; the other one is None.
    """

    def __init__(
        self,
        args: DecoderArgs,
        attention: nn.Module,
        feed_forward: nn.Module | None = None,
        moe: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = feed_forward
        self.moe = moe

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), positions, mask)
        network = self.feed_forward if self.moe is None else self.moe
        assert network is not None
        out: Tensor = h + network(self.ffn_norm(h))
        return out


class Decoder(nn.Module):
    """A stack of blocks between an embedding and an output head.

    `layers` is keyed by the layer's number in the whole model. A pipeline stage keeps some modules
    and sets the others to None. Its input and output are then hidden states (batch, seq, dim).

    `attention_mask` and each attention's `core` are seams: see `layers.kernels`.

    build_block: returns a new block for a layer's number.

    needs_mask: attention also needs its mask without positions, for windows, chunks, or sinks.
    sequence_shards: of the positions of the hidden states that a pipeline stage receives; more than
        one with sequence parallelism.
    """

    attention_mask: Mask | None
    needs_mask = False
    sequence_shards = 1

    def __init__(self, args: DecoderArgs, build_block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(args.vocab_size, args.dim)
        is_masked_by_document = args.attn_mask_type == "block_causal"
        kernel = attention_kernel(args.attn_type)
        self.attention_mask = kernel.mask if is_masked_by_document else None
        self.layers = nn.ModuleDict({str(i): build_block(i) for i in range(args.n_layers)})
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = OutputHead(args.dim, args.vocab_size)
        if args.enable_weight_tying:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Return logits (batch, seq, vocab), or the 0-dim sum of token losses if labels are given
        (see `OutputHead.loss`).

        tokens and labels are int64 (batch, seq); a label of -100 is ignored. positions
        (batch, seq), where given, count from the start of each token's document.
        """
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        mask = self.build_mask(tokens, positions, h.dtype)
        for layer in self.layers.values():
            h = layer(h, positions, mask)
        h = h if self.norm is None else self.norm(h)
        return cast(Tensor, h if self.output is None else self.output(h, labels))

    def use_local_masks(
        self,
        kernel: Kernel,
        max_seq_len: int,
        *,
        window: int = 0,
        chunk: int = 0,
        has_sink: bool = False,
    ) -> None:
        """Give the layers `Masks`: some have a window or a chunk. See `local_masks`."""
        by_document = self.attention_mask is not None
        self.needs_mask = has_sink or 0 < (window or chunk) < max_seq_len
        if by_document or self.needs_mask:
            self.attention_mask = local_masks(
                kernel.mask, by_document=by_document, window=window, chunk=chunk, has_sink=has_sink
            )

    def build_mask(self, tokens: Tensor, positions: Tensor | None, dtype: torch.dtype) -> Any:
        """Return the mask of one forward pass, which all layers share; None: plainly causal.

        tokens: the input of `forward`. dtype: of the activations.
        """
        if self.attention_mask is None or (positions is None and not self.needs_mask):
            return None
        if positions is None:
            shards = self.sequence_shards if self.tok_embeddings is None else 1
            positions = torch.arange(tokens.shape[1] * shards, device=tokens.device)[None]
        return self.attention_mask(positions, dtype, positions.shape[1])

    def init_buffers(self, device: torch.device) -> None:
        """Compute the buffers on `device`; call it again after materializing the model."""
        for module in self.modules():
            if isinstance(module, RotaryEmbedding | MoE):
                module.init_buffers(device)
