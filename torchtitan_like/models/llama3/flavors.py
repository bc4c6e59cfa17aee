"""Sizes, initial weights, and cost of Llama 3, 3.1, and 3.2 (arXiv:2407.21783)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchtitan_like.models.attention_rules import check_attention
from torchtitan_like.models.spec import InitRule, trunc_normal

# The standard deviation of a linear layer's weights as a function of the model's width h.
INIT_STD = {
    "fixed": lambda h: 0.02,
    "sqrt(1/(3h))": lambda h: math.sqrt(1 / (3 * h)),  # MT-NLG 530B, arXiv:2201.11990
    "sqrt(2/(5h))": lambda h: math.sqrt(2 / (5 * h)),  # Nguyen & Salazar 2019, arXiv:1910.05895
}


@dataclass(frozen=True)
class LlamaArgs:
    """Sizes of a Llama model; each can be set in `[model.args]`.

    n_kv_heads: heads of keys and values (None: n_heads).
    multiple_of, ffn_dim_multiplier: the feed-forward width is 8/3 dim times ffn_dim_multiplier,
        rounded up to a multiple of multiple_of.
    max_seq_len: rows of the rotary tables, in tokens.
    depth_init: weights that write to the residual stream shrink with their layer's depth (True) or
        with the number of layers (False).
    init_std: a number, or a name in INIT_STD.
    attn_type: kernel of attention that ends at document borders ("sdpa", "flex", "varlen").
    attn_mask_type: "causal": a token attends to all earlier tokens of the sample; "block_causal":
        to the earlier tokens of its document.
    """

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    vocab_size: int = 128256
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    max_seq_len: int = 131072
    rope_theta: float = 500000.0
    rope_scaling_factor: float = 8.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_seq_len: int = 8192
    enable_weight_tying: bool = False
    depth_init: bool = True
    init_std: float | str = "fixed"
    attn_type: str = "sdpa"
    attn_mask_type: str = "causal"

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def num_kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_dim(self) -> int:
        width = int(8 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return -(-width // self.multiple_of) * self.multiple_of

    @property
    def linear_std(self) -> float:
        """Return `init_std` as a number."""
        return (
            INIT_STD[self.init_std](self.dim)
            if isinstance(self.init_std, str)
            else float(self.init_std)
        )


FLAVORS = {
    "debugmodel": LlamaArgs(dim=256, n_layers=6, n_heads=16, vocab_size=2048),
    "1B": LlamaArgs(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5,
                    rope_scaling_factor=32.0, enable_weight_tying=True),
    "3B": LlamaArgs(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim_multiplier=1.0,
                    rope_scaling_factor=32.0, enable_weight_tying=True),
    "8B": LlamaArgs(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024),
    "70B": LlamaArgs(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096),
    "405B": LlamaArgs(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim_multiplier=1.2, multiple_of=4096),
}  # fmt: skip
# TorchTitan's flavors for other attention kernels: equal sizes, attention within each document.
FLAVORS |= {
    name: replace(FLAVORS[base], attn_type=attn_type, attn_mask_type="block_causal")
    for name, base, attn_type in (
        ("debugmodel_flex_attn", "debugmodel", "flex"),
        ("debugmodel_varlen_attn", "debugmodel", "varlen"),
        ("8B_flex", "8B", "flex"),
        ("8B_varlen", "8B", "varlen"),
    )
}


def check(args: LlamaArgs) -> list[str]:
    """Return one sentence for each problem of the sizes."""
    problems = check_attention(args.attn_type, args.attn_mask_type)
    for key in ("dim", "n_layers", "n_heads", "num_kv_heads", "vocab_size", "multiple_of", "max_seq_len",
                "norm_eps", "rope_theta", "rope_scaling_factor", "rope_original_max_seq_len"):  # fmt: skip
        if not 0 < getattr(args, key) < math.inf:
            problems.append(
                f"{key.replace('num_', 'n_')} = {getattr(args, key)}: expected a number above 0"
            )
    if isinstance(args.init_std, str) and args.init_std not in INIT_STD:
        problems.append(
            f"init_std = {args.init_std!r}: expected a number or one of {', '.join(INIT_STD)}"
        )
    elif not isinstance(args.init_std, str) and not 0 < args.init_std < math.inf:
        problems.append(
            f"init_std = {args.init_std}: expected a number above 0 or one of {', '.join(INIT_STD)}"
        )
    if args.ffn_dim_multiplier is not None and not 0 < args.ffn_dim_multiplier < math.inf:
        problems.append(
            f"ffn_dim_multiplier = {args.ffn_dim_multiplier}: expected a number above 0"
        )
    if not 0 < args.rope_low_freq_factor < args.rope_high_freq_factor < math.inf:
        problems.append(f"rope_low_freq_factor = {args.rope_low_freq_factor}: expected a number between 0 and "
                        f"rope_high_freq_factor = {args.rope_high_freq_factor}")  # fmt: skip
    if problems:
        return problems
    if args.dim % (2 * args.n_heads):
        problems.append(f"dim = {args.dim}: expected a multiple of 2 x n_heads = {2 * args.n_heads}, "
                        "since a head's dimensions are rotated in pairs")  # fmt: skip
    if args.n_heads % args.num_kv_heads:
        problems.append(
            f"n_kv_heads = {args.num_kv_heads}: expected a divisor of n_heads = {args.n_heads}"
        )
    return problems


def num_params(args: LlamaArgs) -> int:
    """Return the number of parameters; a tied output counts once."""
    kv_dim = args.num_kv_heads * args.head_dim
    attention = 2 * args.dim * args.dim + 2 * args.dim * kv_dim
    block = attention + 3 * args.dim * args.ffn_dim + 2 * args.dim
    embeddings = 1 if args.enable_weight_tying else 2
    return args.n_layers * block + args.dim + embeddings * args.vocab_size * args.dim


def flops_per_token(args: LlamaArgs, seq_len: int) -> int:
    """Return 6 (P - P_embedding) + 6 L H (2 head_dim) seq: forward and backward.

    PaLM, arXiv:2204.02311, appendix B. The embedding lookup costs nothing; the output's matrix
    product counts, tied or not. Attention counts in full, including its masked half.
    """
    weights = num_params(args)
    if not args.enable_weight_tying:
        weights -= args.vocab_size * args.dim
    return 6 * weights + 6 * args.n_layers * args.n_heads * 2 * args.head_dim * seq_len


def init_table(args: LlamaArgs) -> tuple[tuple[str, InitRule], ...]:
    """Return TorchTitan's initial weights: (pattern, rule) rows, of which the first match applies.

    A tied embedding starts like an output: with a standard deviation of 1 the first logits would be
    of order sqrt(dim).
    """
    output = InitRule("trunc_normal", std=args.dim**-0.5, bound=3.0)
    embedding = output if args.enable_weight_tying else InitRule("normal", std=1.0)
    rows = [("*norm.weight", InitRule("ones")), ("tok_embeddings.weight", embedding)]
    for layer in range(args.n_layers):
        depth = layer + 1 if args.depth_init else args.n_layers
        residual = trunc_normal(args.linear_std / math.sqrt(2 * depth))
        rows += [(f"layers.{layer}.{name}.weight", residual)
                 for name in ("attention.wo", "feed_forward.w2", "feed_forward.w3")]  # fmt: skip
    plain = trunc_normal(args.linear_std)
    rows += [
        ("layers.*.attention.w[qkv].weight", plain),
        ("layers.*.feed_forward.w1.weight", plain),
    ]
    rows += [("output.weight", output)]
    return tuple(rows)
