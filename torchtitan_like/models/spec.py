"""`ModelSpec`: all that a model hands to the framework, and the table of models that are known.

Nothing here imports torch: the configuration is checked against a model before torch is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from torchtitan_like.models.hf_table import Rows, Table

if TYPE_CHECKING:
    from torch import nn

# What a model's sharding.py may say of a parameter. Each word fixes how the weight is placed, how the module's input and
# output are laid out, and how the weight's gradient is reduced; what that means in collectives is known to `distributed`.
SHARDING_WORDS = {
    "vocab_embedding": "rows are entries of the vocabulary, split; output summed",
    "column": "output features split, the input whole",
    "row": "input features split, the output summed",
    "output": "the head: rows are entries of the vocabulary, split; logits stay split for the loss",
    "norm": "the weight whole, its input split along the sequence, so that its gradient is partial",
    "head_norm": "a norm inside each attention head: the weight whole, its heads split, so that its gradient is partial",
    "latent": "whole, computed alike on every rank",
    "router": "whole, its input split along the sequence, so that its gradient is partial",
    "experts": "stacked expert weights, split by expert",
    "shared_expert": "an expert that sees every token, split like column and row",
    "buffer_state": "a statistic kept beside the weights, without a gradient",
}


@dataclass(frozen=True)
class InitRule:
    """How one parameter is drawn: mean 0, `std`, and for trunc_normal nothing beyond `cut` standard deviations."""

    kind: Literal["zeros", "ones", "normal", "trunc_normal"]
    std: float = 0.0
    cut: float = 0.0

    def __post_init__(self) -> None:
        if self.kind in ("normal", "trunc_normal") and not self.std > 0:
            raise ValueError(f"InitRule({self.kind!r}) has std {self.std}: give a standard deviation above 0")
        if (self.kind == "trunc_normal") != (self.cut > 0):
            raise ValueError(
                f"InitRule({self.kind!r}) has cut {self.cut}: only trunc_normal has one, and it is above 0"
            )


def almost_normal(std: float) -> InitRule:
    """What `torch.nn.init.trunc_normal_` means by its defaults: cut at -2 and 2, however small `std` is."""
    return InitRule("trunc_normal", std=std, cut=2.0 / std)


@dataclass(frozen=True)
class StageTensor:
    """A tensor that each pipeline stage passes to the next one, in addition to the hidden states.

    name: the keyword under which the model's `forward` receives it. Stage 0 and a model that is not
    split into stages do not receive it.
    shape: sizes, or "batch" (samples of a micro-batch), "seq" (positions of the tokens on this
    rank), "hidden_seq" (positions of the hidden states on this rank: with sequence parallelism each
    tensor-parallel rank has a part of "seq").
    dtype: a name such as "float32" or "int64"; empty for the dtype of the hidden states.
    requires_grad: True if its gradient flows back to the stages before.
    """

    name: str
    shape: tuple[int | Literal["batch", "seq", "hidden_seq"], ...]
    dtype: str = ""
    requires_grad: bool = True

    def __post_init__(self) -> None:
        if self.requires_grad and self.dtype and not self.dtype.startswith(("float", "bfloat")):
            raise ValueError(
                f"StageTensor({self.name!r}) of dtype {self.dtype!r} has requires_grad = True. Only "
                "floating-point tensors have gradients: set requires_grad = False"
            )
        unknown = [size for size in self.shape if isinstance(size, str) and size not in _STAGE_SIZES]
        if unknown:
            raise ValueError(
                f"StageTensor({self.name!r}) has unknown sizes {unknown} in its shape. Expected "
                f"integers or names among {', '.join(_STAGE_SIZES)}"
            )


_STAGE_SIZES = ("batch", "seq", "hidden_seq")


@dataclass(frozen=True)
class ModelSpec:
    """One family of models. `A` below is its `args_type`, a frozen dataclass of ints, floats, bools and strings.

    build(A) -> nn.Module       the plain single-device module on the current default device (torch.device("meta"))
    block_pattern               fnmatch pattern of the fqns of the repeated blocks
    init_table(A)               (fnmatch pattern of canonical parameter names, InitRule); the first match wins
    num_params(A)               parameters, a tied one once, computed without building
    flops_per_token(A, seq)     forward and backward FLOPs per trained token at a sequence length in tokens
    constraints(A)              what a layout must divide or respect: n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len
    check(A)                    sentences on what is wrong with the sizes themselves; empty when nothing is
    sharding                    (fnmatch pattern of parameter names, word of SHARDING_WORDS); exactly one matches
    tied(A)                     pairs (parameter name, name of the one it is the same tensor as)
    hf_names(A)                 (our parameter name, Hugging Face's), or `hf_table.Row` where more than the name differs
    hf_config(A)                content of Hugging Face's config.json
    meta_names(A)               the same for Meta's and TorchTitan's checkpoints; None where there are none of them
    stage_tensors(A)            what pipeline stages pass on in addition to the hidden states
    """

    name: str
    args_type: type
    flavors: Mapping[str, Any]
    build: Callable[[Any], nn.Module]
    block_pattern: str
    first_modules: tuple[str, ...]
    last_modules: tuple[str, ...]
    init_table: Callable[[Any], tuple[tuple[str, InitRule], ...]]
    num_params: Callable[[Any], int]
    flops_per_token: Callable[[Any, int], int]
    constraints: Callable[[Any], dict[str, int]]
    check: Callable[[Any], list[str]]
    sharding: Table
    tied: Callable[[Any], Table]
    hf_names: Callable[[Any], Rows]
    hf_config: Callable[[Any], dict[str, Any]]
    meta_names: Callable[[Any], Rows] | None = None
    stage_tensors: Callable[[Any], tuple[StageTensor, ...]] = lambda args: ()

    def __post_init__(self) -> None:
        unknown = sorted({word for _, word in self.sharding} - SHARDING_WORDS.keys())
        if unknown:
            raise ValueError(
                f"model {self.name!r} uses unknown sharding words {unknown}; known: {list(SHARDING_WORDS)}"
            )


# A family is a folder beside this file.
_BUILT_IN = [
    name for _, name, is_folder in iter_modules([str(Path(__file__).parent)]) if is_folder and name != "layers"
]
_registered: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> None:
    """Make `spec` known by its name. Raises ValueError when another spec holds that name."""
    if _registered.setdefault(spec.name, spec) is not spec:
        raise ValueError(f"a model named {spec.name!r} is already registered; give yours another name")


def get_spec(name: str) -> ModelSpec:
    """The registered model of that name; a built-in family is imported when first asked for. Raises KeyError."""
    if name not in _registered and name in _BUILT_IN:
        importlib.import_module(f"{__package__}.{name}")
    if name not in _registered:
        known = sorted({*_registered, *_BUILT_IN})
        raise KeyError(f"model {name!r} is not known{_nearest(name, known)}; known: {', '.join(known)}")
    return _registered[name]


def resolve_args(spec: ModelSpec, flavor: str, overrides: Mapping[str, Any]) -> Any:
    """The sizes of `flavor` with `overrides` put over them.

    Raises ValueError with one line for each problem: an unknown flavor or key, a value of the wrong type, sizes that do
    not fit each other.
    """
    problems = []
    if flavor not in spec.flavors:
        known = list(spec.flavors)
        problems.append(f"{spec.name} has no flavor {flavor!r}{_nearest(flavor, known)}; flavors: {', '.join(known)}")
    hints = get_type_hints(spec.args_type)
    for key, value in overrides.items():
        if key not in hints:
            problems.append(f"{key} = {value!r}: {spec.name} has no such argument{_nearest(key, list(hints))}")
        elif not _has_type(value, hints[key]):
            problems.append(f"{key} = {value!r}: expected {_spell(hints[key])}, found {type(value).__name__}")
    if not problems:
        args = dataclasses.replace(spec.flavors[flavor], **overrides)
        problems = spec.check(args)
    if problems:
        raise ValueError("\n".join(problems))
    return args


def _nearest(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (perhaps {near[0]!r})" if near else ""


def _has_type(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_has_type(value, option) for option in get_args(hint))
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _spell(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_spell(option) for option in get_args(hint))
    return "nothing" if hint is type(None) else str(hint.__name__)


def fit_positions(args: Any, longest: int) -> Any:
    """The same sizes with tables for `longest` positions only, where the model has a `max_seq_len`: less memory, and no
    number changes.
    """
    if not any(field.name == "max_seq_len" for field in dataclasses.fields(args)):
        return args
    return dataclasses.replace(args, max_seq_len=longest)


def has_documents(args: Any) -> bool:
    """True when attention ends at document borders, so that a model needs each token's position in its document."""
    return getattr(args, "attn_mask_type", "causal") == "block_causal"
