"""`checkpoint/dcp_source.py` reads folders of other programs; native steps: test_dcp_storage.py."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _extension

from torchtitan_like.checkpoint.dcp_source import DcpSource
from torchtitan_like.checkpoint.errors import DamagedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE: dict[str, Any] = {
    "a": torch.arange(6.0).view(2, 3),
    "nested": {"list": [torch.tensor(1), "text"], "empty": torch.empty(0, 2)},
}


def save(folder: Path, **options: Any) -> None:
    writer = dcp.FileSystemWriter(folder, thread_count=1, **options)
    dcp.save(STATE, storage_writer=writer, no_dist=True)


def assert_is_state(loaded: Any) -> None:
    assert torch.equal(loaded["a"], STATE["a"])
    assert torch.equal(loaded["nested"]["empty"], STATE["nested"]["empty"])
    assert loaded["nested"]["list"] == [torch.tensor(1), "text"]


def test_all_entries_are_read_as_they_were_nested(tmp_path: Path) -> None:
    save(tmp_path)
    source = DcpSource(tmp_path)
    source.check()
    assert_is_state(source.read_all())
    assert source.read("nested.list.1") == "text"
    selected = source.select({"b": "a"})
    assert (*selected.stored, *selected.object_names) == ("b",)
    assert torch.equal(selected.read("b"), STATE["a"])


class _Inverted(_extension.StreamTransformExtension):
    """Inverts every byte, in place of a compression that is not installed."""

    @staticmethod
    def registry_name() -> str:
        return "test.inverted"

    @staticmethod
    def from_descriptor(version: str) -> _Inverted:
        return _Inverted()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        class Stream:
            def write(self, content: Any) -> int:
                return int(output.write(bytes(255 - byte for byte in bytes(content))))

            def flush(self) -> None:
                output.flush()

            def close(self) -> None:
                pass

        return Stream()

    def transform_from(self, input: Any) -> Any:
        class Stream:
            def seekable(self) -> bool:
                return False

            def read(self) -> bytes:
                return bytes(255 - byte for byte in input.read())

        return Stream()


def test_transforms_of_torch_are_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, _extensions=[_Inverted()])
    with pytest.raises(DamagedError, match="Unknown extension name='test.inverted'"):
        DcpSource(tmp_path).read_all()
    monkeypatch.setattr(_extension, "ZStandard", _Inverted)  # the only one that torch registers
    assert_is_state(DcpSource(tmp_path).read_all())


def test_an_item_of_another_shape_or_kind_is_damage(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    locations = metadata.storage_data
    first, scalar, text = (
        next(index for index in locations if index.fqn == name)
        for name in ("a", "nested.list.0", "nested.list.1")
    )
    for other, reason in ((scalar, r"has \[\] at"), (text, "a str instead of a tensor")):
        metadata.storage_data = locations | {first: locations[other]}
        file.write_bytes(pickle.dumps(metadata))
        with pytest.raises(DamagedError, match=reason):
            DcpSource(tmp_path).read("a")
