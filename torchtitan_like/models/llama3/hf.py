"""Names and sizes of Llama in the formats of Hugging Face, Meta, and TorchTitan.

Rows are in Hugging Face's order, so its table only renames. Meta interleaves a head's rotary pairs.
"""

from __future__ import annotations

from typing import Any

from torchtitan_like.models.hf_table import Row, Rows
from torchtitan_like.models.llama3.flavors import LlamaArgs

_NAMES = (
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight"),
    ("layers.{}.attention.wq.weight", "model.layers.{}.self_attn.q_proj.weight"),
    ("layers.{}.attention.wk.weight", "model.layers.{}.self_attn.k_proj.weight"),
    ("layers.{}.attention.wv.weight", "model.layers.{}.self_attn.v_proj.weight"),
    ("layers.{}.attention.wo.weight", "model.layers.{}.self_attn.o_proj.weight"),
    ("layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
    ("layers.{}.feed_forward.w1.weight", "model.layers.{}.mlp.gate_proj.weight"),
    ("layers.{}.feed_forward.w2.weight", "model.layers.{}.mlp.down_proj.weight"),
    ("layers.{}.feed_forward.w3.weight", "model.layers.{}.mlp.up_proj.weight"),
    ("norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
)


def hf_names(args: LlamaArgs) -> Rows:
    """Return pairs (native name, Hugging Face name)."""
    return _NAMES


def meta_names(args: LlamaArgs) -> Rows:
    """Return rows for Meta's `consolidated.*.pth` and TorchTitan's checkpoints: the names are equal."""
    heads = {"wq": args.n_heads, "wk": args.num_kv_heads}
    return tuple(
        Row(name, name, interleaved_heads=heads.get(name.split(".")[-2], 0)) for name, _ in _NAMES
    )


def hf_config(args: LlamaArgs) -> dict[str, Any]:
    """Return `config.json` of a `LlamaForCausalLM`; the exporter adds special tokens and dtype."""
    scaling = {
        "rope_type": "llama3",
        "factor": args.rope_scaling_factor,
        "low_freq_factor": args.rope_low_freq_factor,
        "high_freq_factor": args.rope_high_freq_factor,
        "original_max_position_embeddings": args.rope_original_max_seq_len,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "initializer_range": args.linear_std,
        "intermediate_size": args.ffn_dim,
        "max_position_embeddings": args.max_seq_len,
        "mlp_bias": False,
        "num_attention_heads": args.n_heads,
        "num_hidden_layers": args.n_layers,
        "num_key_value_heads": args.num_kv_heads,
        "rms_norm_eps": args.norm_eps,
        "rope_scaling": scaling if args.rope_scaling_factor != 1.0 else None,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": args.enable_weight_tying,
        "use_cache": True,
        "vocab_size": args.vocab_size,
    }
