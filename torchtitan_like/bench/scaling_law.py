"""Fit a scaling law to the losses of a ladder, and predict the loss of a larger run.

The law is equation 2 of Hoffmann et al. 2022 (arXiv:2203.15556) for N parameters and D tokens:

    L(N, D) = E + A / N^alpha + B / D^beta

If all runs have the same tokens per parameter, D is proportional to N, and the two terms cannot be
told apart. Then the law is L(N) = E + A / N^alpha.

Equation 10 of the paper minimizes the Huber loss of log L with L-BFGS from many starts. Here, the sum
of squared relative errors is minimized: for given exponents, the law is linear in E, A and B >= 0, so
that a search over the exponents needs no starts. It begins with a grid that is refined afterwards.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.bench.results import Z_95, t_quantile
from torchtitan_like.report.columns import Floats

NUM_SAMPLES = 1000  # of the bootstrap
SMALLEST_EXPONENT, LARGEST_EXPONENT = 0.02, 3.0
# Points of a grid along each exponent, in equal ratios: of the first one, and of each refinement.
NUM_COARSE, NUM_FINE = 25, 9
NUM_GRIDS = 40  # of the fit; each spans a half of the one before it
NUM_SAMPLE_GRIDS = {1: 3, 2: 2}  # of the bootstrap's fits, by number of inputs
CHUNK = 100  # samples whose errors are computed at once, which bounds the memory
NAMES = ("N", "D")
COEFFICIENTS, EXPONENTS = ("A", "B"), ("alpha", "beta")


class Prediction(NamedTuple):
    """A loss and the 95 % band of a measured one; None if the fit has no degree of freedom."""

    loss: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.loss:.4f}"
        return f"{self.loss:.4f} (95 %: {self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted law. inputs: 1 (N) or 2 (N and D).

    constant: E. coefficients, exponents: (inputs,). errors: relative ones of the fitted losses,
    float64 (points,). sample_...: of the laws that the bootstrap has fitted, with the number of
    samples as first dimension; no samples without a degree of freedom.
    sample_errors: relative error of another run in each sample.
    """

    constant: float
    coefficients: Floats
    exponents: Floats
    errors: Floats
    sample_constants: Floats
    sample_coefficients: Floats
    sample_exponents: Floats
    sample_errors: Floats

    @property
    def degrees(self) -> int:
        """Degrees of freedom: points - fitted numbers."""
        return len(self.errors) - num_fitted(len(self.exponents))

    def predict(self, inputs: Floats) -> Prediction:
        """Return the loss of a run with these inputs, float64 (inputs,)."""
        loss = self.constant + float(np.sum(self.coefficients * inputs**-self.exponents))
        if not len(self.sample_constants):
            return Prediction(loss)
        terms = self.sample_coefficients * inputs**-self.sample_exponents
        losses = (self.sample_constants + terms.sum(axis=1)) * (1 + self.sample_errors)
        low, high = np.quantile(losses, (0.025, 0.975))
        # Few residuals are a poor sample of all errors, for which Student's distribution accounts.
        stretch = t_quantile(self.degrees) / Z_95
        low, high = (
            loss + stretch * (min(low, loss) - loss),
            loss + stretch * (max(high, loss) - loss),
        )
        return Prediction(loss, float(max(0.0, low)), float(high))

    def __str__(self) -> str:
        terms = (
            f" + {coefficient:.4g} / {name}^{exponent:.3f}"
            for coefficient, name, exponent in zip(
                self.coefficients, NAMES, self.exponents, strict=False
            )
        )
        return f"L = {self.constant:.4f}{''.join(terms)}"

    def as_json(self) -> dict[str, float]:
        """Return the fitted numbers by their names in the law."""
        numbers = {"E": self.constant}
        numbers |= dict(zip(COEFFICIENTS, self.coefficients.tolist(), strict=False))
        return numbers | dict(zip(EXPONENTS, self.exponents.tolist(), strict=False))


def num_fitted(num_inputs: int) -> int:
    """Return how many numbers a law has that are fitted."""
    return 1 + 2 * num_inputs


def fit_law(inputs: Floats, losses: Floats) -> ScalingLaw:
    """Fit a law to measured losses, and again to `NUM_SAMPLES` samples of a residual bootstrap.

    inputs: float64 (points, inputs), numbers of parameters, and of tokens if the law has them.
    losses: float64 (points,). A sample is the fitted losses with errors drawn from those of the
    points, times sqrt(points / degrees of freedom), because a fit makes its errors too small.
    The same points give the same numbers.
    """
    num_points, num_inputs = inputs.shape
    centers = np.log(inputs).mean(axis=0)
    logs = np.log(inputs) - centers  # a unit of each input at which all columns are of equal size
    exponents, solutions = _search(logs, losses, losses[:, None], NUM_GRIDS)
    fitted = _columns(logs, exponents)[0] @ solutions[0]
    errors = losses / fitted - 1
    degrees = num_points - num_fitted(num_inputs)
    num_samples = NUM_SAMPLES if degrees > 0 else 0
    draws = np.random.default_rng(0).integers(num_points, size=(num_points + 1, num_samples))
    drawn = (errors * math.sqrt(num_points / max(1, degrees)))[draws]
    samples = fitted[:, None] * (1 + drawn[:-1])
    sample_exponents, sample_solutions = _search(
        logs, losses, samples, NUM_SAMPLE_GRIDS[num_inputs]
    )
    return ScalingLaw(
        constant=float(solutions[0, 0]),
        coefficients=solutions[0, 1:] * np.exp(exponents[0] * centers),
        exponents=exponents[0],
        errors=errors,
        sample_constants=sample_solutions[:, 0],
        sample_coefficients=sample_solutions[:, 1:] * np.exp(sample_exponents * centers),
        sample_exponents=sample_exponents,
        sample_errors=drawn[-1],
    )


def _search(logs: Floats, losses: Floats, samples: Floats, num_grids: int) -> tuple[Floats, Floats]:
    """Return the best exponents (samples, inputs) and constant and coefficients (samples, 1 + inputs).

    logs: of the inputs (points, inputs). losses: whose errors are divided by them (points,).
    samples: losses to fit (points, samples).
    """
    num_samples, num_inputs = samples.shape[1], logs.shape[1]
    exponents = np.full((num_samples, num_inputs), math.sqrt(SMALLEST_EXPONENT * LARGEST_EXPONENT))
    solutions = np.zeros((num_samples, 1 + num_inputs))
    span = math.log(LARGEST_EXPONENT / SMALLEST_EXPONENT) / 2
    for number in range(num_grids):
        steps = np.linspace(-span, span, NUM_FINE if number else NUM_COARSE)
        offsets = np.array(list(itertools.product(steps, repeat=num_inputs)))
        # Samples with the same best exponents so far share the next grid.
        centers, group_of = np.unique(exponents, axis=0, return_inverse=True)
        for group, center in enumerate(centers):
            members = np.flatnonzero(group_of.reshape(-1) == group)
            grid = center * np.exp(offsets)
            best, solutions[members] = _best_of(grid, logs, losses, samples[:, members])
            exponents[members] = grid[best]
        span = steps[1] - steps[0] if number == 0 else span / 2
    return exponents, solutions


def _columns(logs: Floats, exponents: Floats) -> Floats:
    """Return 1 and the powers of the inputs: (exponents, points, 1 + inputs)."""
    powers = np.exp(-logs * exponents[:, None, :])
    return np.concatenate([np.ones((*powers.shape[:2], 1)), powers], axis=2)


def _best_of(
    grid: Floats, logs: Floats, losses: Floats, samples: Floats
) -> tuple[NDArray[np.int64], Floats]:
    """Return for each sample the index of its best exponents, and the solution for them.

    The solution of non-negative least squares is the solution of ordinary least squares for some of
    the columns. There are few, so that all subsets are tried.
    """
    columns = _columns(logs, grid) / losses[:, None]
    targets = samples / losses[:, None]
    num_samples, num_columns = samples.shape[1], columns.shape[2]
    smallest = np.full(num_samples, np.inf)
    best = np.zeros(num_samples, dtype=np.int64)
    solutions = np.zeros((num_samples, num_columns))
    for size in range(1, num_columns + 1):
        for subset in map(list, itertools.combinations(range(num_columns), size)):
            some = columns[:, :, subset]
            inverse = np.linalg.pinv(some)
            for start in range(0, num_samples, CHUNK):
                chunk = np.arange(start, min(start + CHUNK, num_samples))
                candidates = inverse @ targets[:, chunk]  # (grid, columns, samples)
                squares = ((some @ candidates - targets[:, chunk]) ** 2).sum(axis=1)
                squares[(candidates < 0).any(axis=1)] = np.inf
                indices = squares.argmin(axis=0)
                sums = squares[indices, chunk - start]
                for sample in np.flatnonzero(sums < smallest[chunk]):
                    smallest[start + sample] = sums[sample]
                    best[start + sample] = indices[sample]
                    solutions[start + sample] = 0.0
                    solutions[start + sample, subset] = candidates[indices[sample], :, sample]
    return best, solutions
