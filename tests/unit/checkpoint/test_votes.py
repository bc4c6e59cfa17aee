"""What all ranks are told when some of them fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.lock import LockedError
from torchtitan_like.checkpoint.votes import Votes

FINE = (None, None)
DAMAGE = (None, (DamagedError, "a flipped bit"))
UNSEEN = (None, (CheckpointError, "rank 1: OSError: not there"))


@pytest.mark.parametrize(
    ("others", "kind", "told"),
    [
        ([FINE, DAMAGE], DamagedError, "step-5; a flipped bit"),
        ([FINE, UNSEEN], CheckpointError, "step-5; rank 1: OSError: not there"),
    ],
)
def test_only_damage_sends_a_run_back_to_an_older_step(others: list[Any], kind: type[Exception], told: str) -> None:
    """What one rank could not read may be whole: with that, nobody gives the step up."""
    group: Any = SimpleNamespace(rank=0, gather_objects=lambda mine: [mine, *others])

    def read() -> None:
        raise DamagedError("step-5")

    with pytest.raises(CheckpointError, match=told) as found:
        Votes(group).all_do(read)
    assert type(found.value) is kind


@pytest.mark.parametrize("kind", [DamagedError, LockedError, CheckpointError])
def test_every_rank_raises_the_class_of_the_leaders_error(kind: type[CheckpointError]) -> None:
    group: Any = SimpleNamespace(rank=0, leader_does=lambda action: action())

    def act() -> None:
        raise kind("the reason")

    with pytest.raises(CheckpointError, match="the reason") as found:
        Votes(group).leader_does(act)
    assert type(found.value) is kind
