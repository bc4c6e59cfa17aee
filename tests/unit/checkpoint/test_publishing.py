"""The checks of one rank before a save becomes a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.folders import one_rank
from torchtitan_like.checkpoint import saving
from torchtitan_like.checkpoint.checkpointer import Checkpointer
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.lock import LOCK
from torchtitan_like.checkpoint.saving import Save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as a run of one process does


class Weights:
    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.arange(1000.0), "told": "in words"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise NotImplementedError


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    """Of a run that holds its folder."""
    made = one_rank(tmp_path)
    assert made._lock is not None
    made._lock.acquire()
    yield made
    made.close()


def save(checkpointer: Checkpointer, **what: Any) -> None:
    given = {"kind": "full", "folder": checkpointer.folder, **what}
    arguments: dict[str, Any] = {"config_toml": "", "summary": {}, "on_published": lambda *_: None}
    checkpointer.save([Save(**given)], 5, {"model": Weights()}, **arguments)


def once_written(checkpointer: Checkpointer, then: Callable[[Path], object]) -> None:
    """Have something happen between the writing of a save and its publishing."""
    write = checkpointer._writer._write_native

    def written(staged: Path, tensors: Mapping[str, Any]) -> Any:
        records = write(staged, tensors)
        then(staged)
        return records

    checkpointer._writer._write_native = written  # type: ignore[method-assign]


def visible(checkpointer: Checkpointer) -> list[str]:
    return sorted(path.name for path in checkpointer.folder.iterdir() if path.name != LOCK)


def test_an_undisturbed_save_is_published(checkpointer: Checkpointer) -> None:
    once_written(checkpointer, lambda staged: None)
    save(checkpointer)
    assert visible(checkpointer) == ["step-5"]


def test_a_run_that_lost_its_lock_while_it_wrote_publishes_nothing(checkpointer: Checkpointer) -> None:
    """Another run believed it dead, and is at work in the folder."""
    lock = checkpointer.folder / LOCK
    once_written(
        checkpointer, lambda _: lock.write_text(json.dumps({**json.loads(lock.read_text()), "token": "theirs"}))
    )
    with pytest.raises(CheckpointError, match="was taken from this run"):
        save(checkpointer)
    assert visible(checkpointer) == []


def test_a_truncated_file_is_not_published(checkpointer: Checkpointer) -> None:
    def cut(staged: Path) -> None:
        (file,) = staged.glob("shard-*.bin")
        file.write_bytes(file.read_bytes()[:-1])

    once_written(checkpointer, cut)
    with pytest.raises(CheckpointError, match="has [0-9]+ bytes, expected "):
        save(checkpointer)
    assert visible(checkpointer) == []


@pytest.mark.parametrize(
    ("what", "num_bytes"),
    [({}, 4000), ({"kind": "weights", "dtype": torch.bfloat16}, 2000), ({"kind": "hf", "dtype": torch.bfloat16}, 2000)],
    ids=["full", "weights", "hf"],
)
def test_free_space_is_checked_for_the_bytes_of_the_save(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch, what: dict[str, Any], num_bytes: int
) -> None:
    """Before anything is written."""

    def full(folder: Path, needed: int, num_files: int) -> None:
        assert needed == num_bytes and list(folder.iterdir()) == []
        raise CheckpointError("no room")

    monkeypatch.setattr(saving, "check_space", full)
    with pytest.raises(CheckpointError, match="no room"):
        save(checkpointer, **what)
    assert visible(checkpointer) == []
