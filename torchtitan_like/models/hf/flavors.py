"""Sizes, initial weights, and cost of dense decoders of the Hugging Face Hub.

Llama (arXiv:2307.09288), Mistral (arXiv:2310.06825), Qwen2 (arXiv:2407.10671), and Qwen3
(arXiv:2505.09388) differ in biases, norms of queries and keys, windows, and rotary scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_like.models.attention_rules import MASK_TYPES, check_attention
from torchtitan_like.models.size_rules import (
    ROPE_TYPES,
    check_base,
    check_divisor,
    check_even,
    check_positive,
    check_ranges,
)
from torchtitan_like.models.spec import InitRule, trunc_normal

# Kernels that can compute a window.
WINDOW_ATTENTION_TYPES = ("sdpa", "flex")


class Architecture(NamedTuple):
    """A class of transformers.

    has_qkv_bias: queries, keys, and values always have a bias, which no argument switches off.
    options: the arguments that the class supports, in addition to the ones of all classes.
    """

    hf_class: str
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    options: tuple[str, ...] = ()


# By the model_type of config.json.
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", options=("attention_bias", "mlp_bias")),
    "mistral": Architecture("MistralForCausalLM", options=("sliding_window_size",)),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        has_qkv_bias=True,
        options=("sliding_window_size", "first_window_layer"),
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        has_qk_norm=True,
        options=("attention_bias", "sliding_window_size", "first_window_layer"),
    ),
}


@dataclass(frozen=True)
class HfArgs:
    """Sizes of a dense decoder; each can be set in `[model.args]`.

    architecture: model_type in config.json. It decides the class of an export, and with "qwen2" and
        "qwen3" biases of queries, keys, and values, and norms of queries and keys.
    head_dim: independent of dim.
    hidden_dim: width of the feed-forward network.
    attention_bias: biases of queries, keys, values, and the output of attention.
    mlp_bias: biases of the feed-forward network.
    sliding_window_size: number of tokens that a token attends to, itself included; 0: all.
    first_window_layer: the layers from this one on have the window.
    max_seq_len: rows of the rotary tables, in tokens.
    rope_type: scaling of rotary frequencies; the other rope arguments are its sizes.
    rope_factor: length of the context relative to rope_original_seq_len.
    rope_attention_factor: factor of rotated queries and keys (only yarn).
    rope_truncate: round the first and last pair of yarn's transition to whole pairs.
    attn_type: kernel of attention that ends at document borders or has a window ("sdpa", "flex"),
        without windows also "varlen". On CPU, "sdpa" replaces the others.
    attn_mask_type: "causal": a token attends to all earlier tokens of the sample; "block_causal":
        to the earlier tokens of its document.
    """

    architecture: str = "llama"
    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 32
    head_dim: int = 128
    hidden_dim: int = 11008
    vocab_size: int = 32000
    norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window_size: int = 0
    first_window_layer: int = 0
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    rope_type: str = "default"
    rope_factor: float = 1.0
    rope_original_seq_len: int = 2048
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_attention_factor: float = 1.0
    rope_truncate: bool = True
    enable_weight_tying: bool = False
    init_std: float = 0.02
    attn_type: str = "sdpa"
    attn_mask_type: str = "causal"

    @property
    def has_qkv_bias(self) -> bool:
        return self.attention_bias or ARCHITECTURES[self.architecture].has_qkv_bias

    @property
    def has_qk_norm(self) -> bool:
        return ARCHITECTURES[self.architecture].has_qk_norm

    def window(self, layer: int) -> int:
        """Return the number of tokens that a token attends to in a layer; 0: all."""
        return self.sliding_window_size if layer >= self.first_window_layer else 0


# The defaults of transformers' classes, which a config.json need not repeat.
FLAVORS = {
    "llama": HfArgs(),
    "mistral": HfArgs(
        "mistral", n_kv_heads=8, hidden_dim=14336, max_seq_len=131072, sliding_window_size=4096
    ),
    "qwen2": HfArgs("qwen2", hidden_dim=22016, vocab_size=151936, max_seq_len=32768),
    "qwen3": HfArgs("qwen3", hidden_dim=22016, vocab_size=151936, max_seq_len=32768),
}


def check(args: HfArgs) -> list[str]:
    """Return one sentence for each problem of the sizes."""
    positive = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size",
                "norm_eps", "max_seq_len", "init_std", "rope_original_seq_len", "rope_low_freq_factor",
                "rope_beta_slow", "rope_attention_factor")  # fmt: skip
    choices = (("architecture", tuple(ARCHITECTURES)), ("rope_type", ROPE_TYPES))
    problems = [
        f"{key} = {getattr(args, key)!r}: expected one of {', '.join(values)}; remove it to use "
        "the flavor's"
        for key, values in choices
        if getattr(args, key) not in values
    ]
    problems += check_positive(args, positive)
    ranges = (
        ("sliding_window_size", 0, math.inf),
        ("first_window_layer", 0, math.inf),
        ("rope_factor", 1, math.inf),
        ("rope_beta_fast", args.rope_beta_slow, math.inf),
    )
    problems += check_ranges(args, ranges)
    problems += check_base(args.rope_theta)
    problems += check_even("head_dim", args.head_dim)
    if problems:
        return problems
    problems += _check_options(args)
    problems += _check_attention(args)
    problems += check_divisor("n_kv_heads", args.n_kv_heads, "n_heads", args.n_heads)
    if not args.rope_low_freq_factor < args.rope_high_freq_factor < math.inf:
        problems.append(
            f"rope_high_freq_factor = {args.rope_high_freq_factor}: expected a number above "
            f"rope_low_freq_factor = {args.rope_low_freq_factor}"
        )
    return problems


def _check_options(args: HfArgs) -> list[str]:
    """Return one sentence for each argument that the class of transformers does not have."""
    architecture = ARCHITECTURES[args.architecture]
    options = {name for each in ARCHITECTURES.values() for name in each.options}
    return [
        f"{name} = {getattr(args, name)}: {architecture.hf_class} has no such option; set "
        f"{name} = {getattr(HfArgs(), name)}, or another architecture"
        for name in sorted(options - set(architecture.options))
        if getattr(args, name) != getattr(HfArgs(), name)
    ]


def _check_attention(args: HfArgs) -> list[str]:
    """Return one sentence for each problem of masks and kernels."""
    if not args.sliding_window_size:
        problems = check_attention(args.attn_type, args.attn_mask_type)
    else:
        problems = [
            f"{key} = {getattr(args, key)!r}: expected one of {', '.join(values)} with a sliding "
            "window; remove it to use the flavor's"
            for key, values in (
                ("attn_type", WINDOW_ATTENTION_TYPES),
                ("attn_mask_type", MASK_TYPES),
            )
            if getattr(args, key) not in values
        ]
    is_longer = args.rope_type == "dynamic" and args.max_seq_len > args.rope_original_seq_len
    if is_longer and args.attn_mask_type != "causal":
        problems.append(
            f'attn_mask_type = "{args.attn_mask_type}": expected "causal" for sequences of more '
            f"than rope_original_seq_len = {args.rope_original_seq_len} tokens, because dynamic "
            f"frequencies depend on their length; set max_seq_len = {args.rope_original_seq_len}"
        )
    if args.rope_type == "dynamic" and args.head_dim <= 2:
        problems.append(
            f"head_dim = {args.head_dim}: expected more than 2 with dynamic frequencies; set "
            'rope_type = "default"'
        )
    return problems


def num_params(args: HfArgs) -> int:
    """Return the number of parameters; a tied output counts once."""
    query_dim, key_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    attention = args.dim * 2 * (query_dim + key_dim)
    attention += (query_dim + 2 * key_dim) * args.has_qkv_bias + args.dim * args.attention_bias
    attention += 2 * args.head_dim * args.has_qk_norm
    feed_forward = 3 * args.dim * args.hidden_dim + (2 * args.hidden_dim + args.dim) * args.mlp_bias
    embeddings = 1 if args.enable_weight_tying else 2
    block = attention + feed_forward + 2 * args.dim
    return args.n_layers * block + args.dim + embeddings * args.vocab_size * args.dim


def flops_per_token(args: HfArgs, seq_len: int) -> int:
    """Return 6 (P - P_embedding) + 6 H (2 head_dim) sum of each layer's keys: forward and backward.

    PaLM, arXiv:2204.02311, appendix B. The embedding lookup costs nothing; the output's matrix
    product counts, tied or not. Attention counts in full, including its masked half, but at most a
    window of keys in the layers that have one.
    """
    weights = num_params(args)
    if not args.enable_weight_tying:
        weights -= args.vocab_size * args.dim
    num_keys = sum(min(args.window(i) or seq_len, seq_len) for i in range(args.n_layers))
    return 6 * (weights + args.n_heads * 2 * args.head_dim * num_keys)


def init_table(args: HfArgs) -> tuple[tuple[str, InitRule], ...]:
    """Return the initial weights of Llama 3: (pattern, rule) rows, of which the first match applies.

    Biases start at 0. A tied embedding starts like an output: with a standard deviation of 1 the
    first logits would be of order sqrt(dim).
    """
    output = InitRule("trunc_normal", std=args.dim**-0.5, bound=3.0)
    embedding = output if args.enable_weight_tying else InitRule("normal", std=1.0)
    rows = [
        ("*norm.weight", InitRule("ones")),
        ("*.bias", InitRule("zeros")),
        ("tok_embeddings.weight", embedding),
    ]
    for layer in range(args.n_layers):
        residual = trunc_normal(args.init_std / math.sqrt(2 * (layer + 1)))
        rows += [
            (f"layers.{layer}.attention.wo.weight", residual),
            (f"layers.{layer}.feed_forward.w[23].weight", residual),
        ]
    plain = trunc_normal(args.init_std)
    rows += [
        ("layers.*.attention.w[qkv].weight", plain),
        ("layers.*.feed_forward.w1.weight", plain),
        ("output.weight", output),
    ]
    return tuple(rows)
