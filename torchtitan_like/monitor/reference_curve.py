"""The committed curve of a recipe: bits per byte of earlier runs, which a run is compared with."""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torchtitan_like.util.bundle import find_config
from torchtitan_like.util.reading import read_file

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import Validation

COLUMNS = ("seed", "tokens", "bits_per_byte")
MAX_BYTES = 2**24  # of a curve


class Comparison(NamedTuple):
    """A validation next to the curve. reference: bits per byte of the curve. line: of the log."""

    reference: float
    line: str


@dataclass(frozen=True)
class ReferenceCurve:
    """Bits per byte of each seed by the number of tokens that were trained.

    dataset: name of the validation dataset that the curve is of, as in validation.jsonl.
    """

    by_seed: Mapping[int, Mapping[int, float]]
    dataset: str = ""

    def values(self, tokens: int) -> list[float]:
        """Return the bits per byte of each seed, interpolated between the points of its curve.

        Seeds whose curve starts later or ends earlier are left out.
        """
        return [
            _interpolate(curve, tokens)
            for curve in self.by_seed.values()
            if min(curve) <= tokens <= max(curve)
        ]

    def compare(self, step: int, tokens: int, bits_per_byte: float) -> Comparison | None:
        """Compare a run with the mean over the seeds at equal tokens; None if there is no seed.

        The line has the range of the seeds if it is visible in two decimals.
        """
        values = self.values(tokens)
        if not values:
            return None
        mean = sum(values) / len(values)
        low, high = f"{min(values):.2f}", f"{max(values):.2f}"
        seeds = f" ({low} to {high}, {len(values)} seeds)" if low != high else ""
        line = f"{bits_per_byte:.2f} bits/byte at step {step}; recipe: {mean:.2f}{seeds}"
        return Comparison(mean, line)


def _interpolate(curve: Mapping[int, float], tokens: int) -> float:
    if tokens in curve:
        return curve[tokens]
    points = sorted(curve)
    after = bisect_left(points, tokens)
    left, right = points[after - 1], points[after]
    share = (tokens - left) / (right - left)
    return (1 - share) * curve[left] + share * curve[right]


def build_reference(validation: Validation) -> ReferenceCurve | None:
    """Read the curve of a run; None without one. It is of the first validation dataset."""
    if not validation.enable or validation.reference_curve is None:
        return None
    names = list(validation.sources)
    by_seed = read_reference_curve(validation.reference_curve)
    return ReferenceCurve(by_seed, names[0] if len(names) > 1 else "")


def read_reference_curve(path: str) -> dict[int, dict[int, float]]:
    """Read a CSV file with the columns `COLUMNS`. Returns bits per byte by seed and tokens.

    path: of a file, or a name in the package as in `find_config`. Raises OSError; ValueError with
    the line that is wrong.
    """
    lines = read_file(find_config(path), MAX_BYTES).decode("utf-8-sig").splitlines()
    rows = csv.DictReader(lines)
    if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
        raise ValueError(f"line 1 lacks the column {missing[0]}")
    curves: dict[int, dict[int, float]] = {}
    for row in rows:
        try:
            seed, tokens, value = int(row["seed"]), int(row["tokens"]), float(row["bits_per_byte"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {rows.line_num}: {error}") from None
        if tokens < 0 or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"line {rows.line_num}: {tokens} tokens, bits per byte {value}")
        curve = curves.setdefault(seed, {})
        if tokens in curve:
            raise ValueError(f"line {rows.line_num}: seed {seed} has {tokens} tokens twice")
        curve[tokens] = value
    if not curves:
        raise ValueError("it has no rows")
    return curves
