"""Run actions on all ranks or on rank 0, and raise an error of any rank on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.lock import LockedError
from torchtitan_like.distributed.world import HostGroup

T = TypeVar("T")
Problem = tuple[type[CheckpointError], str]  # an error's class and message
# Subclasses of CheckpointError that keep their class on all ranks. Others become CheckpointError.
PRESERVED_CLASSES = (DamagedError, LockedError)


class Votes:
    """Runs actions on the ranks of a group. No rank continues before all ranks have succeeded."""

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.is_leader = group.rank == 0

    def all_do(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank. Returns the results in rank order.

        If any rank fails, raises on every rank: DamagedError if all errors are, else
        CheckpointError.
        """
        outcome = _outcome(action, self.group.rank)
        # Without this exchange, peers would wait for a failed rank in the next collective.
        outcomes = self.group.gather_objects(outcome)
        problems = [problem for _, problem in outcomes if problem is not None]
        if problems:
            # DCP raises the same message on every rank.
            messages = dict.fromkeys(message for _, message in problems)
            classes = {error_class for error_class, _ in problems}
            error_class = classes.pop() if len(classes) == 1 else CheckpointError
            raise error_class("; ".join(messages))
        return [result for result, _ in outcomes]

    def leader_does(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0. All ranks return its result or raise its error."""
        outcome, problem = self.group.leader_does(lambda: _outcome(action, 0))
        if problem is not None:
            error_class, message = problem
            raise error_class(message)
        result: T = outcome
        return result


def _error_class(error: BaseException) -> type[CheckpointError]:
    return next((cls for cls in PRESERVED_CLASSES if isinstance(error, cls)), CheckpointError)


def _outcome(action: Callable[[], Any], rank: int) -> tuple[Any, Problem | None]:
    """Return (result, None) or (None, problem)."""
    from torch.distributed.checkpoint.api import CheckpointException

    from torchtitan_like.checkpoint.dcp_storage import unwrap

    try:
        return action(), None
    except CheckpointException as error:  # a BaseException of DCP, which already names the ranks
        cause = unwrap(error)
        return None, (_error_class(cause), str(cause))
    except CheckpointError as error:
        return None, (_error_class(error), str(error))
    except Exception as error:
        return None, (CheckpointError, f"rank {rank}: {type(error).__name__}: {error}")
