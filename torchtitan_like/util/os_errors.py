"""Describe errors of the operating system in three parts: problem, expectation, remedy."""

from __future__ import annotations

import errno

_PERMISSION = ("permission for this user", "Change its owner or mode, or choose another path")
_SPACE = ("free space", "Free some, or choose another disk")
_DISK = ("a disk that works", "Check the disk and its mount")
# Error number -> what was expected, and what to do.
_ADVICE = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: ("a disk that is not mounted read-only", "Choose another path"),
    errno.ENOENT: ("an existing path", "Correct it"),
    errno.ENOTDIR: ("a folder", "Correct the path"),
    errno.EISDIR: ("a file", "Correct the path"),
    errno.EEXIST: ("a new path, or a folder", "Choose another path"),
    errno.ENAMETOOLONG: ("a shorter name", "Choose another path"),
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EMFILE: ("fewer open files", "Raise the limit (ulimit -n)"),
    errno.EFBIG: ("a smaller file", "Choose another path, or raise the limit (ulimit -f)"),
}


def describe_os_error(error: OSError) -> str:
    """Return a message with path, reason, expectation and remedy.

    The message of an error without an error number is its own.
    """
    if error.errno is None:
        return str(error)
    expected, remedy = _ADVICE.get(error.errno, _DISK)
    path = "" if error.filename is None else f"{_as_text(error.filename)}: "
    return f"{path}{error.strerror}. Expected {expected}. {remedy}."


def _as_text(path: str | bytes | int) -> str:
    return path.decode(errors="replace") if isinstance(path, bytes) else str(path)
