"""Deprecated: use `titan download`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

COMMAND = ("download",)


def main() -> None:
    """Replace this process by the command, with the package of this checkout."""
    print(
        "scripts/download_assets.py is deprecated: use `titan download`",
        file=sys.stderr,
        flush=True,
    )
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    argv = [sys.executable, "-m", "torchtitan_like", *COMMAND, *sys.argv[1:]]
    # `-m` must not import modules from the working folder, as a script does not.
    env = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    os.execve(sys.executable, argv, env)


if __name__ == "__main__":
    main()
