"""Reference conversion between native and external weights, on whole tensors.

Loaders and exporters must produce the same result. They use the same links of
`torchtitan_like.models.hf_table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_like.checkpoint.hf.load import LoadReport, load_weights
from torchtitan_like.checkpoint.loading import open_weights
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import Link, Rows, count_named, external_shapes
from torchtitan_like.util.boxes import slices


def to_external(links: Iterable[Link], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors with native names to tensors with external names."""
    links = list(links)
    dtypes = {link.external: state[link.native].dtype for link in links}
    result = {
        name: torch.empty(shape, dtype=dtypes[name])
        for name, shape in external_shapes(links).items()
    }
    for link in links:
        source = state[link.native][slices(link.native_box)]
        target = result[link.external][slices(link.external_box)]
        target.copy_((source.mT if link.transposed else source).reshape(target.shape))
    return result


def to_native(
    links: Iterable[Link], state: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert tensors with external names to native ones with the shapes and dtypes of `like`."""
    result = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    for link in links:
        target = result[link.native][slices(link.native_box)]
        source = state[link.external][slices(link.external_box)]
        target.copy_((source.mT if link.transposed else source).reshape(target.shape))
    return result


def load_hf(
    folder: Path,
    tensors: Mapping[str, Any],
    *,
    rows: Rows,
    group: HostGroup,
    quantized: bool = False,
    alternative_rows: Rows | None = None,
    **options: Any,
) -> LoadReport:
    """Load safetensors. alternative_rows: used if they name more stored tensors."""
    source = open_weights(folder, "hf", group, quantized=quantized)
    tables = (rows, alternative_rows or rows)
    rows = max(tables, key=lambda table: count_named(table, source.stored))
    return load_weights(source, tensors, rows=rows, group=group, **options)


def load_torchtitan(
    folder: Path, tensors: Mapping[str, Any], *, group: HostGroup, **options: Any
) -> LoadReport:
    """Load the weights of a TorchTitan checkpoint."""
    return load_weights(open_weights(folder, "dcp", group), tensors, group=group, **options)


def load_meta(
    path: Path, tensors: Mapping[str, Any], *, group: HostGroup, **options: Any
) -> LoadReport:
    """Load Meta's .pth files."""
    return load_weights(open_weights(path, "pt", group), tensors, group=group, **options)


def permute_rows(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows from Meta's order to Hugging Face's, as transformers' conversion script does."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def unpermute_rows(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows from Hugging Face's order to Meta's."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


# ---- experts: one tensor per expert in files, stacked tensors in modules of transformers


@torch.no_grad()
def load_per_expert(module: Any, stored: Mapping[str, Tensor]) -> None:
    """Load tensors, named as in files, into a module of transformers.

    Its experts are stacked; the files of some families have one tensor per expert. Raises KeyError
    if a tensor is missing or unexpected.
    """
    unread = dict(stored)
    for name, tensor in module.state_dict().items():
        is_tied = name == "lm_head.weight" and module.config.tie_word_embeddings
        if name in stored:
            tensor.copy_(unread.pop(name))
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensor.copy_(_stack(name, unread, tensor.shape[0]))
        elif not is_tied:
            raise KeyError(name)
    if unread:
        raise KeyError(*unread)
    module.tie_weights()


def _stack(name: str, unread: dict[str, Tensor], num_experts: int) -> Tensor:
    prefix, _, kind = name.rpartition(".")
    parts = ("down",) if kind == "down_proj" else ("gate", "up")
    return torch.stack(
        [
            torch.cat([unread.pop(f"{prefix}.{e}.{part}_proj.weight") for part in parts])
            for e in range(num_experts)
        ]
    )


def gradients_per_expert(module: Any) -> dict[str, Tensor]:
    """Return the gradients of a module of transformers, named and split as in files."""
    result: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        prefix, _, kind = name.rpartition(".")
        if ".experts." not in name:
            result[name] = parameter.grad
            continue
        for e, grad in enumerate(parameter.grad):
            if kind == "down_proj":
                result[f"{prefix}.{e}.down_proj.weight"] = grad
            else:
                gate, up = grad.chunk(2)
                result |= {
                    f"{prefix}.{e}.gate_proj.weight": gate,
                    f"{prefix}.{e}.up_proj.weight": up,
                }
    return result
