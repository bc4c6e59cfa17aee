"""`ModelSpec`: everything that a model gives to the framework, and the registry of models.

This module never imports torch: a config is checked against a model before torch is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from torchtitan_like.models.argument_rules import MAX_PARAMS, check_limits
from torchtitan_like.models.cost import ModelCost
from torchtitan_like.models.hf_table import Rows, Table
from torchtitan_like.util.suggestions import did_you_mean

if TYPE_CHECKING:
    from torch import nn

# The sharding roles that a model's sharding.py may give to a parameter. A role fixes the weight's
# placement, the layout of the module's input and output, and the reduction of the weight's
# gradient. `distributed/tensor_parallel.py` implements them.
SHARDING_ROLES = {
    "vocab_embedding": "weight sharded over the vocabulary; output reduced",
    "column": "weight sharded over output features; input replicated",
    "row": "weight sharded over input features; output reduced",
    "output": "head: weight and logits sharded over the vocabulary, for the loss",
    "norm": "weight replicated, input sharded over the sequence, gradient partial",
    "head_norm": "norm of each attention head: weight replicated, heads sharded, gradient partial",
    "head_scalar": "one number for each attention head: sharded over heads",
    "latent": "replicated, as is its input; ranks use its output for their own heads, gradient partial",
    "projection": "projection between blocks: weight, input and gradient as for a norm",
    "router": "weight replicated, input sharded over the sequence, gradient partial",
    "experts": "stacked expert weights; replicated, input and gradient as for the router",
    "buffer_state": "statistic without a gradient, stored with the weights",
}


# Sharding role -> number of dimensions of the matrices of hidden layers, which may be stacked. Other
# tensors are biases, norms, routers, embeddings, and the head.
MATRIX_ROLES = {"column": 2, "row": 2, "latent": 2, "projection": 2, "experts": 3}


# Parts of names of tensors that stay in float32 if a checkpoint is written in another dtype: half
# precision would round their small updates away. The second one is Hugging Face's name.
_FLOAT32_NAMES = ("expert_bias", "e_score_correction_bias")


def is_always_float32(name: str) -> bool:
    """Return True if checkpoints store the tensor in float32 whatever their dtype is."""
    return any(part in name for part in _FLOAT32_NAMES)


@dataclass(frozen=True)
class InitRule:
    """Initial distribution of a parameter, with mean 0.

    std: standard deviation of normal and trunc_normal.
    bound: trunc_normal draws nothing beyond this many standard deviations.
    """

    kind: Literal["zeros", "ones", "normal", "trunc_normal"]
    std: float = 0.0
    bound: float = 0.0

    def __post_init__(self) -> None:
        if self.kind in ("normal", "trunc_normal") and not self.std > 0:
            raise ValueError(
                f"InitRule({self.kind!r}) has std {self.std}: give a standard deviation above 0"
            )
        if (self.kind == "trunc_normal") != (self.bound > 0):
            raise ValueError(
                f"InitRule({self.kind!r}) has bound {self.bound}: expected a bound above 0 for "
                "trunc_normal, and none for the other kinds"
            )


def trunc_normal(std: float) -> InitRule:
    """Return the rule of `torch.nn.init.trunc_normal_`: bounds at -2 and 2, whatever `std` is."""
    return InitRule("trunc_normal", std=std, bound=2.0 / std)


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
        unknown = [
            size for size in self.shape if isinstance(size, str) and size not in _STAGE_SIZES
        ]
        if unknown:
            raise ValueError(
                f"StageTensor({self.name!r}) has unknown sizes {unknown} in its shape. Expected "
                f"integers or names among {', '.join(_STAGE_SIZES)}"
            )


_STAGE_SIZES = ("batch", "seq", "hidden_seq")


class HfModel(NamedTuple):
    """A model of a family, as a config.json of Hugging Face describes it.

    flavor: the flavor whose sizes the file changes. args: all sizes in the file, which are as valid
    in `[model.args]`. notes: sentences about fields without effect, for a warning.
    """

    flavor: str
    args: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Upcycling:
    """Rules that initialize a mixture of experts from a dense model's weights (arXiv:2212.05055).

    dense_args: sizes of the dense model.
    copied: pairs (stacked weights of the experts, dense weight). `{}` is the layer's number. Each
        expert is a copy of the dense weight.
    fresh: fnmatch patterns of tensors that a dense model does not have.
    sizes: (key of `[model.args]`, dense weight, dimension): sizes that both models must share.
    """

    dense_args: Any
    copied: Table
    fresh: tuple[str, ...]
    sizes: tuple[tuple[str, str, int], ...]


class Scale(NamedTuple):
    """Factors of one parameter in a parametrization; see `models.parametrization`.

    std: of the initial weights, and of a norm's initial ones. lr: of the learning rate, by which
    the weight decay is divided. eps: of Adam's epsilon.
    """

    std: float = 1.0
    lr: float = 1.0
    eps: float = 1.0


# (name of a parameter, number of its dimensions) -> its factors
ScaleOf = Callable[[str, int], Scale]


def unscaled(name: str, ndim: int) -> Scale:
    """Return the factors of the standard parametrization: 1."""
    return Scale()


class Widths(NamedTuple):
    """The widths from which a parametrization computes its factors.

    inputs: (fnmatch pattern of weights, width of their input). Other weights read `dim` features.
    queries: pattern of the weights to which all queries are proportional; "" if none exist.
    """

    inputs: tuple[tuple[str, int], ...]
    queries: str


def tied_output(args: Any) -> Table:
    """Return the pair (alias, parameter) of a tied output head; empty if it is not tied."""
    return (("output.weight", "tok_embeddings.weight"),) if args.enable_weight_tying else ()


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One family of models. `A` is its `args_type`, a frozen dataclass of ints, floats, bools, strings.

    build(A) -> nn.Module    build the single-device module on the default device (meta)
    init_table(A)            (fnmatch pattern of parameter names, InitRule); the first match applies
    cost(A)                  `ModelCost`: the layers, from which parameters and FLOPs are counted
    constraints(A)           sizes that a layout must divide or respect: n_layers, n_heads,
                             n_kv_heads, vocab_size, max_seq_len; ffn_dim, n_experts,
                             expert_hidden_dim, and shared_experts_dim for networks that exist
    check(A)                 one sentence for each problem of the sizes; empty if there is none
    sharding                 (fnmatch pattern of parameter names, sharding role); one row matches
    hf_names(A)              (native name, Hugging Face name), or `hf_table.Row`
    hf_config(A)             content of Hugging Face's config.json
    hf_args(config)          the `HfModel` of a config.json, for runs that take their sizes from one;
                             raises ValueError with one line for each field that is not supported
    hf_alternative_names(A)  as hf_names for files of another layout, such as fused experts
    hf_unread(A)             fnmatch patterns of Hugging Face names that are not of this model
    hf_copies(A)             (Hugging Face name, name under which exports store it once more)
    meta_names(A)            as hf_names for Meta's and TorchTitan's checkpoints; None if none exist
    stage_tensors(A)         what pipeline stages pass on in addition to the hidden states
    upcycling(A)             `Upcycling` from a dense model to this MoE, or why it is not possible
    widths(A)                `Widths`; None if the family has the standard parametrization only
    scale                    factors of each parameter; `parametrization.parametrize` sets it

    The defaults of these fields describe `layers.decoder.Decoder`:

    block_pattern            fnmatch pattern of the fqns of the repeated blocks
    first_modules            fqns of the modules before the blocks
    last_modules             fqns of the modules after the blocks; the head is last
    tied(A)                  pairs (alias, name of the parameter that it is)
    """

    name: str
    args_type: type
    flavors: Mapping[str, Any]
    build: Callable[[Any], nn.Module]
    init_table: Callable[[Any], tuple[tuple[str, InitRule], ...]]
    cost: Callable[[Any], ModelCost]
    constraints: Callable[[Any], dict[str, int]]
    check: Callable[[Any], list[str]]
    sharding: Table
    hf_names: Callable[[Any], Rows]
    hf_config: Callable[[Any], dict[str, Any]]
    hf_args: Callable[[Mapping[str, Any]], HfModel] | None = None
    hf_alternative_names: Callable[[Any], Rows] | None = None
    hf_unread: Callable[[Any], tuple[str, ...]] = lambda args: ()
    hf_copies: Callable[[Any], Table] = lambda args: ()
    meta_names: Callable[[Any], Rows] | None = None
    stage_tensors: Callable[[Any], tuple[StageTensor, ...]] = lambda args: ()
    upcycling: Callable[[Any], Upcycling | str] = lambda args: "the family has no dense model"
    widths: Callable[[Any], Widths] | None = None
    scale: ScaleOf = unscaled
    block_pattern: str = "layers.*"
    first_modules: tuple[str, ...] = ("tok_embeddings",)
    last_modules: tuple[str, ...] = ("norm", "output")
    tied: Callable[[Any], Table] = tied_output

    def __post_init__(self) -> None:
        unknown = sorted({role for _, role in self.sharding} - SHARDING_ROLES.keys())
        if unknown:
            raise ValueError(
                f"model {self.name!r} uses unknown sharding roles {unknown}; expected some of "
                f"{list(SHARDING_ROLES)}"
            )

    def num_params(self, args: Any) -> int:
        """Return the number of parameters, a tied one once, without building the model."""
        return self.cost(args).num_params

    def num_active_params(self, args: Any) -> int:
        """Return the number of parameters that process a token: without unselected experts."""
        return self.cost(args).num_active_params

    def flops_per_token(self, args: Any, seq_len: int) -> int:
        """Return the FLOPs of a trained token, forward and backward."""
        return self.cost(args).flops_per_token(seq_len)


# The built-in models, and the folders next to this file that register them.
_BUILT_IN = {
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "gpt_oss",
    "hf": "dense",
    "llama3": "dense",
    "llama4": "llama4",
    "qwen3": "dense",
}
_registered: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> None:
    """Register `spec` by its name. Raises ValueError if another spec has that name."""
    if _registered.setdefault(spec.name, spec) is not spec:
        raise ValueError(
            f"a model named {spec.name!r} is already registered; give yours another name"
        )


def get_spec(name: str) -> ModelSpec:
    """Return the model of that name, importing a built-in family on first use.

    Raises KeyError if no model has the name.
    """
    if name not in _registered and name in _BUILT_IN:
        importlib.import_module(f"{__package__}.{_BUILT_IN[name]}")
    if name not in _registered:
        names = sorted({*_registered, *_BUILT_IN})
        raise KeyError(
            f"model {name!r} does not exist{_suggestion(name, names)}; expected one of "
            f"{', '.join(names)}"
        )
    return _registered[name]


def resolve_args(spec: ModelSpec, flavor: str, overrides: Mapping[str, Any]) -> Any:
    """Return the sizes of `flavor` with `overrides` applied.

    Raises ValueError with one line for each problem: an unknown flavor or key, a value of the wrong
    type, sizes that do not fit each other.
    """
    problems = []
    if flavor not in spec.flavors:
        names = list(spec.flavors)
        problems.append(
            f"{spec.name} has no flavor {flavor!r}{_suggestion(flavor, names)}; expected one of "
            f"{', '.join(names)}"
        )
    hints = get_type_hints(spec.args_type)
    for key, value in overrides.items():
        if key not in hints:
            suggestion = _suggestion(key, list(hints))
            problems.append(f"{key} = {value!r}: {spec.name} has no such argument{suggestion}")
        elif not _has_type(value, hints[key]):
            expected = _type_name(hints[key])
            problems.append(f"{key} = {value!r}: expected {expected}, found {type(value).__name__}")
    if not problems:
        args = dataclasses.replace(spec.flavors[flavor], **overrides)
        problems = check_limits(args) or spec.check(args)
        if not problems and (num_params := spec.num_params(args)) > MAX_PARAMS:
            problems = [f"{num_params:,} parameters: expected at most {MAX_PARAMS:,}"]
    if problems:
        raise ValueError("\n".join(problems))
    return args


def standard_hf_config(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as the family writes it, if it can read such files, else unchanged.

    Raises ValueError with one line for each field that is not supported.
    """
    if spec.hf_args is None:
        return dict(config)
    model = spec.hf_args(config)
    return spec.hf_config(resolve_args(spec, model.flavor, model.args))


def _suggestion(name: str, candidates: list[str]) -> str:
    remedy = did_you_mean(name, candidates)
    return f" ({remedy})" if remedy else ""


def _has_type(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_has_type(value, option) for option in get_args(hint))
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _type_name(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type_name(option) for option in get_args(hint))
    return "nothing" if hint is type(None) else str(hint.__name__)


def describe_size(spec: ModelSpec, args: Any) -> str:
    """Return the number of parameters, and of active parameters if a token uses fewer, for the log."""
    total, active = spec.num_params(args), spec.num_active_params(args)
    text = f"{total:,} total parameters"
    return text if active == total else f"{text}, {active:,} active for each token"


def fit_positions(args: Any, num_positions: int) -> Any:
    """Return the sizes with max_seq_len = num_positions, to save memory; no result changes.

    A model without `max_seq_len` keeps its sizes.
    """
    if not any(field.name == "max_seq_len" for field in dataclasses.fields(args)):
        return args
    return dataclasses.replace(args, max_seq_len=num_positions)


def with_reference_attention(args: Any) -> Any:
    """Return the sizes with attn_type = "sdpa", the kernel for any number of keys; see `kernels`.

    All kernels compute the same function. A model without `attn_type` keeps its sizes.
    """
    if not any(field.name == "attn_type" for field in dataclasses.fields(args)):
        return args
    return dataclasses.replace(args, attn_type="sdpa")


def has_documents(args: Any) -> bool:
    """Return True if attention ends at document borders."""
    return getattr(args, "attn_mask_type", "causal") == "block_causal"


def has_experts(spec: ModelSpec, args: Any) -> bool:
    """Return True if some layers are mixtures of experts."""
    return bool(spec.constraints(args).get("n_experts"))


def num_mtp_layers(args: Any) -> int:
    """Return the number of blocks for multi-token prediction."""
    return int(getattr(args, "num_mtp_layers", 0))


def needs_positions(args: Any) -> bool:
    """Return True if the model reads the positions of tokens in their documents."""
    return has_documents(args) or num_mtp_layers(args) > 0
