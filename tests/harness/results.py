"""A table of what ran: `pytest -p tests.harness.results` counts, and this program prints the table.

The folder in TEST_RESULTS receives one JSON file for each run of pytest. `./run_tests.sh` uses it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = ("passed", "failed", "skipped", "nightly")
SECONDS = "seconds"
MAX_REASONS = 6  # of skipped tests, that are printed


def folder_of(node_id: str) -> str:
    """Return the folder of a test below tests/, such as `unit/data`, without the test's file."""
    parts = node_id.partition("::")[0].split("/")[1:-1]
    return "/".join(parts[:2]) or "tests"


class Results:
    """Counts the tests of a run, in the process that reports them.

    counts: folder -> outcome, or `SECONDS` of all tests -> number. reasons: of skipped tests.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.reasons: Counter[str] = Counter()

    def _add(self, node_id: str, name: str, value: float = 1) -> None:
        self.counts.setdefault(folder_of(node_id), Counter())[name] += value  # type: ignore[assignment]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker("nightly"):
                self._add(item.nodeid, "nightly")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report.nodeid, SECONDS, report.duration)
        if report.failed:
            self._add(report.nodeid, "failed")
        elif report.when == "call" and report.passed:
            self._add(report.nodeid, "passed")
        elif report.skipped:
            self._add(report.nodeid, "skipped")
            if isinstance(report.longrepr, tuple):
                self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Add what a worker of pytest-xdist has deselected; all workers deselect the same."""
        for folder, number in getattr(node, "workeroutput", {}).get("nightly", {}).items():
            self.counts.setdefault(folder, Counter())["nightly"] = number

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        worker: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if worker is not None:
            counts = self.counts.items()
            worker["nightly"] = {folder: count["nightly"] for folder, count in counts}
        elif folder := os.environ.get("TEST_RESULTS"):
            path = Path(folder) / f"{os.getpid()}.json"
            path.write_text(json.dumps({"counts": self.counts, "reasons": self.reasons}))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Results())


# ---- the table


def table(results: Iterable[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of several runs, and why tests were skipped."""
    counts: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for result in results:
        reasons.update(result["reasons"])
        for folder, numbers in result["counts"].items():
            counts.setdefault(folder, Counter()).update(numbers)
    total = sum(counts.values(), Counter())
    rows = [*sorted(counts.items()), ("all", total)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{'tests':{width}}" + "".join(f"{name:>9}" for name in (*OUTCOMES, SECONDS))]
    for name, numbers in rows:
        cells = "".join(f"{numbers[outcome]:>9,}" for outcome in OUTCOMES)
        lines.append(f"{name:{width}}{cells}{numbers[SECONDS]:>9,.0f}")
    lines += [f"skipped {number}: {reason}" for reason, number in reasons.most_common(MAX_REASONS)]
    return lines


def machine() -> str:
    """Return one line about this machine."""
    slurm = "Slurm" if shutil.which("slurmctld") else "no Slurm"
    gpus = "NVIDIA GPUs" if Path("/dev/nvidiactl").exists() else "no GPU"
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    torch = metadata.version("torch")
    return (
        f"on {platform.machine()}, {cores} cores, Python {python}, torch {torch}, {gpus}, {slurm}"
    )


def main() -> None:
    """Print the table of the files in TEST_RESULTS."""
    paths = sorted(Path(os.environ["TEST_RESULTS"]).glob("*.json"))
    if not paths:
        sys.exit("No test ran")
    print("\n".join(table(json.loads(path.read_text()) for path in paths)))
    print(machine())
    print("nightly: ./run_tests.sh --nightly. CUDA paths: --null-gpu. Kills of real runs: --faults")


if __name__ == "__main__":
    main()
