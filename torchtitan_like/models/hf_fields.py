"""Fields of config.json files: the ones that change what a model computes, and harmless ones.

transformers ignores a field that its class does not have. Files of other programs contain such
fields, and their models compute something else. So a reader refuses the fields of `REFUSED`, passes
over the fields of `HARMLESS`, and reports all others. Never imports torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """Why a field is not supported, and the values with which it changes nothing."""

    reason: str
    neutral: tuple[Any, ...] = (None,)


_ABSENT_OR_FALSE = (None, False)
_ABSENT_OR_0 = (None, 0)
_ABSENT_OR_1 = (None, 1)

# Families whose files look like Llama's, by model_type: what they compute or store differently.
OTHER_FAMILIES = {
    "gemma": "norms multiply by 1 + weight, the network is GeGLU, embeddings are scaled",
    "gemma2": "norms multiply by 1 + weight and are four in a layer, scores and logits are capped",
    "granite": "embeddings, scores, residuals, and logits have multipliers",
    "internlm2": "its files have one fused tensor wqkv and names of their own",
    "internlm3": "its files have names of their own, and separate switches for biases",
    "mimo": "its files have one more layer, which predicts the next token but one",
    "minicpm": "embeddings, residuals, and logits are scaled",
    "mistral3": "it is a model with vision, whose sizes are in text_config",
    "ministral3": "queries are scaled by their position",
    "olmo2": "it normalizes the outputs of attention and network, and whole queries and keys",
    "phi3": "its files have the fused tensors qkv_proj and gate_up_proj",
    "smollm3": "some layers have no rotary embedding",
}

# Fields of the whole model.
REFUSED = {
    "alibi": Refusal("positions are rotary", _ABSENT_OR_FALSE),
    "attention_chunk_size": Refusal("layers do not attend within chunks"),
    "attention_dropout": Refusal("there is no dropout", _ABSENT_OR_0),
    "attn_logit_softcapping": Refusal("scores are not capped"),
    "bias": Refusal("a switch of all biases is not supported", _ABSENT_OR_FALSE),
    "clip_qkv": Refusal("queries, keys, and values are not clipped"),
    "dim_model_base": Refusal("logits are not scaled"),
    "embd_pdrop": Refusal("there is no dropout", _ABSENT_OR_0),
    "embedding_multiplier": Refusal("embeddings are not scaled", _ABSENT_OR_1),
    "final_logit_softcapping": Refusal("logits are not capped"),
    "hidden_act": Refusal("the feed-forward network is SwiGLU", (None, "silu")),
    "hidden_activation": Refusal("the feed-forward network is SwiGLU", (None, "silu")),
    "hidden_dropout": Refusal("there is no dropout", _ABSENT_OR_0),
    "is_encoder_decoder": Refusal("the model is a decoder only", _ABSENT_OR_FALSE),
    "kv_lora_rank": Refusal("attention is not latent"),
    "logit_scale": Refusal("logits are not scaled", _ABSENT_OR_1),
    "logits_scaling": Refusal("logits are not scaled", _ABSENT_OR_1),
    "mup_denominator": Refusal("weights are not scaled by width"),
    "n_routed_experts": Refusal("the model is dense", _ABSENT_OR_0),
    "no_rope_layer_interval": Refusal("all layers are rotated"),
    "num_experts": Refusal("the model is dense", _ABSENT_OR_0),
    "num_local_experts": Refusal("the model is dense", _ABSENT_OR_0),
    "num_nextn_predict_layers": Refusal("it predicts one token", _ABSENT_OR_0),
    "partial_rotary_factor": Refusal("heads are rotated whole", _ABSENT_OR_1),
    "per_layer_config": Refusal("all layers have the same sizes", (None, {})),
    "pruned_heads": Refusal("all layers have the same heads", (None, {})),
    "qk_layernorm": Refusal("only Qwen3 normalizes queries and keys", _ABSENT_OR_FALSE),
    "qkv_bias": Refusal("a switch of these biases is not supported", _ABSENT_OR_FALSE),
    "quantization_config": Refusal("weights are not quantized: convert the files to bf16"),
    "query_pre_attn_scalar": Refusal("scores are divided by the root of head_dim"),
    "resid_pdrop": Refusal("there is no dropout", _ABSENT_OR_0),
    "residual_multiplier": Refusal("residuals are not scaled", _ABSENT_OR_1),
    "rope_interleaved": Refusal("the halves of a head are rotated", _ABSENT_OR_FALSE),
    "rotary_pct": Refusal("heads are rotated whole", _ABSENT_OR_1),
    "scale_depth": Refusal("residuals are not scaled"),
    "scale_emb": Refusal("embeddings are not scaled", _ABSENT_OR_1),
    "text_config": Refusal("sizes in a table of their own belong to a model with vision"),
    "use_dynamic_ntk": Refusal("frequencies are scaled by rope_scaling only", _ABSENT_OR_FALSE),
    "use_logn_attn": Refusal("scores are not scaled by length", _ABSENT_OR_FALSE),
    "use_parallel_residual": Refusal("attention precedes the network", _ABSENT_OR_FALSE),
    "use_qk_norm": Refusal("only Qwen3 normalizes queries and keys", _ABSENT_OR_FALSE),
    "vision_config": Refusal("models with vision are not supported"),
}

# Keys of the table rope_scaling or rope_parameters.
ROPE_REFUSED = {
    "alpha": Refusal("its model changes the base by it"),
    "llama_4_scaling_beta": Refusal("queries are not scaled by their position", _ABSENT_OR_0),
    "mrope_section": Refusal("positions of images are not supported"),
    "partial_rotary_factor": Refusal("heads are rotated whole", _ABSENT_OR_1),
}
# `finetuned` is of YaRN's first code. Files of a type without a length name it, and may have it null.
ROPE_HARMLESS = ("finetuned", "original_max_position_embeddings")
# Keys that a type reads, in addition to rope_type and rope_theta.
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}

# They name files, tokens, settings of generation or of other programs.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path auto_map
    bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id dtype
    eos_token_id finetuning_task gradient_checkpointing id2label internal_version is_decoder
    is_llama_config label2id max_sequence_length model_max_length name_or_path num_labels
    output_attentions output_hidden_states pad_token_id prefix pretraining_tp problem_type return_dict
    sep_token_id task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype
    torchscript transformers.js_config transformers_version unk_token_id unsloth_fixed
    unsloth_version use_bfloat16 use_cache

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    """.split()
)
