"""`checkpoint/unpickle.py` and `dcp_metadata.py` load plain data and refuse code.

tests/faults/test_malice.py tests whole commands.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from tests.faults.malice import Call
from tests.faults.trainer import ASSETS
from torchtitan_like.checkpoint.dcp_metadata import (
    CLASSES,
    DTYPE_BYTES,
    FILE_CLASSES,
    GLOBALS,
    load_metadata,
    read_metadata,
)
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.tools.open_checkpoint import open_checkpoint
from torchtitan_like.checkpoint.unpickle import load_saved
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


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_metadata_is_read_as_by_torch(protocol: int) -> None:
    file = ASSETS / "v3/step-3/.metadata"
    expected = pickle.loads(file.read_bytes())
    metadata = load_metadata(pickle.dumps(expected, protocol), file)
    assert [*metadata.tensors, *metadata.objects] and {
        *metadata.tensors,
        *metadata.objects,
    } == expected.state_dict_metadata.keys()
    locations = {
        MetadataIndex(name, chunk.offsets): (chunk.file, chunk.start, chunk.length)
        for name, entry in metadata.tensors.items()
        for chunk in entry.chunks
    } | {
        MetadataIndex(name): (chunk.file, chunk.start, chunk.length)
        for name, chunk in metadata.objects.items()
    }
    assert locations == {
        index: (info.relative_path, info.offset, info.length)
        for index, info in expected.storage_data.items()
    }
    for name, entry in metadata.tensors.items():
        stored = expected.state_dict_metadata[name]
        assert (entry.shape, f"torch.{entry.dtype}") == (stored.size, str(stored.properties.dtype))
        assert [(c.offsets, c.sizes) for c in entry.chunks] == [
            (c.offsets, c.sizes) for c in stored.chunks
        ]
    assert metadata.paths == expected.planner_data


class EarlyPickler(pickle.Pickler):
    """Writes an enum by its name, as Python 3.11.2 does."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_metadata_of_an_early_release_of_python_3_11_is_read(protocol: int) -> None:
    file = ASSETS / "v3/step-3/.metadata"
    EarlyPickler(early := io.BytesIO(), protocol).dump(pickle.loads(file.read_bytes()))
    assert b"getattr" in early.getvalue()
    assert load_metadata(early.getvalue(), file) == load_metadata(file.read_bytes(), file)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES), key=str), ids=str)
def test_every_dtype_loads(tmp_path: Path, dtype: torch.dtype) -> None:
    metadata = save_dcp(tmp_path, {"a": torch.ones(2)})
    metadata.state_dict_metadata["a"].properties.dtype = dtype  # type: ignore[union-attr]
    loaded = load_metadata(pickle.dumps(metadata), tmp_path / ".metadata")
    assert f"torch.{loaded.tensors['a'].dtype}" == str(dtype)


@pytest.mark.parametrize(
    "name",
    [
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("pathlib", "PosixPath"),
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch.serialization", "_get_layout"),
        ("builtins", "getattr"),
    ],
    ids=".".join,
)
def test_a_listed_global_cannot_be_changed(name: tuple[str, str]) -> None:
    """The BUILD instruction sets attributes of any object on the stack, including classes."""
    push_global = f"c{name[0]}\n{name[1]}\n".encode()
    change = b"\x80\x02" + push_global + b"(N}X\x05\x00\x00\x00extraK\x01stb."
    with pytest.raises(DamagedError, match="cannot be read: .*(set|attrib)"):
        load_metadata(change, Path(".metadata"))
    assert not hasattr(GLOBALS[name], "extra")


def test_the_unrestricted_pickle_changes_a_class() -> None:
    """This shows that the previous test can fail."""
    change = b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n(N}S'extra'\nI1\nstb."
    assert pickle.loads(change) is BytesStorageMetadata
    assert BytesStorageMetadata.extra == 1  # type: ignore[attr-defined]
    del BytesStorageMetadata.extra  # type: ignore[attr-defined]


def test_the_table_has_every_class_and_dtype_of_torch() -> None:
    dtypes = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {name.removeprefix("torch.") for name in dtypes} <= DTYPE_BYTES.keys()
    for module, names in (("metadata", CLASSES), ("filesystem", FILE_CLASSES)):
        assert not set(names) - vars(import_module(f"torch.distributed.checkpoint.{module}")).keys()
    for name, num_bytes in DTYPE_BYTES.items():
        if hasattr(torch, name):  # some are newer than the oldest supported torch
            assert getattr(torch, name).itemsize == num_bytes, name


def test_metadata_of_a_foreign_folder_is_read(tmp_path: Path) -> None:
    save_dcp(tmp_path, {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": {"c": "text"}})
    metadata = read_metadata(tmp_path)
    assert [(n, e.shape, e.dtype) for n, e in metadata.tensors.items()] == [
        ("a", (2, 3), "bfloat16")
    ]
    assert metadata.objects.keys() == {"b.c"} and metadata.paths["b.c"] == ("b", "c")


def _entry(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.items()))


CHANGES: dict[str, Callable[[Metadata], object]] = {
    "a path outside the folder": lambda m: m.storage_data.update(
        {_entry(m)[0]: dataclasses.replace(_entry(m)[1], relative_path="../x")}
    ),
    "an absolute path": lambda m: m.storage_data.update({_entry(m)[0]: ("/etc/passwd", 0, 9)}),
    "a huge list": lambda m: m.planner_data.update({"a": ("a", 10**12)}),
    "a negative offset": lambda m: m.storage_data.update({_entry(m)[0]: ("__0_0.distcp", -1, 9)}),
    "an entry of another kind": lambda m: m.state_dict_metadata.update({"a": ("tensor",)}),  # type: ignore[dict-item]
    "no storage": lambda m: setattr(m, "storage_data", None),
    "a tensor without bytes": lambda m: m.storage_data.pop(MetadataIndex("a", (0,))),
    "no planner data": lambda m: setattr(m, "planner_data", [1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_malformed_metadata_is_damage(tmp_path: Path, change: str) -> None:
    metadata = save_dcp(tmp_path, {"a": torch.ones(2), "b": "text"})
    CHANGES[change](metadata)
    with pytest.raises(
        DamagedError, match=r"\.metadata (cannot be read|names '\.\./x'|names '/etc/passwd')"
    ):
        load_metadata(pickle.dumps(metadata), tmp_path / ".metadata")
    for content in (b"", b"\x80", pickle.dumps({"a": 1}), bytes(1000), pickle.dumps(metadata)[:-9]):
        with pytest.raises(DamagedError, match="cannot be read"):
            load_metadata(content, tmp_path / ".metadata")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80\x02Nr\x00\x00\x00\x08.", "it uses the memo index 134,217,728, but has 9 bytes"),
        (b"\x80\x02X\x01\x00\x00\x00r\x8c\x01rNr\xff\xff\xff\xff.", "memo index 4,294,967,295"),
        (b"\x80\x02Np134217728\n.", "it has the instruction 'p'"),
        (
            b"\x80\x02cpathlib\nPurePath\nq\0X\x01\0\0\0a\x85R" + b"q\1h\0h\1h\1\x86R" * 40 + b".",
            "a part of a path is not a string",
        ),
    ],
)
def test_small_metadata_of_much_memory_is_damage(content: bytes, reason: str) -> None:
    with pytest.raises(DamagedError, match=reason):
        load_metadata(content, Path(".metadata"))


@pytest.mark.parametrize("is_zip", [True, False])
def test_bytearray_of_a_size_is_damage(tmp_path: Path, is_zip: bool) -> None:
    file = tmp_path / "a.pt"
    for size in (2**40, torch.tensor(2**40)):
        torch.save({"a": Call(bytearray, size)}, file, _use_new_zipfile_serialization=is_zip)
        with pytest.raises(DamagedError, match="a bytearray of (int|Tensor)"):
            load_saved(file, file)
    torch.save({"a": bytearray(b"\xff"), "b": bytearray()}, file)
    assert load_saved(file, file) == {"a": b"\xff", "b": b""}


def test_tensor_that_repeats_its_numbers_is_damage(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save({"a": torch.zeros(1).expand(2**40)}, file)
    with pytest.raises(DamagedError, match="4,398,046,511,104 bytes in 4"):
        open_checkpoint(file)


def test_compressed_tensor_is_damage(tmp_path: Path) -> None:
    source, file = tmp_path / "source.pt", tmp_path / "a.pt"
    torch.save(torch.zeros(100_000), source)
    with ZipFile(source) as archive, ZipFile(file, "w", ZIP_DEFLATED) as copy:
        for member in archive.infolist():
            copy.writestr(member.filename, archive.read(member))
    with pytest.raises(DamagedError, match="400,[0-9]{3} bytes are compressed into"):
        load_saved(file, file)


def test_dicts_that_contain_others_twice_or_themselves_are_damage(tmp_path: Path) -> None:
    doubled: dict[str, Any] = {"a": torch.ones(1)}
    for _ in range(40):
        doubled = {"a": doubled, "b": doubled}
    endless: dict[str, Any] = {}
    endless["a"] = endless
    for state, reason in ((doubled, "bytes, but more values"), (endless, "RecursionError")):
        torch.save(state, tmp_path / "a.pt")
        with pytest.raises(DamagedError, match=reason):
            open_checkpoint(tmp_path / "a.pt")


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


def test_torchao_tensors_load_if_torchao_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros((2, 256), True, 256)
    torch.save({"exp_avg": state}, tmp_path / "a.pt")
    safe = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # as in a process that has not imported it
    try:
        with pytest.raises(CheckpointError, match="refers to torchao"):
            load_saved(tmp_path / "a.pt", tmp_path / "a.pt")
    finally:
        torch.serialization.add_safe_globals(safe)
    assert type(load_saved(tmp_path / "a.pt", tmp_path / "a.pt")["exp_avg"]) is OptimState8bit


def test_trust_pickle_converts_a_file_to_a_loadable_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron and other programs save their arguments as an object next to the weights."""
    source, copy = tmp_path / "model.pt", tmp_path / "copy.pt"
    torch.save({"model": {"a": torch.ones(2)}, "args": argparse.Namespace(lr=1), "step": 3}, source)
    argv = ["export", str(source), str(copy), "--to", "pt"]
    assert titan(["ckpt", *argv]) == 2
    refusal = capsys.readouterr().err
    assert "it refers to argparse.Namespace" in refusal
    assert f"export {source} COPY --to pt --trust-pickle" in refusal
    assert titan(["ckpt", *argv, "--trust-pickle"]) == 0
    assert "dropped args" in capsys.readouterr().out
    loaded = load_saved(copy, copy)
    assert loaded.keys() == {"model", "step"} and torch.equal(loaded["model"]["a"], torch.ones(2))
    assert titan(["ckpt", *argv[:2], str(tmp_path / "hf"), "--to", "hf", "--trust-pickle"]) == 2
    assert "copy it with --to pt --trust-pickle, then convert" in capsys.readouterr().err


def test_trust_pickle_converts_a_folder_to_a_loadable_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, copy = tmp_path / "step-3", tmp_path / "copy"
    metadata = save_dcp(source, {"a": torch.ones(2), "args": argparse.Namespace(lr=1), "step": 3})
    metadata.version = argparse.Namespace()  # type: ignore[assignment]
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    argv = ["export", str(source), str(copy), "--to", "dcp"]
    assert titan(["ckpt", *argv]) == 2
    assert f"export {source} COPY --to dcp --trust-pickle" in capsys.readouterr().err
    assert titan(["ckpt", *argv, "--trust-pickle"]) == 0
    assert "dropped args" in capsys.readouterr().out
    metadata = read_metadata(copy)
    assert {*metadata.tensors, *metadata.objects} == {"a", "step"}
