"""Complete steps are recognized, damage is reported, and stale folders are renamed or removed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.folders import SHARD, flip_bit, make_steps
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.step_folders import (
    all_steps,
    file_records,
    published_steps,
    read_manifest,
    remove_stale_stages,
    supersede_later,
    write_manifest,
)
from torchtitan_like.util.extents import FileRecord
from torchtitan_like.util.files import publish
from torchtitan_like.util.run_directory import MANIFEST, numbered_folders


def test_a_written_manifest_is_read_back(tmp_path: Path) -> None:
    record = FileRecord(5, ("ab", "cd"))
    content = {
        "kind": "full",
        "step": 5,
        "files": {"a": record},
        "nested": {"b": 1, "a": [0.1, None, "ü"]},
    }
    write_manifest(tmp_path, content)
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert file_records(manifest) == {"a": record}
    assert manifest["nested"] == content["nested"]
    assert {name: manifest[name] for name in ("format_version", "extent_bytes", "hash")} == {
        "format_version": 3,
        "extent_bytes": 4 * 2**20,
        "hash": "xxh3_128",
    }
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_a_folder_without_a_manifest_is_not_a_checkpoint(tmp_path: Path) -> None:
    make_steps(tmp_path, "5?")
    (tmp_path / "step-6").write_text("a file")
    assert read_manifest(tmp_path / "step-5") is None
    assert read_manifest(tmp_path / "step-6") is None
    assert all_steps(tmp_path) == all_steps(tmp_path / "nowhere") == []


@pytest.mark.parametrize("text", ["", "{", "[]", "\0\0\0", '{"step": 5}'])
def test_a_broken_manifest_is_damage(tmp_path: Path, text: str) -> None:
    make_steps(tmp_path, "5")
    (tmp_path / "step-5" / MANIFEST).write_text(text)
    with pytest.raises(DamagedError, match="step-5/manifest.json is damaged"):
        read_manifest(tmp_path / "step-5")
    (step,) = all_steps(tmp_path)
    assert step.step == 5 and step.damage and not step.is_full
    assert published_steps(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format_version": {}}, "format_version is '{}', not an integer of 64 bits"),
        ({"format_version": None}, "it lacks keys"),
        ({"step": "5"}, "step is '5', not an integer of 64 bits"),
        ({"position": True}, "position is 'True', not an integer of 64 bits"),
        ({"data": {"position": True}}, "position is 'True', not an integer of 64 bits"),
        ({"data": [1]}, "no attribute 'get'"),
        ({"config": 1}, "config is '1', not a text"),
    ],
)
def test_a_value_of_another_type_in_a_sealed_manifest_is_damage(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    write_manifest(tmp_path, {"kind": "full", "step": 5, **change})
    with pytest.raises(DamagedError, match=f"is damaged: .*{reason}"):
        read_manifest(tmp_path)


def test_a_flipped_bit_anywhere_in_a_manifest_is_detected(tmp_path: Path) -> None:
    write_manifest(
        tmp_path, {"kind": "full", "step": 5, "seed": 7, "files": {"a": FileRecord(5, ("ab12",))}}
    )
    file = tmp_path / MANIFEST
    original = file.read_bytes()
    for offset in range(len(original)):
        flip_bit(file, offset, bit=offset % 8)
        with pytest.raises(DamagedError):
            read_manifest(tmp_path)
        file.write_bytes(original)
    assert read_manifest(tmp_path) is not None


@pytest.mark.parametrize("version", [1, 2, 4])
def test_another_format_is_refused(tmp_path: Path, version: int) -> None:
    write_manifest(tmp_path, {"format_version": version, "kind": "full", "step": 5})
    with pytest.raises(
        CheckpointError, match=rf"has format_version {version}\. Expected 3: "
    ) as caught:
        read_manifest(tmp_path)
    # A damaged step would make the run fall back to an older one.
    assert not isinstance(caught.value, DamagedError)


@pytest.mark.parametrize("name", [MANIFEST, SHARD])
def test_an_inaccessible_folder_is_not_damage(tmp_path: Path, name: str) -> None:
    """A missing permission or a lost file server must not make the run resume an older step."""
    make_steps(tmp_path, "5", "10")
    file = tmp_path / "step-10" / name
    file.unlink()
    file.symlink_to(name)  # opening it fails with ELOOP, even for root
    with pytest.raises(CheckpointError, match="step-10") as caught:
        all_steps(tmp_path)
    assert not isinstance(caught.value, DamagedError)


def _fifo(file: Path) -> None:
    os.mkfifo(file)


def _endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def _dangling(file: Path) -> None:
    file.symlink_to("nowhere")


@pytest.mark.parametrize("replace", [Path.mkdir, _fifo, _endless, _dangling])
def test_a_manifest_that_is_not_a_regular_file_is_damage(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    make_steps(tmp_path, "5", "10", "15h")
    for step in ("step-10", "step-15"):
        (tmp_path / step / MANIFEST).unlink()
        replace(tmp_path / step / MANIFEST)
    five, ten, fifteen = all_steps(tmp_path)
    assert five.is_full and ten.damage and fifteen.damage
    assert f"step-10/{MANIFEST}" in ten.damage
    assert published_steps(tmp_path) == [five]


def test_nested_text_in_a_manifest_is_damage(tmp_path: Path) -> None:
    make_steps(tmp_path, "5")
    (tmp_path / "step-5" / MANIFEST).write_text("[" * 200_000)
    with pytest.raises(DamagedError, match="it is nested too deeply. Expected valid JSON"):
        read_manifest(tmp_path / "step-5")


def test_emptied_step_folders_are_damage(tmp_path: Path) -> None:
    """Programs that delete old files leave folders and recently used files."""
    make_steps(tmp_path, "5", "10e")
    (tmp_path / "step-15/sharded").mkdir(parents=True)
    five, ten, fifteen = all_steps(tmp_path)
    assert five.damage is None
    assert ten.damage == f"{tmp_path / 'step-10'} is empty except for config.toml"
    assert fifteen.damage == f"{tmp_path / 'step-15'} is empty"


def test_an_export_without_its_manifest_is_damage(tmp_path: Path) -> None:
    """Its config.toml shows that it had a manifest; exports of other programs have neither."""
    make_steps(tmp_path, "5hx", "6H")
    (damaged,) = all_steps(tmp_path)
    assert damaged.step == 5 and damaged.damage and "an export of this program" in damaged.damage
    (tmp_path / "step-5/config.toml").unlink()
    assert all_steps(tmp_path) == []


def test_a_step_under_another_number_is_damage(tmp_path: Path) -> None:
    """Its learning rate and data position would belong to another step."""
    make_steps(tmp_path, "5")
    (tmp_path / "step-5").rename(tmp_path / "step-7")
    (step,) = all_steps(tmp_path)
    assert step.damage and "holds step 5" in step.damage


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (None, "is missing. Expected 100 bytes: "),
        (99, "has 99 bytes. Expected 100: "),
        (101, "has 101 bytes"),
    ],
)
def test_missing_short_and_long_files_are_damage(
    tmp_path: Path, size: int | None, message: str
) -> None:
    make_steps(tmp_path, "5", "6")
    file = tmp_path / "step-5" / SHARD
    file.unlink()
    if size is not None:
        file.write_bytes(bytes(size))
    damaged, complete = all_steps(tmp_path)
    assert damaged.damage and message in damaged.damage and str(file) in damaged.damage
    assert published_steps(tmp_path) == [complete]


def test_steps_are_sorted_by_number(tmp_path: Path) -> None:
    make_steps(tmp_path, "100", "20", "3")
    (tmp_path / "step-20.tmp-x").mkdir()
    (tmp_path / "step-x").mkdir()
    assert [step.step for step in published_steps(tmp_path)] == [3, 20, 100]
    assert [number for number, _ in numbered_folders(tmp_path)] == [3, 20, 100]


def test_a_step_is_renamed_only_after_its_files_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure, the step is complete or absent."""
    staged = tmp_path / "checkpoint" / "step-5.tmp-x"
    final = tmp_path / "checkpoint" / "step-5"
    calls: list[str] = []
    staged.mkdir(parents=True)
    replace, fsync = os.replace, os.fsync

    def record_rename(old: Path, new: Path) -> None:
        calls.append(f"rename {new.name}")
        replace(old, new)

    def record_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(f"fsync {path.relative_to(tmp_path)}")
        fsync(descriptor)

    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "replace", record_rename)
    monkeypatch.setattr(os, "fsync", record_fsync)
    write_manifest(staged, {"kind": "full", "step": 5})
    publish(staged, final)
    assert calls == [
        "fsync checkpoint/step-5.tmp-x/manifest.json.tmp",
        "rename manifest.json",
        "fsync checkpoint/step-5.tmp-x",
        "rename step-5",
        "fsync checkpoint",
        "fsync .",
    ]


def test_steps_after_the_start_are_renamed(tmp_path: Path) -> None:
    """A folder of any content under that name would block the next checkpoint."""
    make_steps(tmp_path, "5", "10", "15m", "20H", "25?")
    make_steps(tmp_path / "hf", "5h", "10h")
    assert len(supersede_later(tmp_path, 5, "abc")) == 5
    assert [number for number, _ in numbered_folders(tmp_path)] == [5]
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "step-5",
        "step-10.superseded-abc",
    }
    assert json.loads((tmp_path / "step-10.superseded-abc" / MANIFEST).read_text())["step"] == 10


def test_unfinished_stages_are_removed(tmp_path: Path) -> None:
    make_steps(tmp_path, "5")
    (tmp_path / "step-10.tmp-x").mkdir()
    (tmp_path / "hf" / "step-10.tmp-x").mkdir(parents=True)
    (tmp_path / "step-5.superseded-x").mkdir()
    assert len(remove_stale_stages(tmp_path)) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"step-5", "step-5.superseded-x", "hf"}
