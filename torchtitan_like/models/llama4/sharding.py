"""Sharding roles of Llama 4's parameters, and the sizes that a layout must divide."""

from __future__ import annotations

from torchtitan_like.models.decoder_tables import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    SHARED_EXPERTS,
    decoder_constraints,
    decoder_sharding,
)
from torchtitan_like.models.llama4.flavors import Llama4Args

SHARDING = decoder_sharding(
    *ATTENTION,
    *FEED_FORWARD,
    *EXPERTS,
    *SHARED_EXPERTS,
)


def constraints(args: Llama4Args) -> dict[str, int]:
    """See `ModelSpec.constraints`."""
    sizes = decoder_constraints(args, args.num_kv_heads) | {
        "n_experts": args.num_experts,
        "expert_hidden_dim": args.moe_inter_dim,
        "shared_experts_dim": args.moe_inter_dim,
    }
    if not all(args.has_experts(layer) for layer in range(args.n_layers)):
        sizes["ffn_dim"] = args.ffn_dim
    return sizes
