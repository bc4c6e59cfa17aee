"""Choose the curves and events of a report's charts, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from torchtitan_like.report.columns import Floats
from torchtitan_like.report.events import (
    CLASS_COLORS,
    EVENT_COLORS,
    HIDDEN_EVENTS,
    OTHER_EVENT_COLOR,
    event_detail,
)
from torchtitan_like.report.history import History, validation_sets
from torchtitan_like.report.recorded import rows_as_floats
from torchtitan_like.report.summary import decimate, moving_mean, smoothing_window
from torchtitan_like.report.tolerant import Row, as_time
from torchtitan_like.util.pictures import PALETTE
from torchtitan_like.util.suggestions import nearest

# Of validation losses next to the training loss of one run.
OTHER_COLORS = (CLASS_COLORS["validation"], "#0072b2", "#e69f00", "#56b4e9", "#d55e00")
MAX_POINTS = 24_000  # on a page, of 8 bytes x 4 numbers, which base64 makes 43 bytes
MIN_POINTS = 200  # of a curve
MAX_EVENTS = 400  # of each kind that are drawn


class ChartSpec(NamedTuple):
    """A chart of one or more keys of metrics.jsonl, each with its label."""

    section: str
    title: str
    unit: str
    keys: dict[str, str]
    has_log_axes: bool = False


CHARTS = (
    ChartSpec("Optimization", "Gradient norm", "before clipping", {"grad_norm": ""}, True),
    ChartSpec("Optimization", "Learning rate", "", {"lr": ""}),
    ChartSpec("Speed", "Throughput", "tokens/s and device", {"tps": ""}),
    ChartSpec("Speed", "Utilization", "% of the peak", {"mfu": "MFU", "hfu": "HFU"}),
    ChartSpec("Speed", "Step time", "seconds", {"step_s": ""}),
    ChartSpec("Speed", "Wait for data", "seconds per step", {"data_loading_s": ""}),
    ChartSpec("Speed", "Memory", "GiB", {"memory_gib": ""}),
    ChartSpec(
        "Mixture of experts",
        "Largest load over the mean",
        "violation",
        {"moe.max_violation": "worst layer", "moe.mean_max_violation": "mean of layers"},
    ),
    ChartSpec("Mixture of experts", "Entropy of the loads", "1: even", {"moe.load_entropy": ""}),
    ChartSpec("Mixture of experts", "Experts without tokens", "", {"moe.dead_experts": ""}),
    ChartSpec("Mixture of experts", "Load of the fullest rank", "", {"moe.ep_imbalance": ""}),
    ChartSpec("Mixture of experts", "Router z", "", {"moe.router_z": ""}),
    ChartSpec("Mixture of experts", "Balance loss", "", {"moe.aux_loss": ""}),
    ChartSpec("Mixture of experts", "Range of the biases", "", {"moe.bias_range": ""}),
)


@dataclass
class Curve:
    """A curve of a chart. All arrays are float64 (rows,).

    is_raw: drawn thin below its smoothed curve. is_dashed: to tell it from others of its color.
    has_markers: few points, each with a marker.
    """

    label: str
    color: str
    step: Floats
    tokens: Floats
    hours: Floats
    values: Floats
    is_raw: bool = False
    is_dashed: bool = False
    has_markers: bool = False

    def thinned(self, max_points: int) -> Curve:
        """Return the curve with the rows that `decimate` chooses."""
        kept = decimate(self.values, max_points)
        return replace(
            self,
            step=self.step[kept],
            tokens=self.tokens[kept],
            hours=self.hours[kept],
            values=self.values[kept],
        )


@dataclass
class Chart:
    """A chart with its curves."""

    section: str
    title: str
    unit: str
    has_log_axes: bool
    curves: list[Curve] = field(default_factory=list)


@dataclass
class EventMarks:
    """Events of one kind and run on the charts: float64 (events,), and one text for each.

    num_recorded: events of this kind that have a step.
    """

    kind: str
    run: str
    color: str
    step: Floats
    tokens: Floats
    hours: Floats
    details: list[str]
    num_recorded: int


def run_color(index: int, num_runs: int) -> str:
    """Return the color of a run and its curves. One that is alone has the color of training."""
    return CLASS_COLORS["training"] if num_runs == 1 else PALETTE[index % len(PALETTE)]


def build_charts(histories: Sequence[History]) -> list[Chart]:
    """Return the charts that have a value to draw, with at most about `MAX_POINTS` points."""
    charts = [_loss_chart(histories), _source_chart(histories)]
    charts += [_metric_chart(spec, histories) for spec in CHARTS]
    for chart in charts:
        chart.curves = [curve for curve in chart.curves if np.isfinite(curve.values).any()]
    charts = [chart for chart in charts if chart.curves]
    num_curves = sum(len(chart.curves) for chart in charts)
    max_points = max(MIN_POINTS, MAX_POINTS // max(1, num_curves))
    for chart in charts:
        chart.curves = [curve.thinned(max_points) for curve in chart.curves]
    return charts


def build_chart(histories: Sequence[History], metric: str) -> Chart:
    """Return the chart of one key of metrics.jsonl. Raises ValueError if no run has a value of it.

    metric: the keys of nested objects are joined by dots: `sources.web.loss`.
    """
    if metric == "loss":
        chart = _loss_chart(histories)
    else:
        known = (spec for spec in CHARTS if metric in spec.keys)
        spec = next(known, ChartSpec("", metric, "", {metric: ""}))
        title = f"{spec.title}: {spec.keys[metric]}".removesuffix(": ")
        chart = _metric_chart(spec._replace(title=title, keys={metric: ""}), histories)
    chart.curves = [curve for curve in chart.curves if np.isfinite(curve.values).any()]
    if not chart.curves:
        names = sorted({name for history in histories for name in history.run.metrics.names()})
        similar = nearest(metric, names)
        raise ValueError(
            f"No run has a finite value of {metric!r}. Expected one of: {', '.join(names) or 'none'}. "
            + (f"Did you mean {similar!r}?" if similar else "Give another metric or run.")
        )
    return chart


def build_marks(history: History) -> list[EventMarks]:
    """Return the events of a run that have a step, by kind."""
    by_kind: dict[str, list[Row]] = {}
    for event in history.events:
        if as_time(event.get("step")) is not None and event["event"] not in HIDDEN_EVENTS:
            by_kind.setdefault(str(event["event"]), []).append(event)
    marks = []
    for kind, events in by_kind.items():
        stride = -(-len(events) // MAX_EVENTS)
        drawn = events[::stride]
        step = rows_as_floats(drawn, "step")
        marks.append(
            EventMarks(
                kind,
                history.run.name,
                EVENT_COLORS.get(kind, OTHER_EVENT_COLOR),
                step,
                history.tokens_at(step),
                history.hours(rows_as_floats(drawn, "time")),
                [event_detail(event) for event in drawn],
                len(events),
            )
        )
    return marks


def _loss_chart(histories: Sequence[History]) -> Chart:
    chart = Chart("Loss", "Loss", "nats per token", True)
    for index, (name, history) in enumerate(_named(histories)):
        metrics = history.run.metrics
        color = run_color(index, len(histories))
        window = smoothing_window(metrics.num_rows)
        chart.curves.append(_curve(history, "loss", f"{name}train", color, is_raw=True))
        mean = _curve(history, "loss", f"{name}train, mean of {window} rows", color)
        mean.values = moving_mean(metrics.get("loss"), window, is_centered=True)
        chart.curves.append(mean)
        chart.curves.append(
            _curve(history, "mtp_loss", f"{name}multi-token prediction", color, is_dashed=True)
        )
        for number, (dataset, rows) in enumerate(validation_sets(history.run).items()):
            is_only = len(histories) == 1
            validation_color = OTHER_COLORS[number % len(OTHER_COLORS)]
            chart.curves.append(
                Curve(
                    f"{name}validation {dataset}".rstrip(),
                    validation_color if is_only else color,
                    rows_as_floats(rows, "step"),
                    rows_as_floats(rows, "n_tokens_seen"),
                    history.hours(rows_as_floats(rows, "time")),
                    rows_as_floats(rows, "loss"),
                    is_dashed=True,
                    has_markers=True,
                )
            )
    return chart


def _source_chart(histories: Sequence[History]) -> Chart:
    chart = Chart("Loss", "Training loss by source", "nats per token", True)
    number = 0
    for name, history in _named(histories):
        for key in history.run.metrics.names():
            if key.startswith("sources.") and key.endswith(".loss"):
                source = key.removeprefix("sources.").removesuffix(".loss")
                color = PALETTE[number % len(PALETTE)]
                chart.curves.append(_curve(history, key, f"{name}{source}", color))
                number += 1
    return chart


def _metric_chart(spec: ChartSpec, histories: Sequence[History]) -> Chart:
    chart = Chart(spec.section, spec.title, spec.unit, spec.has_log_axes)
    for index, (name, history) in enumerate(_named(histories)):
        for number, (key, label) in enumerate(spec.keys.items()):
            is_only = len(histories) == 1
            color = PALETTE[(number if is_only else index) % len(PALETTE)]
            text = f"{name}{label}".removesuffix(": ") or spec.title
            chart.curves.append(_curve(history, key, text, color, is_dashed=number > 0))
    return chart


def _curve(
    history: History,
    key: str,
    label: str,
    color: str,
    *,
    is_raw: bool = False,
    is_dashed: bool = False,
) -> Curve:
    return Curve(
        label,
        color,
        history.step,
        history.tokens,
        history.hours(history.time),
        history.run.metrics.get(key),
        is_raw,
        is_dashed,
    )


def _named(histories: Sequence[History]) -> Iterator[tuple[str, History]]:
    """Yield each history with the start of its labels: "" if it is the only one."""
    for history in histories:
        yield ("" if len(histories) == 1 else f"{history.run.name}: "), history
