"""Errors of checkpoints, one class for each case that callers handle differently."""

from torchtitan_like.util.exit_codes import ExitCode, RunFailure


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
