"""Errors about text, tokenizers and token caches."""

from __future__ import annotations

from torchtitan_like.util.exit_codes import ExitCode, RunFailure


class DataError(RunFailure):
    """The data or their configuration is invalid. The message has location, expectation, remedy."""

    exit_code = ExitCode.BAD_DATA


class WorkerKilled(DataError):
    """A tokenizing process was killed, usually because memory ran low. A new start continues."""

    exit_code = ExitCode.REQUEUE


class BuildStopped(Exception):
    """Another thread ended the build of a token cache. Committed pieces are kept."""


class ReadInterrupted(Exception):
    """The run stops while it waits for a batch. Every rank stops before the step of that batch."""


class CacheWriteError(DataError):
    """A file of the token cache could not be written, usually because the disk is full."""

    exit_code = ExitCode.STORAGE


class TokenizerError(DataError):
    """A tokenizer that cannot be loaded, or does not fit the model or the settings."""


class DataMismatch(DataError):
    """A saved data position belongs to another stream of samples than this run's."""
