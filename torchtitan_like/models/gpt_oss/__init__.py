"""The gpt-oss family: registers its `ModelSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan_like.models.gpt_oss import flavors, hf, sharding
from torchtitan_like.models.spec import ModelSpec, register

if TYPE_CHECKING:
    from torch import nn


def _build(args: flavors.GptOssArgs) -> nn.Module:
    from torchtitan_like.models.gpt_oss.model import Transformer

    return Transformer(args)


register(
    ModelSpec(
        name="gpt_oss",
        args_type=flavors.GptOssArgs,
        flavors=flavors.FLAVORS,
        build=_build,
        init_table=flavors.init_table,
        cost=flavors.cost,
        constraints=sharding.constraints,
        check=flavors.check,
        sharding=sharding.SHARDING,
        hf_names=hf.hf_names,
        hf_config=hf.hf_config,
        meta_names=hf.meta_names,
        widths=flavors.widths,
        upcycling=lambda args: "no dense model has its attention sinks and biased experts",
    )
)
