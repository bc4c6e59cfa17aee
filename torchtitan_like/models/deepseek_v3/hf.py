"""Names and sizes of DeepSeek-V3 in the formats of Hugging Face and TorchTitan.

All keep rotary pairs side by side, so the tables only rename, and stack experts.
"""

from __future__ import annotations

from typing import Any

from torchtitan_like.models.decoder_tables import (
    EXPERT_BIAS,
    HF_DECODER,
    HF_EXPERTS,
    HF_FEED_FORWARD,
    HF_FUSED_EXPERTS,
    decoder_config,
    layer_rows,
    same_names,
)
from torchtitan_like.models.deepseek_v3.flavors import DeepSeekArgs
from torchtitan_like.models.hf_table import Rows, Table

_LATENT_ATTENTION = (
    ("wq", "q_proj"),
    ("wq_a", "q_a_proj"),
    ("q_norm", "q_a_layernorm"),
    ("wq_b", "q_b_proj"),
    ("wkv_a", "kv_a_proj_with_mqa"),
    ("kv_norm", "kv_a_layernorm"),
    ("wkv_b", "kv_b_proj"),
    ("wo", "o_proj"),
)
_NAMES = (
    *HF_DECODER,
    *layer_rows("attention", "self_attn", _LATENT_ATTENTION),
    *layer_rows("feed_forward", "mlp", HF_FEED_FORWARD),
    *layer_rows("moe.shared_experts", "mlp.shared_experts", HF_FEED_FORWARD),
    ("layers.{}.moe.router.gate.weight", "model.layers.{}.mlp.gate.weight"),
)
# A layer for multi-token prediction also has the names of a block.
_LAYER = "model.layers.{}."
_MTP = (
    ("layers.{}.enorm.weight", _LAYER + "enorm.weight"),
    ("layers.{}.hnorm.weight", _LAYER + "hnorm.weight"),
    ("layers.{}.eh_proj.weight", _LAYER + "eh_proj.weight"),
    ("layers.{}.norm.weight", _LAYER + "shared_head.norm.weight"),
)


def hf_names(args: DeepSeekArgs) -> Rows:
    """Return pairs (native name, Hugging Face name)."""
    return (*_names(args), *HF_EXPERTS)


def hf_alternative_names(args: DeepSeekArgs) -> Rows:
    """Return rows for files with the stacked experts of transformers' modules."""
    return (*_names(args), *HF_FUSED_EXPERTS)


def _names(args: DeepSeekArgs) -> tuple[tuple[str, str], ...]:
    # DeepSeek-V2, which has softmax scores, has no bias.
    bias = (EXPERT_BIAS,) if args.score_func == "sigmoid" else ()
    return (*_NAMES, *bias, *(_MTP if args.num_mtp_layers else ()))


def hf_unread(args: DeepSeekArgs) -> tuple[str, ...]:
    """Return patterns of stored tensors that the model does not load.

    With multi-token prediction (arXiv:2412.19437, section 2.2), these are the copies of the
    embedding and the head. Without it, they are all tensors of layer 61 of the published 671B
    model.
    """
    if args.num_mtp_layers:
        return tuple(copy for _, copy in hf_copies(args))
    return ("model.layers.61.*",) if args.n_layers == 61 else ()


def hf_copies(args: DeepSeekArgs) -> Table:
    """Return the copies of embedding and head that published MTP layers store."""
    head = "model.embed_tokens.weight" if args.enable_weight_tying else "lm_head.weight"
    return tuple(
        (name, f"model.layers.{layer}.{copy}.weight")
        for layer in range(args.n_layers, args.n_layers + args.num_mtp_layers)
        for name, copy in (
            ("model.embed_tokens.weight", "embed_tokens"),
            (head, "shared_head.head"),
        )
    )


def meta_names(args: DeepSeekArgs) -> Rows:
    """Return pairs (native name, TorchTitan's name): the names are equal."""
    return same_names((*_NAMES, EXPERT_BIAS, *_MTP, *HF_EXPERTS))


def hf_config(args: DeepSeekArgs) -> dict[str, Any]:
    """Return `config.json` of a `DeepseekV3ForCausalLM`; `DeepseekV2ForCausalLM` for softmax scores."""
    config = decoder_config(args, args.init_std, args.n_heads) | {
        "attention_bias": False,
        "first_k_dense_replace": args.n_dense_layers,
        "intermediate_size": args.inter_dim,
        "kv_lora_rank": args.kv_lora_rank,
        "moe_intermediate_size": args.moe_inter_dim,
        "moe_layer_freq": 1,
        "n_group": args.num_expert_groups,
        "n_routed_experts": args.num_experts,
        "n_shared_experts": args.num_shared_experts,
        "norm_topk_prob": args.route_norm,
        "num_experts_per_tok": args.top_k,
        "q_lora_rank": args.q_lora_rank or None,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "rope_scaling": _rope_scaling(args),
        "routed_scaling_factor": args.route_scale,
        "scoring_func": args.score_func,
        "topk_group": args.num_limited_groups,
        "v_head_dim": args.v_head_dim,
    }
    if args.score_func == "sigmoid":
        return config | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_nextn_predict_layers": args.num_mtp_layers,
            "topk_method": "noaux_tc",
        }
    is_limited = args.num_limited_groups < args.num_expert_groups
    return config | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if is_limited else "greedy",
    }


def _rope_scaling(args: DeepSeekArgs) -> dict[str, Any] | None:
    if args.rope_factor == 1.0:
        return None
    return {
        "type": "yarn",
        "factor": args.rope_factor,
        "original_max_position_embeddings": args.original_seq_len,
        "beta_fast": args.beta_fast,
        "beta_slow": args.beta_slow,
        "mscale": args.mscale,
        "mscale_all_dim": args.mscale,
    }
