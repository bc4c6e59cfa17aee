"""Sharding roles of DeepSeek-V3's parameters, and the sizes that a layout must divide."""

from __future__ import annotations

from torchtitan_like.models.decoder_tables import (
    FEED_FORWARD,
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
    ("moe.router.gate.weight", "router"),
    ("moe.experts.w[123]", "experts"),
    ("moe.shared_experts.w[13].weight", "column"),
    ("moe.shared_experts.w2.weight", "row"),
    ("[eh]norm.weight", "norm"),
    ("norm.weight", "norm"),
    ("eh_proj.weight", "projection"),
)


def constraints(args: DeepSeekArgs) -> dict[str, int]:
    """See `ModelSpec.constraints`."""
    num_layers = args.n_layers + args.num_mtp_layers
    num_experts = args.num_experts if args.n_dense_layers < num_layers else 0
    return decoder_constraints(args, args.n_heads) | {"n_experts": num_experts}
