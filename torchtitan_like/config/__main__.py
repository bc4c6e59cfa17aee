"""`python -m torchtitan_like.config` is `titan check`."""

from __future__ import annotations

import sys

from torchtitan_like.cli import main

if __name__ == "__main__":
    sys.exit(main(["check", *sys.argv[1:]]))
