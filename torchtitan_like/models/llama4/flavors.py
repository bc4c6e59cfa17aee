"""Sizes, initial weights, and cost of Llama 4 text models (Hugging Face's `modeling_llama4.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchtitan_like.models.argument_rules import (
    check_balance,
    check_base,
    check_divisor,
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
class Llama4Args:
    """Sizes of a Llama 4 model; each can be set in `[model.args]`.

    n_kv_heads: heads of keys and values (None: n_heads).
    multiple_of, ffn_dim_multiplier: the feed-forward width is 8/3 dim times ffn_dim_multiplier,
        rounded up to a multiple of multiple_of.
    auto_scale_hidden_dim: divide the width of the experts and of the shared expert by top_k + 1, the
        number of networks that process each token.
    interleave_moe_layer_step: each layer whose number (from 1) is a multiple of this has experts.
    num_experts, top_k: number of experts in such a layer, and number that process each token.
    load_balance, load_balance_coeff, router_z_coeff: see `layers.balance.Balance`.
    every_n_layers_nope: layers whose number (from 1) is a multiple of this do not rotate queries and
        keys, and attend to the whole sequence. The other layers attend within chunks. 0: all layers
        rotate and attend to the whole sequence.
    fixed_attn_block_size: tokens of a chunk.
    use_qk_norm: normalize queries and keys after the rotation.
    attn_scale, floor_scale: layers without rotation multiply the query at position p by
        1 + attn_scale log(1 + floor((p + 1) / floor_scale)); attn_scale = 0 switches this off.
    max_seq_len: rows of the rotary tables, in tokens.
    depth_init: weights that write to the residual stream shrink with their layer's depth (True) or
        with the number of layers (False).
    attn_type: kernel of attention ("sdpa", "flex"). On CPU, "sdpa" replaces "flex".
    attn_mask_type: "causal": a token attends to all earlier tokens of the sample; "block_causal":
        to the earlier tokens of its document.
    """

    dim: int = 5120
    n_layers: int = 48
    n_heads: int = 40
    n_kv_heads: int | None = 8
    vocab_size: int = 202048
    multiple_of: int = 2048
    ffn_dim_multiplier: float | None = 1.2
    auto_scale_hidden_dim: bool = True
    norm_eps: float = 1e-5
    interleave_moe_layer_step: int = 2
    num_experts: int = 8
    top_k: int = 1
    load_balance: str = "none"
    load_balance_coeff: float = 1e-3
    router_z_coeff: float = 0.0
    every_n_layers_nope: int = 0
    fixed_attn_block_size: int = 8192
    use_qk_norm: bool = False
    attn_scale: float = 0.1
    floor_scale: int = 8192
    max_seq_len: int = 1048576
    rope_theta: float = 500000.0
    rope_scaling_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 1.0
    rope_original_max_seq_len: int = 8192
    enable_weight_tying: bool = False
    depth_init: bool = True
    init_std: float = 0.02
    attn_type: str = "sdpa"
    attn_mask_type: str = "causal"

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def num_kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def score_func(self) -> str:
        """The scores of the experts: the sigmoid of each logit."""
        return "sigmoid"

    @property
    def ffn_dim(self) -> int:
        """Width of the feed-forward network of layers without experts."""
        return self._hidden_dim(1)

    @property
    def moe_inter_dim(self) -> int:
        """Width of each expert and of the shared expert."""
        return self._hidden_dim(self.top_k + 1 if self.auto_scale_hidden_dim else 1)

    def _hidden_dim(self, divisor: int) -> int:
        width = int(8 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return -(-(width // divisor) // self.multiple_of) * self.multiple_of

    def has_experts(self, layer: int) -> bool:
        return (layer + 1) % self.interleave_moe_layer_step == 0

    def is_rotated(self, layer: int) -> bool:
        return not self.every_n_layers_nope or (layer + 1) % self.every_n_layers_nope != 0

    def chunk(self, layer: int) -> int:
        """Return the number of tokens that attend to each other in a layer; 0: all."""
        return self.chunk_size if self.is_rotated(layer) else 0

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk in layers that have chunks; 0 if none has."""
        return self.fixed_attn_block_size if self.every_n_layers_nope else 0


_DEBUG = Llama4Args(
    dim=256,
    n_layers=6,
    n_heads=16,
    n_kv_heads=None,
    vocab_size=2048,
    multiple_of=256,
    ffn_dim_multiplier=None,
    rope_scaling_factor=16.0,
)
_SCOUT = Llama4Args(
    num_experts=16,
    interleave_moe_layer_step=1,
    max_seq_len=10485760,
    rope_scaling_factor=16.0,
)
_MAVERICK = Llama4Args(num_experts=128)
# TorchTitan's names. The "_irope" flavors compute the published models: RoPE with chunks in three
# of four layers, no rotation in the fourth one. The others rotate in every layer.
FLAVORS = {
    "debugmodel": _DEBUG,
    "17bx16e": _SCOUT,
    "17bx128e": _MAVERICK,
    "debugmodel_irope": replace(
        _DEBUG, every_n_layers_nope=4, fixed_attn_block_size=256, use_qk_norm=True
    ),
    "17bx16e_irope": replace(_SCOUT, every_n_layers_nope=4, use_qk_norm=True),
    "17bx128e_irope": replace(_MAVERICK, every_n_layers_nope=4),
}
FLAVORS |= {
    name: replace(args, attn_type="flex", attn_mask_type="block_causal")
    for name, args in FLAVORS.items()
    if name.endswith("_irope")
}


def check(args: Llama4Args) -> list[str]:
    """Return one sentence for each problem of the sizes."""
    positive = ("dim", "n_layers", "n_heads", "vocab_size", "multiple_of", "norm_eps", "num_experts",
                "fixed_attn_block_size", "floor_scale", "max_seq_len", "rope_scaling_factor",
                "rope_low_freq_factor", "rope_original_max_seq_len", "init_std")  # fmt: skip
    problems = check_local_attention(args)
    problems += check_balance(
        args.load_balance, args.load_balance_coeff, args.router_z_coeff, args.num_experts
    )
    optional = ("n_kv_heads", "ffn_dim_multiplier")
    given = [key for key in optional if getattr(args, key) is not None]
    problems += check_positive(args, (*positive, *given))
    ranges = (
        ("top_k", 1, args.num_experts),
        ("interleave_moe_layer_step", 1, args.n_layers),
        ("attn_scale", 0, math.inf),
        ("rope_high_freq_factor", args.rope_low_freq_factor, math.inf),
    )
    problems += check_ranges(args, ranges)
    problems += check_base(args.rope_theta)
    if args.every_n_layers_nope < 0 or args.every_n_layers_nope == 1:
        problems.append(
            f"every_n_layers_nope = {args.every_n_layers_nope}: expected 0, or at least 2; set "
            "every_n_layers_nope = 4, or 0 to rotate in all layers"
        )
    if problems:
        return problems
    if args.dim % (2 * args.n_heads):
        problems.append(
            f"dim = {args.dim}: expected a multiple of 2 x n_heads = {2 * args.n_heads}, since a "
            "head's dimensions are rotated in pairs; change dim or n_heads"
        )
    return problems + check_divisor("n_kv_heads", args.num_kv_heads, "n_heads", args.n_heads)


def cost(args: Llama4Args) -> ModelCost:
    """Return the layers and what they cost."""
    query_dim, key_dim = args.n_heads * args.head_dim, args.num_kv_heads * args.head_dim
    params = attention_params(args.dim, query_dim, key_dim) + 2 * args.dim
    expert = feed_forward_params(args.dim, args.moe_inter_dim)
    dense = LayerCost(params + feed_forward_params(args.dim, args.ffn_dim), 2 * query_dim)
    sparse = LayerCost(
        params + args.dim * args.num_experts + expert,
        2 * query_dim,
        num_experts=args.num_experts,
        top_k=args.top_k,
        expert_params=expert,
    )
    layers = (
        (sparse if args.has_experts(i) else dense)._replace(max_keys=args.chunk(i))
        for i in range(args.n_layers)
    )
    return decoder_cost(args, layers)


def init_table(args: Llama4Args) -> tuple[tuple[str, InitRule], ...]:
    """Return TorchTitan's initial weights: (pattern, rule) rows, of which the first match applies."""
    modules = ("attention", "feed_forward", "experts", "shared_experts")
    return decoder_init(args, modules, args.init_std, args.depth_init)


def widths(args: Llama4Args) -> Widths:
    """Return the widths of the weights' inputs. `use_qk_norm` normalizes queries without weights."""
    return decoder_widths(
        "" if args.use_qk_norm else "*.attention.wq.weight",
        heads=args.n_heads * args.head_dim,
        feed_forward=args.ffn_dim,
        experts=args.moe_inter_dim,
        shared_experts=args.moe_inter_dim,
    )
