"""Start a mixture of experts from a dense model (arXiv:2212.05055). Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan_like.models.hf_table import Table


@dataclass(frozen=True)
class Upcycling:
    """Rules that initialize a mixture of experts from the weights of a dense model.

    dense_args: sizes of the dense model.
    copied: pairs (stacked weights of the experts, dense weight). `{}` is the layer's number. Each
        expert is a copy of the dense weight.
    fresh: fnmatch patterns of tensors that a dense model does not have.
    sizes: (key of `[model.args]`, dense weight, dimension): sizes that both models must share.
    """

    dense_args: Any
    copied: Table
    fresh: tuple[str, ...]
    sizes: tuple[tuple[str, str, int], ...]


def decoder_upcycling(dense_args: Any) -> Upcycling:
    """Return the rules for a `Decoder` in which every layer has experts."""
    return Upcycling(
        dense_args,
        copied=tuple(
            (f"layers.{{}}.moe.experts.{name}", f"layers.{{}}.feed_forward.{name}.weight")
            for name in ("w1", "w2", "w3")
        ),
        fresh=("layers.*.moe.router.gate.weight", "layers.*.moe.expert_bias"),
        sizes=(
            ("vocab_size", "tok_embeddings.weight", 0),
            ("dim", "tok_embeddings.weight", 1),
            ("moe_inter_dim", "layers.0.feed_forward.w1.weight", 0),
        ),
    )
