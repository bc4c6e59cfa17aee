"""Table rows shared by all families built on `layers.decoder.Decoder`. Never imports torch."""

from __future__ import annotations

from typing import Any

from torchtitan_like.models.hf_table import Row, Table
from torchtitan_like.models.spec import Upcycling

# Rows of `decoder_sharding` for `layers.attention.Attention` and `layers.feed_forward.FeedForward`.
ATTENTION = (("attention.w[qkv].weight", "column"), ("attention.wo.weight", "row"))
FEED_FORWARD = (("feed_forward.w[13].weight", "column"), ("feed_forward.w2.weight", "row"))
# For the experts of `layers.moe.MoE`.
EXPERTS = (("moe.router.gate.weight", "router"), ("moe.experts.w[123]", "experts"))
SHARED_EXPERTS = (
    ("moe.shared_experts.w[13].weight", "column"),
    ("moe.shared_experts.w2.weight", "row"),
)

# Rows of Hugging Face's table for the modules of `Decoder`.
HF_DECODER = (
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight"),
    ("layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
    ("norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
)
# Names within a module of a layer, for `layer_rows`.
HF_ATTENTION = (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"), ("wo", "o_proj"))
HF_FEED_FORWARD = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
# Rows for the experts of `layers.moe.MoE`. Published models have a tensor for each expert.
_HF_EXPERTS = "model.layers.{}.mlp.experts."
HF_EXPERTS = (
    ("layers.{}.moe.experts.w1", _HF_EXPERTS + "{e}.gate_proj.weight"),
    ("layers.{}.moe.experts.w2", _HF_EXPERTS + "{e}.down_proj.weight"),
    ("layers.{}.moe.experts.w3", _HF_EXPERTS + "{e}.up_proj.weight"),
)
# Of DeepSeek-V3, the only family of Hugging Face that has one.
EXPERT_BIAS = ("layers.{}.moe.expert_bias", "model.layers.{}.mlp.gate.e_score_correction_bias")
# The modules of transformers stack them. Some programs write files of this layout.
HF_FUSED_EXPERTS = (
    Row(
        ("layers.{}.moe.experts.w1", "layers.{}.moe.experts.w3"),
        _HF_EXPERTS + "gate_up_proj",
        axis=1,
    ),
    ("layers.{}.moe.experts.w2", _HF_EXPERTS + "down_proj"),
)


def layer_rows(native: str, external: str, names: Table, kind: str = "weight") -> Table:
    """Return the rows of a module of a layer.

    native, external: the module's names within a layer. names: pairs of names within the module.
    kind: "weight" or "bias".
    """
    return tuple(
        (f"layers.{{}}.{native}.{ours}.{kind}", f"model.layers.{{}}.{external}.{theirs}.{kind}")
        for ours, theirs in names
    )


def same_names(rows: Table) -> Table:
    """Return the rows of a format with our names."""
    return tuple((name, name) for name, _ in rows)


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


def decoder_upcycling(dense_args: Any) -> Upcycling:
    """Return the rules for a `Decoder` in which every layer has experts."""
    return Upcycling(
        dense_args,
        copied=tuple(
            (f"layers.{{}}.moe.experts.{name}", f"layers.{{}}.feed_forward.{name}.weight")
            for name in ("w1", "w2", "w3")
        ),
        fresh=("layers.*.moe.router.gate.weight", "layers.*.moe.expert_bias"),
        sizes=(
            ("vocab_size", "tok_embeddings.weight", 0),
            ("dim", "tok_embeddings.weight", 1),
            ("moe_inter_dim", "layers.0.feed_forward.w1.weight", 0),
        ),
    )
