"""Qwen3 on one device: plain modules, readable alone. Beside Llama 3 it norms each head's queries and keys."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from torchtitan_like.models.layers.embedding import Embedding
from torchtitan_like.models.layers.feed_forward import FeedForward
from torchtitan_like.models.layers.head import OutputHead
from torchtitan_like.models.layers.kernels import Core, Mask, attention_kernel
from torchtitan_like.models.layers.norm import RMSNorm
from torchtitan_like.models.layers.rotary import RotaryEmbedding, rotate
from torchtitan_like.models.qwen3.flavors import Qwen3Args


class Attention(nn.Module):
    """Attention whose queries and keys are normed, each head by itself, before they are rotated (arXiv:2505.09388).

    Input and output (batch, seq, dim); `core` and `mask` as in `layers.attention`.
    """

    core: Core

    def __init__(self, args: Qwen3Args, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.q_norm = RMSNorm(args.head_dim, args.norm_eps)
        self.k_norm = RMSNorm(args.head_dim, args.norm_eps)
        self.rotary = rotary
        self.core = attention_kernel(args.attn_type).core

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
        batch, seq, _ = x.shape
        # The number of heads is left open: a rank may hold some of them.
        q = self.q_norm(self.wq(x).view(batch, seq, -1, self.head_dim))
        k = self.k_norm(self.wk(x).view(batch, seq, -1, self.head_dim))
        v = self.wv(x).view(batch, seq, -1, self.head_dim)
        cos, sin = self.rotary.tables(seq, positions)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, seq, -1))
        return out


class TransformerBlock(nn.Module):
    """Attention, then the feed-forward network, each on normed input and added to the residual stream."""

    def __init__(self, args: Qwen3Args, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args, rotary)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = FeedForward(args.dim, args.hidden_dim)

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

    def __init__(self, args: Qwen3Args) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = Embedding(args.vocab_size, args.dim)
        rotary = RotaryEmbedding(args.head_dim, args.max_seq_len, args.rope_theta)
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
