"""Switch files: a user creates one in the run directory to send a request to the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.resilience.requests import Request
from torchtitan_like.util import run_directory

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Resilience


class Switches:
    """Reads the switch files of a run, on rank 0 only. The step's agreement shares the requests."""

    def __init__(self, run: Path, section: Resilience) -> None:
        paths = run_directory.switches(run, section.kill_switch_path, section.save_switch_path)
        self.kill = paths.kill
        self._once = {paths.save: Request.SAVE, paths.export: Request.EXPORT}

    def read(self) -> list[Request]:
        """Return the requests of the files. Removes SAVE and EXPORT; KILL stays for later runs."""
        requests = [Request.KILL] if self.kill.exists() else []
        for path, request in self._once.items():
            try:
                path.unlink()
            except OSError:
                continue
            requests.append(request)
        return requests
