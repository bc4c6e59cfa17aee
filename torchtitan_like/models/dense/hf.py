"""Names and sizes of dense decoders in the formats of Hugging Face, Meta, and TorchTitan.

Rows are in Hugging Face's order (rotary halves), so its table only renames. Meta's Llama interleaves
a head's rotary pairs. transformers' configuration classes define the fields of config.json and their
defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan_like.models.argument_rules import yarn_scale
from torchtitan_like.models.decoder_tables import (
    EXPERT_BIAS,
    HF_ATTENTION,
    HF_DECODER,
    HF_EXPERTS,
    HF_FEED_FORWARD,
    HF_FUSED_EXPERTS,
    decoder_config,
    layer_rows,
    same_names,
)
from torchtitan_like.models.dense.flavors import (
    ARCHITECTURES,
    HF,
    DenseArgs,
    HfArgs,
    RopeScaling,
    with_experts,
)
from torchtitan_like.models.hf_fields import (
    OTHER_FAMILIES,
    ROPE_HARMLESS,
    ROPE_KEYS,
    ROPE_REFUSED,
    Fields,
    check_refused,
    is_number,
    show,
)
from torchtitan_like.models.hf_table import Row, Rows, Table
from torchtitan_like.models.spec import HfModel


def hf_names(args: DenseArgs) -> Rows:
    """Return pairs (native name, Hugging Face name) of the tensors that the model has."""
    return (*_names(args), *(HF_EXPERTS if with_experts(args) else ()))


def hf_alternative_names(args: DenseArgs) -> Rows:
    """Return rows for files with the stacked experts of transformers' modules."""
    return (*_names(args), *(HF_FUSED_EXPERTS if with_experts(args) else ()))


def _names(args: DenseArgs) -> Table:
    """Return the rows of `hf_names` without experts."""
    rows = [*HF_DECODER, *layer_rows("attention", "self_attn", HF_ATTENTION)]
    if args.has_qk_norm:
        norms = (("q_norm", "q_norm"), ("k_norm", "k_norm"))
        rows += layer_rows("attention", "self_attn", norms)
    if with_experts(args):
        return (*rows, ("layers.{}.moe.router.gate.weight", "model.layers.{}.mlp.gate.weight"))
    rows += layer_rows("feed_forward", "mlp", HF_FEED_FORWARD)
    if args.has_qkv_bias:
        rows += layer_rows("attention", "self_attn", HF_ATTENTION[:3], "bias")
    if args.attention_bias:
        rows += layer_rows("attention", "self_attn", HF_ATTENTION[3:], "bias")
    if args.mlp_bias:
        rows += layer_rows("feed_forward", "mlp", HF_FEED_FORWARD, "bias")
    return tuple(rows)


def meta_names(args: DenseArgs) -> Rows:
    """Return rows for Meta's `consolidated.*.pth` and TorchTitan's checkpoints: the names are equal.

    Those of Llama interleave rotary pairs.
    """
    if args.architecture != "llama":
        experts = (*HF_EXPERTS, EXPERT_BIAS) if with_experts(args) else ()
        return same_names((*_names(args), *experts))
    heads = {"wq": args.n_heads, "wk": args.num_kv_heads}
    return tuple(
        Row(name, name, interleaved_heads=heads.get(name.split(".")[-2], 0))
        for name, _ in _names(args)
    )


# ---- to config.json


def hf_config(args: DenseArgs) -> dict[str, Any]:
    """Return `config.json` of the architecture's class."""
    architecture = ARCHITECTURES[args.architecture]
    config = decoder_config(args, args.linear_std, args.num_kv_heads) | {
        "architectures": [architecture.hf_class],
        "model_type": args.architecture,
        "head_dim": args.head_dim,
        "intermediate_size": args.ffn_dim,
        "rope_scaling": _rope_scaling(args.rope),
    }
    if args.rope.type == "dynamic":  # the length enters its frequencies; max_seq_len may be longer
        config["max_position_embeddings"] = args.rope.original_seq_len
    for name in ("attention_bias", "mlp_bias"):
        if name in architecture.options:
            config[name] = getattr(args, name)
    if "sliding_window_size" in architecture.options:
        config["sliding_window"] = args.sliding_window_size or None
    if "first_window_layer" in architecture.options:
        has_window = args.sliding_window_size > 0
        config["use_sliding_window"] = has_window
        config["max_window_layers"] = args.first_window_layer if has_window else args.n_layers
    if experts := with_experts(args):
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": experts.moe_inter_dim,
            "norm_topk_prob": experts.route_norm,
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
        }
    return config


def _rope_scaling(rope: RopeScaling) -> dict[str, Any] | None:
    """Return the table with the values that are not transformers' defaults."""
    if rope.type == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_seq_len,
        }
    if rope.type == "yarn":
        scaling["original_max_position_embeddings"] = rope.original_seq_len
        defaults = {
            "attention_factor": (rope.attention_factor, yarn_scale(rope.factor)),
            "beta_fast": (rope.beta_fast, RopeScaling().beta_fast),
            "beta_slow": (rope.beta_slow, RopeScaling().beta_slow),
            "truncate": (rope.truncate, True),
        }
        scaling |= {key: value for key, (value, usual) in defaults.items() if value != usual}
    return scaling


# ---- from config.json


def hf_args(config: Mapping[str, Any]) -> HfModel:
    """Return the flavor and sizes of a config.json. `ModelSpec.hf_args` describes the result.

    Raises ValueError with one line for each field that is not supported.
    """
    fields = Fields(config)
    flavor = str(config.get("model_type"))
    check_refused(fields)
    args = {}
    if flavor in ARCHITECTURES:
        args = _read_sizes(fields, HF[flavor])
    else:
        reason = OTHER_FAMILIES.get(flavor, "")
        fields.refuse("model_type", f"one of {', '.join(ARCHITECTURES)}", reason)
    if fields.problems:
        raise ValueError("\n".join(fields.problems))
    return HfModel(flavor, args, tuple(fields.notes()))


def _read_sizes(fields: Fields, defaults: HfArgs) -> dict[str, Any]:
    """Return the arguments of a supported architecture."""
    architecture = ARCHITECTURES[defaults.architecture]
    # LLaMA's first files spell it LLaMAForCausalLM.
    classes = show(fields.get("architectures") or [architecture.hf_class])
    if classes.lower() != show([architecture.hf_class]).lower():
        fields.refuse("architectures", f'["{architecture.hf_class}"]', "it names other tensors")
    dim = fields.integer("hidden_size", defaults.dim)
    n_layers = fields.integer("num_hidden_layers", defaults.n_layers)
    n_heads = fields.integer("num_attention_heads", defaults.n_heads)
    # Absent is not null: null means as many as queries, absent the default of the class.
    n_kv_heads = n_heads if defaults.architecture == "llama" else defaults.n_kv_heads
    if "num_key_value_heads" in fields.config and fields.get("num_key_value_heads") is None:
        n_kv_heads = n_heads
    else:
        n_kv_heads = fields.integer("num_key_value_heads", n_kv_heads)
    max_seq_len = fields.integer("max_position_embeddings", defaults.max_seq_len)
    options: dict[str, Any] = {
        name: fields.switch(name, False)
        for name in ("attention_bias", "mlp_bias")
        if name in architecture.options
    }
    _check_fixed_biases(fields, defaults)
    return {
        "architecture": defaults.architecture,
        "dim": dim,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": _read_head_dim(fields, defaults, dim, n_heads),
        "hidden_dim": fields.integer("intermediate_size", defaults.hidden_dim),
        "vocab_size": fields.integer("vocab_size", defaults.vocab_size),
        "norm_eps": fields.number("rms_norm_eps", defaults.norm_eps),
        "enable_weight_tying": fields.switch("tie_word_embeddings", False),
        "init_std": fields.number("initializer_range", defaults.init_std),
        "max_seq_len": max_seq_len,
        **options,
        **_read_window(fields, defaults, n_layers),
        **_read_rope(fields, max_seq_len),
    }


def _read_head_dim(fields: Fields, defaults: HfArgs, dim: int, n_heads: int) -> int:
    if fields.get("head_dim") is not None or defaults.architecture == "qwen3":
        return fields.integer("head_dim", defaults.head_dim)
    if dim % n_heads:
        expected = f"a multiple of num_attention_heads = {n_heads}"
        fields.refuse("hidden_size", expected, "the file has no head_dim")
    return max(1, dim // n_heads)


def _check_fixed_biases(fields: Fields, defaults: HfArgs) -> None:
    """Refuse switches of biases that the class does not have, unless they agree with it."""
    architecture = ARCHITECTURES[defaults.architecture]
    for name in ("attention_bias", "mlp_bias"):
        fixed = name == "attention_bias" and architecture.has_qkv_bias
        value = fields.get(name)
        if name not in architecture.options and value not in (None, fixed):
            reason = f"{architecture.hf_class} has fixed biases"
            fields.refuse(name, f"no such field or {show(fixed)}", reason)


# ---- windows

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _read_window(fields: Fields, defaults: HfArgs, n_layers: int) -> dict[str, int]:
    """Return the arguments of the sliding window.

    Absent is not null: a Mistral without the field has a window of 4096 tokens. Qwen has a window
    only if use_sliding_window is true, in the layers from max_window_layers on. layer_types, which
    newer files have, names the same layers.
    """
    architecture = ARCHITECTURES[defaults.architecture]
    can_start_later = "first_window_layer" in architecture.options
    has_window = "sliding_window_size" in architecture.options
    if can_start_later:
        has_window = fields.switch("use_sliding_window", False)
    size = 0
    if fields.get("sliding_window", 4096 if has_window else None) is not None:
        size = fields.integer("sliding_window", 4096) if has_window else 0
        if not has_window and not can_start_later:
            fields.refuse("sliding_window", "null", f"{architecture.hf_class} has no window")
    if fields.get("use_sliding_window") not in (None, size > 0) and not can_start_later:
        fields.refuse("use_sliding_window", f"{show(size > 0)} with a window of {size} tokens")
    first_layer = 0
    if can_start_later:
        value = fields.get("max_window_layers", 28)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            fields.refuse("max_window_layers", "an integer of at least 0")
        else:
            first_layer = value
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and can_start_later:
        first_layer = kinds.index(_SLIDING) if _SLIDING in kinds else n_layers
    num_full = min(first_layer, n_layers) if size else n_layers
    if kinds not in (None, [_FULL] * num_full + [_SLIDING] * (n_layers - num_full)):
        expected = f"{num_full} {_FULL}, then {n_layers - num_full} {_SLIDING}"
        fields.refuse("layer_types", expected, "as the other fields of the window say")
    if num_full == n_layers:
        return {"sliding_window_size": 0, "first_window_layer": 0}
    return {"sliding_window_size": size, "first_window_layer": num_full}


# ---- rotary scaling


def _read_rope(fields: Fields, max_position: int) -> dict[str, Any]:
    """Return the rotary arguments of both spellings.

    Up to transformers 4 these are rope_theta and rope_scaling (with `type` or `rope_type`), from 5
    on rope_parameters with all of them.
    """
    spellings = {
        name: _standard_rope(fields, name)
        for name in ("rope_scaling", "rope_parameters")
        if fields.get(name)
    }
    thetas = {
        f"{name}.rope_theta": rope.pop("rope_theta")
        for name, rope in spellings.items()
        if "rope_theta" in rope
    }
    theta = fields.number("rope_theta", next(iter(thetas.values()), HfArgs().rope_theta))
    for name, value in thetas.items():
        if value != theta:
            fields.refuse(name, f"rope_theta = {show(theta)}", "two spellings disagree", value)
    name, rope = next(iter(spellings.items()), ("rope_scaling", {"rope_type": "default"}))
    for other, table in spellings.items():
        if table != rope:
            fields.refuse(other, f"{name} = {show(rope)}", "two spellings disagree", table)
    rope_type = rope.get("rope_type")
    args = {"rope_theta": theta, "rope_type": rope_type}
    if rope_type not in ROPE_KEYS:  # refused with the other fields
        return args
    read = ("rope_type", *ROPE_KEYS[rope_type], *ROPE_REFUSED, *ROPE_HARMLESS)
    fields.unused += [f"{name}.{key} = {show(rope[key])}" for key in rope if key not in read]
    if rope_type != "default":
        scaling = Fields(rope)
        original = _read_original_length(fields, scaling, name, max_position)
        args |= _read_scaling(scaling, rope_type, original)
        fields.problems += [f"{name}.{problem}" for problem in scaling.problems]
    return args


def _read_original_length(fields: Fields, scaling: Fields, name: str, max_position: int) -> int:
    """Return the length of the context before scaling; the file's length if no field names it.

    Dynamic and linear scaling do not read original_max_position_embeddings.
    """
    key = "original_max_position_embeddings"
    if key not in ROPE_KEYS[scaling.get("rope_type")]:
        return max_position
    outer = fields.get(key)
    original = scaling.integer(key, max_position if outer is None else outer)
    if outer not in (None, original):
        fields.refuse(key, f"{name}.{key} = {original}")
    return original


def _read_scaling(scaling: Fields, rope_type: str, original: int) -> dict[str, Any]:
    """Return the arguments of a scaling from its table."""
    args: dict[str, Any] = {"rope_factor": scaling.number("factor", 0)}
    args["rope_original_seq_len"] = original
    if not scaling.problems and args["rope_factor"] < 1:
        scaling.refuse("factor", "at least 1")
    if rope_type == "llama3":
        args["rope_low_freq_factor"] = scaling.number("low_freq_factor", 0)
        args["rope_high_freq_factor"] = scaling.number("high_freq_factor", 0)
    if rope_type == "yarn":
        # DeepSeek's two factors give the ratio of their scales.
        mscales = [scaling.get(key) for key in ("mscale", "mscale_all_dim")]
        scale = yarn_scale(args["rope_factor"])
        if all(is_number(mscale) and mscale for mscale in mscales):
            one, all_dims = (yarn_scale(args["rope_factor"], mscale) for mscale in mscales)
            scale = one / all_dims
        args["rope_attention_factor"] = scaling.number("attention_factor", scale)
        args["rope_beta_fast"] = scaling.number("beta_fast", HfArgs().rope_beta_fast)
        args["rope_beta_slow"] = scaling.number("beta_slow", HfArgs().rope_beta_slow)
        args["rope_truncate"] = scaling.switch("truncate", True)
    return args


def _standard_rope(fields: Fields, name: str) -> dict[str, Any]:
    """Return the table with the key `rope_type` only, and without null values."""
    rope = fields.get(name)
    if not isinstance(rope, dict):
        fields.refuse(name, "null or a table")
        return {}
    if any(isinstance(value, dict) for value in rope.values()):
        fields.refuse(name, "one table for all layers")
        return {}
    rope = {key: value for key, value in rope.items() if value is not None}
    types = [rope.pop(key) for key in ("rope_type", "type") if key in rope]
    if len(set(types)) > 1:
        fields.refuse(f"{name}.type", f"rope_type = {show(types[0])}", value=types[1])
    return {"rope_type": types[0] if types else "default", **rope}
