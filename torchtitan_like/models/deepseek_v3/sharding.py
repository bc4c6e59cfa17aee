"""Sharding roles of DeepSeek-V3's parameters, and the sizes that a layout must divide."""

from __future__ import annotations

from torchtitan_like.models.decoder_tables import (
    EXPERTS,
    FEED_FORWARD,
    SHARED_EXPERTS,
    decoder_constraints,
    decoder_sharding,
)
from torchtitan_like.models.deepseek_v3.flavors import DeepSeekArgs

SHARDING = decoder_sharding(
    ("attention.wq.weight", "column"),
    ("attention.w[qk]*_a.weight", "latent"),
    ("attention.*_norm.weight", "latent"),
    ("attention.w[qk]*_b.weight", "column"),
    ("attention.wo.weight", "row"),
    *FEED_FORWARD,
    *EXPERTS,
    *SHARED_EXPERTS,
    ("[eh]norm.weight", "norm"),
    ("norm.weight", "norm"),
    ("eh_proj.weight", "projection"),
)


def constraints(args: DeepSeekArgs) -> dict[str, int]:
    """See `ModelSpec.constraints`."""
    sizes = decoder_constraints(args, args.n_heads)
    if args.n_dense_layers:
        sizes["ffn_dim"] = args.inter_dim
    if args.n_dense_layers < args.n_layers + args.num_mtp_layers:
        sizes["n_experts"] = args.num_experts
        sizes["expert_hidden_dim"] = args.moe_inter_dim
        sizes["shared_experts_dim"] = args.num_shared_experts * args.moe_inter_dim
    return sizes
