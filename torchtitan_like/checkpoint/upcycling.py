"""Start a mixture of experts from a dense checkpoint (upcycling, arXiv:2212.05055).

Every expert becomes a copy of its layer's dense feed-forward network. All other weights of the
dense model are loaded unchanged. Routers and selection biases keep their initial values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import count
from typing import TYPE_CHECKING, Any

from torchtitan_like.checkpoint.errors import SettingsError
from torchtitan_like.checkpoint.hf.load import config_differences, load_weights
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.source import Source
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import Row, Rows, links
from torchtitan_like.models.spec import Upcycling

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.start import Start

logger = logging.getLogger()
KEY = "checkpoint.initial_load_upcycle"


def load_upcycled(
    start: Start,
    open_source: Callable[[], Source],
    tensors: Mapping[str, Any],
    group: HostGroup,
    identity: Identity,
) -> None:
    """Load the dense checkpoint of `start` into `tensors` of a model with experts, in place.

    All ranks must call it together. Tensors that a dense model does not have are left unchanged.

    open_source: returns the weights of `start`, by the names of its format. A collective.
    Raises CheckpointError if the family cannot be upcycled, or the dense model has other sizes.
    """
    path, spec, args = start.path, identity.spec, identity.args
    assert path is not None
    upcycling = spec.upcycling(args)
    if isinstance(upcycling, str):
        raise SettingsError(
            f"{KEY} = true, but {spec.name} cannot be upcycled: {upcycling}. Expected a family "
            f"with dense models and the same model with experts. Set {KEY} = false"
        )
    fresh = [name for name in tensors if _matches(name, upcycling.fresh)]
    loaded = {name: tensor for name, tensor in tensors.items() if name not in fresh}
    if start.format == "native":
        renamed = [dense for _, dense in upcycling.copied]
        dense_rows: Rows = tuple((name, name) for name in (*renamed, *loaded))
    elif start.format == "hf":
        dense_rows = spec.hf_names(upcycling.dense_args)
    elif start.format == "dcp" and spec.meta_names is not None:
        dense_rows = spec.meta_names(upcycling.dense_args)
    else:
        raise SettingsError(
            f"{KEY} = true, but {path} holds Meta's consolidated.*.pth files. Expected a native "
            "step, a checkpoint of TorchTitan, or Hugging Face safetensors. Convert it first"
        )
    source = open_source()
    num_layers = group.run_on_leader(lambda: _check_sizes(source, dense_rows, upcycling, args))
    if start.format == "hf":
        for line in config_differences(path, spec.hf_config(upcycling.dense_args)):
            logger.warning(line)
    rows = upcycled_rows(dense_rows, upcycling)
    report = load_weights(source, loaded, rows=rows, tied=spec.tied(args), group=group)
    num_copied = num_layers * len(upcycling.copied)
    logger.info(
        f"Upcycled {path}: {num_copied} feed-forward tensors copied to each of {args.num_experts} "
        f"experts, {len(report.used) - num_copied} other tensors loaded unchanged, routers of "
        f"{num_layers} layers initialized anew"
    )


def upcycled_rows(dense_rows: Rows, upcycling: Upcycling) -> Rows:
    """Return the rows of a dense model's table with the experts in place of its feed-forward weights."""
    experts = {dense: stacked for stacked, dense in upcycling.copied}
    rows: list[Row | tuple[str, str]] = []
    for row in dense_rows:
        native, external = (row.native, row.external) if isinstance(row, Row) else row
        if native in experts:
            rows.append(Row(experts[str(native)], external, copied=True))
        elif native not in experts.values():
            rows.append(row)
    return tuple(rows)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_sizes(source: Source, rows: Rows, upcycling: Upcycling, args: Any) -> int:
    """Return the number of layers of the dense model.

    Raises CheckpointError if the source is no dense model, or its sizes differ from `args`.
    """

    def external(name: str) -> str:
        return links(rows, {name: (1, 1)})[0].external

    _, dense = upcycling.copied[0]
    num_layers = next(i for i in count() if external(dense.format(i)) not in source.stored)
    if num_layers == 0:
        raise SettingsError(
            f"{KEY} = true, but {source.path} has no tensor {external(dense.format(0))}. Expected "
            f"a dense model of this family. To load a model that has experts, set {KEY} = false"
        )
    sizes = {"n_layers": num_layers}
    for key, name, dim in upcycling.sizes:
        if (info := source.stored.get(external(name))) is not None:
            sizes[key] = info.shape[dim]
    differing = {key: size for key, size in sizes.items() if size != getattr(args, key)}
    if differing:
        differences = ", ".join(
            f"{key} = {size} (this run: {getattr(args, key)})" for key, size in differing.items()
        )
        remedy = ", ".join(f"model.args.{key} = {size}" for key, size in differing.items())
        raise SettingsError(
            f"{source.path} is a dense model with {differences}. Expected equal sizes, because "
            f"{KEY} = true copies its feed-forward networks whole. Set {remedy}, or load another "
            "checkpoint"
        )
    return num_layers
