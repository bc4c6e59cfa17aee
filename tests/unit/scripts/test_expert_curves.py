"""The picture of the expert benchmark shows the numbers of its committed file."""

from __future__ import annotations

from benchmarks import expert_curves
from tests.harness.runner import ROOT


def test_the_committed_picture_is_drawn_from_the_committed_numbers() -> None:
    curves = expert_curves.read_csv(ROOT / "docs/benchmarks/2026-11-24-expert-curves.csv")
    assert {name: len(rows) for name, rows in curves.items()} == {"dense": 17, "moe": 17}
    picture = expert_curves.draw(curves)
    assert picture == (ROOT / "docs/images/expert_curves.svg").read_text()
