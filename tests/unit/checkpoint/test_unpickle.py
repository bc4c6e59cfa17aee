"""What `checkpoint/unpickle.py` loads and refuses. Whole commands: tests/faults/test_malice.py."""

from __future__ import annotations

import argparse
import dataclasses
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from tests.faults.trainer import ASSETS
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.unpickle import CheckedReader, load_metadata, load_saved
from torchtitan_like.cli import main as titan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DTYPES = [
    value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and "int" not in name
]


def save_dcp(folder: Path, state: dict[str, Any]) -> Metadata:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=1), no_dist=True)
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return metadata


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_metadata_of_every_format_loads_as_it_is(version: int, protocol: int) -> None:
    file = ASSETS / f"v{version}" / "step-3" / ".metadata"
    expected = pickle.loads(file.read_bytes())
    loaded = load_metadata(pickle.dumps(expected, protocol), file)
    if loaded.storage_meta is not None:  # the folder it was saved in, which is never used as a path
        assert expected.storage_meta is not None
        assert str(loaded.storage_meta.checkpoint_id) == str(expected.storage_meta.checkpoint_id)
        loaded.storage_meta = expected.storage_meta
    assert loaded == expected


@pytest.mark.parametrize("dtype", sorted(set(DTYPES), key=str), ids=str)
def test_every_dtype_loads(tmp_path: Path, dtype: torch.dtype) -> None:
    metadata = save_dcp(tmp_path, {"a": torch.ones(2)})
    metadata.state_dict_metadata["a"].properties.dtype = dtype  # type: ignore[union-attr]
    loaded = load_metadata(pickle.dumps(metadata), tmp_path / ".metadata")
    assert loaded.state_dict_metadata == metadata.state_dict_metadata


def test_a_listed_class_cannot_be_changed() -> None:
    """BUILD sets attributes of whatever is on the stack, a class too."""
    push_class = b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n"
    change = b"\x80\x02" + push_class + b"(N}X\x05\x00\x00\x00extraK\x01stb."
    assert pickle.loads(change) is BytesStorageMetadata
    assert BytesStorageMetadata.extra == 1  # type: ignore[attr-defined]
    del BytesStorageMetadata.extra  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="changes torch's metadata classes"):
        load_metadata(change, Path(".metadata"))
    assert not hasattr(BytesStorageMetadata, "extra")


def _entry(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.items()))


CHANGES: dict[str, Callable[[Metadata], object]] = {
    "outside": lambda m: m.storage_data.update(
        {_entry(m)[0]: dataclasses.replace(_entry(m)[1], relative_path="../x")}
    ),
    "absolute": lambda m: m.storage_data.update({_entry(m)[0]: ("/etc/passwd", 0, 9)}),
    "a huge list": lambda m: m.planner_data.update({"a": ("a", 10**12)}),
    "a negative offset": lambda m: m.storage_data.update({_entry(m)[0]: ("__0_0.distcp", -1, 9)}),
    "an entry of another kind": lambda m: m.state_dict_metadata.update({"a": ("tensor",)}),  # type: ignore[dict-item]
    "no storage": lambda m: setattr(m, "storage_data", None),
    "no planner's paths": lambda m: setattr(m, "planner_data", [1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_metadata_that_is_malformed_is_damage(tmp_path: Path, change: str) -> None:
    metadata = save_dcp(tmp_path, {"a": torch.ones(2), "b": "text"})
    CHANGES[change](metadata)
    with pytest.raises(
        DamagedError, match=r"\.metadata (cannot be read|names '\.\./x'|names '/etc/passwd')"
    ):
        load_metadata(pickle.dumps(metadata), tmp_path / ".metadata")
    for content in (b"", b"\x80", pickle.dumps({"a": 1}), bytes(1000), pickle.dumps(metadata)[:-9]):
        with pytest.raises(DamagedError, match="cannot be read"):
            load_metadata(content, tmp_path / ".metadata")


def test_plain_values_and_tensors_load(tmp_path: Path) -> None:
    state = {
        "weight": torch.nn.Parameter(torch.arange(4.0)),
        "moments": OrderedDict(step=torch.tensor(3), betas=(0.9, 0.95), names=["a", None, True]),
        "data": b"bytes",
        "text": "é",
    }
    torch.save(state, tmp_path / "a.pt")
    loaded = load_saved(tmp_path / "a.pt", tmp_path / "a.pt", mmap=True)
    assert (
        torch.equal(loaded.pop("weight"), torch.arange(4.0)) and loaded["moments"].pop("step") == 3
    )
    assert loaded == {
        "moments": OrderedDict(betas=(0.9, 0.95), names=["a", None, True]),
        "data": b"bytes",
        "text": "é",
    }


def test_tensors_of_torchao_load_where_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros((2, 256), True, 256)
    torch.save({"exp_avg": state}, tmp_path / "a.pt")
    safe = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # as in a process that has not imported it
    try:
        with pytest.raises(CheckpointError, match="asks for torchao"):
            load_saved(tmp_path / "a.pt", tmp_path / "a.pt")
    finally:
        torch.serialization.add_safe_globals(safe)
    assert type(load_saved(tmp_path / "a.pt", tmp_path / "a.pt")["exp_avg"]) is OptimState8bit


def test_a_trusted_file_becomes_a_copy_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron and others save their arguments as an object next to the weights."""
    source, copy = tmp_path / "model.pt", tmp_path / "copy.pt"
    torch.save({"model": {"a": torch.ones(2)}, "args": argparse.Namespace(lr=1), "step": 3}, source)
    argv = ["convert", str(source), str(copy), "--to", "pt"]
    assert titan(["ckpt", *argv]) == 2
    refusal = capsys.readouterr().err
    assert "it asks for argparse.Namespace" in refusal
    assert f"convert {source} COPY --to pt --trust-pickle" in refusal
    assert titan(["ckpt", *argv, "--trust-pickle"]) == 0
    assert "dropped args" in capsys.readouterr().out
    loaded = load_saved(copy, copy)
    assert loaded.keys() == {"model", "step"} and torch.equal(loaded["model"]["a"], torch.ones(2))
    assert titan(["ckpt", *argv[:2], str(tmp_path / "hf"), "--to", "hf", "--trust-pickle"]) == 2
    assert "copy it with --to pt --trust-pickle, then convert" in capsys.readouterr().err


def test_a_trusted_folder_becomes_a_copy_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, copy = tmp_path / "step-3", tmp_path / "copy"
    metadata = save_dcp(source, {"a": torch.ones(2), "args": argparse.Namespace(lr=1), "step": 3})
    metadata.version = argparse.Namespace()  # type: ignore[assignment]
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    argv = ["convert", str(source), str(copy), "--to", "dcp"]
    assert titan(["ckpt", *argv]) == 2
    assert f"convert {source} COPY --to dcp --trust-pickle" in capsys.readouterr().err
    assert titan(["ckpt", *argv, "--trust-pickle"]) == 0
    assert "dropped args" in capsys.readouterr().out
    assert CheckedReader(copy).read_metadata().state_dict_metadata.keys() == {"a", "step"}
