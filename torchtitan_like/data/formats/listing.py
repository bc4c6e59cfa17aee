"""Looking at many files: by one rank for all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from torchtitan_like.distributed.world import HostGroup

T = TypeVar("T")


def seen_once(
    group: HostGroup, path: str, look: Callable[[], T], is_here: Callable[[T], bool] = lambda _: True
) -> T:
    """What ``look`` finds at ``path``. A collective of ``group``.

    The first rank looks for all, or thousands would ask one file server for each of thousands of
    files. A rank with another path, or for which ``is_here`` is false, looks by itself: nodes may
    have their own copies. An error of any rank is raised on all.
    """
    own_path = os.path.abspath(path)
    first_path, found = group.leader_does(lambda: (own_path, look()))
    return group.everyone_does(
        lambda: found if first_path == own_path and is_here(found) else look()
    )
