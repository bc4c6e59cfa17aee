"""Draw metrics of runs as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_like.report.curves import Chart, Curve, build_chart
from torchtitan_like.report.history import History
from torchtitan_like.util.pictures import picture

if TYPE_CHECKING:
    from torchtitan_like.report.columns import Floats

MAX_POINTS = 4000  # of a curve
WIDTH, HEIGHT = 7.6, 3.0  # inches of each chart
# Name of the horizontal axis -> its values, and its label.
AXES = {"step": "step", "tokens": "tokens", "hours": "hours since the start"}


def plot(histories: Sequence[History], metrics: Sequence[str], axis: str, path: Path) -> None:
    """Draw one chart for each metric, one below the other, and write them to `path`.

    metrics: keys of metrics.jsonl. axis: a key of `AXES`. Raises OSError, and ValueError if no run
    has a value of a metric.
    """
    charts = [build_chart(histories, metric) for metric in metrics]
    with picture(path, WIDTH, HEIGHT * len(charts)) as figure:
        panels = figure.subplots(len(charts), sharex=True, squeeze=False)[:, 0]
        for panel, metric, chart in zip(panels, metrics, charts, strict=True):
            _draw_chart(panel, metric, chart, axis)
        panels[-1].set_xlabel(AXES[axis])


def _draw_chart(panel: Any, metric: str, chart: Chart, axis: str) -> None:
    for number, curve in enumerate(chart.curves):
        thinned = curve.thinned(MAX_POINTS)
        is_point = curve.has_markers or len(thinned.values) == 1
        (line,) = panel.plot(
            _positions(thinned, axis),
            thinned.values,
            color=curve.color,
            alpha=0.5 if curve.is_raw else 1,
            linewidth=1 if curve.is_raw else 1.8,
            linestyle="--" if curve.is_dashed else "-",
            marker="o" if is_point else "",
            label=curve.label,
        )
        line.set_gid(f"{metric}-{number}")
    panel.set_title(chart.title, loc="left", fontsize="medium")
    panel.set_ylabel(chart.unit)
    panel.grid(visible=True)
    panel.spines[["top", "right"]].set_visible(False)
    if len(chart.curves) > 1:
        panel.legend(frameon=False, fontsize="small")


def _positions(curve: Curve, axis: str) -> Floats:
    return {"step": curve.step, "tokens": curve.tokens, "hours": curve.hours}[axis]
