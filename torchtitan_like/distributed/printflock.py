"""`print` for several processes: `from torchtitan_like.distributed.printflock import printflock as print`.

Lines of processes that share a terminal or a file are never mixed.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
from typing import Any

from torchtitan_like.util.locks import file_lock


def printflock(*values: Any, **options: Any) -> None:
    """As `print`, under a lock shared by all processes: the text is written as one piece."""
    stream = options.pop("file", None) or sys.stdout
    options.pop("flush", None)
    text = io.StringIO()
    builtins.print(*values, file=text, **options)
    with open(os.path.abspath(__file__)) as lock, file_lock(lock):
        stream.write(text.getvalue())
        stream.flush()
