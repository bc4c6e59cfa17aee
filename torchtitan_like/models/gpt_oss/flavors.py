"""Sizes, initial weights, and cost of gpt-oss models (arXiv:2508.10925)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchtitan_like.models.argument_rules import (
    check_balance,
    check_base,
    check_divisor,
    check_even,
    check_local_attention,
    check_positive,
    check_ranges,
)
from torchtitan_like.models.cost import (
    LayerCost,
    ModelCost,
    attention_params,
    decoder_cost,
    feed_forward_params,
)
from torchtitan_like.models.decoder_tables import decoder_init, decoder_widths
from torchtitan_like.models.spec import InitRule, Widths


@dataclass(frozen=True)
class GptOssArgs:
    """Sizes of a gpt-oss model; each can be set in `[model.args]`.

    sliding_window_size: in layers 0, 2, 4, ... a token attends to this many tokens, itself included.
    num_experts, top_k: number of experts in each block, and number that process each token.
    moe_inter_dim: width of each expert.
    swiglu_limit: experts clamp their hidden units to this size.
    load_balance, load_balance_coeff, router_z_coeff: see `layers.balance.Balance`.
    max_seq_len: rows of the rotary tables, in tokens.
    rope_factor: length of the context relative to original_seq_len (YaRN, arXiv:2309.00071), for
        any training.seq_len; 1 switches YaRN off.
    beta_fast, beta_slow: YaRN keeps frequencies with more than beta_fast rotations within
        original_seq_len, and divides frequencies with fewer than beta_slow rotations by rope_factor.
    attn_type: kernel of attention ("sdpa", "flex"). On CPU, "sdpa" replaces "flex".
    attn_mask_type: "causal": a token attends to all earlier tokens of the sample; "block_causal":
        to the earlier tokens of its document.
    """

    dim: int = 2880
    n_layers: int = 24
    n_heads: int = 64
    n_kv_heads: int = 8
    head_dim: int = 64
    vocab_size: int = 201088
    norm_eps: float = 1e-5
    sliding_window_size: int = 128
    num_experts: int = 32
    top_k: int = 4
    moe_inter_dim: int = 2880
    swiglu_limit: float = 7.0
    load_balance: str = "none"
    load_balance_coeff: float = 1e-3
    router_z_coeff: float = 0.0
    max_seq_len: int = 131072
    rope_theta: float = 150000.0
    rope_factor: float = 32.0
    original_seq_len: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    enable_weight_tying: bool = False
    init_std: float = 0.02
    attn_type: str = "flex"
    attn_mask_type: str = "causal"

    def window(self, layer: int) -> int:
        """Return the number of tokens that a token attends to in a layer; 0: all."""
        return self.sliding_window_size if layer % 2 == 0 else 0


FLAVORS = {
    "debugmodel": GptOssArgs(dim=256, n_layers=4, num_experts=8),
    "20b": GptOssArgs(),
    "120b": GptOssArgs(n_layers=36, num_experts=128),
}


def check(args: GptOssArgs) -> list[str]:
    """Return one sentence for each problem of the sizes."""
    positive = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "norm_eps", "sliding_window_size",
                "num_experts", "moe_inter_dim", "swiglu_limit", "max_seq_len", "original_seq_len", "beta_slow",
                "init_std")  # fmt: skip
    problems = check_local_attention(args)
    problems += check_balance(
        args.load_balance, args.load_balance_coeff, args.router_z_coeff, args.num_experts
    )
    problems += check_positive(args, positive)
    ranges = (
        ("top_k", 1, args.num_experts),
        ("rope_factor", 1, math.inf),
        ("beta_fast", args.beta_slow, math.inf),
    )
    problems += check_ranges(args, ranges)
    problems += check_base(args.rope_theta)
    problems += check_even("head_dim", args.head_dim)
    if args.n_kv_heads > 0:
        problems += check_divisor("n_kv_heads", args.n_kv_heads, "n_heads", args.n_heads)
    return problems


def cost(args: GptOssArgs) -> ModelCost:
    """Return the layers and what they cost."""
    query_dim, key_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    attention = attention_params(args.dim, query_dim, key_dim, qkv_bias=True, output_bias=True)
    sinks = args.n_heads
    router = (args.dim + 1) * args.num_experts
    layer = LayerCost(
        attention + sinks + router + 2 * args.dim,
        attention_width=2 * query_dim,
        num_experts=args.num_experts,
        top_k=args.top_k,
        expert_params=feed_forward_params(args.dim, args.moe_inter_dim, has_bias=True),
    )
    layers = (layer._replace(max_keys=args.window(i)) for i in range(args.n_layers))
    return decoder_cost(args, layers)


def init_table(args: GptOssArgs) -> tuple[tuple[str, InitRule], ...]:
    """Return TorchTitan's initial weights: (pattern, rule) rows, of which the first match applies.

    Biases and sinks start like the weights of their layer.
    """
    return decoder_init(args, ("whole_block",), args.init_std)


def widths(args: GptOssArgs) -> Widths:
    """Return the widths of the weights' inputs."""
    return decoder_widths(
        "*.attention.wq.*", heads=args.n_heads * args.head_dim, experts=args.moe_inter_dim
    )
