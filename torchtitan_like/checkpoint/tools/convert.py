"""Convert a checkpoint of any format into any other.

One process needs memory for the weights once or twice. `checkpoint.tools.export_step` exports a large
step on many ranks.
"""

from __future__ import annotations

import io
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.utils._pytree import keystr, tree_map_with_path

from torchtitan_like.checkpoint.dcp_storage import ExtentWriter
from torchtitan_like.checkpoint.errors import CheckpointError, with_checkpoint_errors
from torchtitan_like.checkpoint.hf.export import warn_of_overflow, write_export
from torchtitan_like.checkpoint.hf.folder import ORIGINAL, write_model
from torchtitan_like.checkpoint.hf.safetensors_source import SafetensorsSource
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.loading import load_states
from torchtitan_like.checkpoint.pth_source import flatten
from torchtitan_like.checkpoint.source import Source
from torchtitan_like.checkpoint.staged_output import StagedOutput
from torchtitan_like.checkpoint.start import Format, Start
from torchtitan_like.checkpoint.stateful import ModelState
from torchtitan_like.checkpoint.step_folders import Manifest
from torchtitan_like.checkpoint.stored_weights import HostTensors
from torchtitan_like.checkpoint.tools.open_checkpoint import (
    FAMILIES,
    checkpoint_errors,
    dtype_name,
    open_checkpoint,
)
from torchtitan_like.checkpoint.unpickle import load_saved
from torchtitan_like.checkpoint.verification import find_damage
from torchtitan_like.config import JobConfig, dump_toml
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import external_shapes, links
from torchtitan_like.models.spec import is_always_float32
from torchtitan_like.util.boxes import slices
from torchtitan_like.util.extents import FileRecord, write_file
from torchtitan_like.util.files import refuse_existing
from torchtitan_like.util.reading import parse_json
from torchtitan_like.util.run_directory import CONFIG, MANIFEST

# Function that returns the model and the configuration of the checkpoint at a path.
Identify = Callable[[Path], tuple[Identity, JobConfig]]


def convert_checkpoint(
    source: Path,
    out: Path,
    to: Format,
    *,
    dtype: torch.dtype | None,
    trust_pickle: bool,
    identify: Identify,
) -> list[str]:
    """Convert `source` into `out`, and translate names if the two formats have different names.

    Arguments and result are as for `convert`. trust_pickle is as for `open_checkpoint`; it is allowed
    only for a copy that keeps all names.
    """
    opened = open_checkpoint(source, trust_pickle=trust_pickle)
    is_translated = FAMILIES[opened.format] != FAMILIES[to]
    if trust_pickle and is_translated:
        raise CheckpointError(
            f"--trust-pickle with --to {to}: {source} has the format {opened.format}. Expected "
            f"no change of names: copy it with --to {opened.format} --trust-pickle, then convert "
            "the copy"
        )
    identity, config = None, opened.manifest.get("config")
    if is_translated or (to == "native" and config is None):
        identity, loaded = identify(source)
        config = config or dump_toml(loaded)
    return convert(opened, out, to, dtype=dtype, identity=identity, config=config)


def convert(
    source: Source,
    out: Path,
    to: Format,
    *,
    dtype: torch.dtype | None,
    identity: Identity | None,
    config: str | None,
) -> list[str]:
    """Write `source` to `out`. `out` exists only after all files are complete.

    dtype: target dtype of floating-point tensors; None keeps their dtypes.
    identity: the model; required if the two formats are of different families.
    config: the TOML of a native step.

    A view is saved without the other elements of its base tensor. Objects that no loader accepts
    are dropped. Returns their names. Raises CheckpointError, OSError.
    """
    with StagedOutput(out) as output:
        refuse_existing(out)
        state, dropped = _read_state(source, to, dtype, identity)
        staged, manifest = output.path, None
        with checkpoint_errors(output.final):
            if to == "pt":
                _write_pt(staged, state)
            elif to == "dcp":
                writer = dcp.FileSystemWriter(staged, thread_count=1)
                dcp.save(state, storage_writer=writer, no_dist=True)
            elif to == "native":
                assert config is not None
                manifest = _write_native(staged, state, source, config)
            else:
                is_copy = source.format == "hf"
                manifest = _write_hf(staged, state, source, None if is_copy else identity)
        if manifest is not None:
            for damage in find_damage(staged, manifest["files"]):
                raise damage
        output.publish(manifest)
    return dropped


def _read_state(
    source: Source, to: Format, dtype: torch.dtype | None, identity: Identity | None
) -> tuple[Any, list[str]]:
    """Return what to write, with the names of the format, and the names that are dropped."""
    dropped: list[str] = []
    if FAMILIES[source.format] == FAMILIES[to]:
        state, dropped = _drop_unloadable(source.read_all(), source.path)
    else:
        assert identity is not None
        state = native_weights(source, identity)
        if FAMILIES[to] == "torch":
            state = meta_weights(state, identity)

    def copy(path: Any, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        is_cast = tensor.is_floating_point() and not is_always_float32(keystr(path))
        cast = tensor.to(dtype) if dtype is not None and is_cast else tensor
        return tensor.clone(memory_format=torch.contiguous_format) if cast is tensor else cast

    warn_of_overflow(dict(flatten(state)), dtype)
    return tree_map_with_path(copy, state), dropped


# ---- names


def native_weights(source: Source, identity: Identity) -> dict[str, Tensor]:
    """Read all weights of the model by native name. Raises CheckpointError if one is missing."""
    if source.format == "native":
        return {name.removeprefix("model."): t for name, t in source.read_all().items()}
    dtypes = {info.dtype for info in source.stored.values() if info.dtype.is_floating_point}
    # The widest dtype of all tensors, so that no value is rounded.
    dtype = reduce(torch.promote_types, dtypes or {torch.float32})
    with torch.device("meta"):
        model = identity.spec.build(identity.args).to(dtype)
    weights = HostTensors(
        {name: (t.shape, t.dtype) for name, t in ModelState([model]).state_dict().items()}
    )
    start = Start(
        "warm",
        0,
        source.path,
        "named on the command line",
        format=source.format,
        manifest=source.manifest or None,
    )
    load_states(start, {"model": weights}, with_checkpoint_errors(HostGroup.alone()), identity)
    return weights.state_dict()


def meta_weights(weights: Mapping[str, Tensor], identity: Identity) -> dict[str, Tensor]:
    """Give native weights the names and the row order of TorchTitan and Meta."""
    spec, args = identity.spec, identity.args
    if spec.meta_names is None:
        raise CheckpointError(
            f"model {spec.name} has no names in the format of TorchTitan and Meta. Expected a "
            "model with meta_names: convert to another format"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    table = links(spec.meta_names(args), shapes, spec.tied(args))
    dtypes = {link.external: weights[link.native].dtype for link in table}
    renamed = {
        name: torch.empty(shape, dtype=dtypes[name])
        for name, shape in external_shapes(table).items()
    }
    for link in table:
        target = renamed[link.external][slices(link.external_box)]
        target.copy_(link.boxes.view(weights[link.native]))
    return renamed


def _drop_unloadable(state: Any, path: Path, prefix: str = "") -> tuple[Any, list[str]]:
    """Drop objects that `load_saved` rejects; return the rest and the dropped names, with dots."""
    if not isinstance(state, Mapping):
        return state, [] if _is_loadable(state, path) else [prefix]
    kept: dict[Any, Any] = OrderedDict() if type(state) is OrderedDict else {}
    dropped: list[str] = []
    for key, value in state.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        child, dropped_below = _drop_unloadable(value, path, name)
        dropped += dropped_below
        if isinstance(value, Mapping) or not dropped_below:
            kept[key] = child
    return kept, dropped


def _is_loadable(value: Any, path: Path) -> bool:
    if type(value) in (Tensor, torch.nn.Parameter):
        return True
    saved = io.BytesIO()
    torch.save(value, saved)
    saved.seek(0)
    try:
        load_saved(saved, path)
    except CheckpointError:
        return False
    return True


# ---- writers


def _write_pt(staged: Path, state: Any) -> None:
    with open(staged, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _write_native(
    staged: Path, state: Mapping[str, Tensor], source: Source, config: str
) -> Manifest:
    """Write a step with only the weights, for `checkpoint.initial_load_path`."""
    staged.mkdir()
    writer = ExtentWriter(staged, 0)
    state = {f"model.{name.removeprefix('model.')}": tensor for name, tensor in state.items()}
    dcp.save(state, storage_writer=writer, no_dist=True)
    small_files = {CONFIG: config.encode()}
    manifest = _complete(staged, writer.records, small_files, "weights", source)
    return {**manifest, "config": config}


def _write_hf(
    staged: Path, state: Mapping[str, Tensor], source: Source, identity: Identity | None
) -> Manifest:
    """Write a directory for `transformers`.

    If `identity` is None, keep the names and copy the small files of the source.
    """
    staged.mkdir()
    small_files: dict[str, bytes] = {}
    if identity:
        group = with_checkpoint_errors(HostGroup.alone())
        records = write_model(staged, state, identity, group, dtype=None)
        if "config" in source.manifest:
            small_files[CONFIG] = source.manifest["config"].encode()
    else:
        rows = tuple((name, name) for name in state)
        group = HostGroup.alone()
        records = write_export(
            staged, state, rows=rows, tied=(), dtype=None, group=group, index=_files(source)
        )
        small_files = _small_files(source.path)
        if "config.json" in small_files:
            floating = (t.dtype for t in state.values() if t.is_floating_point())
            name = dtype_name(next(floating, torch.float32))
            content = parse_json(small_files["config.json"]) | {"torch_dtype": name, "dtype": name}
            small_files["config.json"] = json.dumps(content, indent=2).encode() + b"\n"
    return _complete(staged, records, small_files, "hf", source)


def _files(source: Source) -> dict[str, str]:
    """Return the file of each tensor of safetensors."""
    assert isinstance(source, SafetensorsSource)
    return {name: tensor.chunks[0].file for name, tensor in source.stored.items()}


def _small_files(folder: Path) -> dict[str, bytes]:
    """Read all files of a Hugging Face directory except weights and manifest."""
    candidates = [*folder.iterdir(), folder / ORIGINAL / "tokenizer.model"]
    files = [path for path in candidates if path.is_file() and "safetensors" not in path.name]
    _check_links(folder, files)
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in files
        if file.name != MANIFEST
    }


def _check_links(folder: Path, files: Iterable[Path]) -> None:
    """Raise CheckpointError for a link that leaves the folder.

    Links to the blobs of the Hugging Face cache are allowed.
    """
    folder = folder.resolve()
    allowed = (folder, folder.parent.parent / "blobs")
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(root) for root in allowed):
            raise CheckpointError(
                f"{file} is a link to {target}, outside the checkpoint. Expected a file: replace "
                "the link with a copy of the file, or remove it"
            )


def _complete(
    staged: Path,
    records: Mapping[str, FileRecord],
    small_files: Mapping[str, bytes],
    kind: str,
    source: Source,
) -> Manifest:
    """Write the small files; return the manifest, which the caller writes last."""
    written = {}
    for name, content in small_files.items():
        (staged / name).parent.mkdir(exist_ok=True)
        written[name] = write_file(staged / name, content)
    files = dict(sorted({**records, **written}.items()))
    return {"kind": kind, "step": source.manifest.get("step", 0), "files": files}
