"""Table rows shared by all families built on `layers.decoder.Decoder`. Never imports torch."""

from __future__ import annotations

from typing import Any

from torchtitan_like.models.hf_table import Row, Table

# Rows of `decoder_sharding` for `layers.attention.Attention` and `layers.feed_forward.FeedForward`.
ATTENTION = (("attention.w[qkv].weight", "column"), ("attention.wo.weight", "row"))
FEED_FORWARD = (("feed_forward.w[13].weight", "column"), ("feed_forward.w2.weight", "row"))

# Rows of Hugging Face's table for the experts of `layers.moe.MoE`. Published models have a tensor
# for each expert.
_HF_EXPERTS = "model.layers.{}.mlp.experts."
HF_EXPERTS = (
    ("layers.{}.moe.experts.w1", _HF_EXPERTS + "{e}.gate_proj.weight"),
    ("layers.{}.moe.experts.w2", _HF_EXPERTS + "{e}.down_proj.weight"),
    ("layers.{}.moe.experts.w3", _HF_EXPERTS + "{e}.up_proj.weight"),
)
# The modules of transformers stack them. Some programs write files of this layout.
HF_FUSED_EXPERTS = (
    Row(
        ("layers.{}.moe.experts.w1", "layers.{}.moe.experts.w3"),
        _HF_EXPERTS + "gate_up_proj",
        axis=1,
    ),
    ("layers.{}.moe.experts.w2", _HF_EXPERTS + "down_proj"),
)


def decoder_sharding(*block_rows: tuple[str, str]) -> Table:
    """Return the sharding table of a `Decoder` of `DecoderBlock`s.

    block_rows: (pattern of parameter names within a block, sharding role), for attention and
    feed-forward.
    """
    return (
        ("tok_embeddings.weight", "vocab_embedding"),
        ("layers.*.attention_norm.weight", "norm"),
        ("layers.*.ffn_norm.weight", "norm"),
        *((f"layers.*.{pattern}", role) for pattern, role in block_rows),
        ("norm.weight", "norm"),
        ("output.weight", "output"),
    )


def decoder_constraints(args: Any, num_kv_heads: int) -> dict[str, int]:
    """Return the sizes of layers, heads, vocabulary, and positions; see `ModelSpec.constraints`."""
    return {
        "n_layers": args.n_layers,
        "n_heads": args.n_heads,
        "n_kv_heads": num_kv_heads,
        "vocab_size": args.vocab_size,
        "max_seq_len": args.max_seq_len,
    }


def tied_output(args: Any) -> Table:
    """Return the pair (alias, parameter) of a tied output head; empty if it is not tied."""
    return (("output.weight", "tok_embeddings.weight"),) if args.enable_weight_tying else ()
