"""Files that ask a run for something: `touch` one of them below its dump_folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.resilience.requests import Request

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Resilience


class Switches:
    """The switch files of a run. For one rank alone: what it finds is agreed on with the others."""

    def __init__(self, folder: Path, section: Resilience) -> None:
        self.kill = folder / section.kill_switch_path
        self._passing = {folder / section.save_switch_path: Request.SAVE, folder / "EXPORT": Request.EXPORT}

    def read(self) -> list[Request]:
        """What the files ask for. Each is removed, so that it asks once; the kill switch stays, for all runs to come."""
        found = [Request.KILL] if self.kill.exists() else []
        for path, request in self._passing.items():
            try:
                path.unlink()
            except OSError:
                continue
            found.append(request)
        return found
