"""The errors that all ranks raise if a checkpoint's action fails on some ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError, SettingsError
from torchtitan_like.checkpoint.lock import LockedError
from torchtitan_like.distributed.world import HostGroup, RankErrors
from torchtitan_like.util.files import describe_os_error

T = TypeVar("T")
# Subclasses of CheckpointError that keep their class on all ranks. Others become CheckpointError.
PRESERVED_CLASSES = (DamagedError, LockedError, SettingsError)


def with_checkpoint_errors(group: HostGroup) -> HostGroup:
    """Let `run_on_all` and `run_on_leader` of a group raise CheckpointError. Returns the group.

    If several ranks fail, all raise one error with every message: a DamagedError only if all errors
    are.
    """
    group.errors = _CheckpointErrors()
    return group


class _CheckpointErrors(RankErrors):
    """Converts the errors of actions that read and write checkpoints."""

    def call(self, action: Callable[[], T], rank: int) -> T:
        """Call `action` on one rank. Raises CheckpointError, or one of PRESERVED_CLASSES."""
        from torch.distributed.checkpoint.api import CheckpointException

        from torchtitan_like.checkpoint.dcp_storage import unwrap

        try:
            return action()
        except CheckpointException as error:  # a BaseException, which already names the ranks
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

    def merge(self, errors: list[Exception]) -> CheckpointError:
        """Return one error with every message. It has the class that all errors have, if any."""
        messages = dict.fromkeys(map(str, errors))  # DCP raises the same message on every rank
        classes = {_error_class(error) for error in errors}
        error_class = classes.pop() if len(classes) == 1 else CheckpointError
        return error_class("; ".join(messages))


def _error_class(error: BaseException) -> type[CheckpointError]:
    return next((cls for cls in PRESERVED_CLASSES if isinstance(error, cls)), CheckpointError)
