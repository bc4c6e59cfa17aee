"""The installed release of torch, without importing it."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_like.config.findings import Findings
# Releases of torch: the oldest that is supported, and the newest that the tests have run on.
OLDEST_TORCH, NEWEST_TESTED_TORCH = (2, 11), (2, 14)


def check_torch(findings: Findings) -> None:
    """Refuse a torch that is too old; warn once of one that is newer than the tested ones."""
    release = installed_release()
    version, newest, oldest = (
        ".".join(map(str, numbers)) for numbers in (release, NEWEST_TESTED_TORCH, OLDEST_TORCH)
    )
    if release < OLDEST_TORCH:
        text = f"torch {oldest} or newer; torch {version} is installed"
        findings.error("torch", text, f"pip install 'torch>={oldest}'")
    elif release > NEWEST_TESTED_TORCH:
        text = f"torch {version} is newer than the newest tested release, {newest}"
        findings.warning("torch", text, "report what fails; torch 2.13 runs in every CI run")


def installed_release() -> tuple[int, ...]:
    """(2, 13) for 2.13.0+cpu, of what is installed; nothing is imported for it."""
    return tuple(int(part) for part in metadata.version("torch").split(".")[:2])
