"""Dense decoders of the Hugging Face Hub, with the sizes of a config.json: registers their `ModelSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan_like.models.hf import flavors, hf, sharding
from torchtitan_like.models.spec import ModelSpec, register

if TYPE_CHECKING:
    from torch import nn


def _build(args: flavors.HfArgs) -> nn.Module:
    from torchtitan_like.models.hf.model import Transformer

    return Transformer(args)


register(
    ModelSpec(
        name="hf",
        args_type=flavors.HfArgs,
        flavors=flavors.FLAVORS,
        build=_build,
        init_table=flavors.init_table,
        num_params=flavors.num_params,
        flops_per_token=flavors.flops_per_token,
        flops_formula="6 (P - P_embedding) + 6 H (2 head_dim) sum of each layer's keys",
        constraints=sharding.constraints,
        check=flavors.check,
        sharding=sharding.SHARDING,
        hf_names=hf.hf_names,
        hf_config=hf.hf_config,
        hf_args=hf.hf_args,
        upcycling=lambda args: "the family has no mixture of experts",
    )
)
