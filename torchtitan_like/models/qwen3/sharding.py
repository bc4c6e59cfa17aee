"""Sharding roles of Qwen3's parameters, and the sizes that a layout must divide."""

from __future__ import annotations

from torchtitan_like.models.qwen3.flavors import Qwen3Args

SHARDING = (
    ("tok_embeddings.weight", "vocab_embedding"),
    ("layers.*.attention_norm.weight", "norm"),
    ("layers.*.attention.w[qkv].weight", "column"),
    ("layers.*.attention.[qk]_norm.weight", "head_norm"),
    ("layers.*.attention.wo.weight", "row"),
    ("layers.*.ffn_norm.weight", "norm"),
    ("layers.*.feed_forward.w[13].weight", "column"),
    ("layers.*.feed_forward.w2.weight", "row"),
    ("layers.*.moe.router.gate.weight", "router"),
    ("layers.*.moe.experts.w[123]", "experts"),
    ("norm.weight", "norm"),
    ("output.weight", "output"),
)


def constraints(args: Qwen3Args) -> dict[str, int]:
    """Return the sizes that a layout must divide (heads, layers, vocabulary) or fit (max_seq_len)."""
    return {
        "n_layers": args.n_layers,
        "n_heads": args.n_heads,
        "n_kv_heads": args.n_kv_heads,
        "vocab_size": args.vocab_size,
        "max_seq_len": args.max_seq_len,
        "n_experts": args.num_experts,
    }


def tied(args: Qwen3Args) -> tuple[tuple[str, str], ...]:
    """Return pairs (alias, parameter that it is)."""
    return (("output.weight", "tok_embeddings.weight"),) if args.enable_weight_tying else ()
