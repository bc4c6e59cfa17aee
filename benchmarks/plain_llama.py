"""A Llama of plain torch modules for one device: the baseline of the benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan_like.models.dense.flavors import LlamaArgs


def rotary_tables(args: LlamaArgs, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotary angles, both (seq_len, head_dim / 2)."""
    exponents = torch.arange(0, args.head_dim, 2) / args.head_dim
    angles = torch.outer(torch.arange(seq_len), args.rope_theta**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x (batch, heads, seq, head_dim)."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


class Block(nn.Module):
    """Attention and SwiGLU, each with a preceding norm and a residual connection."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        kv_dim = args.num_kv_heads * args.head_dim
        self.attention_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, kv_dim, bias=False)
        self.wv = nn.Linear(args.dim, kv_dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        self.ffn_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Input and output are (batch, seq, dim)."""
        batch, seq, _ = x.shape
        normed = self.attention_norm(x)
        q, k, v = (
            w(normed).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).reshape(batch, seq, -1))
        normed = self.ffn_norm(x)
        out: Tensor = x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return out


class PlainLlama(nn.Module):
    """Map token ids (batch, seq) to logits (batch, seq, vocab_size)."""

    def __init__(self, args: LlamaArgs, seq_len: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.cos: Tensor
        self.sin: Tensor
        for name, table in zip(("cos", "sin"), rotary_tables(args, seq_len), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits: Tensor = self.output(self.norm(x))
        return logits
