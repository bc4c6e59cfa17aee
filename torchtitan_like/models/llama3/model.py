"""Llama 3 on one device: plain modules, readable alone."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from torchtitan_like.models.layers.attention import Attention
from torchtitan_like.models.layers.embedding import Embedding
from torchtitan_like.models.layers.feed_forward import FeedForward
from torchtitan_like.models.layers.head import OutputHead
from torchtitan_like.models.layers.kernels import Mask, attention_kernel
from torchtitan_like.models.layers.norm import RMSNorm
from torchtitan_like.models.layers.rotary import RotaryEmbedding
from torchtitan_like.models.llama3.flavors import LlamaArgs


class TransformerBlock(nn.Module):
    """Attention, then the feed-forward network, each on normed input and added to the residual stream."""

    def __init__(self, args: LlamaArgs, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        core = attention_kernel(args.attn_type).core
        self.attention = Attention(args.dim, args.n_heads, args.num_kv_heads, rotary, core)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = FeedForward(args.dim, args.ffn_dim)

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), positions, mask)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Transformer(nn.Module):
    """A decoder-only language model.

    `layers` is keyed by the layer's number in the whole model. A pipeline stage keeps some of the modules and sets the
    others to None; what enters it is then hidden states (batch, seq, dim) and what leaves it too. `attention_mask` is a seam,
    as is each attention's `core`: see `layers.kernels`.
    """

    attention_mask: Mask | None

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = Embedding(args.vocab_size, args.dim)
        rotary = RotaryEmbedding(
            args.head_dim,
            args.max_seq_len,
            args.rope_theta,
            factor=args.rope_scaling_factor,
            low_freq_factor=args.rope_low_freq_factor,
            high_freq_factor=args.rope_high_freq_factor,
            original_max_seq_len=args.rope_original_max_seq_len,
        )
        documents = args.attn_mask_type == "block_causal"
        self.attention_mask = attention_kernel(args.attn_type).mask if documents else None
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args, rotary) for i in range(args.n_layers)})
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = OutputHead(args.dim, args.vocab_size)
        if args.enable_weight_tying:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits (batch, seq, vocab), or with labels (batch, seq) the 0-dim sum of token losses over labels != -100.

        tokens (batch, seq) and labels are int64; positions (batch, seq) count from each document's start where given.
        """
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        mask = None
        if positions is not None and self.attention_mask is not None:
            mask = self.attention_mask(positions, h.dtype, positions.shape[1])
        for layer in self.layers.values():
            h = layer(h, positions, mask)
        h = h if self.norm is None else self.norm(h)
        return cast(Tensor, h if self.output is None else self.output(h, labels))

    def init_buffers(self, device: torch.device) -> None:
        """Compute the rotary tables on `device`: needed again after materialising."""
        for module in self.modules():
            if isinstance(module, RotaryEmbedding):
                module.init_buffers(device)
