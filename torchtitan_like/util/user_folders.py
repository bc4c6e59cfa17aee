"""The folder of the current user for caches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_cache(variables: Mapping[str, str]) -> Path:
    """Return the cache folder of this package: below $XDG_CACHE_HOME, else below ~/.cache.

    The path is relative for a user without a home folder.
    """
    home = variables.get("HOME") or os.path.expanduser("~")
    return Path(variables.get("XDG_CACHE_HOME") or f"{home}/.cache") / "torchtitan_like"
