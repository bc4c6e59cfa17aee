"""Sharding roles of Llama's parameters, and the sizes that a layout must divide."""

from __future__ import annotations

from torchtitan_like.models.decoder_tables import (
    ATTENTION,
    FEED_FORWARD,
    decoder_constraints,
    decoder_sharding,
)
from torchtitan_like.models.llama3.flavors import LlamaArgs

SHARDING = decoder_sharding(*ATTENTION, *FEED_FORWARD)


def constraints(args: LlamaArgs) -> dict[str, int]:
    """See `ModelSpec.constraints`."""
    return decoder_constraints(args, args.num_kv_heads) | {"ffn_dim": args.ffn_dim}
