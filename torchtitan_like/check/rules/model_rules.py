"""Rules of [model]: sizes that tensor cores compute slowly."""

from __future__ import annotations

import math
from collections.abc import Callable

from torchtitan_like.check.context import RunContext
from torchtitan_like.check.rules.keys import MODEL_KEYS, TP
from torchtitan_like.config.problems import Rule
from torchtitan_like.models.hf_table import links

# Matrix products on tensor cores are fast if a dimension of a weight is a multiple of 64 elements:
# the tile of an A100 or later, in 16-bit types. Its shard on each rank must be a multiple of 8
# elements (16 bytes), else torch uses slower kernels.
TILE = 64
UNIT = 8


def is_aligned(size: int, num_shards: int = 1) -> bool:
    """Return True if tensor cores are fast for a dimension sharded over `num_shards` ranks."""
    return size % TILE == 0 and (size % num_shards != 0 or size // num_shards % UNIT == 0)


def pad(size: int, num_shards: int = 1) -> int:
    """Return the next larger size that is aligned on every rank."""
    step = math.lcm(TILE, UNIT * num_shards)
    return -(-size // step) * step


def _width_rule(
    name: str, description: str, get: Callable[[RunContext], int], key: str, is_sharded: bool
) -> Rule[RunContext]:
    """Return the rule that a dimension of the weights is aligned to the tiles of tensor cores."""

    def num_shards(run: RunContext) -> int:
        return run.dims.tp if is_sharded else 1

    def describe(run: RunContext) -> str:
        ranks = f" on {num_shards(run)} tensor-parallel ranks" if num_shards(run) > 1 else ""
        multiples = f"multiples of {TILE}, and of {UNIT} on each rank, are fast"
        return f"{description} of {get(run)}{ranks} is slow on tensor cores: {multiples}"

    return Rule(
        name,
        "model.args",
        lambda run: run.uses_tensor_cores and not is_aligned(get(run), num_shards(run)),
        describe,
        lambda run: f"set {key} = {pad(get(run), num_shards(run))}",
        (*MODEL_KEYS, TP),
        "warning",
    )


_HF_KEYS = tuple(
    f"checkpoint.{name}" for name in ("initial_load_in_hf", "last_save_in_hf", "hf_interval")
)


def _has_biases(run: RunContext) -> bool:
    return getattr(run.args, "load_balance", "none") == "bias"


def _hf_settings(run: RunContext) -> list[str]:
    """Return the settings that read or write weights in Hugging Face's format."""
    section = run.config.checkpoint
    # An upcycling start reads a dense model without biases, and initializes the biases to 0.
    keys = _HF_KEYS[1:] if section.initial_load_upcycle else _HF_KEYS
    return [key for key in keys if section.enable and run.config.value_of(key)]


def _has_hf_bias(run: RunContext) -> bool:
    """Return True if the model's table of Hugging Face names has the experts' bias."""
    assert run.spec is not None
    try:
        links(run.spec.hf_names(run.args), {"layers.0.moe.expert_bias": (1,)})
    except KeyError:
        return False
    return True


MODEL_RULES: tuple[Rule[RunContext], ...] = (
    _width_rule(
        "unaligned-vocabulary",
        "a vocabulary",
        lambda run: run.size("vocab_size"),
        "model.args.vocab_size",
        True,
    ),
    _width_rule(
        "unaligned-width", "a width (dim)", lambda run: run.width("dim"), "model.args.dim", False
    ),
    _width_rule(
        "unaligned-features",
        "a feed-forward width",
        lambda run: run.width("ffn_dim", "hidden_dim"),
        "the feed-forward width",
        True,
    ),
    Rule(
        "unaligned-heads",
        "model.args",
        lambda run: run.uses_tensor_cores and run.width("head_dim") % UNIT != 0,
        lambda run: (
            f"heads of {run.width('head_dim')} dimensions are slow: the flash kernel and tensor "
            f"cores are fast for multiples of {UNIT}"
        ),
        "change dim or n_heads",
        MODEL_KEYS,
        "warning",
    ),
    Rule(
        "bias-of-softmax",
        "model.args",
        lambda run: _has_biases(run) and getattr(run.args, "score_func", "softmax") == "softmax",
        'load_balance = "bias" with a softmax router: a bias of 0.001 is as large as a score of '
        "many experts, so loads may oscillate",
        'set load_balance = "global"',
        MODEL_KEYS,
        "warning",
    ),
    Rule(
        "bias-without-hf-name",
        "model.args",
        lambda run: _has_biases(run) and bool(_hf_settings(run)) and not _has_hf_bias(run),
        lambda run: (
            f'load_balance other than "bias" with {", ".join(_hf_settings(run))}: Hugging Face\'s '
            f"{run.config.model.name} has no selection bias"
        ),
        'set load_balance = "global", or remove that setting',
        (*MODEL_KEYS, *_HF_KEYS),
    ),
)
