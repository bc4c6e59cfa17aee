"""Names and sizes of Llama 4's text model in the formats of Hugging Face and TorchTitan.

Both keep rotary pairs side by side. Hugging Face stores the transposed matrices of all experts of a
layer as one tensor, with w1 in front of w3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan_like.models.decoder_tables import (
    EXPERT_BIAS,
    HF_ATTENTION,
    HF_DECODER,
    HF_FEED_FORWARD,
    decoder_config,
    layer_rows,
    same_names,
)
from torchtitan_like.models.hf_table import Row, Rows
from torchtitan_like.models.llama4.flavors import Llama4Args

_NETWORK = "model.layers.{}.feed_forward."
_EXPERTS = "layers.{}.moe.experts."
_NAMES = (
    *HF_DECODER,
    *layer_rows("attention", "self_attn", HF_ATTENTION),
    *layer_rows("feed_forward", "feed_forward", HF_FEED_FORWARD),
    *layer_rows("moe.shared_experts", "feed_forward.shared_expert", HF_FEED_FORWARD),
    ("layers.{}.moe.router.gate.weight", _NETWORK + "router.weight"),
)


def hf_names(args: Llama4Args) -> Rows:
    """Return the rows of Hugging Face's names of a `Llama4ForCausalLM`."""
    gate_up = (_EXPERTS + "w1", _EXPERTS + "w3")
    return (
        *_NAMES,
        Row(gate_up, _NETWORK + "experts.gate_up_proj", axis=1, transposed=True),
        Row(_EXPERTS + "w2", _NETWORK + "experts.down_proj", transposed=True),
    )


def hf_alternative_names(args: Llama4Args) -> Rows:
    """Return the rows of the published files, whose text model is a part of a model with vision."""
    rows = [row if isinstance(row, Row) else Row(*row) for row in hf_names(args)]
    return tuple(replace(row, external=f"language_model.{row.external}") for row in rows)


def hf_unread(args: Llama4Args) -> tuple[str, ...]:
    """Return the patterns of the vision model and of its projection in the published files."""
    return ("vision_model.*", "multi_modal_projector.*")


def meta_names(args: Llama4Args) -> Rows:
    """Return pairs (native name, TorchTitan's name): the names are equal."""
    experts = tuple((_EXPERTS + weight, "") for weight in ("w1", "w2", "w3"))
    return same_names((*_NAMES, *experts, EXPERT_BIAS))


def hf_config(args: Llama4Args) -> dict[str, Any]:
    """Return `config.json` of a `Llama4ForCausalLM`."""
    layers = range(args.n_layers)
    kinds = ("full_attention", "chunked_attention")
    scaling = {
        "rope_type": "llama3",
        "factor": args.rope_scaling_factor,
        "low_freq_factor": args.rope_low_freq_factor,
        "high_freq_factor": args.rope_high_freq_factor,
        "original_max_position_embeddings": args.rope_original_max_seq_len,
    }
    return decoder_config(args, args.init_std, args.num_kv_heads) | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": args.fixed_attn_block_size,
        "attn_scale": args.attn_scale,
        "attn_temperature_tuning": args.attn_scale > 0,
        "floor_scale": args.floor_scale,
        "head_dim": args.head_dim,
        "interleave_moe_layer_step": args.interleave_moe_layer_step,
        "intermediate_size": args.moe_inter_dim,
        "intermediate_size_mlp": args.ffn_dim,
        "layer_types": [kinds[args.chunk(i) > 0] for i in layers],
        "moe_layers": [i for i in layers if args.has_experts(i)],
        "no_rope_layers": [int(args.is_rotated(i)) for i in layers],  # 1: rotated
        "num_experts_per_tok": args.top_k,
        "num_local_experts": args.num_experts,
        "output_router_logits": False,
        "rope_scaling": scaling if args.rope_scaling_factor != 1.0 else None,
        "router_jitter_noise": 0.0,
        "use_qk_norm": args.use_qk_norm,
    }
