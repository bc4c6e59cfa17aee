"""The scaling law of a ladder: known laws are recovered, and the band holds what it states."""

from __future__ import annotations

import time

import numpy as np
import pytest

from torchtitan_like.bench import scaling_law
from torchtitan_like.bench.scaling_law import fit_law
from torchtitan_like.report.columns import Floats

PARAMS = 2e5 * 2.0 ** np.arange(8)


def loss_at(inputs: Floats, constant: float, *terms: tuple[float, float]) -> Floats:
    """Return E + A / N^alpha + B / D^beta. terms: (A, alpha) and (B, beta)."""
    powers = (a * inputs[:, i] ** -alpha for i, (a, alpha) in enumerate(terms))
    return constant + sum(powers, np.zeros(len(inputs)))


@pytest.mark.parametrize(
    ("constant", "coefficient", "exponent"),
    [(1.69, 406.4, 0.34), (0.5, 20.0, 0.1), (3.0, 5e4, 0.9), (0.0, 30.0, 0.2)],
)
def test_a_law_of_one_ratio_is_recovered(
    constant: float, coefficient: float, exponent: float
) -> None:
    inputs = PARAMS[:, None]
    terms = (coefficient, exponent)
    law = fit_law(inputs[:5], loss_at(inputs[:5], constant, terms))
    assert law.constant == pytest.approx(constant, abs=1e-4)
    assert law.coefficients == pytest.approx(coefficient, rel=1e-3)
    assert law.exponents == pytest.approx(exponent, rel=1e-3)
    predicted = law.predict(inputs[6])
    (truth,) = loss_at(inputs[6:7], constant, terms)
    assert predicted.loss == pytest.approx(truth, rel=1e-5)
    assert predicted.low == pytest.approx(truth, rel=1e-2)
    assert predicted.high == pytest.approx(truth, rel=1e-2)


def test_chinchillas_law_is_recovered_in_seconds() -> None:
    """Equation 10 of arXiv:2203.15556."""
    inputs = np.array([(n, n * ratio) for n in PARAMS[:5] for ratio in (10, 20, 40)])
    terms = ((406.4, 0.34), (410.7, 0.28))
    before = time.process_time()
    law = fit_law(inputs, loss_at(inputs, 1.69, *terms))
    assert time.process_time() - before < 20  # with the 1,000 fits of the bootstrap
    assert law.as_json() == pytest.approx(
        {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}, rel=1e-2
    )
    assert str(law) == "L = 1.6900 + 406.4 / N^0.340 + 410.7 / D^0.280"


@pytest.mark.parametrize("num_points", [4, 7])
def test_the_band_holds_about_95_percent_of_measured_losses(
    num_points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling_law, "NUM_SAMPLES", 100)
    inputs = PARAMS[: num_points + 1, None]
    losses = loss_at(inputs, 1.7, (406.0, 0.34))
    num_inside = 0
    for seed in range(50):
        noise = 0.003 * np.random.default_rng(seed).standard_normal(num_points + 1)
        measured = losses * (1 + noise)
        predicted = fit_law(inputs[:-1], measured[:-1]).predict(inputs[-1])
        assert predicted.low is not None and predicted.high is not None
        assert predicted.low <= predicted.loss <= predicted.high
        num_inside += predicted.low <= measured[-1] <= predicted.high
    assert num_inside >= 0.88 * 50  # two standard deviations below 95 %


def test_as_many_points_as_fitted_numbers_have_no_band() -> None:
    inputs = PARAMS[:3, None]
    predicted = fit_law(inputs, loss_at(inputs, 2.0, (100.0, 0.3))).predict(PARAMS[3:4])
    assert (predicted.low, predicted.high) == (None, None)
    assert str(predicted) == f"{predicted.loss:.4f}"


def test_losses_that_do_not_fall_have_a_law_without_negative_terms() -> None:
    law = fit_law(PARAMS[:5, None], np.array([3.0, 3.1, 3.2, 3.3, 3.4]))
    assert law.constant >= 0 and (law.coefficients >= 0).all()
    assert law.predict(PARAMS[5:6]).loss == pytest.approx(3.2, rel=0.02)
