"""Read the fields of a config.json, and refuse the ones that change what a model computes.

transformers ignores a field that its class does not have. Files of other programs contain such
fields, and their models compute something else. So a reader refuses the fields of `REFUSED`, passes
over the fields of `HARMLESS`, and reports all others. Never imports torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchtitan_like.models.argument_rules import MAX_LAYERS, MAX_SIZE


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


class Fields:
    """The fields of one config.json: reads them with their types, and collects problems.

    used: the fields that were read. unused: keys of the rope table that its type does not read.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []
        self.used = {"model_type", "architectures"}
        self.unused: list[str] = []

    def refuse(self, name: str, expected: str, reason: str = "", value: Any = None) -> None:
        """Add the problem of a field. value: None for the field's own value."""
        value = self.config.get(name) if value is None else value
        is_absent = value is None and name not in self.config
        text = "absent" if is_absent else show(value)
        self.problems.append(f"{name} = {text}: expected {expected}{reason and f'; {reason}'}")

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return self.config.get(name, default)

    def integer(self, name: str, default: int | None) -> int:
        """Return an integer above 0; the default if the field is absent."""
        value = self.get(name, default)
        limit = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
        is_positive = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if is_positive and value <= limit:
            return int(value)
        self.refuse(name, f"at most {limit}" if is_positive else "an integer above 0")
        return 1

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if is_number(value) and value > 0:
            return float(value)
        self.refuse(name, "a number above 0")
        return 1.0

    def switch(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if isinstance(value, bool):
            return value
        self.refuse(name, "true or false")
        return default

    def notes(self) -> list[str]:
        """Return a sentence about the fields that no table names."""
        names = self.config.keys() - self.used - REFUSED.keys() - HARMLESS
        unknown = [f"{name} = {show(self.config[name])}" for name in sorted(names)]
        unknown += self.unused
        if not unknown:
            return []
        return [
            "has fields that are unknown here and have no effect. Check that the model does not "
            f"need them: {', '.join(unknown)}"
        ]


def show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_number(value: Any) -> bool:
    """Return True for a number that fp64 can represent, unlike NaN and an integer of 400 digits."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def check_refused(fields: Fields) -> None:
    """Refuse the fields that change what the model computes."""
    config = fields.config
    for name, refusal in REFUSED.items():
        if name in config and not _is_neutral(config[name], refusal):
            _refuse(fields, name, config[name], refusal)
    if fields.get("attention_multiplier") not in (None, _scale_of_scores(config)):  # of Granite
        reason = "scores are divided by the root of head_dim"
        fields.refuse("attention_multiplier", "no such field", reason)
    # SmolLM3 rotates the layers whose entry is 1.
    rotated = fields.get("no_rope_layers")
    if rotated is not None and not (isinstance(rotated, list) and all(rotated)):
        fields.refuse("no_rope_layers", "1 for each layer", "all layers are rotated")
    nested = config.get("text_config")
    for table in (config, nested if isinstance(nested, dict) else {}):
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(rope := table.get(name), dict):
                _check_refused_rope(fields, name, rope)


def _check_refused_rope(fields: Fields, name: str, rope: Mapping[str, Any]) -> None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if str(rope_type) not in ROPE_KEYS:
        expected = f"one of {', '.join(ROPE_KEYS)}"
        fields.refuse(f"{name}.rope_type", expected, "other scalings are not supported", rope_type)
    for key, refusal in ROPE_REFUSED.items():
        if key in rope and not _is_neutral(rope[key], refusal):
            _refuse(fields, f"{name}.{key}", rope[key], refusal)


def _scale_of_scores(config: Mapping[str, Any]) -> float | None:
    """Return head_dim^-0.5; None if the file has no valid sizes."""
    sizes: list[Any] = [
        config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads")
    ]
    head_dim, dim, n_heads = (size if is_number(size) and size > 0 else 0 for size in sizes)
    if not head_dim and n_heads:
        head_dim = dim // n_heads
    return head_dim**-0.5 if head_dim else None


def _is_neutral(value: Any, refusal: Refusal) -> bool:
    """Return True for a neutral value; 1 and 1.0 are equal, false and 0 too."""
    return any(value == neutral for neutral in refusal.neutral)


def _refuse(fields: Fields, name: str, value: Any, refusal: Refusal) -> None:
    allowed = [show(neutral) for neutral in refusal.neutral if neutral is not None]
    fields.refuse(name, " or ".join(["no such field", *allowed]), refusal.reason, value)
