"""Where two runs part, and what they ran in.

    python scripts/compare_runs.py outputs_a outputs_b
    python scripts/compare_runs.py outputs_a outputs_b --environment
    python scripts/compare_runs.py outputs/attempts/1 outputs/attempts/2 --environment

Each is a run's folder (or its metrics.jsonl). For every number of a step that a layout or a restart must not change, the
first step at which the two differ; for loss, largest loss and gradient norm the largest relative difference besides. With
--data-only only what was read is compared: the runs may differ in their weights.

With --environment, what their newest attempts (or those that are named) ran in: variables, packages, machine, git. One that
only preloads another library may explain a gap in speed.

Exit code 0: all that both have is equal, numbers to the last bit; 1: it is not; 2: there is nothing to compare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from torchtitan_like.util.jsonl import read_rows

DATA = ("n_tokens_seen", "num_valid_tokens", "data_digest", "data_digest_chain")
NUMBERS = ("lr", "skipped", "loss", "max_loss", "grad_norm", "sources")
MEASURED = ("loss", "max_loss", "grad_norm")
Row = dict[str, Any]


def rows_by_step(run: Path) -> dict[int, Row]:
    """The rows of a run by step. Raises OSError or ValueError where there are none."""
    file = run / "metrics.jsonl" if run.is_dir() else run
    rows = {row["step"]: row for row in read_rows(file)}
    if not rows:
        raise ValueError(f"{file} has no step")
    return rows


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, which a number's text tells; NaN equals NaN."""
    return repr(a) == repr(b)


def largest_difference(pairs: list[tuple[float, float]]) -> float:
    """Of the numbers relative to the first of each pair; infinite where only one of them is a number."""
    found = [0.0 if same(a, b) else abs(a - b) / abs(a) if a else abs(b) for a, b in pairs]
    return max(math.inf if math.isnan(one) else one for one in found)


def report(ours: dict[int, Row], theirs: dict[int, Row], keys: tuple[str, ...]) -> tuple[list[str], bool]:
    """Lines for a person, and whether all is equal."""
    steps = sorted(ours.keys() & theirs.keys())
    lines = [f"{len(steps):,} steps in both, {steps[0]:,} to {steps[-1]:,}"]
    only = [(name, len(mine.keys() - others)) for name, mine, others in (("A", ours, theirs), ("B", theirs, ours))]
    lines += [f"{count:,} steps only in {name}" for name, count in only if count]
    is_equal = True
    for key in keys:
        pairs = [
            (step, ours[step][key], theirs[step][key]) for step in steps if key in ours[step] and key in theirs[step]
        ]
        first = next(((step, a, b) for step, a, b in pairs if not same(a, b)), None)
        if first is None:
            lines.append(f"  {key:<18} equal" if pairs else f"  {key:<18} in no row of both")
            continue
        is_equal = False
        told = f"  {key:<18} differs from step {first[0]:,} on: {first[1]} and {first[2]}"
        if key in MEASURED:
            told += f"; largest relative difference {largest_difference([(a, b) for _, a, b in pairs]):.2e}"
        lines.append(told)
    return lines, is_equal


# ---- what they ran in


def environment_of(run: Path) -> Path:
    """The folder of an attempt's environment: of the one that is named, or of a run's newest. Raises ValueError."""
    attempts = sorted(
        (path for path in run.glob("attempts/[0-9]*") if path.name.isdecimal()), key=lambda p: int(p.name)
    )
    for attempt in (run, *reversed(attempts)):
        if (attempt / "environment").is_dir():
            return attempt / "environment"
    raise ValueError(f"{run} holds no environment: expected the folder of a run, or one of its attempts")


def settings(file: Path) -> dict[str, str]:
    """What a file of an environment says, as name -> value; of a line that names nothing, all is the name."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    if file.suffix == ".json":
        return {key: str(value) for key, value in json.loads(text or "{}").items() if key != "time"}
    if file.suffix == ".diff":  # too long to be shown
        return {f"hash of {file.name}": hashlib.sha256(text.encode()).hexdigest()[:12]} if text else {}
    parts = (re.split(r"==?", line, maxsplit=1) for line in text.splitlines())
    return {name: rest[0] if rest else "there" for name, *rest in parts}


def report_environment(a: Path, b: Path) -> tuple[list[str], bool]:
    """Lines for a person, and whether all is equal."""
    lines, is_equal = [f"A: {a}", f"B: {b}"], True
    for name in sorted({path.name for path in (*a.iterdir(), *b.iterdir()) if path.is_file()}):
        ours, theirs = settings(a / name), settings(b / name)
        differing = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
        lines.append(f"{name}: {len(differing)} differences" if differing else f"{name}: equal")
        for key in differing:
            lines += [f"  {key}", f"    A {ours.get(key, '(none)')}", f"    B {theirs.get(key, '(none)')}"]
        is_equal &= not differing
    return lines, is_equal


# ---- the command


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_a", type=Path, help="a run's folder, such as outputs")
    parser.add_argument("run_b", type=Path)
    parser.add_argument("--data-only", action="store_true", help="compare only what was read")
    parser.add_argument("--environment", action="store_true", help="compare what they ran in")
    arguments = parser.parse_args(argv)
    try:
        if arguments.environment:
            lines, is_equal = report_environment(*map(environment_of, (arguments.run_a, arguments.run_b)))
            print("\n".join(lines))
            return 0 if is_equal else 1
        ours, theirs = rows_by_step(arguments.run_a), rows_by_step(arguments.run_b)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if not ours.keys() & theirs.keys():
        print(
            f"no step in both: A has {min(ours)} to {max(ours)}, B has {min(theirs)} to {max(theirs)}", file=sys.stderr
        )
        return 2
    lines, is_equal = report(ours, theirs, DATA if arguments.data_only else DATA + NUMBERS)
    print("\n".join(lines))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
