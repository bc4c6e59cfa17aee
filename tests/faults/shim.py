"""Python interface of shim.c: build the library, write its rules, read its hits."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")


def build_shim(folder: Path) -> Path:
    """Compile shim.c into `folder`. Raise RuntimeError if no C compiler is installed."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError(
            "no C compiler is in PATH: install gcc or cc to build the fault injection library"
        )
    library = folder / "shim.so"
    command = [compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True, timeout=60)
    return library


@dataclass(frozen=True)
class Rule:
    """One line of the rules file; the fields are described in shim.c."""

    call: str
    pattern: str
    action: str
    rank: int | str = "*"
    first: int = 1
    hits: int = 1
    seconds: float = 0

    def __str__(self) -> str:
        return (
            f"{self.rank} {self.call} {self.pattern} {self.first} {self.hits} "
            f"{self.action} {self.seconds:g}"
        )


class Faults:
    """The rules file of runs that start with `env`, and the calls that it has hit."""

    def __init__(self, library: Path, rules: Path) -> None:
        self.rules = rules
        self.env = {"LD_PRELOAD": str(library), "FAULT_RULES": str(rules)}
        self.set()

    def set(self, *rules: Rule) -> None:
        """Replace the rules for processes that start later, and clear the recorded hits."""
        for path in self.rules.parent.glob(f"{self.rules.name}.*"):
            path.unlink()
        self.rules.write_text("".join(f"{rule}\n" for rule in rules))

    @property
    def hits(self) -> list[str]:
        """A line "rank call path" for each call that a rule hit."""
        path = self.rules.with_name(f"{self.rules.name}.hits")
        return path.read_text().splitlines() if path.exists() else []

    def parked(self) -> dict[int, int]:
        """Return the pids of the halted ranks, by rank."""
        parked_pids = {}
        for path in self.rules.parent.glob(f"{self.rules.name}.parked.*"):
            pid = path.read_text()
            if pid.endswith("\n"):
                parked_pids[int(path.suffix[1:])] = int(pid)
        return parked_pids

    def release(self) -> None:
        """Continue the halted ranks."""
        self.rules.with_name(f"{self.rules.name}.go").touch()

    def wait_for_parked(
        self, num_ranks: int, is_over: Callable[[], bool], timeout: float = 60
    ) -> dict[int, int]:
        """Wait until `num_ranks` ranks are halted or the run is over; return the halted ranks.

        Raise AssertionError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while len(parked_pids := self.parked()) < num_ranks:
            if is_over():
                return self.parked()
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"no call matched {self.rules.read_text()!r} within {timeout:g} s"
                )
            time.sleep(0.002)
        return parked_pids
