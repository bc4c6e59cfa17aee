"""Table rows shared by all families built on `layers.decoder.Decoder`. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torchtitan_like.models.hf_table import Row, Table
from torchtitan_like.models.spec import InitRule, Upcycling, Widths, trunc_normal

# Rows of `decoder_sharding` for `layers.attention.Attention` and `layers.decoder.FeedForward`.
ATTENTION = (("attention.w[qkv].weight", "column"), ("attention.wo.weight", "row"))
FEED_FORWARD = (("feed_forward.w[13].weight", "column"), ("feed_forward.w2.weight", "row"))
# For the experts of `layers.moe.MoE`.
EXPERTS = (("moe.router.gate.weight", "router"), ("moe.experts.w[123]", "experts"))
SHARED_EXPERTS = (
    ("moe.shared_experts.w[13].weight", "column"),
    ("moe.shared_experts.w2.weight", "row"),
)

# Names of weights within a block, by module: the ones with a plain standard deviation, and the ones
# that write to the residual stream or, as in TorchTitan, are initialized like them.
_INITIAL_WEIGHTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention": (("attention.w[qkv]*.weight",), ("attention.wo.weight",)),
    "feed_forward": (("feed_forward.w1.weight",), ("feed_forward.w[23].weight",)),
    "experts": (("moe.experts.w1",), ("moe.experts.w[23]", "moe.router.gate.weight")),
    "shared_experts": (
        ("moe.shared_experts.w1.weight",),
        ("moe.shared_experts.w[23].weight",),
    ),
    "mtp": (("eh_proj.weight",), ()),
    "whole_block": ((), ("attention.*", "moe.*")),
}

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
# The modules of transformers stack them. Some programs write files of this layout.
HF_FUSED_EXPERTS = (
    Row(
        ("layers.{}.moe.experts.w1", "layers.{}.moe.experts.w3"),
        _HF_EXPERTS + "gate_up_proj",
        axis=1,
    ),
    ("layers.{}.moe.experts.w2", _HF_EXPERTS + "down_proj"),
)
# Hugging Face has a name for it in DeepSeek-V3 only.
EXPERT_BIAS = ("layers.{}.moe.expert_bias", "model.layers.{}.mlp.gate.e_score_correction_bias")


def layer_rows(native: str, external: str, names: Table, kind: str = "weight") -> Table:
    """Return the rows of a module of a layer.

    native, external: the module's names within a layer. names: pairs of names within the module.
    kind: "weight" or "bias".
    """
    return tuple(
        (f"layers.{{}}.{native}.{name}.{kind}", f"model.layers.{{}}.{external}.{hf_name}.{kind}")
        for name, hf_name in names
    )


def same_names(rows: Table) -> Table:
    """Return the rows of a format that has the native names."""
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


def decoder_config(args: Any, std: float, num_kv_heads: int) -> dict[str, Any]:
    """Return the part of config.json that all families have.

    The exporter adds special tokens and dtype. std: of initial weights.
    """
    return {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "initializer_range": std,
        "max_position_embeddings": args.max_seq_len,
        "num_attention_heads": args.n_heads,
        "num_hidden_layers": args.n_layers,
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": args.enable_weight_tying,
        "use_cache": True,
        "vocab_size": args.vocab_size,
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


def decoder_widths(
    queries: str,
    *,
    heads: int,
    feed_forward: int = 0,
    experts: int = 0,
    shared_experts: int = 0,
    latents: tuple[tuple[str, int], ...] = (),
) -> Widths:
    """Return the widths of a `Decoder`; queries: see `Widths`.

    heads: width of the values of all heads. feed_forward, experts, shared_experts: of the hidden
    units of these networks. latents: further rows.
    """
    rows = (
        ("*.attention.wo.weight", heads),
        ("*.feed_forward.w2.weight", feed_forward),
        ("*.experts.w2", experts),
        ("*.shared_experts.w2.weight", shared_experts),
        *latents,
    )
    return Widths(rows, queries)


def decoder_init(
    args: Any,
    modules: Iterable[str],
    std: float,
    depth_init: bool = True,
    *,
    num_layers: int | None = None,
    has_bias: bool = False,
) -> tuple[tuple[str, InitRule], ...]:
    """Return TorchTitan's initial weights: (pattern, rule) rows, of which the first match applies.

    A tied embedding starts like an output: with a standard deviation of 1 the first logits would be
    of order sqrt(dim).

    modules: keys of `_INITIAL_WEIGHTS`. std: standard deviation of linear layers.
    depth_init: weights that write to the residual stream shrink with their layer's depth (True) or
        with the number of layers (False).
    num_layers: number of blocks, if it is not args.n_layers. has_bias: biases exist; they start at 0.
    """
    tables = [_INITIAL_WEIGHTS[name] for name in modules]
    num_layers = num_layers or args.n_layers
    output = InitRule("trunc_normal", std=args.dim**-0.5, bound=3.0)
    embedding = output if args.enable_weight_tying else InitRule("normal", std=1.0)
    rows = [("*norm.weight", InitRule("ones")), ("tok_embeddings.weight", embedding)]
    if has_bias:
        rows.append(("*.bias", InitRule("zeros")))
    for layer in range(num_layers):
        depth = layer + 1 if depth_init else num_layers
        rule = trunc_normal(std / math.sqrt(2 * depth))
        rows += [(f"layers.{layer}.{name}", rule) for _, residual in tables for name in residual]
    rows += [(f"layers.*.{name}", trunc_normal(std)) for plain, _ in tables for name in plain]
    rows.append(("output.weight", output))
    return tuple(rows)
