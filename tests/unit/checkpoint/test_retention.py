"""Retention deletes the right steps, in the background, without failing the run."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.folders import SHARD, make_steps, one_rank
from torchtitan_like.checkpoint import step_folders
from torchtitan_like.checkpoint.step_folders import (
    Retention,
    pin_before,
    supersede_later,
)
from torchtitan_like.util.run_directory import PIN, numbered_folders


@pytest.fixture
def retention(tmp_path: Path) -> Iterator[Retention]:
    retention = Retention(tmp_path, keep_latest_k=2)
    yield retention
    retention.close()


def remaining(folder: Path) -> list[int]:
    return [number for number, _ in numbered_folders(folder)]


@pytest.mark.parametrize(
    ("on_disk", "keep", "every", "expected"),
    [
        (["1", "2", "3", "4"], 2, 0, [3, 4]),
        (["1", "2", "3", "4"], 0, 0, [1, 2, 3, 4]),
        (["1", "2", "3w", "4w"], 2, 0, [2, 3, 4]),
        (["1", "2", "3h", "4h"], 2, 0, [2, 3, 4]),
        (["0", "1", "2", "3"], 2, 0, [0, 2, 3]),
        (["0H", "1", "2", "3"], 2, 0, [0, 2, 3]),
        # only complete steps are counted and deleted
        (["1", "2", "3?", "4"], 2, 0, [2, 3, 4]),
        (["1", "2", "3!", "4m"], 2, 0, [1, 2, 3, 4]),
        (["1", "2", "3H", "4"], 2, 0, [2, 3, 4]),
        (["1!", "2", "3", "4"], 2, 0, [1, 3, 4]),
        (["1"], 2, 0, [1]),
        (["10", "20", "30", "40", "50"], 2, 20, [20, 40, 50]),
    ],
)
def test_the_newest_steps_are_kept(
    tmp_path: Path, on_disk: list[str], keep: int, every: int, expected: list[int]
) -> None:
    make_steps(tmp_path, *on_disk)
    before = remaining(tmp_path)
    retention = Retention(tmp_path, keep_latest_k=keep, keep_every=every)
    assert retention.apply() == [step for step in before if step not in expected]
    retention.close()
    assert remaining(tmp_path) == expected
    assert not list(tmp_path.glob(".trash-*"))


@pytest.mark.parametrize(("keep", "every"), [(0, 0), (3, 1), (3, 0)])
def test_the_number_of_manifests_read_does_not_depend_on_kept_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, every: int
) -> None:
    opened: list[str] = []
    read_text = step_folders.read_text

    def counting(path: Path, *args: Any, **options: Any) -> str:
        opened.append(path.parent.name)
        return read_text(path, *args, **options)

    def manifests_read(folder: Path, num_kept: int) -> list[list[str]]:
        """Return the steps whose manifest is read after each of three checkpoints."""
        make_steps(folder, *map(str, range(1, num_kept + 1)))
        if not every:  # pins keep the old steps
            for number in range(1, num_kept + 1):
                (folder / f"step-{number}" / PIN).touch()
        retention = Retention(folder, keep_latest_k=keep, keep_every=every)
        reads_by_checkpoint = []
        for number in range(num_kept + 1, num_kept + 4):
            make_steps(folder, str(number))
            opened.clear()
            assert retention.apply() == []
            reads_by_checkpoint.append(list(opened))
        retention.close()
        return reads_by_checkpoint

    with monkeypatch.context() as patched:
        patched.setattr(step_folders, "read_text", counting)
        few, many = manifests_read(tmp_path / "few", 5), manifests_read(tmp_path / "many", 30)
    assert [len(names) for names in few] == [len(names) for names in many]
    assert [len(names) for names in many] == ([keep, 1, 1] if keep else [0, 0, 0])


def test_the_newest_full_step_is_checked_again_before_others_are_deleted(
    tmp_path: Path, retention: Retention
) -> None:
    """If its files have disappeared, an older step is the last complete one and must stay."""
    make_steps(tmp_path, "1", "2", "3")
    assert retention.apply() == [1]
    (tmp_path / "step-3" / SHARD).unlink()
    make_steps(tmp_path, "4w", "5w")
    assert retention.apply() == []
    assert remaining(tmp_path) == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("steps", "keep", "expected"),
    [
        (["40"], 2, ["20", "30", "40", "50"]),
        (["20", "30"], 2, ["20", "30", "40", "50"]),
        (["20", "30", "40"], 2, ["20", "40", "50"]),
        (["20", "30", "40", "50", "60"], 2, ["20"]),
        (["20", "30", "40", "50!", "60!"], 2, ["20", "40", "50"]),
        (["20", "30", "40", "50", "60"], 0, ["20", "30", "40", "50"]),
    ],
)
def test_a_superseded_step_expires_after_as_many_newer_steps_as_are_kept(
    tmp_path: Path, steps: list[str], keep: int, expected: list[str]
) -> None:
    """Superseded exports expire too. A pinned step (step 20) never expires."""
    make_steps(tmp_path, "20", "30", "40", "50")
    make_steps(tmp_path / "hf", "40h")
    (tmp_path / "step-20" / PIN).touch()
    supersede_later(tmp_path, 10, "abc")
    make_steps(tmp_path, *steps)
    retention = Retention(tmp_path, keep_latest_k=keep)
    retention.apply()
    retention.close()
    present = {path.name for path in tmp_path.glob("*.superseded-*")}
    assert present == {f"step-{number}.superseded-abc" for number in expected}
    assert bool(list((tmp_path / "hf").iterdir())) == ("40" in expected)
    assert not list(tmp_path.glob(".trash-*"))


def test_a_pinned_step_is_kept(tmp_path: Path, retention: Retention) -> None:
    make_steps(tmp_path, "1", "2", "3", "4")
    (tmp_path / "step-1" / PIN).touch()
    assert retention.apply() == [2]


def test_pin_before_pins_the_newest_earlier_full_step(tmp_path: Path) -> None:
    make_steps(tmp_path, "10", "20", "30w", "40")
    assert pin_before(tmp_path, 10) is None, "step 10 is the first step"
    assert pin_before(tmp_path, 40) == tmp_path / "step-20" / PIN
    assert pin_before(tmp_path, 25) is None, "step 20 is pinned already"
    assert [path.parent.name for path in tmp_path.glob(f"*/{PIN}")] == ["step-20"]


def test_deletion_runs_in_the_background_until_close(
    tmp_path: Path, retention: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_steps(tmp_path, "1", "2", "3")
    may_delete, rmtree = threading.Event(), shutil.rmtree

    def slow_rmtree(path: Path) -> None:
        assert may_delete.wait(10)
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", slow_rmtree)
    retention.apply()
    assert remaining(tmp_path) == [2, 3] and (tmp_path / ".trash-1").exists()
    may_delete.set()
    retention.close()
    assert not (tmp_path / ".trash-1").exists()


def test_a_failed_deletion_is_retried(
    tmp_path: Path, retention: Retention, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The same step may have been saved and deleted again in between."""
    make_steps(tmp_path, "1", "2", "3")
    with monkeypatch.context() as patched:

        def refuse(path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        patched.setattr(shutil, "rmtree", refuse)
        retention.apply()
        make_steps(tmp_path, "1")
        retention.apply()
        retention._deleter.submit(lambda: None).result()
    assert {path.name for path in tmp_path.glob(".trash-*")} == {".trash-1", ".trash-1-1"}
    assert (
        "Permission denied" in caplog.text and "retrying after the next checkpoint" in caplog.text
    )
    assert retention.apply() == []
    retention.close()
    assert not list(tmp_path.glob(".trash-*"))


def test_the_trash_of_an_earlier_run_is_emptied(tmp_path: Path, retention: Retention) -> None:
    (tmp_path / ".trash-7").mkdir()
    retention.apply()
    retention.close()
    assert not (tmp_path / ".trash-7").exists()


@pytest.mark.parametrize("reason", ["", "for a non-finite step"])
def test_releasing_a_pin_keeps_a_pin_with_a_reason(tmp_path: Path, reason: str) -> None:
    make_steps(tmp_path / "checkpoint", "10", "20")
    checkpointer = one_rank(tmp_path)
    unpin = checkpointer.pin_before(30)
    pin = tmp_path / "checkpoint/step-20" / PIN

    def write_pin(previous: Path | None) -> None:
        assert previous == pin.parent
        pin.write_text(reason)

    checkpointer.find_previous(30, write_pin)
    unpin()
    checkpointer.find_previous(30, lambda previous: None)
    checkpointer.close()
    assert pin.exists() == bool(reason)
