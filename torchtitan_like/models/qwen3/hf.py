"""Names and sizes of Qwen3 in the formats of Hugging Face and TorchTitan.

All keep the rows of queries and keys in the same order (rotary halves), so the tables only rename.
"""

from __future__ import annotations

from typing import Any

from torchtitan_like.models.decoder_tables import HF_EXPERTS, HF_FUSED_EXPERTS
from torchtitan_like.models.hf_table import Rows
from torchtitan_like.models.qwen3.flavors import Qwen3Args

_NAMES: tuple[tuple[str, str], ...] = (
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight"),
    ("layers.{}.attention.wq.weight", "model.layers.{}.self_attn.q_proj.weight"),
    ("layers.{}.attention.wk.weight", "model.layers.{}.self_attn.k_proj.weight"),
    ("layers.{}.attention.wv.weight", "model.layers.{}.self_attn.v_proj.weight"),
    ("layers.{}.attention.q_norm.weight", "model.layers.{}.self_attn.q_norm.weight"),
    ("layers.{}.attention.k_norm.weight", "model.layers.{}.self_attn.k_norm.weight"),
    ("layers.{}.attention.wo.weight", "model.layers.{}.self_attn.o_proj.weight"),
    ("layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
    ("layers.{}.feed_forward.w1.weight", "model.layers.{}.mlp.gate_proj.weight"),
    ("layers.{}.feed_forward.w2.weight", "model.layers.{}.mlp.down_proj.weight"),
    ("layers.{}.feed_forward.w3.weight", "model.layers.{}.mlp.up_proj.weight"),
    ("layers.{}.moe.router.gate.weight", "model.layers.{}.mlp.gate.weight"),
    ("norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
)


def hf_names(args: Qwen3Args) -> Rows:
    """Return pairs (native name, Hugging Face name)."""
    return (*_NAMES, *HF_EXPERTS)


def hf_alternative_names(args: Qwen3Args) -> Rows:
    """Return rows for files with the stacked experts of transformers' modules."""
    return (*_NAMES, *HF_FUSED_EXPERTS)


def meta_names(args: Qwen3Args) -> Rows:
    """Return pairs (native name, TorchTitan's name): the names are equal."""
    bias = "layers.{}.moe.expert_bias"
    return (*((name, name) for name, _ in (*_NAMES, *HF_EXPERTS)), (bias, bias))


def hf_config(args: Qwen3Args) -> dict[str, Any]:
    """Return `config.json` of a `Qwen3ForCausalLM` or `Qwen3MoeForCausalLM`.

    The exporter adds special tokens and dtype.
    """
    config = _dense_config(args)
    if args.num_experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": args.moe_inter_dim,
            "norm_topk_prob": args.route_norm,
            "num_experts": args.num_experts,
            "num_experts_per_tok": args.top_k,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
        }
    return config


def _dense_config(args: Qwen3Args) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "initializer_range": args.init_std,
        "intermediate_size": args.hidden_dim,
        "max_position_embeddings": args.max_seq_len,
        "max_window_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_hidden_layers": args.n_layers,
        "num_key_value_heads": args.n_kv_heads,
        "rms_norm_eps": args.norm_eps,
        "rope_scaling": None,
        "rope_theta": args.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": args.enable_weight_tying,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": args.vocab_size,
    }
