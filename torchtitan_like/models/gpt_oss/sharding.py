"""Sharding roles of gpt-oss's parameters, and the sizes that a layout must divide."""

from __future__ import annotations

from torchtitan_like.models.decoder_tables import decoder_constraints, decoder_sharding
from torchtitan_like.models.gpt_oss.flavors import GptOssArgs

SHARDING = decoder_sharding(
    ("attention.w[qkv].*", "column"),
    ("attention.sinks", "head_scalar"),
    ("attention.wo.*", "row"),
    ("moe.router.gate.*", "router"),
    ("moe.experts.[wb][123]", "experts"),
)


def constraints(args: GptOssArgs) -> dict[str, int]:
    """See `ModelSpec.constraints`."""
    return decoder_constraints(args, args.n_kv_heads) | {
        "n_experts": args.num_experts,
        "expert_hidden_dim": args.moe_inter_dim,
    }
