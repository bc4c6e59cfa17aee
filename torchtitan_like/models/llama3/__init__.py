"""The Llama 3 family: registers its `ModelSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan_like.models.llama3 import flavors, hf, sharding
from torchtitan_like.models.spec import ModelSpec, register

if TYPE_CHECKING:
    from torch import nn


def _build(args: flavors.LlamaArgs) -> nn.Module:
    from torchtitan_like.models.llama3.model import Transformer

    return Transformer(args)


register(
    ModelSpec(
        name="llama3",
        args_type=flavors.LlamaArgs,
        flavors=flavors.FLAVORS,
        build=_build,
        init_table=flavors.init_table,
        num_params=flavors.num_params,
        flops_per_token=flavors.flops_per_token,
        constraints=sharding.constraints,
        check=flavors.check,
        sharding=sharding.SHARDING,
        hf_names=hf.hf_names,
        hf_config=hf.hf_config,
        meta_names=hf.meta_names,
        upcycling=lambda args: "the family has no mixture of experts",
    )
)
