"""Where two runs part: `python scripts/compare_runs.py RUN_A RUN_B`.

Each is a run's folder (or its metrics.jsonl). For every number of a step that a layout or a restart must not change, the
first step at which the two differ; for loss, largest loss and gradient norm the largest relative difference besides. With
--data-only only what was read is compared: the runs may differ in their weights.

Exit code 0: all steps that both have are equal to the last bit; 1: they are not; 2: there is nothing to compare.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from torchtitan_like.monitor.jsonl import read_rows

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
    """Of the numbers relative to the first of each pair."""
    return max((abs(a - b) / abs(a) if a else abs(b)) for a, b in pairs)


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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_a", type=Path, help="a run's folder, such as outputs")
    parser.add_argument("run_b", type=Path)
    parser.add_argument("--data-only", action="store_true", help="compare only what was read")
    arguments = parser.parse_args(argv)
    try:
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
