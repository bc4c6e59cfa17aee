"""Compare two checkpoints: settings, names, shapes, dtypes, numbers and objects."""

from __future__ import annotations

import pickle
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from torchtitan_like.checkpoint.changes import complete_settings, diff_settings
from torchtitan_like.checkpoint.source import Source
from torchtitan_like.checkpoint.tools.convert import Identify, native_weights
from torchtitan_like.checkpoint.tools.open_checkpoint import FAMILIES, dtype_name, open_checkpoint

BLOCK_ELEMENTS = 2**22  # compared at a time


class Side(NamedTuple):
    """One of the two checkpoints: its path, its names, and a function that reads a name."""

    path: Path
    names: tuple[str, ...]
    read: Callable[[str], Any]


def compare_checkpoints(a: Path, b: Path, identify: Identify) -> tuple[list[str], str]:
    """Return one line for every difference, and a summary.

    identify: returns the model whose tables translate names, if the two formats have different
    names. Raises CheckpointError, ConfigError, OSError.
    """
    sources = open_checkpoint(a), open_checkpoint(b)
    lines = _differing_settings(*sources)
    left, right = _sides(*sources, identify)
    for side, other in ((left, right), (right, left)):
        absent = set(side.names).difference(other.names)
        lines += [f"{name}: only in {side.path}" for name in side.names if name in absent]
    object_names = {name for one in sources for name in one.object_names}
    shared = set(right.names)
    common = [name for name in left.names if name in shared]
    tensor_names = [name for name in common if name not in object_names]
    num_equal = 0
    for names, difference in (
        (tensor_names, tensor_difference),
        ([name for name in common if name in object_names], object_difference),
    ):
        for name in names:
            text = difference(left.read(name), right.read(name))
            if text:
                lines.append(f"{name}: {text}")
            elif difference is tensor_difference:
                num_equal += 1
    summary = f"{num_equal} of {len(tensor_names)} common tensors are equal bit for bit"
    return lines, summary


def _sides(a: Source, b: Source, identify: Identify) -> list[Side]:
    if FAMILIES[a.format] == FAMILIES[b.format]:
        return [
            Side(source.path, (*source.stored, *source.object_names), source.read)
            for source in (a, b)
        ]
    native = b if b.format == "native" and a.format != "native" else a
    identity, _ = identify(native.path)
    sides = []
    for source in (a, b):
        weights: Mapping[str, Tensor] = native_weights(source, identity)
        sides.append(Side(source.path, tuple(weights), weights.__getitem__))
    return sides


def _differing_settings(a: Source, b: Source) -> list[str]:
    before, after = a.manifest.get("config"), b.manifest.get("config")
    if not before or not after:
        return []
    changes = diff_settings(before, complete_settings(after), {}, {})
    return sorted(str(change) for group in changes for change in group)


def tensor_difference(a: Tensor, b: Tensor) -> str | None:
    """Describe the difference in dtype, shape or numbers; None if all bits are equal."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{dtype_name(a.dtype)} {list(a.shape)} -> {dtype_name(b.dtype)} {list(b.shape)}"
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
    if torch.equal(bits[0], bits[1]):
        return None
    exact = torch.complex128 if a.is_complex() else torch.float64
    blocks = zip(
        a.reshape(-1).split(BLOCK_ELEMENTS), b.reshape(-1).split(BLOCK_ELEMENTS), strict=True
    )
    maxima = torch.stack([(x.to(exact) - y.to(exact)).abs().max() for x, y in blocks])
    return f"max abs difference {maxima.max().item():.3e}"  # NaN stays NaN


def object_difference(a: Any, b: Any) -> str | None:
    """Return both values, shortened; None if they are equal, tensors inside included."""
    values_a, structure_a = tree_flatten(a)
    values_b, structure_b = tree_flatten(b)
    is_equal = structure_a == structure_b and all(
        tensor_difference(x, y) is None
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        # `==` returns False for NaN and itself, and an array for arrays.
        else pickle.dumps(x) == pickle.dumps(y)
        for x, y in zip(values_a, values_b, strict=True)
    )
    return None if is_equal else f"{reprlib.repr(a)} -> {reprlib.repr(b)}"
