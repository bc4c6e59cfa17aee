"""Errors about text, tokenizers and token caches."""

from __future__ import annotations


class DataError(Exception):
    """The data or their configuration is invalid. The message has location, expectation, remedy."""


class WorkerKilled(DataError):
    """A tokenizing process was killed, usually because memory ran low. A new start continues."""


class ReadInterrupted(Exception):
    """The run stops while it waits for a batch. Every rank stops before the step of that batch."""


class CacheWriteError(DataError):
    """A file of the token cache could not be written, usually because the disk is full."""


class TokenizerError(DataError):
    """A tokenizer that cannot be loaded, or does not fit the model or the settings."""


class DataMismatch(DataError):
    """A saved data position belongs to another stream of samples than this run's."""
