"""Sizes, initial weights, and cost of dense decoders, and of Qwen3's mixture of experts.

Llama (arXiv:2307.09288, arXiv:2407.21783), Mistral (arXiv:2310.06825), Qwen2 (arXiv:2407.10671),
and Qwen3 (arXiv:2505.09388) differ in biases, norms of queries and keys, windows, and rotary
scaling. `DenseArgs` has a property for each difference, which the other files of this folder read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from torchtitan_like.models.argument_rules import (
    ROPE_TYPES,
    check_attention,
    check_balance,
    check_base,
    check_choices,
    check_divisor,
    check_even,
    check_local_attention,
    check_positive,
    check_ranges,
)
from torchtitan_like.models.cost import (
    LayerCost,
    ModelCost,
    attention_params,
    decoder_cost,
    feed_forward_params,
)
from torchtitan_like.models.decoder_tables import decoder_init, decoder_upcycling, decoder_widths
from torchtitan_like.models.spec import InitRule, Upcycling, Widths

# The standard deviation of a linear layer's weights as a function of the model's width h.
INIT_STD = {
    "fixed": lambda h: 0.02,
    "sqrt(1/(3h))": lambda h: math.sqrt(1 / (3 * h)),  # MT-NLG 530B, arXiv:2201.11990
    "sqrt(2/(5h))": lambda h: math.sqrt(2 / (5 * h)),  # Nguyen & Salazar 2019, arXiv:1910.05895
}


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


class RopeScaling(NamedTuple):
    """Scaling of the rotary frequencies; `layers.rotary` has its types.

    factor: length of the context relative to original_seq_len.
    attention_factor: factor of rotated queries and keys (only yarn).
    truncate: round the first and last pair of yarn's transition to whole pairs.
    """

    type: str = "default"
    factor: float = 1.0
    original_seq_len: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class DenseArgs:
    """Sizes of all dense decoders. The families below add their own, and the defaults.

    Each size can be set in `[model.args]`.

    max_seq_len: rows of the rotary tables, in tokens.
    attn_type: kernel of attention that ends at document borders or has a window ("sdpa", "flex"),
        without windows also "varlen". On CPU, "sdpa" replaces the others.
    attn_mask_type: "causal": a token attends to all earlier tokens of the sample; "block_causal":
        to the earlier tokens of its document.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None
    vocab_size: int
    norm_eps: float
    max_seq_len: int
    rope_theta: float
    init_std: float | str
    enable_weight_tying: bool = False
    attn_type: str = "sdpa"
    attn_mask_type: str = "causal"

    @property
    def architecture(self) -> str:
        """The key of `ARCHITECTURES`."""
        raise NotImplementedError

    @property
    def ffn_dim(self) -> int:
        """Width of the feed-forward network."""
        raise NotImplementedError

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def num_kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def linear_std(self) -> float:
        """`init_std` as a number."""
        if isinstance(self.init_std, str):
            return INIT_STD[self.init_std](self.dim)
        return float(self.init_std)

    @property
    def depth_init(self) -> bool:
        """Weights that write to the residual stream shrink with their layer's depth."""
        return True

    @property
    def rope(self) -> RopeScaling:
        return RopeScaling()

    @property
    def attention_bias(self) -> bool:
        """Queries, keys, values, and the output of attention have a bias."""
        return False

    @property
    def mlp_bias(self) -> bool:
        """The feed-forward network has biases."""
        return False

    @property
    def has_qkv_bias(self) -> bool:
        return self.attention_bias or ARCHITECTURES[self.architecture].has_qkv_bias

    @property
    def has_qk_norm(self) -> bool:
        return ARCHITECTURES[self.architecture].has_qk_norm

    @property
    def sliding_window_size(self) -> int:
        """Number of tokens that a token attends to, itself included; 0: all."""
        return 0

    @property
    def first_window_layer(self) -> int:
        """The layers from this one on have the window."""
        return 0

    def window(self, layer: int) -> int:
        """Return the number of tokens that a token attends to in a layer; 0: all."""
        return self.sliding_window_size if layer >= self.first_window_layer else 0


@dataclass(frozen=True, kw_only=True)
class LlamaArgs(DenseArgs):
    """Sizes of Llama 3, 3.1, and 3.2, with TorchTitan's names. See also `DenseArgs`.

    n_kv_heads: heads of keys and values (None: n_heads).
    multiple_of, ffn_dim_multiplier: the feed-forward width is 8/3 dim times ffn_dim_multiplier,
        rounded up to a multiple of multiple_of.
    depth_init: weights that write to the residual stream shrink with their layer's depth (True) or
        with the number of layers (False).
    init_std: a number, or a name in INIT_STD.
    """

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    vocab_size: int = 128256
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    max_seq_len: int = 131072
    rope_theta: float = 500000.0
    rope_scaling_factor: float = 8.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_seq_len: int = 8192
    depth_init: bool = True
    init_std: float | str = "fixed"

    @property
    def architecture(self) -> str:
        return "llama"

    @property
    def ffn_dim(self) -> int:
        width = int(8 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return -(-width // self.multiple_of) * self.multiple_of

    @property
    def rope(self) -> RopeScaling:
        if self.rope_scaling_factor == 1.0:
            return RopeScaling()
        return RopeScaling(
            "llama3",
            self.rope_scaling_factor,
            self.rope_original_max_seq_len,
            self.rope_low_freq_factor,
            self.rope_high_freq_factor,
        )


@dataclass(frozen=True, kw_only=True)
class Qwen3Args(DenseArgs):
    """Sizes of Qwen3, dense or with experts, with TorchTitan's names. See also `DenseArgs`.

    head_dim: independent of dim.
    hidden_dim: width of the feed-forward network of a dense model.
    depth_init: weights that write to the residual stream shrink with their layer's depth (True) or
        with the number of layers (False).
    num_experts: experts in each block instead of a feed-forward network; 0: a dense model.
    top_k: number of experts that process each token.
    moe_inter_dim: width of each expert.
    route_norm: divide the weights of a token's experts by their sum.
    load_balance, load_balance_coeff, router_z_coeff: see `layers.balance.Balance`.
    """

    dim: int = 1024
    n_layers: int = 28
    n_heads: int = 16
    n_kv_heads: int = 8
    head_dim: int = 128
    hidden_dim: int = 3072
    vocab_size: int = 151936
    norm_eps: float = 1e-6
    max_seq_len: int = 40960
    rope_theta: float = 1000000.0
    depth_init: bool = True
    init_std: float = 0.02
    num_experts: int = 0
    top_k: int = 8
    moe_inter_dim: int = 768
    route_norm: bool = True
    load_balance: str = "none"
    load_balance_coeff: float = 1e-3
    router_z_coeff: float = 0.0

    @property
    def architecture(self) -> str:
        return "qwen3"

    @property
    def ffn_dim(self) -> int:
        return self.hidden_dim


def with_experts(args: DenseArgs) -> Qwen3Args | None:
    """Return the sizes if blocks have experts instead of a feed-forward network, else None."""
    return args if isinstance(args, Qwen3Args) and args.num_experts else None


@dataclass(frozen=True, kw_only=True)
class HfArgs(DenseArgs):
    """Sizes of a decoder of the Hugging Face Hub. See also `DenseArgs`.

    architecture: model_type in config.json. It decides the class of an export, and with "qwen2" and
        "qwen3" biases of queries, keys, and values, and norms of queries and keys.
    head_dim: independent of dim.
    hidden_dim: width of the feed-forward network.
    attention_bias: biases of queries, keys, values, and the output of attention.
    mlp_bias: biases of the feed-forward network.
    sliding_window_size: number of tokens that a token attends to, itself included; 0: all.
    first_window_layer: the layers from this one on have the window.
    rope_type: scaling of rotary frequencies; the other rope arguments are its sizes
        (`RopeScaling`).
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
    init_std: float = 0.02

    @property
    def ffn_dim(self) -> int:
        return self.hidden_dim

    @property
    def rope(self) -> RopeScaling:
        return RopeScaling(
            self.rope_type,
            self.rope_factor,
            self.rope_original_seq_len,
            self.rope_low_freq_factor,
            self.rope_high_freq_factor,
            self.rope_beta_fast,
            self.rope_beta_slow,
            self.rope_attention_factor,
            self.rope_truncate,
        )


LLAMA3 = {
    "debugmodel": LlamaArgs(dim=256, n_layers=6, n_heads=16, vocab_size=2048),
    "1B": LlamaArgs(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5,
                    rope_scaling_factor=32.0, enable_weight_tying=True),
    "3B": LlamaArgs(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim_multiplier=1.0,
                    rope_scaling_factor=32.0, enable_weight_tying=True),
    "8B": LlamaArgs(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024),
    "70B": LlamaArgs(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096),
    "405B": LlamaArgs(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim_multiplier=1.2, multiple_of=4096),
}  # fmt: skip
# TorchTitan's flavors for other attention kernels: equal sizes, attention within each document.
LLAMA3 |= {
    name: replace(LLAMA3[base], attn_type=attn_type, attn_mask_type="block_causal")
    for name, base, attn_type in (
        ("debugmodel_flex_attn", "debugmodel", "flex"),
        ("debugmodel_varlen_attn", "debugmodel", "varlen"),
        ("8B_flex", "8B", "flex"),
        ("8B_varlen", "8B", "varlen"),
    )
}
QWEN3 = {
    "debugmodel": Qwen3Args(dim=256, n_layers=8, n_heads=16, n_kv_heads=8, hidden_dim=3072, vocab_size=2048,
                            max_seq_len=4096, enable_weight_tying=True),
    "0.6B": Qwen3Args(dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, enable_weight_tying=True),
    "1.7B": Qwen3Args(dim=2048, n_layers=28, n_heads=16, hidden_dim=6144, enable_weight_tying=True),
    "4B": Qwen3Args(dim=2560, n_layers=36, n_heads=32, hidden_dim=9728, enable_weight_tying=True),
    "8B": Qwen3Args(dim=4096, n_layers=36, n_heads=32, hidden_dim=12288),
    "14B": Qwen3Args(dim=5120, n_layers=40, n_heads=40, hidden_dim=17408),
    "32B": Qwen3Args(dim=5120, n_layers=64, n_heads=64, hidden_dim=25600),
    "debugmodel_moe": Qwen3Args(dim=256, n_layers=8, n_heads=16, n_kv_heads=8, hidden_dim=3072, vocab_size=2048,
                                max_seq_len=4096, num_experts=64),
    "debugmodel_moe_small": Qwen3Args(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=2048,
                                      max_seq_len=4096, num_experts=8, top_k=2, moe_inter_dim=128),
    "30B-A3B": Qwen3Args(dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, hidden_dim=6144, max_seq_len=262144,
                         num_experts=128),
    "235B-A22B": Qwen3Args(dim=4096, n_layers=94, n_heads=64, n_kv_heads=4, hidden_dim=12288, max_seq_len=4096,
                           rope_theta=5000000.0, num_experts=128, moe_inter_dim=1536),
}  # fmt: skip
# The defaults of transformers' classes, which a config.json need not repeat.
HF = {
    "llama": HfArgs(),
    "mistral": HfArgs(
        architecture="mistral",
        n_kv_heads=8,
        hidden_dim=14336,
        max_seq_len=131072,
        sliding_window_size=4096,
    ),
    "qwen2": HfArgs(architecture="qwen2", hidden_dim=22016, vocab_size=151936, max_seq_len=32768),
    "qwen3": HfArgs(architecture="qwen3", hidden_dim=22016, vocab_size=151936, max_seq_len=32768),
}


# ---- checks

_POSITIVE = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "multiple_of",
    "ffn_dim_multiplier", "norm_eps", "max_seq_len", "init_std", "rope_scaling_factor",
    "rope_original_max_seq_len", "rope_original_seq_len", "rope_low_freq_factor", "rope_beta_slow",
    "rope_attention_factor",
}  # fmt: skip


def check(args: DenseArgs) -> list[str]:
    """Return one sentence for each problem of the sizes."""
    given = {field.name: getattr(args, field.name) for field in fields(args)}
    numbers = [key for key, value in given.items() if not isinstance(value, str | None)]
    problems = check_positive(args, [key for key in numbers if key in _POSITIVE])
    problems += check_base(args.rope_theta)
    if isinstance(args, LlamaArgs):
        problems += _check_init_std(args.init_std)
    if isinstance(args, Qwen3Args):
        problems += _check_experts(args)
    if isinstance(args, HfArgs):
        problems += _check_choices(args)
    if problems:
        return problems
    if "head_dim" in given:
        problems += check_even("head_dim", args.head_dim)
    elif args.dim % (2 * args.n_heads):
        problems.append(
            f"dim = {args.dim}: expected a multiple of 2 x n_heads = {2 * args.n_heads}, since a "
            "head's dimensions are rotated in pairs; change dim or n_heads"
        )
    problems += check_divisor("n_kv_heads", args.num_kv_heads, "n_heads", args.n_heads)
    problems += _check_attention(args)
    low, high = given.get("rope_low_freq_factor", 0), given.get("rope_high_freq_factor", 1)
    if not low < high < math.inf:
        problems.append(
            f"rope_high_freq_factor = {high}: expected a number above rope_low_freq_factor = {low}"
        )
    return problems


def _check_init_std(init_std: float | str) -> list[str]:
    if not isinstance(init_std, str) or init_std in INIT_STD:
        return []
    return [f"init_std = {init_std!r}: expected a number or one of {', '.join(INIT_STD)}"]


def _check_experts(args: Qwen3Args) -> list[str]:
    problems = check_balance(
        args.load_balance, args.load_balance_coeff, args.router_z_coeff, args.num_experts
    )
    if args.num_experts < 0:
        problems.append(
            f"num_experts = {args.num_experts}: expected 0 for a dense model, or the number of experts"
        )
    if args.num_experts > 0:
        problems += check_ranges(args, [("top_k", 1, args.num_experts)])
        problems += check_positive(args, ["moe_inter_dim"])
    return problems


def _check_choices(args: HfArgs) -> list[str]:
    """Return the problems of names, of ranges, and of options that the class does not have."""
    choices = (("architecture", tuple(ARCHITECTURES)), ("rope_type", ROPE_TYPES))
    problems = check_choices(args, *choices)
    ranges = (
        ("sliding_window_size", 0, math.inf),
        ("first_window_layer", 0, math.inf),
        ("rope_factor", 1, math.inf),
        ("rope_beta_fast", args.rope_beta_slow, math.inf),
    )
    problems += check_ranges(args, ranges)
    if problems:
        return problems
    architecture = ARCHITECTURES[args.architecture]
    options = {name for each in ARCHITECTURES.values() for name in each.options}
    return [
        f"{name} = {getattr(args, name)}: {architecture.hf_class} has no such option; set "
        f"{name} = {getattr(HfArgs(), name)}, or another architecture"
        for name in sorted(options - set(architecture.options))
        if getattr(args, name) != getattr(HfArgs(), name)
    ]


def _check_attention(args: DenseArgs) -> list[str]:
    """Return one sentence for each problem of masks and kernels."""
    if args.sliding_window_size:
        problems = check_local_attention(args, " with a sliding window")
    else:
        problems = check_attention(args)
    if args.rope.type != "dynamic":
        return problems
    original = args.rope.original_seq_len
    if args.max_seq_len > original and args.attn_mask_type != "causal":
        problems.append(
            f'attn_mask_type = "{args.attn_mask_type}": expected "causal" for sequences of more '
            f"than rope_original_seq_len = {original} tokens, because dynamic frequencies depend "
            f"on their length; set max_seq_len = {original}"
        )
    if args.head_dim <= 2:
        problems.append(
            f"head_dim = {args.head_dim}: expected more than 2 with dynamic frequencies; set "
            'rope_type = "default"'
        )
    return problems


# ---- cost and initial weights


def cost(args: DenseArgs) -> ModelCost:
    """Return the layers and what they cost."""
    query_dim, key_dim = args.n_heads * args.head_dim, args.num_kv_heads * args.head_dim
    attention = attention_params(
        args.dim,
        query_dim,
        key_dim,
        qkv_bias=args.has_qkv_bias,
        output_bias=args.attention_bias,
    )
    params = attention + 2 * args.head_dim * args.has_qk_norm + 2 * args.dim
    layer = LayerCost(params, attention_width=2 * query_dim)
    if experts := with_experts(args):
        layer = layer._replace(
            params=params + args.dim * experts.num_experts,
            num_experts=experts.num_experts,
            top_k=experts.top_k,
            expert_params=feed_forward_params(args.dim, experts.moe_inter_dim),
        )
    else:
        network = feed_forward_params(args.dim, args.ffn_dim, has_bias=args.mlp_bias)
        layer = layer._replace(params=params + network)
    layers = (layer._replace(max_keys=args.window(i)) for i in range(args.n_layers))
    return decoder_cost(args, layers)


def init_table(args: DenseArgs) -> tuple[tuple[str, InitRule], ...]:
    """Return TorchTitan's initial weights: (pattern, rule) rows, of which the first match applies.

    Biases start at 0. A tied embedding starts like an output: with a standard deviation of 1 the
    first logits would be of order sqrt(dim).
    """
    modules = ("attention", "experts" if with_experts(args) else "feed_forward")
    has_bias = args.has_qkv_bias or args.mlp_bias
    return decoder_init(args, modules, args.linear_std, args.depth_init, has_bias=has_bias)


def widths(args: DenseArgs) -> Widths:
    """Return the widths of the weights' inputs."""
    experts = with_experts(args)
    return decoder_widths(
        "*.attention.q_norm.weight" if args.has_qk_norm else "*.attention.wq.*",
        heads=args.n_heads * args.head_dim,
        feed_forward=args.ffn_dim,
        experts=experts.moe_inter_dim if experts else 0,
    )


def upcycling(args: DenseArgs) -> Upcycling | str:
    """Return the rules that start this MoE from a dense Qwen3, or the reason why none exist."""
    if not isinstance(args, Qwen3Args):
        return "the family has no mixture of experts"
    if not args.num_experts:
        return "num_experts = 0: the model has no experts"
    return decoder_upcycling(replace(args, num_experts=0, hidden_dim=args.moe_inter_dim))
