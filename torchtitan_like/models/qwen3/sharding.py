"""Sharding roles of Qwen3's parameters, and the sizes that a layout must divide."""

from __future__ import annotations

from torchtitan_like.models.decoder_tables import (
    ATTENTION,
    FEED_FORWARD,
    decoder_constraints,
    decoder_sharding,
)
from torchtitan_like.models.qwen3.flavors import Qwen3Args

SHARDING = decoder_sharding(
    *ATTENTION,
    ("attention.[qk]_norm.weight", "head_norm"),
    *FEED_FORWARD,
    ("moe.router.gate.weight", "router"),
    ("moe.experts.w[123]", "experts"),
)


def constraints(args: Qwen3Args) -> dict[str, int]:
    """See `ModelSpec.constraints`."""
    sizes = decoder_constraints(args, args.n_kv_heads)
    if args.num_experts:
        return sizes | {"n_experts": args.num_experts, "expert_hidden_dim": args.moe_inter_dim}
    return sizes | {"ffn_dim": args.hidden_dim}
