"""`StagedOutput` admits one writer per output and publishes only complete outputs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.harness.extents import record_file
from tests.unit.checkpoint.folders import flip_bit
from torchtitan_like.checkpoint.errors import (
    DamagedError,
    with_checkpoint_errors,
)
from torchtitan_like.checkpoint.staged_output import STAGED, StagedOutput
from torchtitan_like.checkpoint.verification import verify_together
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.files import refuse_existing
from torchtitan_like.util.locks import LockedError, LockLostError
from torchtitan_like.util.run_directory import MANIFEST


def test_an_output_appears_when_it_is_published(tmp_path: Path) -> None:
    with StagedOutput(tmp_path / "new" / "model") as output:
        output.path.mkdir()
        assert not output.final.exists()
        output.publish({"kind": "hf", "step": 1})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]
    assert (tmp_path / "new/model" / MANIFEST).exists()


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_failed_output_leaves_no_files(tmp_path: Path, is_folder: bool) -> None:
    with pytest.raises(OSError, match="disk"), StagedOutput(tmp_path / "model") as output:
        output.path.mkdir() if is_folder else output.path.touch()
        raise OSError("disk")
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_is_refused_and_the_first_continues(tmp_path: Path) -> None:
    with StagedOutput(tmp_path / "model") as first:
        first.path.mkdir()
        with pytest.raises(LockedError, match="model belongs to a process that is alive: process"):
            StagedOutput(tmp_path / "model").__enter__()
        with StagedOutput(tmp_path / "model-2") as neighbor:  # another output with a similar name
            neighbor.path.touch()
            neighbor.publish()
        first.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model-2"]


def test_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "model"
    ended = subprocess.Popen(["true"])
    ended.wait()
    killed = StagedOutput(out)
    killed.path.mkdir()
    (killed.path / "half").write_text("half")
    (tmp_path / "model.lock").write_text(json.dumps(killed._lock._content | {"pid": ended.pid}))
    others = [tmp_path / f"model{STAGED}user", tmp_path / f"model-2{STAGED}00000000"]
    for path in others:
        path.mkdir()
    with StagedOutput(out) as output:
        output.path.touch()
        output.publish()
    assert set(tmp_path.iterdir()) == {out, *others}


@pytest.mark.parametrize("present", ["file", "folder", "dangling link"])
def test_an_existing_output_is_never_replaced(tmp_path: Path, present: str) -> None:
    """Another program may create the output between the first check and the publish."""
    out = tmp_path / "model"
    with pytest.raises(FileExistsError, match="exists already"), StagedOutput(out) as output:
        refuse_existing(out)
        output.path.mkdir()
        if present == "file":
            out.write_text("kept")
        elif present == "folder":
            out.mkdir()  # rename(2) would replace an empty one
        else:
            out.symlink_to(tmp_path / "nowhere")
        output.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_writer_that_lost_its_lock_publishes_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "model.lock"
    with (
        pytest.raises(LockLostError, match="was taken from this process"),
        StagedOutput(tmp_path / "model") as output,
    ):
        output.path.mkdir()
        lock.write_text(json.dumps(json.loads(lock.read_text()) | {"token": "another"}))
        output.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_verification_reads_files_back_and_detects_damage(tmp_path: Path) -> None:
    group = with_checkpoint_errors(HostGroup.alone())
    (tmp_path / "a").write_bytes(bytes(1000))
    records = {"a": record_file(tmp_path / "a")}
    verify_together(tmp_path, records, group)
    flip_bit(tmp_path / "a", 500)
    with pytest.raises(DamagedError, match="a is damaged: extent 0"):
        verify_together(tmp_path, records, group)
    (tmp_path / "a").unlink()
    with pytest.raises(DamagedError, match="a is missing"):
        verify_together(tmp_path, records, group)
