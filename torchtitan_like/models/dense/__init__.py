"""Dense decoders, and the mixture of experts of Qwen3: registers `llama3`, `qwen3`, and `hf`.

`llama3` and `qwen3` have TorchTitan's arguments and flavors. `hf` has the sizes of a config.json:
Llama, Mistral, Qwen2, and Qwen3 of the Hugging Face Hub.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torchtitan_like.models.dense import flavors, hf, sharding
from torchtitan_like.models.spec import ModelSpec, register

if TYPE_CHECKING:
    from torch import nn


def _build(args: flavors.DenseArgs) -> nn.Module:
    from torchtitan_like.models.dense.model import Transformer

    return Transformer(args)


_spec = partial(
    ModelSpec,
    build=_build,
    init_table=flavors.init_table,
    cost=flavors.cost,
    constraints=sharding.constraints,
    check=flavors.check,
    sharding=sharding.SHARDING,
    hf_names=hf.hf_names,
    hf_config=hf.hf_config,
    upcycling=flavors.upcycling,
    widths=flavors.widths,
)
register(
    _spec(
        name="llama3",
        args_type=flavors.LlamaArgs,
        flavors=flavors.LLAMA3,
        meta_names=hf.meta_names,
    )
)
register(
    _spec(
        name="qwen3",
        args_type=flavors.Qwen3Args,
        flavors=flavors.QWEN3,
        hf_alternative_names=hf.hf_alternative_names,
        meta_names=hf.meta_names,
    )
)
register(_spec(name="hf", args_type=flavors.HfArgs, flavors=flavors.HF, hf_args=hf.hf_args))
