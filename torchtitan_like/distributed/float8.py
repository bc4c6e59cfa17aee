"""float8 in linear layers: torchao's `Float8Linear` in place of `nn.Linear` (Micikevicius et al. 2022, arXiv:2209.05433).

A converted layer casts its input, its weight and its output's gradient to 8 bits, each with a scale of its own, just before
the three matrix products; the weight itself, its name, its initial value and the optimizer's states stay what they are.
Scales are dynamic: the largest value that the type holds over the largest absolute value of the tensor (or of each row).

NOTE: under tensor parallelism a layer sees its part of a weight and so takes the scale of that part. More scales are finer,
so a layout changes the numbers by less than the rounding to 8 bits does, but it changes them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from torchtitan_like.config.sections_scale import Float8Linear

FLOAT8 = "quantize.linear.float8"
# The kernels take operands whose dimensions are multiples of this.
MULTIPLE = 16


def convert_to_float8(
    model: nn.Module, section: Float8Linear, *, num_shards: int, tp: int, compiled: bool
) -> list[str]:
    """Convert the linear layers of a model on meta, in place, before anything else is applied; returns lines for the log.

    Converted are plain `nn.Linear` whose dimensions are multiples of 16 on each of `tp` ranks, and whose name contains
    none of `filter_fqns`; a subclass, as the output head is one, has a forward of its own and stays. num_shards: ranks over
    which FSDP2 cuts a weight; compiled: so will the model be.
    """
    from torch import nn

    unit = MULTIPLE * tp
    linears = {fqn: module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = {
        fqn: module
        for fqn, module in linears.items()
        if type(module) is nn.Linear
        and module.in_features % unit == module.out_features % unit == 0
        and not any(part in fqn for part in section.filter_fqns)
    }
    # What is not cut is not gathered; and torchao does not pad what is cut unevenly.
    wants_gather = section.enable_fsdp_float8_all_gather and num_shards > 1
    gathered = {fqn for fqn, module in chosen.items() if wants_gather and module.out_features % (num_shards * tp) == 0}
    for fqns, gathers in ((gathered, True), (chosen.keys() - gathered, False)):
        if fqns:
            _convert(model, fqns, section, gathers)
    if section.recipe_name == "rowwise" and compiled:
        # Inductor would keep in fp32 what is rounded to bfloat16 elsewhere. Recomputed in backward in another kernel, it gives
        # other maxima of the rows than in forward, and in the end NaN.
        import torch._inductor.config as inductor_config

        inductor_config.emulate_precision_casts = True
    return list(_lines(section, linears.keys(), chosen.keys(), gathered, num_shards))


def _convert(model: nn.Module, fqns: Collection[str], section: Float8Linear, gathers: bool) -> None:
    with _fewer_warnings():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(section.recipe_name or "tensorwise")
    config = replace(recipe, emulate=section.emulate, enable_fsdp_float8_all_gather=gathers)
    convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn in fqns, config=config)


def _lines(
    section: Float8Linear, linears: Set[str], chosen: Set[str], gathered: Set[str], num_shards: int
) -> Iterator[str]:
    how = section.recipe_name or "tensorwise"
    yield (
        f"Float8 training active ({how}{', emulated' if section.emulate else ''}): {len(chosen)} of {len(linears)} linear "
        f"layers converted, left as they are: {_shortened(linears - chosen)}"
    )
    if section.enable_fsdp_float8_all_gather:
        if num_shards == 1:
            yield f"{FLOAT8}.enable_fsdp_float8_all_gather has no effect: no weight is cut, so none is gathered"
        elif chosen - gathered:
            yield (
                f"Not gathered in float8, because {num_shards} ranks cannot share their rows evenly: "
                f"{_shortened(chosen - gathered)}"
            )
    for part in section.filter_fqns:
        if not any(part in fqn for fqn in linears):
            yield f"{FLOAT8}.filter_fqns: no name of a linear layer contains {part!r}"


def _shortened(fqns: Iterable[str]) -> str:
    """The names, those that differ by the number of a layer only once: `layers.*.attention.wq`."""
    return ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", fqn) for fqn in fqns})) or "none"


def after_optimizer_step(parts: Iterable[nn.Module], section: Float8Linear) -> Callable[[], None] | None:
    """What is to be called after each update of the weights: it computes the scales of all of them with one all-reduce for
    each part of the model, where the next forward would need one for each weight. None: nothing is to be called.

    NOTE: such a scale is that of the whole weight also under tensor parallelism.
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


@contextmanager
def _fewer_warnings() -> Iterator[None]:
    """torchao warns of each of its libraries for other hardware that cannot be loaded on this one."""
    logger = logging.getLogger("torchao")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
