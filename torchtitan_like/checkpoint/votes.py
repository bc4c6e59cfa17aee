"""Doing something on disk together: whatever goes wrong on one rank is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.distributed.world import HostGroup

T = TypeVar("T")


class Votes:
    """Runs actions on the ranks of a group; nobody goes on before everybody is known to have succeeded."""

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.is_leader = group.rank == 0

    def all_do(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; what each returned, in rank order.

        Raises on every rank when any failed: DamagedError when damage is all that was found, else CheckpointError.
        """
        outcome = _outcome(action, self.group.rank)
        # Vote: a rank that failed must not leave its peers inside the next step of the protocol.
        outcomes = self.group.gather_objects(outcome)
        problems = [problem for _, problem in outcomes if problem is not None]
        if problems:
            texts = dict.fromkeys(text for _, text in problems)  # DCP tells every rank of all
            raise _error(all(damaged for damaged, _ in problems), "; ".join(texts))
        return [result for result, _ in outcomes]

    def leader_does(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone; its result, or its error, is everyone's."""
        result, problem = self.group.leader_does(lambda: _outcome(action, 0))
        if problem is not None:
            raise _error(*problem)
        answer: T = result
        return answer


def _error(damaged: bool, text: str) -> CheckpointError:
    return DamagedError(text) if damaged else CheckpointError(text)


def _outcome(action: Callable[[], Any], rank: int) -> tuple[Any, tuple[bool, str] | None]:
    """(result, None) or (None, (is it damage?, who has met what))."""
    from torch.distributed.checkpoint.api import CheckpointException

    from torchtitan_like.checkpoint.dcp_storage import unwrap

    try:
        return action(), None
    except CheckpointException as problem:  # no Exception, but a BaseException; it names the ranks itself
        cause = unwrap(problem)
        return None, (isinstance(cause, DamagedError), str(cause))
    except CheckpointError as problem:
        return None, (isinstance(problem, DamagedError), str(problem))
    except Exception as problem:
        return None, (False, f"rank {rank}: {type(problem).__name__}: {problem}")
