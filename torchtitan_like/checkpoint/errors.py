"""Errors of checkpoints, and how an error of some ranks becomes one error of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torchtitan_like.util.exit_codes import ExitCode, RunFailure
from torchtitan_like.util.files import describe_os_error
from torchtitan_like.util.locks import LockedError

if TYPE_CHECKING:  # these import torch, and `titan ckpt ls` needs only the classes
    from torch.distributed.checkpoint.api import CheckpointException

    from torchtitan_like.distributed.world import HostGroup

T = TypeVar("T")


class CheckpointError(RunFailure):
    """A checkpoint cannot be saved or loaded. The message names it, the cause, and the remedy."""

    exit_code = ExitCode.STORAGE


class SettingsError(CheckpointError):
    """The settings contradict the checkpoint or each other, so another start fails, too."""

    exit_code = ExitCode.BAD_CONFIG


class ChangedError(SettingsError):
    """Settings that affect the result have changed since the checkpoint. The user must decide."""


class DamagedError(CheckpointError):
    """A published checkpoint has missing or changed bytes. An earlier step may still be usable."""


# Errors that keep their class on all ranks. Others become CheckpointError.
PRESERVED_CLASSES = (DamagedError, LockedError, SettingsError)


def with_checkpoint_errors(group: HostGroup) -> HostGroup:
    """Let `run_on_all` and `run_on_leader` of a group raise CheckpointError. Returns the group.

    If several ranks fail, all raise one error with every message: a DamagedError only if all errors
    are.
    """
    group.errors = _CheckpointErrors()
    return group


class _CheckpointErrors:
    """The `RankErrors` of actions that read and write checkpoints."""

    def call(self, action: Callable[[], T], rank: int) -> T:
        """Call `action` on one rank. Raises CheckpointError, or one of PRESERVED_CLASSES."""
        from torch.distributed.checkpoint.api import CheckpointException

        problem: RunFailure
        try:
            return action()
        except CheckpointException as error:  # a BaseException, which already names the ranks
            problem = unwrap(error)
        except RunFailure as error:
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

    def merge(self, errors: list[Exception]) -> RunFailure:
        """Return one error with every message. It has the class that all errors have, if any."""
        messages = dict.fromkeys(map(str, errors))  # DCP raises the same message on every rank
        classes = {_error_class(error) for error in errors}
        error_class = classes.pop() if len(classes) == 1 else CheckpointError
        return error_class("; ".join(messages))


def _error_class(error: BaseException) -> type[RunFailure]:
    return next((cls for cls in PRESERVED_CLASSES if isinstance(error, cls)), CheckpointError)


def unwrap(error: CheckpointException) -> CheckpointError:
    """Convert DCP's error, with the messages of all failed ranks.

    Returns a DamagedError if any rank has found damage.
    """
    messages = []
    is_damaged = False
    for rank, (failure, _) in error.failures.items():
        is_damaged |= isinstance(failure, DamagedError)
        if isinstance(failure, OSError):
            message = describe_os_error(failure)
        elif isinstance(failure, CheckpointError):
            message = str(failure)
        else:
            message = f"{type(failure).__name__}: {failure}"
        messages.append(f"rank {rank}: {message}")
    return (DamagedError if is_damaged else CheckpointError)("; ".join(messages))
