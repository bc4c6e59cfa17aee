"""Hugging Face's names, and sizes to and from config.json.

Files of all architectures have the same names and the same order of rows (rotary halves), so the
table only renames. transformers' configuration classes define the fields of config.json and their
defaults.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from torchtitan_like.models.hf.flavors import ARCHITECTURES, FLAVORS, HfArgs
from torchtitan_like.models.hf_fields import (
    HARMLESS,
    OTHER_FAMILIES,
    REFUSED,
    ROPE_HARMLESS,
    ROPE_KEYS,
    ROPE_REFUSED,
    Refusal,
)
from torchtitan_like.models.hf_table import Rows
from torchtitan_like.models.size_rules import MAX_LAYERS, MAX_SIZE, yarn_scale
from torchtitan_like.models.spec import HfModel

_ATTENTION = "model.layers.{}.self_attn."
_MLP = "model.layers.{}.mlp."
_PROJECTIONS = (
    ("layers.{}.attention.wq", _ATTENTION + "q_proj", "has_qkv_bias"),
    ("layers.{}.attention.wk", _ATTENTION + "k_proj", "has_qkv_bias"),
    ("layers.{}.attention.wv", _ATTENTION + "v_proj", "has_qkv_bias"),
    ("layers.{}.attention.wo", _ATTENTION + "o_proj", "attention_bias"),
    ("layers.{}.feed_forward.w1", _MLP + "gate_proj", "mlp_bias"),
    ("layers.{}.feed_forward.w2", _MLP + "down_proj", "mlp_bias"),
    ("layers.{}.feed_forward.w3", _MLP + "up_proj", "mlp_bias"),
)
_NORMS = (
    ("layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight"),
    ("layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
    ("norm.weight", "model.norm.weight"),
)
_QK_NORMS = (
    ("layers.{}.attention.q_norm.weight", _ATTENTION + "q_norm.weight"),
    ("layers.{}.attention.k_norm.weight", _ATTENTION + "k_norm.weight"),
)


def hf_names(args: HfArgs) -> Rows:
    """Return pairs (native name, Hugging Face name) of the tensors that the model has."""
    weights = [(f"{native}.weight", f"{hf}.weight") for native, hf, _ in _PROJECTIONS]
    biases = [
        (f"{native}.bias", f"{hf}.bias")
        for native, hf, switch in _PROJECTIONS
        if getattr(args, switch)
    ]
    return (
        ("tok_embeddings.weight", "model.embed_tokens.weight"),
        *weights,
        *biases,
        *(_QK_NORMS if args.has_qk_norm else ()),
        *_NORMS,
        ("output.weight", "lm_head.weight"),
    )


# ---- to config.json


def hf_config(args: HfArgs) -> dict[str, Any]:
    """Return `config.json` of the architecture's class; the exporter adds special tokens and dtype."""
    architecture = ARCHITECTURES[args.architecture]
    # The length enters dynamic frequencies, for which max_seq_len may be longer.
    is_dynamic = args.rope_type == "dynamic"
    config = {
        "architectures": [architecture.hf_class],
        "model_type": args.architecture,
        "attention_dropout": 0.0,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "initializer_range": args.init_std,
        "intermediate_size": args.hidden_dim,
        "max_position_embeddings": args.rope_original_seq_len if is_dynamic else args.max_seq_len,
        "num_attention_heads": args.n_heads,
        "num_hidden_layers": args.n_layers,
        "num_key_value_heads": args.n_kv_heads,
        "rms_norm_eps": args.norm_eps,
        "rope_scaling": _rope_scaling(args),
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": args.enable_weight_tying,
        "use_cache": True,
        "vocab_size": args.vocab_size,
    }
    for name in ("attention_bias", "mlp_bias"):
        if name in architecture.options:
            config[name] = getattr(args, name)
    if "sliding_window_size" in architecture.options:
        config["sliding_window"] = args.sliding_window_size or None
    if "first_window_layer" in architecture.options:
        has_window = args.sliding_window_size > 0
        config["use_sliding_window"] = has_window
        config["max_window_layers"] = args.first_window_layer if has_window else args.n_layers
    return config


def _rope_scaling(args: HfArgs) -> dict[str, Any] | None:
    """Return the table with the values that are not transformers' defaults."""
    if args.rope_type == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": args.rope_type, "factor": args.rope_factor}
    if args.rope_type == "llama3":
        scaling |= {
            "low_freq_factor": args.rope_low_freq_factor,
            "high_freq_factor": args.rope_high_freq_factor,
            "original_max_position_embeddings": args.rope_original_seq_len,
        }
    if args.rope_type == "yarn":
        scaling["original_max_position_embeddings"] = args.rope_original_seq_len
        defaults = {
            "attention_factor": (args.rope_attention_factor, yarn_scale(args.rope_factor)),
            "beta_fast": (args.rope_beta_fast, HfArgs().rope_beta_fast),
            "beta_slow": (args.rope_beta_slow, HfArgs().rope_beta_slow),
            "truncate": (args.rope_truncate, True),
        }
        scaling |= {key: value for key, (value, usual) in defaults.items() if value != usual}
    return scaling


# ---- from config.json


def hf_args(config: Mapping[str, Any]) -> HfModel:
    """Return the flavor and sizes of a config.json. `ModelSpec.hf_args` describes the result.

    Raises ValueError with one line for each field that is not supported.
    """
    fields = _Fields(config)
    flavor = str(config.get("model_type"))
    _check_refused(fields)
    args = {}
    if flavor in ARCHITECTURES:
        args = _read_sizes(fields, FLAVORS[flavor])
    else:
        reason = OTHER_FAMILIES.get(flavor, "")
        fields.refuse("model_type", f"one of {', '.join(ARCHITECTURES)}", reason)
    if fields.problems:
        raise ValueError("\n".join(fields.problems))
    return HfModel(flavor, args, tuple(fields.notes()))


class _Fields:
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
        text = "absent" if is_absent else _show(value)
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
        if _is_number(value) and value > 0:
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
        unknown = [f"{name} = {_show(self.config[name])}" for name in sorted(names)]
        unknown += self.unused
        if not unknown:
            return []
        return [
            "has fields that are unknown here and have no effect. Check that the model does not "
            f"need them: {', '.join(unknown)}"
        ]


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_number(value: Any) -> bool:
    """Return True for a number that fp64 can represent, unlike NaN and an integer of 400 digits."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _check_refused(fields: _Fields) -> None:
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


def _check_refused_rope(fields: _Fields, name: str, rope: Mapping[str, Any]) -> None:
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
    head_dim, dim, n_heads = (size if _is_number(size) and size > 0 else 0 for size in sizes)
    if not head_dim and n_heads:
        head_dim = dim // n_heads
    return head_dim**-0.5 if head_dim else None


def _is_neutral(value: Any, refusal: Refusal) -> bool:
    """Return True for a neutral value; 1 and 1.0 are equal, false and 0 too."""
    return any(value == neutral for neutral in refusal.neutral)


def _refuse(fields: _Fields, name: str, value: Any, refusal: Refusal) -> None:
    allowed = [_show(neutral) for neutral in refusal.neutral if neutral is not None]
    fields.refuse(name, " or ".join(["no such field", *allowed]), refusal.reason, value)


def _read_sizes(fields: _Fields, defaults: HfArgs) -> dict[str, Any]:
    """Return the arguments of a supported architecture."""
    architecture = ARCHITECTURES[defaults.architecture]
    # LLaMA's first files spell it LLaMAForCausalLM.
    classes = _show(fields.get("architectures") or [architecture.hf_class])
    if classes.lower() != _show([architecture.hf_class]).lower():
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


def _read_head_dim(fields: _Fields, defaults: HfArgs, dim: int, n_heads: int) -> int:
    if fields.get("head_dim") is not None or defaults.architecture == "qwen3":
        return fields.integer("head_dim", defaults.head_dim)
    if dim % n_heads:
        expected = f"a multiple of num_attention_heads = {n_heads}"
        fields.refuse("hidden_size", expected, "the file has no head_dim")
    return max(1, dim // n_heads)


def _check_fixed_biases(fields: _Fields, defaults: HfArgs) -> None:
    """Refuse switches of biases that the class does not have, unless they agree with it."""
    architecture = ARCHITECTURES[defaults.architecture]
    for name in ("attention_bias", "mlp_bias"):
        fixed = name == "attention_bias" and architecture.has_qkv_bias
        value = fields.get(name)
        if name not in architecture.options and value not in (None, fixed):
            reason = f"{architecture.hf_class} has fixed biases"
            fields.refuse(name, f"no such field or {_show(fixed)}", reason)


# ---- windows

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _read_window(fields: _Fields, defaults: HfArgs, n_layers: int) -> dict[str, int]:
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
        fields.refuse("use_sliding_window", f"{_show(size > 0)} with a window of {size} tokens")
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


def _read_rope(fields: _Fields, max_position: int) -> dict[str, Any]:
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
            fields.refuse(name, f"rope_theta = {_show(theta)}", "two spellings disagree", value)
    name, rope = next(iter(spellings.items()), ("rope_scaling", {"rope_type": "default"}))
    for other, table in spellings.items():
        if table != rope:
            fields.refuse(other, f"{name} = {_show(rope)}", "two spellings disagree", table)
    rope_type = rope.get("rope_type")
    args = {"rope_theta": theta, "rope_type": rope_type}
    if rope_type not in ROPE_KEYS:  # refused with the other fields
        return args
    read = ("rope_type", *ROPE_KEYS[rope_type], *ROPE_REFUSED, *ROPE_HARMLESS)
    fields.unused += [f"{name}.{key} = {_show(rope[key])}" for key in rope if key not in read]
    if rope_type != "default":
        scaling = _Fields(rope)
        original = _read_original_length(fields, scaling, name, max_position)
        args |= _read_scaling(scaling, rope_type, original)
        fields.problems += [f"{name}.{problem}" for problem in scaling.problems]
    return args


def _read_original_length(fields: _Fields, scaling: _Fields, name: str, max_position: int) -> int:
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


def _read_scaling(scaling: _Fields, rope_type: str, original: int) -> dict[str, Any]:
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
        if all(_is_number(mscale) and mscale for mscale in mscales):
            one, all_dims = (yarn_scale(args["rope_factor"], mscale) for mscale in mscales)
            scale = one / all_dims
        args["rope_attention_factor"] = scaling.number("attention_factor", scale)
        args["rope_beta_fast"] = scaling.number("beta_fast", HfArgs().rope_beta_fast)
        args["rope_beta_slow"] = scaling.number("beta_slow", HfArgs().rope_beta_slow)
        args["rope_truncate"] = scaling.switch("truncate", True)
    return args


def _standard_rope(fields: _Fields, name: str) -> dict[str, Any]:
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
        fields.refuse(f"{name}.type", f"rope_type = {_show(types[0])}", value=types[1])
    return {"rope_type": types[0] if types else "default", **rope}
