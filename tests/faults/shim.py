"""The faults of shim.c from Python: build the library, write its rules, read what it hit."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")


def build_shim(folder: Path) -> Path:
    """Compile shim.c into `folder`. Raises RuntimeError, with what to install, where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("faults are injected by a C library that is built on the spot: no gcc or cc in PATH")
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
        return f"{self.rank} {self.call} {self.pattern} {self.first} {self.hits} {self.action} {self.seconds:g}"


class Faults:
    """The rules file of the runs that are started with `env`, and what it led to."""

    def __init__(self, library: Path, rules: Path) -> None:
        self.rules = rules
        self.env = {"LD_PRELOAD": str(library), "FAULT_RULES": str(rules)}
        self.set()

    def set(self, *rules: Rule) -> None:
        """Replace all rules, for processes that start from now on, and forget what happened so far."""
        for path in self.rules.parent.glob(f"{self.rules.name}.*"):
            path.unlink()
        self.rules.write_text("".join(f"{rule}\n" for rule in rules))

    @property
    def hits(self) -> list[str]:
        """A line "rank call path" of every call that a rule hit."""
        path = self.rules.with_name(f"{self.rules.name}.hits")
        return path.read_text().splitlines() if path.exists() else []

    def parked(self) -> dict[int, int]:
        """Map each rank that is halted at a call to its pid."""
        found = {}
        for path in self.rules.parent.glob(f"{self.rules.name}.parked.*"):
            pid = path.read_text()
            if pid.endswith("\n"):
                found[int(path.suffix[1:])] = int(pid)
        return found

    def release(self) -> None:
        """Let the parked ranks go on."""
        self.rules.with_name(f"{self.rules.name}.go").touch()

    def wait_for_parked(self, num_ranks: int, is_over: Callable[[], bool], timeout: float = 60) -> dict[int, int]:
        """Wait until so many ranks are parked, until the run is over (then fewer are) or for `timeout` seconds."""
        give_up = time.monotonic() + timeout
        while len(found := self.parked()) < num_ranks:
            if is_over():
                return self.parked()
            if time.monotonic() > give_up:
                raise AssertionError(f"no call was reached that fits {self.rules.read_text()!r} within {timeout:g} s")
            time.sleep(0.002)
        return found
