"""A user's model from outside the package, with its own architecture and parameter names.

It has GPT-2's names, LayerNorm and biases (Radford et al. 2019). As in GPT-J (Wang & Komatsuzaki
2021), attention and feed-forward run in parallel. Two matrices with a GELU form the feed-forward
layer, attention is multi-head, positions are rotary. The code contains nothing distributed. Load it
with `experimental.custom_import = "tests.distributed.outside_model"`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan_like.models import InitRule, ModelSpec, register
from torchtitan_like.models.cost import LayerCost, ModelCost
from torchtitan_like.models.hf_table import Rows
from torchtitan_like.models.layers.decoder import Embedding
from torchtitan_like.models.layers.head import OutputHead
from torchtitan_like.models.layers.kernels import causal_attention
from torchtitan_like.models.layers.rotary import RotaryEmbedding, rotate

# ---- flavors


@dataclass(frozen=True)
class OutsideArgs:
    """Sizes of the model; each can be set in `[model.args]`."""

    dim: int = 32
    n_layers: int = 2
    n_heads: int = 4
    vocab_size: int = 2048
    max_seq_len: int = 1024

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


FLAVORS = {
    "tiny": OutsideArgs(),
    "small": OutsideArgs(dim=768, n_layers=12, n_heads=12, vocab_size=50304),
}


def check(args: OutsideArgs) -> list[str]:
    """Return the problems of the sizes, one sentence each."""
    if args.dim % (2 * args.n_heads):
        return [f"dim = {args.dim}: expected a multiple of 2 x n_heads = {2 * args.n_heads}"]
    return []


def cost(args: OutsideArgs) -> ModelCost:
    """Return the layers and what they cost."""
    layer = LayerCost(12 * args.dim * args.dim + 11 * args.dim, attention_width=2 * args.dim)
    embedding = args.vocab_size * args.dim
    return ModelCost((layer,) * args.n_layers, embedding, is_tied=False, other=2 * args.dim)


def init_table(args: OutsideArgs) -> tuple[tuple[str, InitRule], ...]:
    """Return GPT-2's table: std 0.02, and 0.02 / sqrt(2 L) for residual output projections."""
    plain = InitRule("normal", std=0.02)
    into_residual = InitRule("normal", std=0.02 / (2 * args.n_layers) ** 0.5)
    return (
        ("*ln*.weight", InitRule("ones")),
        ("*.bias", InitRule("zeros")),
        ("h.*.*_out.weight", into_residual),
        ("*", plain),
    )


# ---- model


class SelfAttention(nn.Module):
    """Input and output (batch, seq, dim). Context parallelism replaces `core`."""

    core: Callable[..., Tensor]

    def __init__(self, args: OutsideArgs, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.query = nn.Linear(args.dim, args.dim)
        self.key = nn.Linear(args.dim, args.dim)
        self.value = nn.Linear(args.dim, args.dim)
        self.attn_out = nn.Linear(args.dim, args.dim)
        self.rotary = rotary
        self.core = causal_attention

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            linear(x).view(batch, seq, -1, self.head_dim)
            for linear in (self.query, self.key, self.value)
        )
        cos, sin = self.rotary.tables(seq, positions)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out: Tensor = self.attn_out(y.transpose(1, 2).reshape(batch, seq, -1))
        return out


class MLP(nn.Module):
    """`mlp_out(gelu(fc x))`; input and output (batch, seq, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, 4 * dim)
        self.mlp_out = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp_out(F.gelu(self.fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Parallel block: attention and feed-forward read the same normalized input."""

    def __init__(self, args: OutsideArgs, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(args.dim)
        self.attn = SelfAttention(args, rotary)
        self.mlp = MLP(args.dim)

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        normed = self.ln(x)
        out: Tensor = x + self.attn(normed, positions) + self.mlp(normed)
        return out


class GPT(nn.Module):
    """The whole model. A pipeline stage keeps some modules and sets the others to None."""

    def __init__(self, args: OutsideArgs) -> None:
        super().__init__()
        self.wte = Embedding(args.vocab_size, args.dim)
        self.rotary = RotaryEmbedding(args.head_dim, args.max_seq_len, theta=1e4)
        self.h = nn.ModuleDict({str(i): Block(args, self.rotary) for i in range(args.n_layers)})
        self.ln_f = nn.LayerNorm(args.dim)
        self.lm_head = OutputHead(args.dim, args.vocab_size)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Return logits (batch, seq, vocab), or with labels (batch, seq) the sum of token losses.

        The sum is a 0-dim tensor and skips labels of -100.
        """
        x = tokens if self.wte is None else self.wte(tokens)
        for block in self.h.values():
            x = block(x, positions)
        x = x if self.ln_f is None else self.ln_f(x)
        out: Tensor = x if self.lm_head is None else self.lm_head(x, labels)
        return out

    def init_buffers(self, device: torch.device) -> None:
        """Compute the rotary tables on `device`."""
        self.rotary.init_buffers(device)


# ---- sharding, Hugging Face names, and the model's spec

SHARDING = (
    ("wte.weight", "vocab_embedding"),
    ("h.*.ln.*", "norm"),
    ("h.*.attn.query.*", "column"),
    ("h.*.attn.key.*", "column"),
    ("h.*.attn.value.*", "column"),
    ("h.*.attn.attn_out.*", "row"),
    ("h.*.mlp.fc.*", "column"),
    ("h.*.mlp.mlp_out.*", "row"),
    ("ln_f.*", "norm"),
    ("lm_head.weight", "output"),
)
MODULES_WITH_BIAS = (
    "h.{}.ln",
    "h.{}.attn.query",
    "h.{}.attn.key",
    "h.{}.attn.value",
    "h.{}.attn.attn_out",
    "h.{}.mlp.fc",
    "h.{}.mlp.mlp_out",
    "ln_f",
)


def constraints(args: OutsideArgs) -> dict[str, int]:
    """Return the sizes that restrict the parallel layouts of this model."""
    return {
        "n_layers": args.n_layers,
        "n_heads": args.n_heads,
        "n_kv_heads": args.n_heads,
        "vocab_size": args.vocab_size,
        "max_seq_len": args.max_seq_len,
    }


def hf_names(args: OutsideArgs) -> Rows:
    """Return pairs (name in this model, name in a fictional Hugging Face model)."""
    weights = [f"{name}.weight" for name in ("wte", *MODULES_WITH_BIAS, "lm_head")]
    return tuple(
        (name, f"transformer.{name}")
        for name in (*weights, *(f"{name}.bias" for name in MODULES_WITH_BIAS))
    )


def hf_config(args: OutsideArgs) -> dict[str, Any]:
    """Return the `config.json` of the fictional Hugging Face model."""
    return {"model_type": "outside", "hidden_size": args.dim, "num_hidden_layers": args.n_layers}


SPEC = ModelSpec(
    name="outside",
    args_type=OutsideArgs,
    flavors=FLAVORS,
    build=GPT,
    block_pattern="h.*",
    first_modules=("wte",),
    last_modules=("ln_f", "lm_head"),
    init_table=init_table,
    cost=cost,
    constraints=constraints,
    check=check,
    sharding=SHARDING,
    tied=lambda args: (),
    hf_names=hf_names,
    hf_config=hf_config,
)
register(SPEC)
