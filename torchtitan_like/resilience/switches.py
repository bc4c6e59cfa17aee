"""Files that ask a run for something: `touch <dump_folder>/SAVE` or `<dump_folder>/EXPORT`."""

from __future__ import annotations

from pathlib import Path

from torchtitan_like.resilience.requests import Request

SWITCHES = {"SAVE": Request.SAVE, "EXPORT": Request.EXPORT}


def read_switches(folder: Path) -> list[Request]:
    """What the switch files in `folder` ask for; each is removed, so that it asks once. For one rank alone."""
    found = []
    for name, request in SWITCHES.items():
        try:
            (folder / name).unlink()
        except OSError:
            continue
        found.append(request)
    return found
