"""Compare two runs: the first step at which their numbers differ, and their environments.

A run is also compared with the plan of its configuration: memory and step time.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_like.report.tolerant import METRICS_KINDS, Row, read_rows
from torchtitan_like.util.plan_file import (
    TOLERANCE,
    Deviation,
    Measured,
    PlanFile,
    check_modules,
    describe_differences,
    deviations,
    differences,
    event_fields,
    module_table,
    read_plan,
    settings_of,
)
from torchtitan_like.util.run_directory import (
    ENVIRONMENT,
    METRICS,
    numbered_attempts,
    read_config,
)

# Keys of metrics.jsonl that must not depend on layout or restarts.
DATA_KEYS = ("n_tokens_seen", "num_valid_tokens", "data_digest", "data_digest_chain")
NUMBER_KEYS = ("lr", "group_lr", "skipped", "loss", "max_loss", "grad_norm", "sources")
MEASURED_KEYS = ("loss", "max_loss", "grad_norm")  # whose largest difference is printed


@dataclass(frozen=True)
class KeyComparison:
    """One key of the rows of two runs.

    num_rows              steps whose rows in both runs have the key
    first                 (step, value in A, value in B) of the first difference; None: equal
    largest_difference    largest relative difference of all steps; None for keys without one
    """

    key: str
    num_rows: int
    first: tuple[int, Any, Any] | None
    largest_difference: float | None

    def line(self) -> str:
        """Return the line of `titan run compare`."""
        if self.first is None:
            return f"  {self.key:<18} {'equal' if self.num_rows else 'in no step of both'}"
        step, a, b = self.first
        line = f"  {self.key:<18} differs from step {step:,} on: {a} and {b}"
        if self.largest_difference is not None:
            line += f"; largest relative difference {self.largest_difference:.2e}"
        return line


@dataclass(frozen=True)
class Comparison:
    """The rows of two runs, compared."""

    first_step: int
    last_step: int
    num_steps: int
    only_in_a: int
    only_in_b: int
    keys: tuple[KeyComparison, ...]

    @property
    def is_equal(self) -> bool:
        """Return True if no key differs."""
        return all(key.first is None for key in self.keys)

    def lines(self) -> list[str]:
        """Return the lines of `titan run compare`."""
        steps = f"{self.first_step:,} to {self.last_step:,}"
        lines = [f"{self.num_steps:,} steps in both, {steps}"]
        for name, count in (("A", self.only_in_a), ("B", self.only_in_b)):
            if count:
                lines.append(f"{count:,} steps only in {name}")
        return lines + [key.line() for key in self.keys]

    def as_json(self) -> dict[str, Any]:
        """Return the object of `titan run compare --json`."""
        keys = {}
        for key in self.keys:
            step, a, b = key.first or (None, None, None)
            keys[key.key] = {
                "equal": key.first is None,
                "num_rows": key.num_rows,
                "first_step": step,
                "a": a,
                "b": b,
                "largest_relative_difference": key.largest_difference,
            }
        return {
            "equal": self.is_equal,
            "num_steps": self.num_steps,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "only_in_a": self.only_in_a,
            "only_in_b": self.only_in_b,
            "keys": keys,
        }


def compare_runs(a: Path, b: Path, *, data_only: bool = False) -> Comparison:
    """Compare the metrics of two runs (their folders, or their metrics.jsonl).

    data_only: only compare the keys that describe the data. Raises ValueError if a file is missing
    or damaged, or if no step is in both.
    """
    rows_a = _rows_by_step(a)
    rows_b = _rows_by_step(b)
    steps = sorted(rows_a.keys() & rows_b.keys())
    if not steps:
        raise ValueError(
            f"no step is in both runs: A has {min(rows_a)} to {max(rows_a)}, "
            f"B has {min(rows_b)} to {max(rows_b)}. Expected at least one. "
            "Compare runs of the same steps."
        )
    keys = DATA_KEYS if data_only else DATA_KEYS + NUMBER_KEYS
    return Comparison(
        steps[0],
        steps[-1],
        len(steps),
        len(rows_a.keys() - rows_b.keys()),
        len(rows_b.keys() - rows_a.keys()),
        tuple(_compare_key(key, rows_a, rows_b, steps) for key in keys),
    )


def _rows_by_step(run: Path) -> dict[int, Row]:
    """Return all rows of a run. Raises ValueError without one, or if a line is damaged."""
    file = run / METRICS if run.is_dir() else run
    if not file.exists():
        raise ValueError(
            f"{file} does not exist. Expected the metrics of a run. "
            "Give the folder of a run, or its metrics.jsonl."
        )
    rows, problems = read_rows(file, ("step",), METRICS_KINDS)
    # A live run may be writing the last line.
    if damage := [problem for problem in problems if "(incomplete)" not in problem]:
        raise ValueError(f"{file.parent}: {damage[0]}. Expected a row in each line: delete them")
    if not rows:
        raise ValueError(
            f"{file} has no step. Expected at least one: wait for the run's first step"
        )
    return {row["step"]: row for row in rows}


def _compare_key(
    key: str, rows_a: dict[int, Row], rows_b: dict[int, Row], steps: Sequence[int]
) -> KeyComparison:
    values = [
        (step, rows_a[step][key], rows_b[step][key])
        for step in steps
        if key in rows_a[step] and key in rows_b[step]
    ]
    first = next(((step, a, b) for step, a, b in values if not _is_same(a, b)), None)
    largest = None
    if first is not None and key in MEASURED_KEYS:
        largest = _largest_difference([(a, b) for _, a, b in values])
    return KeyComparison(key, len(values), first, largest)


def _is_same(a: Any, b: Any) -> bool:
    """Return True if two values are equal to the last bit, as text; NaN equals NaN."""
    return repr(a) == repr(b)


def _largest_difference(pairs: Sequence[tuple[float | None, float | None]]) -> float:
    """Return the largest relative difference; infinite if only one of a pair is a number."""
    return max(_relative_difference(a, b) for a, b in pairs)


def _relative_difference(a: float | None, b: float | None) -> float:
    if _is_same(a, b):
        return 0.0
    if a is None or b is None:  # a step without labels
        return math.inf
    difference = abs(a - b) / abs(a) if a else abs(b)
    return math.inf if math.isnan(difference) else difference


# ---- a plan


@dataclass(frozen=True)
class PlanComparison:
    """A plan, read from `path`, and the measurements of a run.

    modules: bytes that each module keeps in memory, as measured.
    """

    plan: PlanFile
    path: Path
    measured: Measured
    modules: Any
    deviations: list[Deviation]

    @property
    def is_within_tolerance(self) -> bool:
        """Whether all measurements are close to the plan."""
        return not any(abs(each.share) > TOLERANCE for each in self.deviations)

    def as_json(self) -> dict[str, Any]:
        """Return what `titan run compare --json` prints."""
        both = {"planned_modules": self.plan.modules, "modules": self.modules}
        return {**event_fields(self.plan, self.measured), **both}

    def lines(self) -> list[str]:
        """Return what `titan run compare` prints."""
        lines = [f"Plan for {self.plan.gpu} ({self.path})", *map(str, self.deviations)]
        if self.measured.reserved is None:
            lines.append("Memory is not compared: the run did not measure a GPU's allocator")
        return [*lines, *module_table(self.plan.modules, self.modules)]


def compare_with_plan(run: Path, path: Path) -> PlanComparison:
    """Compare the newest attempt of a run with a plan file.

    Raises ValueError if there is no plan of this configuration, or nothing to compare.
    """
    from torchtitan_like.report.recorded import measured_modules, measured_steps, read_run

    recorded = read_run(run)
    if not recorded.attempts:
        raise ValueError(f"{run} has no attempts. Expected a run that has trained: name another")
    num_ranks = recorded.attempts[-1].num_ranks or 1
    if not path.exists():
        raise ValueError(
            f"there is no plan {path}. Expected a plan file: write it with `titan plan "
            f"{run}/config.toml --world-size {num_ranks} -o {path}`"
        )
    plan = read_plan(path)
    if found := differences(plan, settings_of(read_config(run), num_ranks)):
        raise ValueError(describe_differences(path, found))
    modules = measured_modules(recorded)
    check_modules(modules)
    measured = measured_steps(recorded)
    compared = deviations(plan, measured)
    if not compared:
        raise ValueError(
            f"{run} has no measurement to compare. Expected a log line after step 10 of the "
            "newest attempt: train for longer, or lower metrics.log_freq"
        )
    return PlanComparison(plan, path, measured, modules, compared)


# ---- environments


def compare_environments(a: Path, b: Path) -> dict[str, dict[str, tuple[str | None, str | None]]]:
    """Return the different settings of each file: name -> values in A and B; None: absent.

    a, b: run folders (the newest attempt is compared) or attempt folders. Raises ValueError.
    """
    folder_a, folder_b = environment_folder(a), environment_folder(b)
    names = sorted({p.name for p in (*folder_a.iterdir(), *folder_b.iterdir()) if p.is_file()})
    differences = {}
    for name in names:
        before, after = _settings(folder_a / name), _settings(folder_b / name)
        keys = sorted(before.keys() | after.keys())
        differences[name] = {
            key: (before.get(key), after.get(key))
            for key in keys
            if before.get(key) != after.get(key)
        }
    return differences


def format_environments(
    a: Path, b: Path, differences: dict[str, dict[str, tuple[str | None, str | None]]]
) -> list[str]:
    """Return the lines of `titan run compare --environment`."""
    lines = [f"A: {environment_folder(a)}", f"B: {environment_folder(b)}"]
    for name, settings in differences.items():
        lines.append(f"{name}: {len(settings)} differences" if settings else f"{name}: equal")
        for key, (before, after) in settings.items():
            lines.append(f"  {key}")
            lines.append(f"    A {'(none)' if before is None else before}")
            lines.append(f"    B {'(none)' if after is None else after}")
    return lines


def environment_folder(run: Path) -> Path:
    """Return the environment folder of an attempt, or of a run's newest one. Raises ValueError."""
    for attempt in (run, *reversed(numbered_attempts(run))):
        if (attempt / ENVIRONMENT).is_dir():
            return attempt / ENVIRONMENT
    raise ValueError(
        f"{run} contains no environment: it has no {ENVIRONMENT}/ and no attempt with one. "
        "Expected the folder of a run or of an attempt. Correct the path."
    )


def _settings(file: Path) -> dict[str, str]:
    """Return a file of an environment as name -> value."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    if file.suffix == ".json":
        content = json.loads(text or "{}")
        return {key: str(value) for key, value in content.items() if key != "time"}
    if file.suffix == ".diff":  # too long to print
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return {f"hash of {file.name}": digest} if text else {}
    settings = {}
    for line in text.splitlines():
        name, *value = re.split(r"==?", line, maxsplit=1)
        settings[name] = value[0] if value else "present"
    return settings
