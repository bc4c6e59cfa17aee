"""The folders of the current user for caches and state, and secrets that are stored there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PACKAGE_FOLDER = "torchtitan_like"


def user_cache(variables: Mapping[str, str]) -> Path:
    """Return the cache folder of this package: below $XDG_CACHE_HOME, else below ~/.cache.

    The path is relative for a user without a home folder.
    """
    return _folder(variables, "XDG_CACHE_HOME", ".cache")


def user_state(variables: Mapping[str, str]) -> Path:
    """Return the state folder of this package: below $XDG_STATE_HOME, else below ~/.local/state."""
    return _folder(variables, "XDG_STATE_HOME", os.path.join(".local", "state"))


def stored_secret(file: Path, new: bytes) -> bytes | None:
    """Return the secret in a file that only this user can read; `new`, at first use.

    None if it cannot be stored, or if the file has another length.
    """
    with suppress(OSError, RuntimeError):
        file = file.expanduser()
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = file.with_name(f".{file.name}-{os.getpid()}")
            with open(temporary, "wb", opener=open_private) as stream:
                stream.write(new)
            with suppress(FileExistsError):  # another process has created one meanwhile
                os.link(temporary, file)
            temporary.unlink()
        secret = file.read_bytes()
        if len(secret) == len(new):
            return secret
    return None


def open_private(path: str, flags: int) -> int:
    """Open a file that only the user can read (an `opener` of `open`)."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # for a file that exists already
    return descriptor


def _folder(variables: Mapping[str, str], name: str, default: str) -> Path:
    home = variables.get("HOME") or os.path.expanduser("~")
    return Path(variables.get(name) or os.path.join(home, default)) / PACKAGE_FOLDER
