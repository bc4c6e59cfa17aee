"""The rungs of a scaling ladder: smaller models of a configuration, and the settings of their runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any, NamedTuple

from torchtitan_like.bench.run_list import Overrides
from torchtitan_like.check import check_layout
from torchtitan_like.check.context import build_context
from torchtitan_like.check.model_checks import CheckedModel, check_model
from torchtitan_like.config import ConfigError, JobConfig, Problem
from torchtitan_like.models.parametrization import BASE_KEYS, WIDTH_KEYS
from torchtitan_like.models.spec import ModelSpec, resolve_args

NEEDED_SIZES = ("dim", "n_layers", "n_heads")
# `multiple_of` shrinks with the width, so that the feed-forward width does, too.
SCALED_KEYS = (*WIDTH_KEYS, "multiple_of")
MAX_WIDTHS = 32  # about as many different ones are tried
ALIGNMENT = 8  # of widths, if the target's have it: tensor cores need it
# How much changed proportions count against a wrong number of parameters. Both are logarithms of
# ratios.
PROPORTIONS_WEIGHT = 0.3
NO_CHECKPOINT = ("checkpoint.initial_load_path", "checkpoint.initial_load_in_hf")


class Shape(NamedTuple):
    """A smaller model. sizes: those of the model's arguments that differ from the target's.

    distortion: logarithm of the largest of its ratios to the target in heads, key-value heads and
    layers, over the smallest; 0 if its proportions are the target's.
    """

    sizes: dict[str, int]
    args: Any
    num_params: int
    distortion: float


class Rung(NamedTuple):
    """The runs of one model with one number of tokens.

    number: from 1, the smallest; 0 for the target. ratio: tokens per parameter.
    num_params: all parameters, with those of embeddings and of all experts. flops: of a whole run.
    """

    name: str
    number: int
    ratio: float
    settings: Overrides
    width: int
    num_layers: int
    num_params: int
    steps: int
    tokens: int
    flops: float

    @property
    def size(self) -> str:
        return f"{self.width} x {self.num_layers}"


def list_rungs(
    config: JobConfig,
    num_ranks: int,
    num_rungs: int,
    factor: float,
    ratios: Sequence[float],
) -> tuple[list[Rung], list[Rung]]:
    """Return the rungs, smallest first, and the target with each ratio of tokens to parameters.

    factor: ratio of the parameters of two neighboring rungs, and of the target and the last rung.
    Raises ConfigError, and ValueError if a rung has no shape.
    """
    if problems := list(_problems(config)):
        raise ConfigError(problems)
    model = check_model(config)
    assert model.spec is not None
    context = build_context(config, num_ranks, model)
    batch_tokens = context.geometry.global_batch_size * config.training.seq_len
    num_params = model.spec.num_params(model.args)
    shapes = list(_shapes(model.spec, model.args, has_fixed_depth=_has_fixed_depth(config)))
    models = [(0, Shape({}, model.args, num_params, 0.0))]
    for number in range(num_rungs, 0, -1):
        wanted = num_params / factor ** (num_rungs + 1 - number)
        # Nearer to this number than to that of another rung.
        near = [
            shape
            for shape in shapes
            if 2 * abs(math.log(shape.num_params / wanted)) < math.log(factor)
        ]
        shape = _nearest(near, wanted, config, num_ranks, model.spec)
        if shape is None:
            raise ValueError(
                f"--rungs {num_rungs}: only {num_rungs - number} models with heads of the same size "
                f"exist in ratios of --factor {factor:g}, and none has about {wanted:,.0f} parameters. "
                "Expected one for each rung: choose fewer rungs, another --factor, a smaller "
                "vocabulary, or a target with more heads and layers"
            )
        models.append((number, shape))
    rungs = [
        _rung(config, model, number, shape, ratio, batch_tokens, has_name=len(ratios) > 1)
        for ratio in ratios
        for number, shape in models
    ]
    rungs.sort(key=lambda rung: (rung.number, rung.ratio))
    return [rung for rung in rungs if rung.number], [rung for rung in rungs if not rung.number]


def _problems(config: JobConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that a ladder cannot have."""
    args = check_model(config).args
    missing = [key for key in NEEDED_SIZES if not hasattr(args, key)]
    if missing:
        expected = f"a model with the arguments {', '.join(NEEDED_SIZES)}, which a ladder changes"
        remedy = f"choose another family, this one has no {', '.join(missing)}"
        yield config.locate(Problem("model.name", None, expected, remedy))
    if config.training.batch_ramp:
        expected = "[]: all steps of a rung read the same number of tokens"
        yield config.locate(Problem("training.batch_ramp", None, expected))
    for key in NO_CHECKPOINT:
        if config.checkpoint.enable and config.value_of(key):
            expected = "no checkpoint to start from: the rungs have other sizes"
            yield config.locate(Problem(key, None, expected, "remove it"))


def _has_fixed_depth(config: JobConfig) -> bool:
    """Return True if the parametrization transfers over width only."""
    return config.model.parametrization == "mup"


# ---- shapes


def _shapes(spec: ModelSpec, args: Any, *, has_fixed_depth: bool) -> Iterator[Shape]:
    """Yield all valid models with fewer heads or layers, in about the target's proportions.

    Heads keep their size, and the width is in proportion to their number.
    """
    # Every second, ... layer has experts: rungs have whole groups of such layers.
    group = getattr(args, "interleave_moe_layer_step", 1)
    depths = [args.n_layers] if has_fixed_depth else range(group, args.n_layers + 1, group)
    step = max(1, args.n_heads // MAX_WIDTHS)
    for heads in range(step, args.n_heads + 1, step):
        for layers in depths:
            sizes = _sizes(args, heads, layers)
            if sizes.get("n_dense_layers", -1) == layers:
                continue  # it would have no experts
            smaller = replace(args, **sizes)
            if spec.check(smaller):
                continue
            keys = ["n_heads", "n_kv_heads", *([] if has_fixed_depth else ["n_layers"])]
            ratios = [sizes[key] / getattr(args, key) for key in keys if key in sizes]
            distortion = math.log(max(ratios) / min(ratios))
            yield Shape(sizes, smaller, spec.num_params(smaller), distortion)


def _sizes(args: Any, heads: int, layers: int) -> dict[str, int]:
    """Return the arguments of a model with this number of heads and layers."""
    given = asdict(args)
    share = Fraction(heads, args.n_heads)
    sizes = {"n_layers": layers}
    for key in SCALED_KEYS:
        value = given.get(key)
        if not value:  # the family has no such argument, or the model does not use it
            continue
        # Families without the argument head_dim compute it from dim.
        is_of_heads = key == "dim" and "head_dim" not in given
        unit = max(1, value // args.n_heads) if is_of_heads else math.gcd(value, ALIGNMENT)
        sizes[key] = max(1, round(value * share / unit)) * unit
    sizes["n_heads"] = heads
    if kv_heads := given.get("n_kv_heads"):
        divisors = [number for number in range(1, heads + 1) if heads % number == 0]
        sizes["n_kv_heads"] = min(divisors, key=lambda n: abs(math.log(n / (kv_heads * share))))
    if dense := given.get("n_dense_layers"):
        sizes["n_dense_layers"] = max(1, round(dense * layers / args.n_layers))
    return sizes


def _nearest(
    shapes: Sequence[Shape], wanted: float, config: JobConfig, num_ranks: int, spec: ModelSpec
) -> Shape | None:
    """Return the shape that is nearest to a number of parameters and to the target's proportions.

    Its layout is valid, if any of them is. None if there is no shape.
    """

    def distance(shape: Shape) -> float:
        error = abs(math.log(shape.num_params / wanted))
        return error + PROPORTIONS_WEIGHT * shape.distortion

    nearest = sorted(shapes, key=distance)
    valid = (shape for shape in nearest if not check_layout(config, num_ranks, spec, shape.args))
    return next(valid, nearest[0] if nearest else None)


# ---- settings


def _rung(
    config: JobConfig,
    model: CheckedModel,
    number: int,
    shape: Shape,
    ratio: float,
    batch_tokens: int,
    *,
    has_name: bool,
) -> Rung:
    """Return a rung with its settings. has_name: its ratio is a part of its name."""
    assert model.spec is not None
    steps = math.ceil(ratio * shape.num_params / batch_tokens)
    schedule = config.lr_scheduler
    settings: dict[str, Any] = {f"model.args.{key}": value for key, value in shape.sizes.items()}
    settings |= _base_settings(config, model.spec, shape)
    settings["training.steps"] = steps
    settings["validation.reference_curve"] = None  # it is of the target's size
    share = steps / config.training.steps
    if schedule.name == "wsd":
        settings["lr_scheduler.warmup_steps"] = round(schedule.warmup_steps * share)
    if schedule.total_steps is not None:
        settings["lr_scheduler.total_steps"] = max(1, round(schedule.total_steps * share))
    flops_per_token = model.spec.flops_per_token(shape.args, config.training.seq_len)
    name = f"rung-{number}" if number else "target"
    return Rung(
        f"{name}-x{ratio:g}" if has_name else name,
        number,
        ratio,
        {key: str(value) for key, value in settings.items()},
        shape.args.dim,
        shape.args.n_layers,
        shape.num_params,
        steps,
        steps * batch_tokens,
        float(flops_per_token) * steps * batch_tokens,
    )


def _base_settings(config: JobConfig, spec: ModelSpec, shape: Shape) -> dict[str, Any]:
    """Return the sizes with which all rungs have the same base model as the target."""
    section = config.model
    if section.parametrization == "standard":
        return {}
    base = resolve_args(spec, section.flavor, {**section.args, **section.base_args})
    return {
        f"model.base_args.{key}": getattr(base, key)
        for key in shape.sizes
        if key in BASE_KEYS and key not in section.base_args
    }
