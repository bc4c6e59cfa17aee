"""benchmarks/recipes.py: the numbers of docs/recipes are those of the committed results."""

from __future__ import annotations

from benchmarks.recipes import CONFIGS, PAGE, RESULTS, page_with_tables, read_csv


def test_the_tables_of_the_page_are_of_the_committed_results() -> None:
    text = PAGE.read_text()
    assert "<!-- results -->" in text and "<!-- rates -->" in text
    assert page_with_tables() == text


def test_results_are_the_ends_of_the_curves() -> None:
    results = [row for row in read_csv(RESULTS) if row["heldout"] == "heldout"]
    recipes = {file.stem for file in CONFIGS.glob("*.csv")}
    assert {row["recipe"] for row in results} == recipes
    for recipe in recipes:
        ends = {row["seed"]: row for row in read_csv(CONFIGS / f"{recipe}.csv")}
        assert len(ends) == 3
        actual = {seed: (row["step"], row["bits_per_byte"]) for seed, row in ends.items()}
        rows = [row for row in results if row["recipe"] == recipe]
        assert actual == {row["seed"]: (row["steps"], row["bits_per_byte"]) for row in rows}
