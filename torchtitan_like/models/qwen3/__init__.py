"""The Qwen3 family, dense and mixture of experts: registers its `ModelSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan_like.models.qwen3 import flavors, hf, sharding
from torchtitan_like.models.spec import ModelSpec, register

if TYPE_CHECKING:
    from torch import nn


def _build(args: flavors.Qwen3Args) -> nn.Module:
    from torchtitan_like.models.qwen3.model import Transformer

    return Transformer(args)


register(
    ModelSpec(
        name="qwen3",
        args_type=flavors.Qwen3Args,
        flavors=flavors.FLAVORS,
        build=_build,
        init_table=flavors.init_table,
        num_params=flavors.num_params,
        num_active_params=flavors.num_active_params,
        flops_per_token=flavors.flops_per_token,
        constraints=sharding.constraints,
        check=flavors.check,
        sharding=sharding.SHARDING,
        hf_names=hf.hf_names,
        hf_config=hf.hf_config,
        hf_alternative_names=hf.hf_alternative_names,
        meta_names=hf.meta_names,
        upcycling=flavors.upcycling,
    )
)
