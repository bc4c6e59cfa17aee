"""Doing something on disk together: whatever goes wrong on one rank is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.lock import LockedError
from torchtitan_like.distributed.world import HostGroup

T = TypeVar("T")
# An error's class, which a caller tells apart, and its text.
Problem = tuple[type[CheckpointError], str]
TOLD_APART = (DamagedError, LockedError)


class Votes:
    """Runs actions on the ranks of a group; nobody goes on before everybody is known to have succeeded."""

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.is_leader = group.rank == 0

    def all_do(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; what each returned, in rank order.

        Raises on every rank when any failed: DamagedError if all problems are damage, else CheckpointError.
        """
        outcome = _outcome(action, self.group.rank)
        # Vote: a rank that failed must not leave its peers inside the next step of the protocol.
        outcomes = self.group.gather_objects(outcome)
        problems = [problem for _, problem in outcomes if problem is not None]
        if problems:
            texts = dict.fromkeys(text for _, text in problems)  # DCP tells every rank of all
            kinds = {kind for kind, _ in problems}
            kind = kinds.pop() if len(kinds) == 1 else CheckpointError
            raise kind("; ".join(texts))
        return [result for result, _ in outcomes]

    def leader_does(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone; its result, or its error, is everyone's."""
        result, problem = self.group.leader_does(lambda: _outcome(action, 0))
        if problem is not None:
            kind, text = problem
            raise kind(text)
        answer: T = result
        return answer


def _kind(problem: BaseException) -> type[CheckpointError]:
    return next((kind for kind in TOLD_APART if isinstance(problem, kind)), CheckpointError)


def _outcome(action: Callable[[], Any], rank: int) -> tuple[Any, Problem | None]:
    """Return (result, None), or None and the problem."""
    from torch.distributed.checkpoint.api import CheckpointException

    from torchtitan_like.checkpoint.dcp_storage import unwrap

    try:
        return action(), None
    except (
        CheckpointException
    ) as problem:  # no Exception, but a BaseException; it names the ranks itself
        cause = unwrap(problem)
        return None, (_kind(cause), str(cause))
    except CheckpointError as problem:
        return None, (_kind(problem), str(problem))
    except Exception as problem:
        return None, (CheckpointError, f"rank {rank}: {type(problem).__name__}: {problem}")
