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
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from torchtitan_like.util.modules import silencing_torchao

if TYPE_CHECKING:
    from torch import nn

    from torchtitan_like.config.sections_scale import Float8Linear

FLOAT8 = "quantize.linear.float8"
# The kernels take operands whose dimensions are multiples of this.
MULTIPLE = 16


def convert_to_float8(
    model: nn.Module, section: Float8Linear, *, num_shards: int, tp: int, compiled: bool
) -> list[str]:
    """Convert linear layers of a model on meta, in place; return lines for the log.

    Call it before any parallelism is applied. It converts an `nn.Linear` if its dimensions are
    multiples of 16 on each of `tp` ranks and its name contains none of `filter_fqns`. A subclass,
    such as the output head, has its own forward and is not converted.

    num_shards: ranks over which FSDP2 shards a weight. compiled: whether the model will be
    compiled.
    """
    from torch import nn

    unit = MULTIPLE * tp
    linears = {
        fqn: module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    chosen = {
        fqn: module
        for fqn, module in linears.items()
        if type(module) is nn.Linear
        and module.in_features % unit == module.out_features % unit == 0
        and not any(part in fqn for part in section.filter_fqns)
    }
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
    return list(_lines(section, linears.keys(), chosen.keys(), gathered, num_shards))


def _convert(model: nn.Module, fqns: Collection[str], section: Float8Linear, gathers: bool) -> None:
    with silencing_torchao():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(section.recipe_name or "tensorwise")
    config = replace(recipe, emulate=section.emulate, enable_fsdp_float8_all_gather=gathers)
    convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn in fqns, config=config)


def _lines(
    section: Float8Linear, linears: Set[str], chosen: Set[str], gathered: Set[str], num_shards: int
) -> Iterator[str]:
    recipe = section.recipe_name or "tensorwise"
    emulated = ", emulated" if section.emulate else ""
    yield (
        f"Float8 training active ({recipe}{emulated}): {len(chosen)} of {len(linears)} linear layers "
        f"converted, not converted: {_shortened(linears - chosen)}"
    )
    if section.enable_fsdp_float8_all_gather:
        if num_shards == 1:
            yield (
                f"{FLOAT8}.enable_fsdp_float8_all_gather has no effect: no weight is sharded, so none "
                "is gathered"
            )
        elif chosen - gathered:
            yield (
                f"Not gathered in float8, because {num_shards} ranks do not divide the rows: "
                f"{_shortened(chosen - gathered)}"
            )
    for part in section.filter_fqns:
        if not any(part in fqn for fqn in linears):
            yield f"{FLOAT8}.filter_fqns: no name of a linear layer contains {part!r}"


def _shortened(fqns: Iterable[str]) -> str:
    """Return the names, with one for all layers: `layers.*.attention.wq`."""
    return ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", fqn) for fqn in fqns})) or "none"


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
