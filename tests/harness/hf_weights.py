"""Whole tensors carried over the links of `torchtitan_like.models.hf_table`: what every loader and exporter must equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from torchtitan_like.models.hf_table import Link, external_shapes, slices


def to_theirs(found: Iterable[Link], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` (our names) as their tensors."""
    found = list(found)
    dtypes = {link.external: state[link.native].dtype for link in found}
    theirs = {name: torch.empty(shape, dtype=dtypes[name]) for name, shape in external_shapes(found).items()}
    for link in found:
        ours, there = state[link.native][slices(link.native_box)], theirs[link.external][slices(link.external_box)]
        there.copy_((ours.mT if link.transposed else ours).reshape(there.shape))
    return theirs


def to_ours(found: Iterable[Link], state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` (their names) as our tensors, in the shapes and dtypes of `like`."""
    ours = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    for link in found:
        here, theirs = ours[link.native][slices(link.native_box)], state[link.external][slices(link.external_box)]
        here.copy_((theirs.mT if link.transposed else theirs).reshape(here.shape))
    return ours


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Meta's rows in Hugging Face's order, as transformers' conversion script writes it."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def unpermuted(weight: Tensor, heads: int) -> Tensor:
    """The way back."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
