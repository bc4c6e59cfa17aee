"""The host copy of a state, and the checks before a checkpoint is published."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.folders import one_rank
from torchtitan_like.checkpoint import saving
from torchtitan_like.checkpoint.checkpointer import Checkpointer
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.saving import HostCopy, RunRecord, Save
from torchtitan_like.util.run_directory import LOCK

# A single-process run ignores this warning, too.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Weights:
    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.arange(1000.0), "name": "a string"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise NotImplementedError


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    """Yield a checkpointer that holds the lock of its folder."""
    checkpointer = one_rank(tmp_path)
    assert checkpointer._lock is not None
    checkpointer._lock.acquire()
    yield checkpointer
    checkpointer.close()


def save(checkpointer: Checkpointer, **options: Any) -> None:
    options = {"kind": "full", "folder": checkpointer.folder, **options}
    checkpointer.save([Save(**options)], RunRecord(5, "", {}), {"model": Weights()})


def after_write(checkpointer: Checkpointer, action: Callable[[Path], object]) -> None:
    """Run ``action`` after the files of a checkpoint are written and before it is published."""
    write = checkpointer._writer._write_native

    def write_and_act(staged: Path, tensors: Mapping[str, Any]) -> Any:
        records = write(staged, tensors)
        action(staged)
        return records

    checkpointer._writer._write_native = write_and_act  # type: ignore[method-assign]


def visible(checkpointer: Checkpointer) -> list[str]:
    return sorted(path.name for path in checkpointer.folder.iterdir() if path.name != LOCK)


def test_a_written_checkpoint_is_published(checkpointer: Checkpointer) -> None:
    after_write(checkpointer, lambda staged: None)
    save(checkpointer)
    assert visible(checkpointer) == ["step-5"]


def test_a_run_that_lost_its_lock_while_writing_publishes_nothing(
    checkpointer: Checkpointer,
) -> None:
    """Another run considered it dead and now uses the folder."""
    lock = checkpointer.folder / LOCK
    after_write(
        checkpointer,
        lambda _: lock.write_text(json.dumps({**json.loads(lock.read_text()), "token": "another"})),
    )
    with pytest.raises(CheckpointError, match="was taken from this run"):
        save(checkpointer)
    assert visible(checkpointer) == []


def test_a_truncated_file_is_not_published(checkpointer: Checkpointer) -> None:
    def truncate(staged: Path) -> None:
        (file,) = staged.glob("shard-*.bin")
        file.write_bytes(file.read_bytes()[:-1])

    after_write(checkpointer, truncate)
    with pytest.raises(CheckpointError, match="has [0-9]+ bytes. Expected "):
        save(checkpointer)
    assert visible(checkpointer) == []


@pytest.mark.parametrize(
    ("options", "num_bytes"),
    [
        ({}, 4000),
        ({"kind": "weights", "dtype": torch.bfloat16}, 2000),
        ({"kind": "hf", "dtype": torch.bfloat16}, 2000),
    ],
    ids=["full", "weights", "hf"],
)
def test_free_space_is_checked_before_the_checkpoint_is_written(
    checkpointer: Checkpointer,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    num_bytes: int,
) -> None:
    def full(folder: Path, needed: int, num_files: int) -> None:
        assert needed == num_bytes and list(folder.iterdir()) == []
        raise CheckpointError("no room")

    monkeypatch.setattr(saving, "check_space", full)
    with pytest.raises(CheckpointError, match="no room"):
        save(checkpointer, **options)
    assert visible(checkpointer) == []


def test_every_thread_waits_for_the_copy() -> None:
    """The checkpoint thread waits before writing, and the trainer before it changes weights."""

    class Copy:
        def __init__(self) -> None:
            self.is_complete = threading.Event()

        def synchronize(self) -> None:
            self.is_complete.wait(10)

    copy: Any = Copy()
    host_copy = HostCopy(pinned=True)
    host_copy._event = copy
    waited: list[bool] = []

    def wait_for_copy() -> None:
        host_copy.wait()
        waited.append(copy.is_complete.is_set())

    threads = [threading.Thread(target=wait_for_copy) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    copy.is_complete.set()
    for thread in threads:
        thread.join()
    assert waited == [True, True]
