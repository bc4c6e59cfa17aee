"""Sharding roles of the parameters, and the sizes that a layout must divide."""

from __future__ import annotations

from torchtitan_like.models.decoder_tables import decoder_constraints, decoder_sharding
from torchtitan_like.models.hf.flavors import HfArgs

SHARDING = decoder_sharding(
    ("attention.w[qkv].*", "column"),
    ("attention.[qk]_norm.weight", "head_norm"),
    ("attention.wo.*", "row"),
    ("feed_forward.w[13].*", "column"),
    ("feed_forward.w2.*", "row"),
)


def constraints(args: HfArgs) -> dict[str, int]:
    """See `ModelSpec.constraints`."""
    return decoder_constraints(args, args.n_kv_heads) | {"ffn_dim": args.hidden_dim}
