"""Sharding roles of the parameters, and the sizes that a layout must divide."""

from __future__ import annotations

from torchtitan_like.models.decoder_tables import EXPERTS, decoder_constraints, decoder_sharding
from torchtitan_like.models.dense.flavors import DenseArgs, with_experts

SHARDING = decoder_sharding(
    ("attention.w[qkv].*", "column"),
    ("attention.[qk]_norm.weight", "head_norm"),
    ("attention.wo.*", "row"),
    ("feed_forward.w[13].*", "column"),
    ("feed_forward.w2.*", "row"),
    *EXPERTS,
)


def constraints(args: DenseArgs) -> dict[str, int]:
    """See `ModelSpec.constraints`."""
    sizes = decoder_constraints(args, args.num_kv_heads)
    if experts := with_experts(args):
        return sizes | {
            "n_experts": experts.num_experts,
            "expert_hidden_dim": experts.moe_inter_dim,
        }
    return sizes | {"ffn_dim": args.ffn_dim}
