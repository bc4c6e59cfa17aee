"""The Llama 4 family: registers its `ModelSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan_like.models.llama4 import flavors, hf, sharding
from torchtitan_like.models.spec import ModelSpec, register

if TYPE_CHECKING:
    from torch import nn


def _build(args: flavors.Llama4Args) -> nn.Module:
    from torchtitan_like.models.llama4.model import Transformer

    return Transformer(args)


register(
    ModelSpec(
        name="llama4",
        args_type=flavors.Llama4Args,
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
        meta_names=hf.meta_names,
        widths=flavors.widths,
    )
)
