"""When an action fails on some ranks, all ranks raise the error."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest

from torchtitan_like.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    with_checkpoint_errors,
)
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.exit_codes import RunFailure
from torchtitan_like.util.locks import LockedError

DAMAGE = DamagedError("a flipped bit")
UNREADABLE = CheckpointError("rank 1: OSError: not there")


@pytest.mark.parametrize(
    ("others", "kind", "message"),
    [
        ([None, DAMAGE], DamagedError, "step-5; a flipped bit"),
        ([None, UNREADABLE], CheckpointError, "step-5; rank 1: OSError: not there"),
    ],
)
def test_only_damage_on_all_failed_ranks_is_damage(
    others: list[Exception | None], kind: type[Exception], message: str
) -> None:
    """A run loads an older step only if this one is damaged; an unreadable file may be intact."""
    group = HostGroup.alone()
    group.gather_objects = lambda own: [own, *others]  # type: ignore[method-assign]

    def read() -> None:
        raise DamagedError("step-5")

    with pytest.raises(CheckpointError, match=message) as caught:
        with_checkpoint_errors(group).run_on_all(read)
    assert type(caught.value) is kind


@pytest.mark.parametrize("kind", [DamagedError, LockedError, CheckpointError])
@pytest.mark.parametrize("method", ["run_on_all", "run_on_leader"])
def test_every_rank_raises_the_class_of_the_error(method: str, kind: type[RunFailure]) -> None:
    def act() -> None:
        raise kind("the reason")

    with pytest.raises(RunFailure, match="the reason") as caught:
        getattr(with_checkpoint_errors(HostGroup.alone()), method)(act)
    assert type(caught.value) is kind


@pytest.mark.parametrize("method", ["run_on_all", "run_on_leader"])
def test_other_errors_name_the_rank(method: str) -> None:
    with pytest.raises(CheckpointError, match="^rank 0: ValueError: no number$"):
        getattr(with_checkpoint_errors(HostGroup.alone()), method)(lambda: int_of("no number"))


def int_of(text: str) -> int:
    raise ValueError(text)


class Tensors:
    """The argument of an action."""


def fail_with(tensors: Tensors) -> None:
    raise OSError("disk full")


@pytest.mark.parametrize("method", ["run_on_all", "run_on_leader"])
def test_an_error_keeps_no_memory_of_its_action(method: str) -> None:
    """The trainer disables automatic garbage collection, which frees cycles of references."""
    tensors = Tensors()
    reference = weakref.ref(tensors)

    gc.disable()
    try:
        with pytest.raises(CheckpointError):
            getattr(with_checkpoint_errors(HostGroup.alone()), method)(partial(fail_with, tensors))
        del tensors
        assert reference() is None
    finally:
        gc.enable()
