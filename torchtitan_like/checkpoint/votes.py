"""Run actions on all ranks or on rank 0, and raise an error of any rank on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError, SettingsError
from torchtitan_like.checkpoint.lock import LockedError
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.os_errors import describe_os_error

T = TypeVar("T")
# Subclasses of CheckpointError that keep their class on all ranks. Others become CheckpointError.
PRESERVED_CLASSES = (DamagedError, LockedError, SettingsError)


class Votes:
    """Runs actions on the ranks of a group. No rank continues before all ranks have succeeded."""

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.is_leader = group.rank == 0

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank. Returns the result of this rank.

        If any rank fails, raises on every rank: DamagedError if all errors are, else
        CheckpointError.
        """
        # Without this exchange, peers would wait for a failed rank in the next collective.
        return self.group.run_on_all(lambda: _run(action, self.group.rank), _merge)

    def gather(self, action: Callable[[], T]) -> list[T]:
        """Run `action` as `run_on_all`. Returns the results of all ranks in rank order."""
        return self.group.gather_objects(self.run_on_all(action))

    def run_on_leader(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0. All ranks return its result or raise its error."""
        return self.group.run_on_leader(lambda: _run(action, 0))


def _run(action: Callable[[], T], rank: int) -> T:
    """Run `action` on one rank. Raises CheckpointError, or one of PRESERVED_CLASSES."""
    from torch.distributed.checkpoint.api import CheckpointException

    from torchtitan_like.checkpoint.dcp_storage import unwrap

    try:
        return action()
    except CheckpointException as error:  # a BaseException of DCP, which already names the ranks
        cause = unwrap(error)
        problem = _error_class(cause)(str(cause))
    except CheckpointError as error:
        problem = _error_class(error)(str(error))
    except OSError as error:
        problem = CheckpointError(f"rank {rank}: {describe_os_error(error)}")
    except Exception as error:
        problem = CheckpointError(f"rank {rank}: {type(error).__name__}: {error}")
    # The new error must not keep alive what `action` uses: neither through the context that a
    # handler sets, nor through a cycle of its traceback and this frame.
    try:
        raise problem
    finally:
        del problem


def _error_class(error: BaseException) -> type[CheckpointError]:
    return next((cls for cls in PRESERVED_CLASSES if isinstance(error, cls)), CheckpointError)


def _merge(errors: list[Exception]) -> CheckpointError:
    """Return one error with every message. It has the class of the errors if that is the same."""
    messages = dict.fromkeys(map(str, errors))  # DCP raises the same message on every rank
    classes = {_error_class(error) for error in errors}
    error_class = classes.pop() if len(classes) == 1 else CheckpointError
    return error_class("; ".join(messages))
