"""float8 in linear layers: torchao's `Float8Linear` replaces `nn.Linear`.

A converted layer casts its input, its weight, and the gradient of its output to 8 bits before its
matrix products. Each has its own scale (Micikevicius et al. 2022, arXiv:2209.05433). The
weight itself, its name, its initial value, and the optimizer's states do not change. Scales are
dynamic: the largest value of the type divided by the largest absolute value of the tensor (or of
each row).

NOTE: with tensor parallelism, each rank scales its shard of a weight by itself. So the layout
changes the numbers, by less than the rounding to 8 bits does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from torchtitan_like.util.modules import silencing_torchao

if TYPE_CHECKING:
    from torch import nn

    from torchtitan_like.config.sections_scale import Float8Linear

FLOAT8 = "quantize.linear.float8"
# The kernels take operands whose dimensions are multiples of this.
MULTIPLE = 16
# In `filter_fqns`: do not convert layers that are too small to gain, as in TorchTitan.
SMALL = "auto_filter_small_kn"
# The line starts with this if a smaller share of the work gains from float8. It is a warning.
LEAST_SHARE = 0.5
HARDLY_FASTER = "Float8 will hardly be faster than bfloat16"


def convert_to_float8(
    model: nn.Module, section: Float8Linear, *, num_shards: int, tp: int, compiled: bool
) -> list[str]:
    """Convert linear layers of a model on meta, in place; return lines for the log.

    Call it before any parallelism is applied.

    num_shards: ranks over which FSDP2 shards a weight. compiled: whether the model will be
    compiled.
    """
    from torch import nn

    linears = {
        fqn: module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    gains = _size_rule(section.recipe_name or "tensorwise")
    kept: dict[str, list[str]] = {}  # reason -> names of layers that are not converted
    chosen = {}
    for fqn, module in linears.items():
        if reason := _reason_to_keep(module, fqn, section.filter_fqns, MULTIPLE * tp, gains):
            kept.setdefault(reason, []).append(fqn)
        else:
            chosen[fqn] = module
    gaining = sum(_work(module) for fqn, module in chosen.items() if gains(module, fqn))
    total = sum(_work(module) for module in linears.values() if type(module) is nn.Linear)
    # A weight that is not sharded is not gathered, and torchao does not pad uneven shards.
    wants_gather = section.enable_fsdp_float8_all_gather and num_shards > 1
    gathered = {
        fqn
        for fqn, module in chosen.items()
        if wants_gather and module.out_features % (num_shards * tp) == 0
    }
    for fqns, gathers in ((gathered, True), (chosen.keys() - gathered, False)):
        if fqns:
            _convert(model, fqns, section, gathers)
    if section.recipe_name == "rowwise" and compiled:
        # Without it, Inductor keeps some values in fp32 that other kernels round to bfloat16. A
        # recomputation in backward then finds other row maxima than forward, which ends in NaN.
        import torch._inductor.config as inductor_config

        inductor_config.emulate_precision_casts = True
    lines = list(_lines(section, linears.keys(), kept, chosen.keys() - gathered, num_shards))
    if gaining < LEAST_SHARE * total and not section.emulate:
        lines.append(
            f"{HARDLY_FASTER}: {gaining / total:.0%} of the work of linear layers is in converted "
            "layers that torchao's rule finds large enough to gain. Expected at least "
            f"{LEAST_SHARE:.0%}: remove {FLOAT8} from model.converters, or train a wider model"
        )
    return lines


def _size_rule(recipe: str) -> Callable[[nn.Module, str], bool]:
    """Return torchao's rule: whether a layer is large enough to be faster in float8 on an H100.

    torchao has none for "rowwise_with_gw_hp", which gains less than "rowwise": that rule applies.
    """
    with silencing_torchao():
        from torchao.float8 import _auto_filter_for_recipe

    rule: Callable[[nn.Module, str], bool] = _auto_filter_for_recipe(
        recipe.removesuffix("_with_gw_hp"), filter_fqns=[]
    )
    return rule


def _reason_to_keep(
    module: nn.Linear,
    fqn: str,
    filter_fqns: Collection[str],
    unit: int,
    gains: Callable[[nn.Module, str], bool],
) -> str:
    """Return why a layer is not converted, for the log; "" if it is.

    unit: of which dimensions are multiples, so that a rank's shards are multiples of 16.
    """
    from torch import nn

    if type(module) is not nn.Linear:  # such as the output head
        return "with a forward of its own"
    if module.in_features % unit or module.out_features % unit:
        return f"with dimensions that are no multiples of {unit}"
    if any(part in fqn for part in filter_fqns if part != SMALL):
        return "in filter_fqns"
    if SMALL in filter_fqns and not gains(module, fqn):
        return f"too small to gain ({SMALL})"
    return ""


def _work(module: nn.Linear) -> int:
    """Return the multiplications of a token in a layer."""
    return module.in_features * module.out_features


def _convert(model: nn.Module, fqns: Collection[str], section: Float8Linear, gathers: bool) -> None:
    with silencing_torchao():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(section.recipe_name or "tensorwise")
    config = replace(recipe, emulate=section.emulate, enable_fsdp_float8_all_gather=gathers)
    convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn in fqns, config=config)


def _lines(
    section: Float8Linear,
    linears: Set[str],
    kept: Mapping[str, Collection[str]],
    not_gathered: Set[str],
    num_shards: int,
) -> Iterator[str]:
    recipe = section.recipe_name or "tensorwise"
    emulated = ", emulated" if section.emulate else ""
    num_converted = len(linears) - sum(map(len, kept.values()))
    reasons = "; ".join(
        f"{len(fqns)} {reason}: {_shortened(fqns)}" for reason, fqns in kept.items()
    )
    yield (
        f"Float8 training active ({recipe}{emulated}): {num_converted} of {len(linears)} linear "
        f"layers converted, not converted: {reasons or 'none'}"
    )
    if section.enable_fsdp_float8_all_gather:
        if num_shards == 1:
            yield (
                f"{FLOAT8}.enable_fsdp_float8_all_gather has no effect: no weight is sharded, so none "
                "is gathered"
            )
        elif not_gathered:
            yield (
                f"Not gathered in float8, because {num_shards} ranks do not divide the rows: "
                f"{_shortened(not_gathered)}"
            )
    for part in section.filter_fqns:
        if part != SMALL and not any(part in fqn for fqn in linears):
            yield f"{FLOAT8}.filter_fqns: no name of a linear layer contains {part!r}"


def _shortened(fqns: Iterable[str]) -> str:
    """Return the names, with one for all layers: `layers.*.attention.wq`."""
    return ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", fqn) for fqn in fqns}))


def after_optimizer_step(
    parts: Iterable[nn.Module], section: Float8Linear
) -> Callable[[], None] | None:
    """Return the function to call after each update of the weights, or None.

    It computes the scales of all weights with one all-reduce for each model part. Otherwise the
    next forward needs one for each weight.

    NOTE: these scales cover the whole weight, also with tensor parallelism.
    """
    is_gathered = section.enable_fsdp_float8_all_gather
    if not (section.precompute_float8_dynamic_scale_for_fsdp and is_gathered):
        return None
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    models = list(parts)

    def precompute() -> None:
        for model in models:
            precompute_float8_dynamic_scale_for_fsdp(model)

    return precompute
