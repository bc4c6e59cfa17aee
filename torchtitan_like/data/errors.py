"""What the user is told when text, tokenizer or token cache are not as they should be."""

from __future__ import annotations


class DataError(Exception):
    """A fault in the data or in how it is configured: says where, what was expected, what to do."""


class WorkerKilled(DataError):
    """A process that tokenizes was killed from outside, usually because memory ran low. A new
    start continues."""


class CacheWriteError(DataError):
    """A file of the token cache could not be written, usually because the disk is full."""


class TokenizerError(DataError):
    """A tokenizer that cannot be loaded, or does not fit the model or the settings."""


class DataMismatch(DataError):
    """A saved data position belongs to another stream of samples than this run would read."""
