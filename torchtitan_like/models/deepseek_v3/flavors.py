"""Sizes, initial weights, and cost of DeepSeek-V3 (arXiv:2412.19437) and similar models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torchtitan_like.models.argument_rules import (
    check_attention,
    check_balance,
    check_base,
    check_choices,
    check_divisor,
    check_even,
    check_positive,
    check_ranges,
)
from torchtitan_like.models.cost import (
    LayerCost,
    ModelCost,
    decoder_cost,
    feed_forward_params,
)
from torchtitan_like.models.decoder_tables import decoder_init, decoder_widths
from torchtitan_like.models.spec import InitRule, Widths

ScoreFunction = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class DeepSeekArgs:
    """Sizes of a DeepSeek-V3 model; each can be set in `[model.args]`.

    inter_dim: width of the feed-forward network of the first n_dense_layers blocks.
    moe_inter_dim: width of each expert in the other blocks.
    num_shared_experts: experts that process every token, computed as one network of their total
        width.
    top_k: number of the num_experts experts that process each token.
    score_func: scores of the experts: "sigmoid" of each logit (DeepSeek-V3) or "softmax" over all
        experts (DeepSeek-V2).
    route_norm: divide the weights of a token's experts by their sum.
    route_scale: multiply these weights by this factor.
    num_expert_groups, num_limited_groups: the experts form groups; a token chooses among the
        experts of its best num_limited_groups groups.
    load_balance, load_balance_coeff, router_z_coeff: see `layers.balance.Balance`.
    sequence_loss_coeff: with load_balance = "bias", weight of an additional loss over each
        sequence.
    q_lora_rank: width of the latent of the queries; 0: no latent.
    kv_lora_rank: width of the latent of keys and values.
    qk_nope_head_dim, qk_rope_head_dim: widths of the unrotated and the rotated part of a query or
        key head.
    max_seq_len: rows of the rotary tables, in tokens.
    rope_factor: length of the context relative to original_seq_len (YaRN, arXiv:2309.00071), for
        any training.seq_len; 1 switches YaRN off.
    beta_fast, beta_slow: YaRN keeps frequencies with more than beta_fast rotations within
        original_seq_len, and divides frequencies with fewer than beta_slow rotations by rope_factor.
    mscale: attention scores are multiplied by (0.1 mscale ln(rope_factor) + 1)^2.
    num_mtp_layers: blocks for multi-token prediction (section 2.2). In training, each block
        predicts one more token. Evaluation and generation ignore them.
    mtp_loss_weight: weight of their mean loss. DeepSeek-V3 was trained with 0.3, later 0.1.
    attn_type: kernel of attention that ends at document borders ("sdpa", "flex", "varlen").
    attn_mask_type: "causal": a token attends to all earlier tokens of the sample; "block_causal":
        to the earlier tokens of its document.
    """

    dim: int = 2048
    n_layers: int = 27
    n_dense_layers: int = 1
    n_heads: int = 16
    inter_dim: int = 10944
    moe_inter_dim: int = 1408
    vocab_size: int = 102400
    norm_eps: float = 1e-6
    num_experts: int = 64
    num_shared_experts: int = 2
    top_k: int = 6
    score_func: str = "softmax"
    route_norm: bool = False
    route_scale: float = 1.0
    num_expert_groups: int = 1
    num_limited_groups: int = 1
    load_balance: str = "bias"
    load_balance_coeff: float = 1e-3
    router_z_coeff: float = 0.0
    sequence_loss_coeff: float = 0.0
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    max_seq_len: int = 163840
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    original_seq_len: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    enable_weight_tying: bool = False
    init_std: float = 0.02
    num_mtp_layers: int = 0
    mtp_loss_weight: float = 0.3
    attn_type: str = "sdpa"
    attn_mask_type: str = "causal"

    @property
    def head_dim(self) -> int:
        """Width of a query or key head; kernels see values of this width too."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


FLAVORS = {
    "debugmodel": DeepSeekArgs(dim=256, n_layers=6, inter_dim=1024, moe_inter_dim=256, vocab_size=2048, norm_eps=1e-5,
                               num_experts=8, top_k=3, max_seq_len=16384, mscale=0.70),
    "16B": DeepSeekArgs(mscale=0.70),
    "236B": DeepSeekArgs(dim=5120, n_layers=60, n_heads=128, inter_dim=12288, moe_inter_dim=1536, num_experts=160,
                         route_scale=16.0, num_expert_groups=8, num_limited_groups=3, q_lora_rank=1536),
    "671B": DeepSeekArgs(dim=7168, n_layers=61, n_dense_layers=3, n_heads=128, inter_dim=18432, moe_inter_dim=2048,
                         vocab_size=129280, num_experts=256, num_shared_experts=1, top_k=8, score_func="sigmoid",
                         route_norm=True, route_scale=2.5, num_expert_groups=8, num_limited_groups=4, q_lora_rank=1536),
    "moonlight": DeepSeekArgs(inter_dim=11264, vocab_size=163840, norm_eps=1e-5, score_func="sigmoid", route_norm=True,
                              route_scale=2.446, max_seq_len=8192, rope_theta=50000.0, rope_factor=1.0),
}  # fmt: skip
# TorchTitan's flavor for another attention kernel: equal sizes, attention within each document.
FLAVORS["debugmodel_flex_attn"] = replace(
    FLAVORS["debugmodel"], attn_type="flex", attn_mask_type="block_causal"
)


def check(args: DeepSeekArgs) -> list[str]:
    """Return one sentence for each problem of the sizes."""
    positive = ("dim", "n_layers", "n_heads", "inter_dim", "moe_inter_dim", "vocab_size", "norm_eps", "num_experts",
                "num_shared_experts", "num_expert_groups", "route_scale", "kv_lora_rank", "qk_nope_head_dim",
                "qk_rope_head_dim", "v_head_dim", "max_seq_len", "original_seq_len", "beta_slow", "init_std")  # fmt: skip
    problems = check_attention(args)
    problems += check_balance(
        args.load_balance,
        args.load_balance_coeff,
        args.router_z_coeff,
        args.num_experts,
        args.sequence_loss_coeff,
    )
    problems += check_positive(args, positive)
    ranges = (
        ("n_dense_layers", 0, args.n_layers),
        ("q_lora_rank", 0, math.inf),
        ("top_k", 1, args.num_experts),
        ("num_limited_groups", 1, args.num_expert_groups),
        ("v_head_dim", 1, args.head_dim),
        ("rope_factor", 1, math.inf),
        ("beta_fast", args.beta_slow, math.inf),
        ("num_mtp_layers", 0, math.inf),
        ("mtp_loss_weight", 0, math.inf),
    )
    problems += check_ranges(args, ranges)
    problems += check_base(args.rope_theta)
    problems += check_even("qk_rope_head_dim", args.qk_rope_head_dim)
    return problems or _check_router(args)


def _check_router(args: DeepSeekArgs) -> list[str]:
    """Return the problems of the router, whose sizes are in range."""
    problems = check_choices(args, ("score_func", get_args(ScoreFunction)))
    if args.score_func == "softmax" and args.route_norm:
        problems.append(
            'route_norm = True: expected False with score_func = "softmax", as in DeepSeek-V2; '
            'set score_func = "sigmoid" for DeepSeek-V3\'s router'
        )
    problems += check_divisor(
        "num_expert_groups", args.num_expert_groups, "num_experts", args.num_experts
    )
    if args.num_expert_groups == args.num_limited_groups:
        return problems
    num_chosen = args.num_experts // args.num_expert_groups * args.num_limited_groups
    if num_chosen < args.top_k:
        problems.append(
            f"top_k = {args.top_k}: expected at most {num_chosen}, the experts in "
            f"num_limited_groups = {args.num_limited_groups} groups; lower top_k, or raise "
            "num_limited_groups"
        )
    if args.score_func == "sigmoid" and args.top_k != 2 * args.num_limited_groups:
        problems.append(
            f"num_limited_groups = {args.num_limited_groups}: expected top_k / 2 = {args.top_k / 2:g}, "
            "since a group's score is the sum of its two best experts' scores; "
            f"set top_k = {2 * args.num_limited_groups}"
        )
    return problems


def cost(args: DeepSeekArgs) -> ModelCost:
    """Return the layers and what they cost, with the ones for multi-token prediction at the end."""
    query_dim = args.n_heads * args.head_dim
    queries = args.dim * query_dim
    if args.q_lora_rank:
        queries = args.q_lora_rank * (args.dim + 1 + query_dim)
    latent = args.dim * (args.kv_lora_rank + args.qk_rope_head_dim) + args.kv_lora_rank
    keys_and_values = args.kv_lora_rank * args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)
    output = args.n_heads * args.v_head_dim * args.dim
    params = queries + latent + keys_and_values + output + 2 * args.dim
    width = args.n_heads * (args.head_dim + args.v_head_dim)
    dense = LayerCost(params + feed_forward_params(args.dim, args.inter_dim), width)
    expert = feed_forward_params(args.dim, args.moe_inter_dim)
    sparse = LayerCost(
        params + args.dim * args.num_experts + args.num_shared_experts * expert,
        width,
        num_experts=args.num_experts,
        top_k=args.top_k,
        expert_params=expert,
    )
    mtp = sparse._replace(params=sparse.params + 2 * args.dim * args.dim + 3 * args.dim)
    layers = [dense] * args.n_dense_layers + [sparse] * (args.n_layers - args.n_dense_layers)
    return decoder_cost(args, layers + [mtp] * args.num_mtp_layers, 1 + args.num_mtp_layers)


def init_table(args: DeepSeekArgs) -> tuple[tuple[str, InitRule], ...]:
    """Return TorchTitan's initial weights: (pattern, rule) rows, of which the first match applies.

    DeepSeek-V3 itself uses a standard deviation of 0.006 (section 4.2): set `init_std`.
    """
    modules = ["attention", "experts", "shared_experts"]
    if args.n_dense_layers:
        modules.append("feed_forward")
    if args.num_mtp_layers:
        modules.append("mtp")
    num_layers = args.n_layers + args.num_mtp_layers
    return decoder_init(args, modules, args.init_std, num_layers=num_layers)


def widths(args: DeepSeekArgs) -> Widths:
    """Return the widths of the weights' inputs."""
    latents = (
        ("*.attention.wq_b.weight", args.q_lora_rank),
        ("*.attention.wkv_b.weight", args.kv_lora_rank),
    )
    return decoder_widths(
        "*.attention.wq_b.weight" if args.q_lora_rank else "*.attention.wq.weight",
        heads=args.n_heads * args.v_head_dim,
        feed_forward=args.inter_dim,
        experts=args.moe_inter_dim,
        shared_experts=args.num_shared_experts * args.moe_inter_dim,
        latents=latents,
    )
