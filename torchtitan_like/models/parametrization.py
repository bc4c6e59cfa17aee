"""Parametrizations in which hyperparameters transfer from a small base model to larger ones.

muP (Yang et al. 2021, arXiv:2203.03466, table 8) transfers over width, CompleteP (Dey et al. 2025,
arXiv:2505.01618, table 1, alpha = 1) also over depth. The optimizer is AdamW. With r = width of a
weight's input / the base model's, m = dim / the base's, d = layers / the base's (1 for muP):

| parameter | std | learning rate | epsilon | multiplier |
| --- | --- | --- | --- | --- |
| matrix of a hidden layer, of an expert | r^-1/2 | 1/r | 1/(m d) | 1 |
| embedding, norm, bias, sink | 1 | 1 | 1/(m d), 1/m outside of layers | 1 |
| head, router | 1 | 1 | 1/m, 1/(m d) | 1/r |
| weight that scales the queries | as above | as above | as above | sqrt(base head_dim / head_dim) |
| output of attention and networks | as above | as above | as above | 1/d |
| final norm of a tied model | 1 | 1 | 1/m | 1/m |

No multiplier is computed in the forward pass. With Adam, a weight W with a multiplier a is the same
function as a weight a W whose std and learning rate are a times, and whose epsilon is 1/a times as
large (lemma J.1 of arXiv:2203.03466). So a trained model is a plain model of its family, and exports
need no other architecture.

A router reads `dim` features and writes a fixed number of logits, so that it scales as a head
(arXiv:2508.09752 derives the same rule); the matrices of an expert scale as hidden layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torchtitan_like.models.spec import (
    MATRIX_ROLES,
    InitRule,
    ModelSpec,
    Scale,
    num_mtp_layers,
)

# The sizes in which a base model may differ. Others, such as the number of experts, do not transfer.
WIDTH_KEYS = (
    "dim",
    "n_heads",
    "n_kv_heads",
    "hidden_dim",
    "inter_dim",
    "moe_inter_dim",
    "q_lora_rank",
    "kv_lora_rank",
)
BASE_KEYS = (*WIDTH_KEYS, "head_dim", "multiple_of", "ffn_dim_multiplier", "n_layers")
_READOUT_ROLES = ("output", "router")
# Of the model, and of multi-token prediction.
_FINAL_NORMS = ("norm.weight", "layers.*.norm.weight")
_RESIDUAL_OUTPUTS = ("layers.*.wo.*", "layers.*.w2", "layers.*.w2.*", "layers.*.b2")

Value = TypeVar("Value")


def find_problems(spec: ModelSpec, args: Any, base: Any, changes: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a base model, one sentence each.

    changes: the sizes of `base` that the user has written.
    """
    if spec.widths is None:
        return [f"{spec.name} has no table of widths (`ModelSpec.widths`)"]
    if "dim" not in changes:
        return ["the width of the model for which the learning rate was chosen is missing"]
    problems = [
        f"{key}: only {', '.join(BASE_KEYS)} may differ"
        for key in changes
        if key not in BASE_KEYS and getattr(args, key) != getattr(base, key)
    ]
    if not spec.widths(args).queries and args.head_dim != base.head_dim:
        problems.append(
            f"heads of {base.head_dim} dimensions, and {args.head_dim} in the model: without a "
            "weight that scales its queries, it needs equal heads"
        )
    return problems


def parametrize(spec: ModelSpec, args: Any, base: Any) -> ModelSpec:
    """Return `spec` whose initial weights and `scale` are those of CompleteP for this base model.

    With equal numbers of layers, it is muP. With equal sizes, all factors are 1.
    """
    assert spec.widths is not None
    inputs, base_inputs = spec.widths(args).inputs, spec.widths(base).inputs
    queries = spec.widths(args).queries
    width, depth = args.dim / base.dim, args.n_layers / base.n_layers
    head_multiplier = math.sqrt(base.head_dim / args.head_dim)

    def scale(name: str, ndim: int) -> Scale:
        role = _first_match(spec.sharding, name, "")
        ratio = _first_match(inputs, name, args.dim) / _first_match(base_inputs, name, base.dim)
        std = lr = multiplier = 1.0
        if MATRIX_ROLES.get(role) == ndim:
            std = ratio**-0.5
            lr = 1 / ratio
        if role in _READOUT_ROLES and ndim > 1:
            multiplier /= ratio
        if queries and fnmatchcase(name, queries):
            multiplier *= head_multiplier
        if any(fnmatchcase(name, pattern) for pattern in _RESIDUAL_OUTPUTS):
            multiplier /= depth
        if args.enable_weight_tying and any(fnmatchcase(name, each) for each in _FINAL_NORMS):
            multiplier /= width
        eps = 1 / (width * depth) if name.startswith("layers.") else 1 / width
        return Scale(std * multiplier, lr * multiplier, eps / multiplier)

    return replace(spec, init_table=lambda _: _init_table(spec, args, base), scale=scale)


def _init_table(spec: ModelSpec, args: Any, base: Any) -> tuple[tuple[str, InitRule], ...]:
    """Return the base model's table. A layer has the rows of the base's layer at the same depth."""
    by_base_layer: dict[int, list[int]] = {}
    for layer in range(args.n_layers + num_mtp_layers(args)):
        base_layer = layer * base.n_layers // args.n_layers
        if layer >= args.n_layers:
            base_layer = base.n_layers + layer - args.n_layers
        by_base_layer.setdefault(base_layer, []).append(layer)
    rows = []
    for pattern, rule in spec.init_table(base):
        numbered = re.fullmatch(r"layers\.(\d+)\.(.*)", pattern)
        if numbered is None:
            rows.append((pattern, rule))
        else:
            layers = by_base_layer.get(int(numbered[1]), [])
            rows += [(f"layers.{layer}.{numbered[2]}", rule) for layer in layers]
    return tuple(rows)


def _first_match(rows: tuple[tuple[str, Value], ...], name: str, default: Value) -> Value:
    return next((value for pattern, value in rows if fnmatchcase(name, pattern)), default)
