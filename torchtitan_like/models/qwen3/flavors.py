"""Sizes, initial weights, and cost of the Qwen3 models, dense and MoE (arXiv:2505.09388, section 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchtitan_like.models.attention_rules import check_attention
from torchtitan_like.models.balance_rules import check_balance
from torchtitan_like.models.spec import InitRule, trunc_normal
from torchtitan_like.models.upcycling import Upcycling, decoder_upcycling


@dataclass(frozen=True)
class Qwen3Args:
    """Sizes of a Qwen3 model; each can be set in `[model.args]`.

    head_dim: independent of dim.
    hidden_dim: width of the feed-forward network of a dense model.
    num_experts: experts in each block instead of a feed-forward network; 0: a dense model.
    top_k: number of experts that process each token.
    moe_inter_dim: width of each expert.
    route_norm: divide the weights of a token's experts by their sum.
    load_balance, load_balance_coeff, router_z_coeff: see `models.balance_rules.Balance`.
    max_seq_len: rows of the rotary tables, in tokens.
    depth_init: weights that write to the residual stream shrink with their layer's depth (True) or
        with the number of layers (False).
    attn_type: kernel of attention that ends at document borders ("sdpa", "flex", "varlen").
    attn_mask_type: "causal": a token attends to all earlier tokens of the sample; "block_causal":
        to the earlier tokens of its document.
    """

    dim: int = 1024
    n_layers: int = 28
    n_heads: int = 16
    n_kv_heads: int = 8
    head_dim: int = 128
    hidden_dim: int = 3072
    vocab_size: int = 151936
    norm_eps: float = 1e-6
    max_seq_len: int = 40960
    rope_theta: float = 1000000.0
    enable_weight_tying: bool = False
    depth_init: bool = True
    init_std: float = 0.02
    attn_type: str = "sdpa"
    attn_mask_type: str = "causal"
    num_experts: int = 0
    top_k: int = 8
    moe_inter_dim: int = 768
    route_norm: bool = True
    load_balance: str = "none"
    load_balance_coeff: float = 1e-3
    router_z_coeff: float = 0.0


FLAVORS = {
    "debugmodel": Qwen3Args(dim=256, n_layers=8, n_heads=16, n_kv_heads=8, hidden_dim=3072, vocab_size=2048,
                            max_seq_len=4096, enable_weight_tying=True),
    "0.6B": Qwen3Args(dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, enable_weight_tying=True),
    "1.7B": Qwen3Args(dim=2048, n_layers=28, n_heads=16, hidden_dim=6144, enable_weight_tying=True),
    "4B": Qwen3Args(dim=2560, n_layers=36, n_heads=32, hidden_dim=9728, enable_weight_tying=True),
    "8B": Qwen3Args(dim=4096, n_layers=36, n_heads=32, hidden_dim=12288),
    "14B": Qwen3Args(dim=5120, n_layers=40, n_heads=40, hidden_dim=17408),
    "32B": Qwen3Args(dim=5120, n_layers=64, n_heads=64, hidden_dim=25600),
    "debugmodel_moe": Qwen3Args(dim=256, n_layers=8, n_heads=16, n_kv_heads=8, hidden_dim=3072, vocab_size=2048,
                                max_seq_len=4096, num_experts=64),
    "debugmodel_moe_small": Qwen3Args(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=2048,
                                      max_seq_len=4096, num_experts=8, top_k=2, moe_inter_dim=128),
    "30B-A3B": Qwen3Args(dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, hidden_dim=6144, max_seq_len=262144,
                         num_experts=128),
    "235B-A22B": Qwen3Args(dim=4096, n_layers=94, n_heads=64, n_kv_heads=4, hidden_dim=12288, max_seq_len=4096,
                           rope_theta=5000000.0, num_experts=128, moe_inter_dim=1536),
}  # fmt: skip


def check(args: Qwen3Args) -> list[str]:
    """Return one sentence for each problem of the sizes."""
    positive = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "norm_eps",
                "max_seq_len", "rope_theta", "init_std")  # fmt: skip
    problems = check_attention(args.attn_type, args.attn_mask_type)
    problems += check_balance(
        args.load_balance, args.load_balance_coeff, args.router_z_coeff, args.num_experts
    )
    problems += [
        f"{key} = {getattr(args, key)}: expected a number above 0"
        for key in positive
        if not 0 < getattr(args, key) < math.inf
    ]
    if args.head_dim % 2:
        problems.append(
            f"head_dim = {args.head_dim}: expected an even number, since it is rotated in pairs"
        )
    if args.n_kv_heads > 0 and args.n_heads % args.n_kv_heads:
        problems.append(
            f"n_kv_heads = {args.n_kv_heads}: expected a divisor of n_heads = {args.n_heads}"
        )
    if args.num_experts < 0:
        problems.append(
            f"num_experts = {args.num_experts}: expected 0 for a dense model, or the number of experts"
        )
    if args.num_experts > 0 and not 0 < args.top_k <= args.num_experts:
        problems.append(f"top_k = {args.top_k}: expected 1 to num_experts = {args.num_experts}")
    if args.num_experts > 0 and args.moe_inter_dim < 1:
        problems.append(f"moe_inter_dim = {args.moe_inter_dim}: expected a number above 0")
    return problems


def num_params(args: Qwen3Args) -> int:
    """Return the number of parameters; a tied output counts once."""
    return _count_params(args, args.num_experts)


def num_active_params(args: Qwen3Args) -> int:
    """Return the number of parameters that process a token: without unselected experts."""
    return _count_params(args, min(args.top_k, args.num_experts))


def _count_params(args: Qwen3Args, num_experts: int) -> int:
    heads = 2 * (args.n_heads + args.n_kv_heads)  # queries and output, keys and values
    attention = heads * args.head_dim * args.dim + 2 * args.head_dim
    feed_forward = 3 * args.dim * args.hidden_dim
    if args.num_experts:
        router = args.num_experts * args.dim
        feed_forward = router + num_experts * 3 * args.dim * args.moe_inter_dim
    block = attention + feed_forward + 2 * args.dim
    embeddings = 1 if args.enable_weight_tying else 2
    return args.n_layers * block + args.dim + embeddings * args.vocab_size * args.dim


def flops_per_token(args: Qwen3Args, seq_len: int) -> int:
    """Return 6 (P - P_embedding) + 6 L H (2 head_dim) seq: forward and backward.

    PaLM, arXiv:2204.02311, appendix B. P counts only the experts that process a token. The
    embedding lookup costs nothing; the output's matrix product counts, tied or not. Attention
    counts in full, including its masked half.
    """
    weights = num_active_params(args)
    if not args.enable_weight_tying:
        weights -= args.vocab_size * args.dim
    return 6 * weights + 6 * args.n_layers * args.n_heads * 2 * args.head_dim * seq_len


def init_table(args: Qwen3Args) -> tuple[tuple[str, InitRule], ...]:
    """Return TorchTitan's initial weights: (pattern, rule) rows, of which the first match applies.

    A tied embedding starts like an output: with a standard deviation of 1 the first logits would be
    of order sqrt(dim).
    """
    output = InitRule("trunc_normal", std=args.dim**-0.5, bound=3.0)
    embedding = output if args.enable_weight_tying else InitRule("normal", std=1.0)
    rows = [("*norm.weight", InitRule("ones")), ("tok_embeddings.weight", embedding)]
    for layer in range(args.n_layers):
        depth = layer + 1 if args.depth_init else args.n_layers
        residual = trunc_normal(args.init_std / math.sqrt(2 * depth))
        rows += [
            (f"layers.{layer}.attention.wo.weight", residual),
            (f"layers.{layer}.feed_forward.w[23].weight", residual),
            (f"layers.{layer}.moe.experts.w[23]", residual),
            (f"layers.{layer}.moe.router.gate.weight", residual),
        ]
    plain = trunc_normal(args.init_std)
    rows += [
        ("layers.*.attention.w[qkv].weight", plain),
        ("layers.*.feed_forward.w1.weight", plain),
        ("layers.*.moe.experts.w1", plain),
    ]
    rows += [("output.weight", output)]
    return tuple(rows)


def upcycling(args: Qwen3Args) -> Upcycling | str:
    """Return the rules that start this MoE from a dense Qwen3, or the reason why none exist."""
    if not args.num_experts:
        return "num_experts = 0: the model has no experts"
    dense = replace(args, num_experts=0, hidden_dim=args.moe_inter_dim)
    return decoder_upcycling(dense)
