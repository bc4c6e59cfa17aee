"""`python -m torchtitan_like` is the `titan` command."""

from __future__ import annotations

import sys

from torchtitan_like.cli import main

if __name__ == "__main__":
    sys.exit(main())
