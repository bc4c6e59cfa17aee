"""Weights of another format straight into the parameters, in place, on every topology: all of them, or an error.

Each rank reads what belongs to its own rectangles and nothing else; beside the model it needs a few MiB.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import torch

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.hf.pieces import Form, Piece, owned, pieces
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.models.hf_table import Link, Rows, Shape, Table, links, their_shapes
from torchtitan_like.util.reading import read_json

logger = logging.getLogger()

# What may differ in config.json without another result: how the weights were trained, and what they may be used for.
_FREE = ("architectures", "attention_dropout", "initializer_range", "max_position_embeddings", "use_cache")
# What transformers takes where config.json says nothing, as those of older models do.
_DEFAULTS = {"rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-6}
# Tables that others store and every model computes for itself: names of their tensors that may stay unread.
COMPUTED = ("*rotary_emb.inv_freq", "rope.freqs", "freqs_cis")


class Source(Protocol):
    """Somebody's tensors on disk, by their names."""

    @property
    def path(self) -> Path: ...

    @property
    def stored(self) -> Mapping[str, Form]: ...

    def fill(self, wanted: Iterable[Piece]) -> None:
        """Copy each piece of what is stored into its target. Raises DamagedError where bytes are missing."""


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor of theirs (their names); equal on all ranks.

    unused      stored, but no tensor of ours is made of it
    missing     needed, but not stored
    misfits     a sentence for each that has another shape than ours, or another kind of numbers
    converted   name -> the change of its dtype, such as "bfloat16 -> float32"
    """

    path: Path
    used: tuple[str, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    misfits: tuple[str, ...]
    converted: Mapping[str, str]

    def check(self) -> None:
        """Raises CheckpointError naming every tensor that stands in the way; tables that models compute do not."""
        surplus = [name for name in self.unused if not any(fnmatchcase(name, known) for known in COMPUTED)]
        kinds = [("missing", self.missing), ("without a place in this model", surplus), ("unfit", self.misfits)]
        problems = [f"{len(names)} {kind}: {', '.join(names)}" for kind, names in kinds if names]
        if problems:
            raise CheckpointError(
                f"{self.path} does not hold the weights of this model. Of its tensors are " + "; ".join(problems) + ". "
                "Choose the model.flavor and [model.args] (such as n_layers, vocab_size, enable_weight_tying) of that model"
            )

    def __str__(self) -> str:
        changes = ", ".join(f"{n} {change}" for change, n in Counter(self.converted.values()).items())
        unread = f"; not used: {', '.join(self.unused)}" if self.unused else ""
        return f"Read {len(self.used)} tensors of {self.path}" + (f" ({changes})" if changes else "") + unread


def load_hf(
    folder: Path, tensors: Mapping[str, Any], *, rows: Rows, tied: Table, quantized: bool, votes: Votes
) -> LoadReport:
    """A directory of safetensors files (one, or many with or without an index) into `tensors`, as `load_weights` does.

    quantized: the weights are float8 with a scale for each block, and are multiplied out in float32. Raises
    CheckpointError where that is not so, or is so without being asked for.
    """
    from torchtitan_like.checkpoint.hf.safetensors_source import open_safetensors

    source = votes.leader_does(lambda: open_safetensors(folder, quantized=quantized))
    return load_weights(source, tensors, rows=rows, tied=tied, votes=votes)


def config_differences(folder: Path, ours: Mapping[str, Any]) -> list[str]:
    """What the directory's config.json says of the model otherwise than `ours`, one sentence each.

    Weights of equal shapes load all the same: another number of heads or another rotary base shows in the loss alone.
    """
    if not (folder / "config.json").exists():
        return []
    try:
        theirs = _DEFAULTS | _older_form(read_json(folder / "config.json"))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder / 'config.json'} cannot be read: {type(error).__name__} {error}") from error
    return [
        f"{folder / 'config.json'} says {key} = {theirs[key]}, this model has {value}"
        for key, value in ours.items()
        if key in theirs and key not in _FREE and theirs[key] != value
    ]


def _older_form(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes rope_theta and rope_scaling as one table."""
    rope = dict(config.get("rope_parameters") or {})
    if not rope:
        return config
    theta = rope.pop("rope_theta", _DEFAULTS["rope_theta"])
    return config | {"rope_theta": theta, "rope_scaling": None if rope.get("rope_type") == "default" else rope}


def load_weights(source: Source, tensors: Mapping[str, Any], *, rows: Rows, tied: Table, votes: Votes) -> LoadReport:
    """Fill this rank's `tensors` (our names -> tensor or DTensor) from `source`, in place; all ranks together.

    What is missing, surplus or of another shape is found before anything is read. The second name of a tied parameter
    may be stored too, if it holds the same numbers. Raises on every rank DamagedError for damaged files, CheckpointError
    for all else; an error while reading leaves the tensors part old, part new.
    """
    ours = {dict(tied).get(name, name): tensor for name, tensor in tensors.items()}
    found: list[Link] = []
    copies: dict[str, Any] = {}  # of a tied parameter, under its second name

    def needs() -> dict[str, Form]:
        for alias, name in tied:
            if name in ours and _is_stored(source, rows, alias, ours[name].shape):
                copies[alias] = torch.empty_like(ours[name])
        filled = ours | copies
        found.extend(links(rows, {name: tuple(tensor.shape) for name, tensor in filled.items()}))
        dtypes = {link.theirs: filled[link.ours].dtype for link in found}
        return {name: Form(shape, dtypes[name]) for name, shape in their_shapes(found).items()}

    # The ranks together need what a model needs: a pipeline stage has no use for another's layers.
    wanted = {name: form for part in votes.all_do(needs) for name, form in part.items()}
    report = _compare(source, wanted)
    report.check()
    votes.all_do(lambda: source.fill(pieces(found, ours | copies)))
    votes.all_do(
        lambda: _check_ties(source, {alias: (copies[alias], ours[name]) for alias, name in tied if alias in copies})
    )
    logger.info(report)
    return report


def _is_stored(source: Source, rows: Rows, name: str, shape: Shape) -> bool:
    """Is the tensor that we call `name` among theirs? Not where no row knows it."""
    try:
        return any(theirs in source.stored for theirs in their_shapes(links(rows, {name: tuple(shape)})))
    except KeyError:
        return False


def _compare(source: Source, wanted: Mapping[str, Form]) -> LoadReport:
    misfits, converted = [], {}
    used = [name for name in wanted if name in source.stored]
    for name in used:
        ours, theirs = wanted[name], source.stored[name]
        change = " -> ".join(str(dtype).removeprefix("torch.") for dtype in (theirs.dtype, ours.dtype))
        if ours.shape != theirs.shape:
            misfits.append(f"{name} is {theirs.shape}, this model needs {ours.shape}")
        elif theirs.dtype != ours.dtype:
            converted[name] = change
            if not (theirs.dtype.is_floating_point and ours.dtype.is_floating_point):
                misfits.append(f"{name} holds other numbers ({change})")
    return LoadReport(
        source.path,
        used=tuple(used),
        unused=tuple(name for name in source.stored if name not in wanted),
        missing=tuple(name for name in wanted if name not in source.stored),
        misfits=tuple(misfits),
        converted=converted,
    )


def _check_ties(source: Source, pairs: Mapping[str, tuple[Any, Any]]) -> None:
    for alias, (copy, original) in pairs.items():
        both = zip(owned(copy), owned(original), strict=True)
        if not all(torch.equal(mine, other) for (_, mine), (_, other) in both):
            raise CheckpointError(
                f"{source.path} holds a tensor of its own for {alias}, which this model ties to another with other "
                "numbers. Untie them in [model.args] (enable_weight_tying = false)"
            )
