"""Names and sizes of gpt-oss in the formats of Hugging Face and TorchTitan.

Both keep the rows of queries and keys in the same order (rotary halves). Both store w1 and w3 of
the experts as one tensor, in which their hidden units alternate.
"""

from __future__ import annotations

from typing import Any

from torchtitan_like.models.decoder_tables import (
    EXPERT_BIAS,
    HF_ATTENTION,
    HF_DECODER,
    decoder_config,
    layer_rows,
    same_names,
)
from torchtitan_like.models.gpt_oss.flavors import GptOssArgs
from torchtitan_like.models.hf_table import Row, Rows

_MLP = "model.layers.{}.mlp."
_EXPERTS = "layers.{}.moe.experts."
_NAMES = (
    *HF_DECODER,
    *layer_rows("attention", "self_attn", HF_ATTENTION),
    *layer_rows("attention", "self_attn", HF_ATTENTION, "bias"),
    ("layers.{}.attention.sinks", "model.layers.{}.self_attn.sinks"),
    ("layers.{}.moe.router.gate.weight", _MLP + "router.weight"),
    ("layers.{}.moe.router.gate.bias", _MLP + "router.bias"),
)


def _alternating(kind: str, external: str, *, transposed: bool = False) -> Row:
    """Return the row of w1 and w3 (kind "w"), or of b1 and b3 (kind "b")."""
    native = (f"{_EXPERTS}{kind}1", f"{_EXPERTS}{kind}3")
    return Row(native, external, axis=1, transposed=transposed, alternating=True)


def hf_names(args: GptOssArgs) -> Rows:
    """Return the rows of Hugging Face's names."""
    return (
        *_NAMES,
        _alternating("w", _MLP + "experts.gate_up_proj", transposed=True),
        _alternating("b", _MLP + "experts.gate_up_proj_bias"),
        Row(_EXPERTS + "w2", _MLP + "experts.down_proj", transposed=True),
        (_EXPERTS + "b2", _MLP + "experts.down_proj_bias"),
    )


def meta_names(args: GptOssArgs) -> Rows:
    """Return the rows of TorchTitan's names."""
    return (
        *same_names((*_NAMES, EXPERT_BIAS)),
        _alternating("w", _EXPERTS + "mlp1_weight"),
        _alternating("b", _EXPERTS + "mlp1_bias"),
        (_EXPERTS + "w2", _EXPERTS + "mlp2_weight"),
        (_EXPERTS + "b2", _EXPERTS + "mlp2_bias"),
    )


def hf_config(args: GptOssArgs) -> dict[str, Any]:
    """Return `config.json` of a `GptOssForCausalLM`."""
    kinds = ("sliding_attention", "full_attention")
    return decoder_config(args, args.init_std, args.n_kv_heads) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": args.head_dim,
        "intermediate_size": args.moe_inter_dim,
        "layer_types": [kinds[args.window(layer) == 0] for layer in range(args.n_layers)],
        "num_experts_per_tok": args.top_k,
        "num_local_experts": args.num_experts,
        "output_router_logits": False,
        "rope_scaling": _rope_scaling(args),
        "sliding_window": args.sliding_window_size,
        "swiglu_limit": args.swiglu_limit,
    }


def _rope_scaling(args: GptOssArgs) -> dict[str, Any]:
    if args.rope_factor == 1.0:
        return {"rope_type": "default"}  # transformers takes an absent table for YaRN
    return {
        "rope_type": "yarn",
        "factor": args.rope_factor,
        "original_max_position_embeddings": args.original_seq_len,
        "beta_fast": args.beta_fast,
        "beta_slow": args.beta_slow,
        "truncate": False,
    }
