"""`checkpoint/dcp_source.py` reads folders of other programs; native steps: test_dcp_storage.py."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from torchtitan_like.checkpoint.dcp_source import DcpSource
from torchtitan_like.checkpoint.errors import DamagedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE: dict[str, Any] = {
    "step": 3,
    "a": torch.arange(6.0).view(2, 3),
    "nested": {"list": [torch.tensor(1), "text"], "empty": torch.empty(0, 2)},
}


def save(folder: Path) -> None:
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(folder, thread_count=1), no_dist=True)


def assert_is_state(loaded: Any) -> None:
    assert [*loaded] == [*STATE] and loaded["step"] == 3
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


def test_transforms_of_torch_are_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is inverted, in place of a compression that is not installed."""

    def invert(content: bytes) -> bytes:
        return bytes(255 - byte for byte in content)

    save(tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(invert(file.read_bytes()))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for location in metadata.storage_data.values():
        location.transform_descriptors = ("test.inverted/1",)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="Unknown extension name='test.inverted'"):
        DcpSource(tmp_path).read_all()
    extension = Mock(
        spec=StreamTransformExtension,
        transform_from=lambda stream: io.BytesIO(invert(stream.read())),
    )
    monkeypatch.setattr(ExtensionRegistry, "from_descriptor_list", lambda *_: [extension])
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
