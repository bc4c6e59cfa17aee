"""The installed release of torch, and environment variables of NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator

from torchtitan_like.check.context import RunContext
from torchtitan_like.config.problems import Problem

# The oldest release of torch that is supported, and the newest that the tests have run on.
OLDEST_TORCH = (2, 11)
NEWEST_TESTED_TORCH = (2, 14)


def check_torch(run: RunContext) -> Iterator[Problem]:
    """Refuse a torch that is too old; warn about one that is newer than the tested releases."""
    release = ".".join(map(str, run.torch_release))
    oldest = ".".join(map(str, OLDEST_TORCH))
    newest = ".".join(map(str, NEWEST_TESTED_TORCH))
    if run.torch_release < OLDEST_TORCH:
        expected = f"torch {oldest} or newer; torch {release} is installed"
        yield Problem("torch", None, expected, f"pip install 'torch>={oldest}'")
    elif run.torch_release > NEWEST_TESTED_TORCH:
        text = f"torch {release} is newer than the newest tested release, {newest}"
        remedy = "report what fails; torch 2.13 runs in every CI run"
        yield Problem("torch", None, text, remedy, severity="warning")


def check_nccl(run: RunContext) -> Iterator[Problem]:
    """Warn about a fixed algorithm or protocol of NCCL, unless debug.deterministic sets both."""
    if run.device_type != "cuda" or run.config.debug.deterministic:
        return
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        if value := os.environ.get(name):
            text = (
                f"{name}={value} is set: NCCL selects by message size, "
                "and a fixed choice is usually slower"
            )
            remedy = "unset it, or see docs/guides/nccl.md"
            yield Problem(name, None, text, remedy, severity="warning")
