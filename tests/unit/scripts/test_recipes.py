"""benchmarks/recipes.py: the numbers of docs/recipes are those of the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import recipes
from benchmarks.recipes import (
    CONFIGS,
    FOLDER,
    PAGES,
    RESULTS,
    page_path,
    page_with_tables,
    read_csv,
)
from torchtitan_like.bench.results import write_csv


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_of_the_committed_results(page: str) -> None:
    text = page_path(page).read_text()
    assert "<!-- results -->" in text and f"recipes_{page}.svg" in text
    assert page_with_tables(page) == text


def test_each_recipe_is_compared_with_one_that_has_read_as_many_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [("long", 1, 9e6, "text", 2.0), ("long", 2, 9e6, "text", 3.0),
            ("longer", 1, 9e6, "text", 2.5), ("longer", 1, 9e6, "code", 4.0),
            ("short", 1, 5e6, "text", 2.25), ("longest", 1, 9e6, "code", 3.5)]  # fmt: skip
    names = ("recipe", "seed", "tokens", "heldout", "bits_per_byte")
    other = {"seconds": 60, "data_digest_chain": "ab"}
    monkeypatch.setattr(recipes, "RESULTS", tmp_path / "results.csv")
    write_csv(recipes.RESULTS, [dict(zip(names, run, strict=True)) | other for run in runs])
    table = recipes.results_table(["long", "longer", "short", "longest"])
    cells = [line.split(" | ")[:4] for line in table.splitlines()[2:]]
    assert cells == [
        ["| `long`", "text", "2.5000 ± 6.4", "–"],
        ["| `longer`", "text", "2.5000", "0.5000 to `long`"],
        ["| `longer`", "code", "4.0000", "–"],
        ["| `short`", "text", "2.2500", "–"],
        ["| `longest`", "code", "3.5000", "-0.5000 to `longer`"],
    ]


def test_each_page_is_of_recipes_that_were_run() -> None:
    pages = {file.stem for file in FOLDER.glob("*.md")} - {"index"}
    assert pages == PAGES.keys()
    run = {file.stem for file in CONFIGS.glob("*.csv")}
    assert {recipe for shown in PAGES.values() for recipe in shown} == run


def test_results_are_the_ends_of_the_curves() -> None:
    results = [row for row in read_csv(RESULTS) if row["heldout"] == "heldout"]
    run = {file.stem for file in CONFIGS.glob("*.csv")}
    assert {row["recipe"] for row in results} == run
    for recipe in run:
        ends = {row["seed"]: row for row in read_csv(CONFIGS / f"{recipe}.csv")}
        assert len(ends) == 3
        actual = {seed: (row["step"], row["bits_per_byte"]) for seed, row in ends.items()}
        rows = [row for row in results if row["recipe"] == recipe]
        assert actual == {row["seed"]: (row["steps"], row["bits_per_byte"]) for row in rows}
