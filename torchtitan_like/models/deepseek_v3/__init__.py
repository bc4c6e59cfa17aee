"""The DeepSeek-V3 family: registers its `ModelSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan_like.models.deepseek_v3 import flavors, hf, sharding
from torchtitan_like.models.spec import ModelSpec, register

if TYPE_CHECKING:
    from torch import nn


def _build(args: flavors.DeepSeekArgs) -> nn.Module:
    from torchtitan_like.models.deepseek_v3.model import Transformer

    return Transformer(args)


register(
    ModelSpec(
        name="deepseek_v3",
        args_type=flavors.DeepSeekArgs,
        flavors=flavors.FLAVORS,
        build=_build,
        init_table=flavors.init_table,
        cost=flavors.cost,
        constraints=sharding.constraints,
        check=flavors.check,
        sharding=sharding.SHARDING,
        hf_names=hf.hf_names,
        hf_config=hf.hf_config,
        hf_alternative_names=hf.hf_alternative_names,
        hf_unread=hf.hf_unread,
        hf_copies=hf.hf_copies,
        meta_names=hf.meta_names,
        widths=flavors.widths,
        upcycling=lambda args: "no dense model has its latent attention",
    )
)
