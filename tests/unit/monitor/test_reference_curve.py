"""A run is compared with the bits per byte that a recipe's runs reached with as many tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.runner import ROOT
from torchtitan_like.config.sections_training import DataSource, Validation
from torchtitan_like.monitor.reference_curve import (
    ReferenceCurve,
    build_reference,
    read_reference_curve,
)
from torchtitan_like.util import bundle

CURVE = ROOT / "tests/assets/reference_curve.csv"
TOKENS = 128  # of a step of the curve


def test_values_are_interpolated_between_the_points_of_each_seed() -> None:
    curve = ReferenceCurve(read_reference_curve(str(CURVE)))
    assert curve.values(TOKENS) == [6.0, 6.0]
    assert curve.values(4 * TOKENS) == pytest.approx([5.25, 5.55])
    assert curve.values(5 * TOKENS) == [5.0, 5.4]
    assert curve.values(TOKENS - 1) == curve.values(5 * TOKENS + 1) == []


@pytest.mark.parametrize(("names", "dataset"), [((), ""), (("web",), ""), (("web", "code"), "web")])
def test_the_curve_is_of_the_first_validation_dataset(names: tuple[str, ...], dataset: str) -> None:
    sources = {name: DataSource(path=name) for name in names}
    validation = Validation(enable=True, sources=sources, reference_curve=str(CURVE))
    reference = build_reference(validation)
    assert reference is not None and reference.dataset == dataset


def test_a_seed_counts_between_its_own_first_and_last_point() -> None:
    curve = ReferenceCurve({1: {10: 3.0, 20: 2.0}, 2: {30: 1.5, 10: 3.5, 20: 2.5}})
    assert curve.values(15) == [2.5, 3.0]
    assert curve.values(25) == [2.0]


@pytest.mark.parametrize(
    ("reference", "line"),
    [
        ([2.3], "2.31 bits/byte at step 400; recipe: 2.30"),
        ([2.301, 2.302], "2.31 bits/byte at step 400; recipe: 2.30"),
        ([2.28, 2.31, 2.32], "2.31 bits/byte at step 400; recipe: 2.30 (2.28 to 2.32, 3 seeds)"),
    ],
)
def test_the_line_shows_the_range_of_the_seeds_if_it_is_visible(
    reference: list[float], line: str
) -> None:
    curve = ReferenceCurve({seed: {8000: value} for seed, value in enumerate(reference)})
    compared = curve.compare(400, 8000, 2.3149)
    assert compared is not None and compared.line == line
    assert compared.reference == pytest.approx(sum(reference) / len(reference))
    assert curve.compare(400, 8001, 2.3) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 lacks the column seed"),
        ("seed,tokens,loss\n1,1,2.0\n", "line 1 lacks the column bits_per_byte"),
        ("seed,tokens,bits_per_byte\n", "it has no rows"),
        ("seed,tokens,bits_per_byte\n1,1,2.0\n1,2\n", "line 3: "),
        ("seed,tokens,bits_per_byte\n1,ten,2.0\n", "line 2: .*'ten'"),
        ("seed,tokens,bits_per_byte\n1,-1,2.0\n", "line 2: -1 tokens"),
        ("seed,tokens,bits_per_byte\n1,1,nan\n", "line 2: 1 tokens, bits per byte nan"),
        ("seed,tokens,bits_per_byte\n1,1,-2.0\n", "line 2: 1 tokens, bits per byte -2.0"),
        (
            "seed,tokens,bits_per_byte\n1,1,2.0\n2,1,2.0\n1,1,2.1\n",
            "line 4: seed 1 has 1 tokens twice",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "curve.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_reference_curve(str(file))


def test_a_curve_of_the_package_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs/recipes").mkdir(parents=True)
    (tmp_path / "configs/recipes/tiny.csv").write_bytes(CURVE.read_bytes())
    monkeypatch.setattr(bundle, "TRAIN_CONFIGS", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    assert read_reference_curve("recipes/tiny.csv").keys() == {1, 2}
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/tiny.csv").write_text("seed,tokens,bits_per_byte\n7,1,2.0\n")
    assert read_reference_curve("recipes/tiny.csv").keys() == {7}
