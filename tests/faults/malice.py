"""Tables of malicious checkpoints: calls in pickles, and locations of a pickle in a checkpoint.

Every executed call creates a marker file. `PAYLOADS` are the calls. The functions in `LOCATIONS`
write a whole checkpoint around one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import operator
import os
import pickle
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from tests.faults.trainer import ASSETS
from tests.harness.extents import record_file
from torchtitan_like.checkpoint.step_folders import read_manifest, write_manifest

MODULE = "malicious_module"  # writes its marker when it is imported


class Call:
    """An object whose unpickling calls `function`. `function` may be another `Call`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments

    def __call__(self) -> None:
        raise AssertionError("pickle requires a callable but must not call it")


def _import_module(marker: Path) -> Any:
    return Call(importlib.import_module, MODULE)


def _run_path(marker: Path) -> Any:
    return Call(runpy.run_path, str(marker.with_name(f"{MODULE}.py")))


# Name of the first class or function that the pickle requests -> the object to be pickled.
PAYLOADS: dict[str, Callable[[Path], Any]] = {
    "posix.system": lambda marker: Call(os.system, f"touch {marker}"),
    "builtins.eval": lambda marker: Call(eval, f"open({str(marker)!r}, 'w').close()"),
    "builtins.exec": lambda marker: Call(exec, f"open({str(marker)!r}, 'w').close()"),
    "builtins.getattr": lambda marker: Call(
        Call(getattr, Call(importlib.import_module, "os"), "mkdir"), str(marker)
    ),
    "builtins.open": lambda marker: Call(open, str(marker), "w"),
    "subprocess.Popen": lambda marker: Call(subprocess.Popen, ["touch", str(marker)]),
    "functools.partial": lambda marker: Call(functools.partial(os.mkdir, str(marker))),
    "operator.methodcaller": lambda marker: Call(operator.methodcaller("touch"), marker),
    "importlib.import_module": _import_module,
    "runpy.run_path": _run_path,
    "builtins.list": lambda marker: Call(list, Call(map, os.mkdir, [str(marker)])),
    "numpy.load": lambda marker: Call(np.load, _saved(marker), None, True),
}


def _saved(marker: Path) -> str:
    path = marker.with_name("inner.npy")
    np.save(path, np.array([Call(os.mkdir, str(marker))], dtype=object), allow_pickle=True)
    return str(path)


def write_module(marker: Path) -> None:
    """Write the module that some payloads import next to the marker."""
    marker.with_name(f"{MODULE}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    sys.modules.pop(MODULE, None)


# ---- locations: each writes a checkpoint into the new `folder` and returns the path for a command

WriteCheckpoint = Callable[[Path, Any], Path]


def _native(folder: Path) -> tuple[Path, Metadata]:
    step = shutil.copytree(ASSETS / "v3/step-3", folder / "step-3")
    return step, pickle.loads((step / ".metadata").read_bytes())


def _seal(step: Path, metadata: Any) -> Path:
    """Write `.metadata`, and a new manifest with the hashes of the changed files."""
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = read_manifest(step)
    assert manifest is not None
    files = {name: dataclasses.asdict(record_file(step / name)) for name in manifest["files"]}
    (step / "manifest.json").unlink()
    write_manifest(step, {**manifest, "files": files})
    return step


def _metadata(change: Callable[[Metadata, Any], Any]) -> WriteCheckpoint:
    def write(folder: Path, payload: Any) -> Path:
        step, metadata = _native(folder)
        return _seal(step, change(metadata, payload) or metadata)

    return write


def _set(key: str) -> Callable[[Metadata, Any], None]:
    return lambda metadata, payload: setattr(metadata, key, payload)


def _as_entry(metadata: Metadata, payload: Any) -> None:
    metadata.state_dict_metadata["model.extra"] = payload


def _as_dtype(metadata: Metadata, payload: Any) -> None:
    metadata.state_dict_metadata["model.norm.weight"].properties.dtype = payload


def _item(name: str) -> WriteCheckpoint:
    """Replace item `name` with a payload written by `torch.save`."""

    def write(folder: Path, payload: Any) -> Path:
        step, metadata = _native(folder)
        index = next(index for index in metadata.storage_data if index.fqn == name)
        storage_info = metadata.storage_data[index]
        saved = _torch_save(payload)
        offset = _append(step / storage_info.relative_path, saved)
        metadata.storage_data[index] = dataclasses.replace(
            storage_info, offset=offset, length=len(saved)
        )
        return _seal(step, metadata)

    return write


def _append(path: Path, content: bytes) -> int:
    before = path.read_bytes()
    before += bytes(-len(before) % 64)
    path.write_bytes(before + content)
    return len(before)


def _torch_save(payload: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(payload, file, **options)
    return file.getvalue()


def _foreign(change: Callable[[Path, Metadata, Any], None]) -> WriteCheckpoint:
    """Write a DCP folder in TorchTitan's format."""

    def write(folder: Path, payload: Any) -> Path:
        state = {
            "tok_embeddings.weight": torch.ones(32, 4),
            "norm.weight": torch.ones(4),
            "train_state": {"step": 3},
        }
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=1), no_dist=True)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(folder, metadata, payload)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return folder

    return write


def _foreign_item(name: str) -> WriteCheckpoint:
    def change(folder: Path, metadata: Metadata, payload: Any) -> None:
        metadata.state_dict_metadata.setdefault(name, BytesStorageMetadata())
        index = next(
            (index for index in metadata.storage_data if index.fqn == name), MetadataIndex(name)
        )
        storage_info = next(iter(metadata.storage_data.values()))
        saved = _torch_save(payload)
        offset = _append(folder / storage_info.relative_path, saved)
        metadata.storage_data[index] = dataclasses.replace(
            storage_info, offset=offset, length=len(saved)
        )
        metadata.planner_data.setdefault(name, (name,))

    return _foreign(change)


def _pt(name: str, content: Callable[[Any], bytes]) -> WriteCheckpoint:
    def write(folder: Path, payload: Any) -> Path:
        folder.mkdir(parents=True)
        (folder / name).write_bytes(content(payload))
        return folder / name if name.endswith(".pt") else folder

    return write


def _state(payload: Any) -> dict[str, Any]:
    return {"norm.weight": torch.ones(4), "extra": [payload]}


LOCATIONS: dict[str, WriteCheckpoint] = {
    "native: .metadata as a whole": _metadata(lambda metadata, payload: payload),
    "native: planner data": _metadata(_set("planner_data")),
    "native: storage meta": _metadata(_set("storage_meta")),
    "native: version": _metadata(_set("version")),
    "native: an entry": _metadata(_as_entry),
    "native: a dtype": _metadata(_as_dtype),
    "native: a string": _item("lr_scheduler.json"),
    "native: the position": _item("train_state.json"),
    "foreign: planner data": _foreign(
        lambda folder, metadata, payload: setattr(metadata, "planner_data", payload)
    ),
    "foreign: storage data": _foreign(
        lambda folder, metadata, payload: setattr(metadata, "storage_data", payload)
    ),
    "foreign: a tensor": _foreign_item("norm.weight"),
    "foreign: a value": _foreign_item("train_state.step"),
    "foreign: _extra_state": _foreign_item("layers.0._extra_state"),
    ".pt": _pt("model.pt", lambda payload: _torch_save(_state(payload))),
    ".pt of an older torch": _pt(
        "model.pt",
        lambda payload: _torch_save(_state(payload), _use_new_zipfile_serialization=False),
    ),
    ".pt that is a plain pickle": _pt(
        "model.pt", lambda payload: pickle.dumps({"extra": payload}, 2)
    ),
    "consolidated.00.pth": _pt("consolidated.00.pth", lambda payload: _torch_save(_state(payload))),
}
