"""Any checkpoint as names and tensors, read one at a time; compared, and converted into any other format.

One process holds the weights of a model once or twice: what runs on many ranks is in `loading` and `hf`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal
from zipfile import is_zipfile

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_flatten, tree_map_only

from torchtitan_like.checkpoint.dcp_storage import ExtentReader, ExtentWriter, load_planned, unwrap
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.extents import FileRecord, find_damage, write_file
from torchtitan_like.checkpoint.hf.direct import write_export
from torchtitan_like.checkpoint.hf.folder import ORIGINAL, write_model
from torchtitan_like.checkpoint.hf.safetensors_source import open_safetensors, read_box
from torchtitan_like.checkpoint.loading import Identity, load_states
from torchtitan_like.checkpoint.overflow import warn_of_overflow
from torchtitan_like.checkpoint.publishing import StagedOutput
from torchtitan_like.checkpoint.start import Start, format_of
from torchtitan_like.checkpoint.stateful import ModelState
from torchtitan_like.checkpoint.step_folders import (
    CONFIG,
    MANIFEST,
    Manifest,
    file_records,
    read_manifest,
)
from torchtitan_like.checkpoint.unpickle import (
    CheckedEmptyPlanner,
    CheckedPlanner,
    CheckedReader,
    load_saved,
)
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.distributed.initialize import materialize
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import links, slices, their_shapes
from torchtitan_like.util.reading import parse_json

Kind = Literal["native", "hf", "dcp", "pt"]
# Whose names the tensors have. Within one family they are kept; from one to another the model's tables translate.
FAMILIES: dict[Kind, str] = {"native": "ours", "hf": "hf", "dcp": "torch", "pt": "torch"}
BLOCK = 2**22  # elements compared at a time


@dataclass(frozen=True)
class Contents:
    """A checkpoint of any format. `forms`: name -> (shape, dtype) of its tensors, under the names they have there.

    read      one tensor, or object, by name
    whole     everything, nested as it was saved; of a step of ours the weights alone
    objects   names of what is no tensor
    files     of safetensors: name -> file
    """

    path: Path
    kind: Kind
    manifest: Manifest
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    read: Callable[[str], Any]
    whole: Callable[[], Any]
    objects: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return FAMILIES[self.kind]


def open_contents(path: Path, *, trust_pickle: bool = False) -> Contents:
    """Read headers and indices. Raises CheckpointError; DamagedError where they are not what was written.

    trust_pickle: unpickle whatever the checkpoint names, which may run code of its author.
    """
    if path.is_file():
        return _open_pt(path, trust_pickle)
    found = format_of(path)
    if found == "hf":
        return _open_hf(path)
    if found in ("step", "dcp"):
        return _open_dcp(path, "native" if found == "step" else "dcp", trust_pickle)
    raise CheckpointError(
        f"{path} is no checkpoint that can be read here: give a step-N, a folder of safetensors or of "
        "torch.distributed.checkpoint, or a .pt file"
    )


@contextmanager
def _told_plainly(path: Path) -> Iterator[None]:
    """What torch raises where bytes are not what they should be is of many kinds; as errors of ours."""
    try:
        yield
    except CheckpointException as problem:  # no Exception
        raise unwrap(problem) from problem
    except (CheckpointError, OSError):
        raise
    except Exception as problem:
        raise CheckpointError(f"{path}: {type(problem).__name__}: {problem}") from problem


def _open_dcp(path: Path, kind: Kind, trust: bool) -> Contents:
    manifest = read_manifest(path) or {}
    records = file_records(manifest)
    reader: Any = ExtentReader(path, records, trust=trust) if records else CheckedReader(path, trust=trust)
    with _told_plainly(path):
        stored = reader.read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}

    def read(name: str) -> Any:
        entry = tensors.get(name)
        target = {name: None if entry is None else torch.empty(entry.size, dtype=entry.properties.dtype)}
        with _told_plainly(path):
            load_planned(target, reader, CheckedPlanner(path, trust=trust))
        return target[name]

    def whole() -> Any:
        if kind == "native":
            return {name: read(name) for name in tensors if name.startswith("model.")}
        state: dict[str, Any] = {}
        with _told_plainly(path):
            load_planned(state, reader, CheckedEmptyPlanner(path, trust=trust))
        return state

    forms = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in tensors.items()}
    return Contents(path, kind, manifest, forms, read, whole, tuple(name for name in stored if name not in tensors))


def _open_hf(path: Path) -> Contents:
    stored = open_safetensors(path, quantized=False).stored

    def read(name: str) -> Tensor:
        with open(path / stored[name].file, "rb", buffering=0) as file:
            return read_box(file, stored[name], tuple((0, n, 1) for n in stored[name].shape))

    def whole() -> dict[str, Tensor]:
        for damage in find_damage(path, file_records(manifest)):  # of an export of ours the hashes are known
            raise damage
        return {name: read(name) for name in stored}

    manifest = read_manifest(path) or {}
    forms = {name: (tuple(entry.shape), entry.dtype) for name, entry in stored.items()}
    files = {name: entry.file for name, entry in stored.items()}
    return Contents(path, "hf", manifest, forms, read, whole, files=files)


def _open_pt(path: Path, trust: bool) -> Contents:
    state = load_saved(path, path, trust=trust, mmap=is_zipfile(path))
    leaves = dict(_leaves(state))
    tensors = {name: value for name, value in leaves.items() if isinstance(value, Tensor)}
    forms = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    objects = tuple(name for name in leaves if name not in tensors)
    return Contents(path, "pt", {}, forms, leaves.__getitem__, lambda: state, objects)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def difference(a: Tensor, b: Tensor) -> str | None:
    """In what two tensors differ: dtype and shape, or the largest absolute difference; None: equal bit for bit."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{short(a.dtype)} {list(a.shape)} -> {short(b.dtype)} {list(b.shape)}"
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
    if torch.equal(bits[0], bits[1]):
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    blocks = zip(a.reshape(-1).split(BLOCK), b.reshape(-1).split(BLOCK), strict=True)
    largest = torch.stack([(x.to(wide) - y.to(wide)).abs().max() for x, y in blocks]).max()  # NaN stays NaN
    return f"max abs difference {largest.item():.3e}"


def object_difference(a: Any, b: Any) -> str | None:
    """Both in short, where they differ; None: they are equal, with all tensors that are in them."""
    (values, form), (others, other_form) = tree_flatten(a), tree_flatten(b)
    if form == other_form and all(
        difference(x, y) is None
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else pickle.dumps(x) == pickle.dumps(y)  # with == NaN differs from itself, and an array has many answers
        for x, y in zip(values, others, strict=True)
    ):
        return None
    return f"{reprlib.repr(a)} -> {reprlib.repr(b)}"


def short(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


def our_weights(source: Contents, identity: Identity) -> dict[str, Tensor]:
    """The model's weights under our names, checked to be all of them. Raises CheckpointError."""
    if source.kind == "native":
        return {name.removeprefix("model."): tensor for name, tensor in source.whole().items()}
    with torch.device("meta"):
        model = identity.spec.build(identity.args)
    stored = {dtype for _, dtype in source.forms.values() if dtype.is_floating_point}
    # Of several the one that loses nothing: the few tensors kept in a wider one are those that need it.
    dtype = reduce(torch.promote_types, stored or {torch.float32})
    model = model.to(dtype)
    # Not to_empty: that makes two of a tied weight, one of which nothing fills.
    materialize(model, torch.device("cpu"))
    weights = ModelState([model])
    start = Start(
        "warm",
        0,
        source.path,
        "named on the command line",
        format="meta" if source.kind == "pt" else source.kind,
        manifest=source.manifest or None,
    )
    load_states(start, {"model": weights}, Votes(HostGroup.alone()), identity)
    return {name: tensor.detach() for name, tensor in weights.state_dict().items()}


def _meta_weights(ours: Mapping[str, Tensor], identity: Identity) -> dict[str, Tensor]:
    """Our weights as TorchTitan and Meta name them and order their rows."""
    spec, args = identity.spec, identity.args
    if spec.meta_names is None:
        raise CheckpointError(f"of {spec.name} no checkpoints of TorchTitan or Meta are known")
    found = links(spec.meta_names(args), {name: tuple(tensor.shape) for name, tensor in ours.items()}, spec.tied(args))
    dtypes = {link.theirs: ours[link.ours].dtype for link in found}
    theirs = {name: torch.empty(shape, dtype=dtypes[name]) for name, shape in their_shapes(found).items()}
    for link in found:
        part = ours[link.ours][slices(link.our_box)]
        target = theirs[link.theirs][slices(link.their_box)]
        target.copy_((part.mT if link.transposed else part).reshape(target.shape))
    return theirs


def convert(
    source: Contents, out: Path, to: Kind, *, dtype: torch.dtype | None, identity: Identity | None, config: str | None
) -> list[str]:
    """Write `source` as `out`, which appears when it is complete. Floating-point tensors become `dtype` (None: stay).

    identity: the model, needed when the two formats are of different families. config: the TOML for a native step.
    Every tensor is saved without what it may be a view of. Returns the names of what is left out, because a checkpoint
    that holds it would be refused. Raises CheckpointError, OSError.
    """
    with StagedOutput(out) as output:
        output.refuse_existing()
        return _convert(source, output, to, dtype=dtype, identity=identity, config=config)


def _convert(
    source: Contents,
    output: StagedOutput,
    to: Kind,
    *,
    dtype: torch.dtype | None,
    identity: Identity | None,
    config: str | None,
) -> list[str]:
    if source.family == FAMILIES[to]:
        state, identity = source.whole(), None if to == "hf" else identity
        state, left_out = _without_refused(state, source.path)
    else:
        assert identity is not None
        left_out = []
        state = our_weights(source, identity)
        state = _meta_weights(state, identity) if FAMILIES[to] == "torch" else state

    def converted(tensor: Tensor) -> Tensor:
        changed = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        if changed is tensor:
            return changed.clone(memory_format=torch.contiguous_format)
        return changed

    warn_of_overflow(dict(_leaves(state)), dtype)
    state = tree_map_only(Tensor, converted, state)
    staged, manifest = output.path, None
    with _told_plainly(output.final):
        if to == "pt":
            _write_pt(staged, state)
        elif to == "dcp":
            writer = dcp.FileSystemWriter(staged, thread_count=1)
            dcp.save(state, storage_writer=writer, no_dist=True)
        elif to == "native":
            assert config is not None
            manifest = _write_native(staged, state, source, config)
        else:
            manifest = _write_hf(staged, state, source, identity)
    if manifest is not None:
        for damage in find_damage(staged, manifest["files"]):
            raise damage
    output.publish(manifest)
    return left_out


def _without_refused(state: Any, path: Path, prefix: str = "") -> tuple[Any, list[str]]:
    """Leave out of nested mappings what `load_saved` would refuse; returns its dotted names too."""
    if not isinstance(state, Mapping):
        return state, [] if _is_loadable(state, path) else [prefix]
    kept: dict[Any, Any] = OrderedDict() if type(state) is OrderedDict else {}
    left_out: list[str] = []
    for key, value in state.items():
        part, refused = _without_refused(value, path, f"{prefix}.{key}" if prefix else str(key))
        left_out += refused
        if isinstance(value, Mapping) or not refused:
            kept[key] = part
    return kept, left_out


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


def _check_links(folder: Path, files: Iterable[Path]) -> None:
    """Raise CheckpointError for a link that leads out of the folder, and not to the blobs of the Hub's cache."""
    folder = folder.resolve()
    allowed = (folder, folder.parent.parent / "blobs")
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(place) for place in allowed):
            raise CheckpointError(
                f"{file} is a link to {target}, outside of the checkpoint: it is not copied. Put a copy of that file "
                "in its place, or remove the link"
            )


def _write_pt(staged: Path, state: Any) -> None:
    with open(staged, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _write_native(
    staged: Path, state: Mapping[str, Tensor], source: Contents, config: str
) -> Manifest:
    """A step with weights alone, to be named in `checkpoint.initial_load_path`."""
    staged.mkdir()
    writer = ExtentWriter(staged, 0)
    state = {f"model.{name.removeprefix('model.')}": tensor for name, tensor in state.items()}
    dcp.save(state, storage_writer=writer, no_dist=True)
    small_files = {CONFIG: config.encode()}
    more = {"config": config}
    return _complete(staged, writer.records, small_files, "weights", source, more)


def _write_hf(
    staged: Path, state: Mapping[str, Tensor], source: Contents, identity: Identity | None
) -> Manifest:
    """A directory for `transformers`; without a model, one with the names and small files of the source."""
    staged.mkdir()
    others: dict[str, bytes] = {}
    if identity:
        votes = Votes(HostGroup.alone())
        records = write_model(staged, state, identity, votes, dtype=None)
        if "config" in source.manifest:
            others[CONFIG] = source.manifest["config"].encode()
    else:
        dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
        names = tuple((name, name) for name in state)
        records = write_export(
            staged, state, rows=names, tied=(), dtype=None, group=HostGroup.alone(), index=source.files
        )
        small = [*source.path.iterdir(), source.path / ORIGINAL / "tokenizer.model"]
        files = [file for file in small if file.is_file() and "safetensors" not in file.name]
        _check_links(source.path, files)
        others = {
            file.relative_to(source.path).as_posix(): file.read_bytes()
            for file in files
            if file.name != MANIFEST
        }
        if "config.json" in others:
            types = {"torch_dtype": short(dtype), "dtype": short(dtype)}
            others["config.json"] = json.dumps(parse_json(others["config.json"]) | types, indent=2).encode() + b"\n"
    return _complete(staged, records, others, "hf", source, {})


def _complete(
    staged: Path,
    records: Mapping[str, FileRecord],
    others: Mapping[str, bytes],
    kind: str,
    source: Contents,
    more: Mapping[str, str],
) -> Manifest:
    """Write the small files; returns the manifest, which is to be written last."""
    written = {}
    for name, content in others.items():
        (staged / name).parent.mkdir(exist_ok=True)
        written[name] = write_file(staged / name, content)
    files = dict(sorted({**records, **written}.items()))
    return {"kind": kind, "step": source.manifest.get("step", 0), "files": files, **more}
