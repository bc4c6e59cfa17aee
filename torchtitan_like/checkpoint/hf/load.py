"""Load weights of another format into the parameters, in place, for every layout of ranks.

Each rank reads only the bytes of its own shards. This needs a few MiB in addition to the model. A
missing tensor is an error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from torchtitan_like.checkpoint.errors import DamagedError, SettingsError
from torchtitan_like.checkpoint.source import Read, Source, TensorInfo
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import (
    Link,
    Rows,
    Table,
    external_shapes,
    links,
)
from torchtitan_like.util.boxes import Shape, sizes_of, whole
from torchtitan_like.util.reading import read_json
from torchtitan_like.util.shards import local_boxes

logger = logging.getLogger()

# Keys of config.json that may differ without changing what the model computes.
_IRRELEVANT = (
    "architectures",
    "attention_dropout",
    "initializer_range",
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "use_cache",
)
# The values that transformers assumes if an (older) config.json lacks the key.
_DEFAULTS = {"rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-6}
# Tensors that may remain unread: other programs store them, and every model computes them.
COMPUTED = ("*rotary_emb.inv_freq", "rope.freqs", "freqs_cis")


# Number of elements read, converted, and copied at a time. It bounds the memory that loading needs
# in addition to the model.
MAX_ELEMENTS = 2**22


@dataclass(frozen=True)
class LoadReport:
    """The use of every external tensor; equal on all ranks.

    unused: stored, but not needed by this model.
    missing: needed, but not stored.
    misfits: one sentence for each tensor with another shape or kind of dtype.
    converted: name -> change of dtype, such as "bfloat16 -> float32".
    unread: patterns of stored tensors that may remain unused, in addition to `COMPUTED`.
    """

    path: Path
    used: tuple[str, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    misfits: tuple[str, ...]
    converted: Mapping[str, str]
    unread: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise CheckpointError with all problems. Unused tensors that may remain are accepted."""
        accepted = (*COMPUTED, *self.unread)
        surplus = [
            name
            for name in self.unused
            if not any(fnmatchcase(name, pattern) for pattern in accepted)
        ]
        kinds = [
            ("missing", self.missing),
            ("not in this model", surplus),
            ("of another shape or dtype", self.misfits),
        ]
        problems = [f"{len(names)} {kind}: {', '.join(names)}" for kind, names in kinds if names]
        if problems:
            raise SettingsError(
                f"{self.path} does not contain the weights of this model. Tensors: "
                + "; ".join(problems)
                + ". Set model.flavor and [model.args] (such as n_layers, vocab_size, "
                "enable_weight_tying) as in the stored model"
            )

    def __str__(self) -> str:
        counts = Counter(self.converted.values())
        changes = ", ".join(f"{n} {change}" for change, n in counts.items())
        unread = f"; not used: {_summarize(self.unused)}" if self.unused else ""
        converted = f" ({changes})" if changes else ""
        return f"Read {len(self.used)} tensors of {self.path}{converted}{unread}"


def config_differences(
    folder: Path,
    expected: Mapping[str, Any],
    standardize: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
) -> list[str]:
    """Compare the directory's config.json with `expected`; return one sentence per difference.

    Such differences do not prevent loading if all shapes are equal. For example, a different number
    of heads or rotary base is visible only in the loss.

    standardize: returns the content of a file as the model's family writes it; raises ValueError
        with one line for each field that it does not support.
    """
    if not (folder / "config.json").exists():
        return []
    try:
        content = read_json(folder / "config.json")
        _flat_rope(content)  # raises for content that is no table of tables and values
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(
            f"{folder / 'config.json'} is not valid: {type(error).__name__} {error}. Expected the "
            "config of a Hugging Face model: copy the file again"
        ) from error
    try:
        stored = _DEFAULTS | _flat_rope(standardize(content))
    except ValueError as error:
        return [f"{folder / 'config.json'} has {line}" for line in str(error).splitlines()]
    return [
        f"{folder / 'config.json'} has {key} = {stored[key]}, this model has {value}"
        for key, value in _flat_rope(dict(expected)).items()
        if key in stored and key not in _IRRELEVANT and stored[key] != value
    ]


def _flat_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Split the table `rope_parameters` of transformers 5 into rope_theta and rope_scaling.

    Older files name the rope_type of rope_scaling "type". Files of models with vision have the
    sizes of the text model in a table `text_config`.
    """
    config = config.get("text_config", config)
    rope = dict(config.get("rope_parameters") or {})
    if rope:
        theta = rope.pop("rope_theta", _DEFAULTS["rope_theta"])
        scaling = None if rope.get("rope_type") == "default" else rope
        config = config | {"rope_theta": theta, "rope_scaling": scaling}
    scaling = dict(config.get("rope_scaling") or {})
    if "type" in scaling:
        scaling = {"rope_type": scaling.pop("type")} | scaling
        config = config | {"rope_scaling": scaling}
    return config


def load_weights(
    source: Source,
    tensors: Mapping[str, Any],
    *,
    rows: Rows,
    tied: Table,
    group: HostGroup,
    unread: tuple[str, ...] = (),
) -> LoadReport:
    """Fill this rank's `tensors` (native names) from `source` in place; all ranks call it together.

    Tensors that are missing, surplus, or of another shape are detected before anything is read. The
    alias of a tied parameter may be stored too, if it has the same values.

    unread: patterns of stored tensors that are not of this model.

    Raises the same error on every rank: DamagedError for damaged files, CheckpointError otherwise.
    After an error during reading, some tensors are loaded and some are not.
    """
    natives = {dict(tied).get(name, name): tensor for name, tensor in tensors.items()}
    all_links: list[Link] = []
    aliases: dict[str, Any] = {}  # stored aliases of tied parameters, loaded for a comparison

    def list_needed() -> dict[str, TensorInfo]:
        for alias, name in tied:
            if name in natives and _is_stored(source, rows, alias, natives[name].shape):
                aliases[alias] = torch.empty_like(natives[name])
        targets = natives | aliases
        shapes = {name: tuple(tensor.shape) for name, tensor in targets.items()}
        all_links.extend(links(rows, shapes))
        dtypes = {link.external: targets[link.native].dtype for link in all_links}
        return {
            name: TensorInfo(shape, dtypes[name])
            for name, shape in external_shapes(all_links).items()
        }

    # A pipeline stage needs only its own layers; all ranks together need the whole model.
    parts = group.gather_objects(group.run_on_all(list_needed))
    needed = {name: info for part in parts for name, info in part.items()}
    report = _compare(source, needed, unread)
    report.check()
    group.run_on_all(lambda: source.fill(plan_reads(all_links, natives | aliases)))
    pairs = {alias: (aliases[alias], natives[name]) for alias, name in tied if alias in aliases}
    group.run_on_all(lambda: _check_ties(source, pairs))
    logger.info(report)
    return report


def plan_reads(table: Iterable[Link], tensors: Mapping[str, Any]) -> Iterator[Read]:
    """Yield the reads that fill this rank's `tensors` (native names), at most MAX_ELEMENTS each."""
    for name, group in groupby(table, key=lambda link: link.native):
        shards = local_boxes(tensors[name])
        for link in group:
            for shard_box, view in shards:
                if boxes := link.boxes.within_source(shard_box):
                    yield from _split(Read(link.external, boxes.target, boxes.view(view)))


def _split(read: Read) -> Iterator[Read]:
    """Split a read along its first dimensions, so that the parts stay as contiguous as possible."""
    if read.target.numel() <= MAX_ELEMENTS:
        yield read
        return
    sizes = sizes_of(read.box)
    dim = next(d for d, count in enumerate(sizes) if count > 1)
    half = sizes[dim] // 2
    for span in ((0, half, 1), (half, sizes[dim] - half, 1)):
        yield from _split(read.part((*whole(sizes[:dim]), span, *whole(sizes[dim + 1 :]))))


def _is_stored(source: Source, rows: Rows, name: str, shape: Shape) -> bool:
    """Return True if the source stores the tensor that has this native name."""
    try:
        names = external_shapes(links(rows, {name: tuple(shape)}))
    except KeyError:  # no row has the name
        return False
    return any(name in source.stored for name in names)


def _compare(
    source: Source, needed: Mapping[str, TensorInfo], unread: tuple[str, ...]
) -> LoadReport:
    misfits, converted = [], {}
    used = [name for name in needed if name in source.stored]
    for name in used:
        native, stored = needed[name], source.stored[name]
        dtypes = (str(info.dtype).removeprefix("torch.") for info in (stored, native))
        change = " -> ".join(dtypes)
        if native.shape != stored.shape:
            misfits.append(f"{name} is {stored.shape}, this model needs {native.shape}")
        elif stored.dtype != native.dtype:
            converted[name] = change
            if not (stored.dtype.is_floating_point and native.dtype.is_floating_point):
                misfits.append(f"{name} has another kind of dtype ({change})")
    return LoadReport(
        source.path,
        used=tuple(used),
        unused=tuple(name for name in source.stored if name not in needed),
        missing=tuple(name for name in needed if name not in source.stored),
        misfits=tuple(misfits),
        converted=converted,
        unread=unread,
    )


def _summarize(names: tuple[str, ...]) -> str:
    """Return the names; of many, their number and the first one."""
    return ", ".join(names) if len(names) <= 8 else f"{len(names)} tensors, such as {names[0]}"


def _check_ties(source: Source, pairs: Mapping[str, tuple[Any, Any]]) -> None:
    for alias, (copy, original) in pairs.items():
        shards = zip(local_boxes(copy), local_boxes(original), strict=True)
        if not all(torch.equal(a, b) for (_, a), (_, b) in shards):
            raise SettingsError(
                f"{source.path}: {alias} has its own values, but this model ties it to another "
                "tensor. Expected equal values: set enable_weight_tying = false in [model.args]"
            )
