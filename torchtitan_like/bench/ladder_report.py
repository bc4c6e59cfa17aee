"""The results of a scaling ladder: its law, the predictions, ladder.csv, ladder.json and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from torchtitan_like.bench import results
from torchtitan_like.bench.results import DONE, Row
from torchtitan_like.bench.run_list import BenchRun
from torchtitan_like.bench.rungs import Rung
from torchtitan_like.bench.scaling_law import Prediction, ScalingLaw, fit_law, num_fitted
from torchtitan_like.config import JobConfig
from torchtitan_like.report.columns import Floats
from torchtitan_like.report.history import History
from torchtitan_like.report.page import Table
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.output import show
from torchtitan_like.util.pictures import PALETTE, picture

NAME = "ladder"  # of the files
PICTURE_SIZE = (7.6, 4.2)  # inches
NUM_CURVE_POINTS = 60


class Point(NamedTuple):
    """The measured loss of a run."""

    rung: Rung
    loss: float


@dataclass(frozen=True)
class Findings:
    """What follows from the runs that are done.

    law: None if too few are done. held_out: the largest rung, as the law of the smaller ones predicts
    it, and its mean measured loss. predictions: of the target.
    """

    loss_name: str
    points: list[Point]
    law: ScalingLaw | None
    held_out: list[tuple[Rung, Prediction, float]]
    predictions: list[tuple[Rung, Prediction]]

    def lines(self) -> Iterator[str]:
        """Yield the findings as sentences."""
        yield f"Loss: {self.loss_name}"
        if self.law is None:
            num_done = len({point.rung.name for point in self.points})
            yield (
                f"No law: {num_done} rungs have trained all their tokens, which are too few. The "
                "same command runs those that are not done"
            )
            return
        error = 100 * math.sqrt(np.mean(self.law.errors**2))
        inputs = " and ".join(("N parameters", "D tokens")[: len(self.law.exponents)])
        yield f"Law: {self.law}, for {inputs}; its errors are {error:.2f} % (RMS)"
        for rung, prediction, measured in self.held_out:
            yield (
                f"{rung.name} from the smaller rungs: predicted {prediction}, measured "
                f"{measured:.4f}, error {100 * (prediction.loss / measured - 1):+.2f} %"
            )
        for target, prediction in self.predictions:
            yield (
                f"{target.name} with {target.num_params:,} parameters and {target.tokens:,} tokens: "
                f"predicted {prediction}"
            )

    def as_json(self) -> dict[str, Any]:
        """Return the content of ladder.json."""
        return {
            "loss": self.loss_name,
            "law": None if self.law is None else self.law.as_json(),
            "held_out": [
                _prediction_as_json(rung, prediction)
                | {"measured": measured, "relative_error": prediction.loss / measured - 1}
                for rung, prediction, measured in self.held_out
            ],
            "predictions": [_prediction_as_json(*pair) for pair in self.predictions],
        }


def write_report(
    rungs: Sequence[Rung],
    targets: Sequence[Rung],
    runs: Sequence[BenchRun],
    rows: Sequence[Row],
    histories: Sequence[History],
    path: Path | None,
) -> None:
    """Write ladder.csv, ladder.json and the page, and print the findings.

    rows, histories: see `results.collect`. path: of a picture of the law; None: none is drawn.
    """
    loss_key, loss_name = _loss_of(runs[0].config)
    by_name = {rung.name: rung for rung in rungs}
    points = [
        Point(by_name[row["variant"]], row[loss_key])
        for row in rows
        if _is_complete(row) and math.isfinite(row.get(loss_key) or math.nan)
    ]
    findings = find(loss_name, points, rungs, targets)
    rows = [_with_rung(by_name[row["variant"]], row, loss_key, findings.law) for row in rows]
    lines = list(findings.lines())
    table = _table_of(rungs, rows, f"{'. '.join(lines)}.")
    file = runs[0].folder.parent / f"{NAME}.json"
    results.write_results(file.with_suffix(""), rows, histories, table)
    write_atomically(file, json.dumps(findings.as_json(), indent=2) + "\n")
    show(f"Wrote {file}")
    if path is not None and findings.law is not None:
        draw_law(path, findings.law, points, targets, loss_name)
        show(f"Wrote {path}")
    for line in lines:
        show(line)


def find(
    loss_name: str, points: list[Point], rungs: Sequence[Rung], targets: Sequence[Rung]
) -> Findings:
    """Fit the law to all rungs, and to all but the largest ones."""
    number = num_inputs(len(targets))
    law = _fit(points, number)
    largest = max(rung.number for rung in rungs)
    smaller_law = _fit([point for point in points if point.rung.number != largest], number)
    held_out = []
    for rung in rungs:
        losses = [point.loss for point in points if point.rung == rung]
        if rung.number == largest and losses and smaller_law is not None:
            held_out.append((rung, _predict(smaller_law, rung), fmean(losses)))
    predictions = [] if law is None else [(target, _predict(law, target)) for target in targets]
    return Findings(loss_name, points, law, held_out, predictions)


def num_inputs(num_ratios: int) -> int:
    """Return the inputs of the law: N, and D if it is not proportional to N."""
    return min(2, num_ratios)


def _is_complete(row: Row) -> bool:
    """Return True if a run has trained all its tokens. Its data may have ended before."""
    return row["state"] == DONE and not row["cause"]


def _fit(points: Sequence[Point], number: int) -> ScalingLaw | None:
    """Return the law of the mean losses of rungs. None if there are too few rungs.

    Repeats of a rung are not points of their own: they share the error of the law at this rung.
    """
    rungs = {point.rung.name: point.rung for point in points}
    if len(rungs) < num_fitted(number):
        return None
    inputs = np.stack([_inputs(rung, number) for rung in rungs.values()])
    losses = [fmean(loss for rung, loss in points if rung.name == name) for name in rungs]
    return fit_law(inputs, np.array(losses))


def _inputs(rung: Rung, number: int) -> Floats:
    return np.array([rung.num_params, rung.tokens][:number], dtype=np.float64)


def _predict(law: ScalingLaw, rung: Rung) -> Prediction:
    return law.predict(_inputs(rung, len(law.exponents)))


def _loss_of(config: JobConfig) -> tuple[str, str]:
    """Return the column of `results.collect` that is fitted, and its description."""
    if config.validation.enable:
        dataset = next(iter(config.validation.sources), config.validation.dataset)
        return "validation_loss", f"last validation loss of {dataset}"
    return "loss", "training loss, mean of the last rows"


# ---- output


def _prediction_as_json(rung: Rung, prediction: Prediction) -> dict[str, Any]:
    sizes = {"params": rung.num_params, "tokens": rung.tokens, "flops": rung.flops}
    return {"rung": rung.name, **sizes, **prediction._asdict()}


def _with_rung(rung: Rung, row: Row, loss_key: str, law: ScalingLaw | None) -> Row:
    """Return the row of a run with the columns of the ladder at the start."""
    return {
        "rung": rung.number,
        "tokens_per_param": rung.ratio,
        "params": rung.num_params,
        "planned_tokens": rung.tokens,
        "flops": rung.flops,
        "law_loss": row.get(loss_key),
        "fitted_loss": None if law is None else _predict(law, rung).loss,
        **row,
    }


def _table_of(rungs: Sequence[Rung], rows: Sequence[Row], note: str) -> Table:
    """Return one line for each rung."""
    head = ["rung", "parameters", "tokens", "FLOPs", "runs", "loss", "fitted", "error, %"]
    lines = []
    for rung in rungs:
        repeats = [row for row in rows if row["variant"] == rung.name]
        done = [row for row in repeats if _is_complete(row)]
        losses = [row["law_loss"] for row in done if row["law_loss"] is not None]
        fitted = repeats[0]["fitted_loss"]
        line = [rung.name, f"{rung.num_params:,}", f"{rung.tokens:,}", f"{rung.flops:.3g}"]
        line.append(results.describe_states(repeats))
        line.append(str(results.interval(losses)) if losses else "–")
        line.append("–" if fitted is None else f"{fitted:.4f}")
        has_error = bool(losses) and fitted is not None
        line.append(f"{100 * (fitted / np.mean(losses) - 1):+.2f}" if has_error else "–")
        lines.append(line)
    return Table("Scaling ladder", head, lines, note)


def draw_law(
    path: Path,
    law: ScalingLaw,
    points: Sequence[Point],
    targets: Sequence[Rung],
    loss_name: str,
) -> None:
    """Draw the runs, the law with its band, and the predictions. Raises OSError."""
    from matplotlib.ticker import EngFormatter

    smallest = min(rung.num_params for rung, _ in points)
    with picture(path, *PICTURE_SIZE) as figure:
        panel = figure.subplots()
        for number, target in enumerate(targets):
            color = PALETTE[number % len(PALETTE)]
            params = np.geomspace(smallest, target.num_params, NUM_CURVE_POINTS)
            tokens = params * (target.tokens / target.num_params)
            curve = [
                law.predict(np.array(pair[: len(law.exponents)]))
                for pair in zip(params, tokens, strict=True)
            ]
            label = f"{target.ratio:g} tokens per parameter"
            panel.plot(params, [each.loss for each in curve], color=color, label=label)
            if law.degrees > 0:
                low, high = ([getattr(each, end) for each in curve] for end in ("low", "high"))
                panel.fill_between(params, low, high, color=color, alpha=0.2, linewidth=0)
            runs = [(rung.num_params, loss) for rung, loss in points if rung.ratio == target.ratio]
            panel.plot(*zip(*runs, strict=True), "o", color=color)
            panel.plot(
                [target.num_params], [curve[-1].loss], "D", color=color, markerfacecolor="none"
            )
        panel.set_xscale("log")
        panel.minorticks_off()
        panel.set_xticks(
            sorted({rung.num_params for rung in [*targets, *(p.rung for p in points)]})
        )
        panel.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
        panel.set_xlabel("parameters")
        panel.set_title(loss_name, loc="left", fontsize="medium")
        panel.grid(visible=True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize="small")
