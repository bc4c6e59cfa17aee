"""Draw charts with Bokeh, for a page that needs no network, or with matplotlib as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_like.report.curves import Chart, Curve, EventMarks, build_chart
from torchtitan_like.report.history import History
from torchtitan_like.util.modules import pip_install
from torchtitan_like.util.pictures import picture

TOOLS = "xpan,box_zoom,xwheel_zoom,reset,save"
HEIGHT = 300  # pixels, without the legend
LEGEND_LINE = 20  # pixels of each entry
CURVE = "curve"  # name of the curves' renderers, for page.js; events have event:<kind>
MAX_POINTS = 4000  # of a curve of a picture
PICTURE_WIDTH, PICTURE_HEIGHT = 7.6, 3.0  # inches of each chart
# Name of the horizontal axis -> its label. The names are those of arrays of a curve.
AXES = {"step": "step", "tokens": "tokens", "hours": "hours since the start"}


class Drawing(NamedTuple):
    """HTML of each chart, in their order, and the scripts that draw them."""

    charts: list[str]
    scripts: str


def require_bokeh() -> None:
    """Raise ValueError if Bokeh is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise ValueError(
            "The page needs Bokeh, which is not installed. Expected the package, or --json, which "
            f"prints the numbers: {pip_install('bokeh')}"
        ) from None


def draw(charts: Sequence[Chart], marks: Sequence[EventMarks], *, shows_events: bool) -> Drawing:
    """Draw the charts. shows_events: events are visible before the reader selects them."""
    from bokeh.embed import components
    from bokeh.models import ColumnDataSource
    from bokeh.resources import Resources

    if not charts:
        return Drawing([], "")
    event_sources = [
        ColumnDataSource(
            {"step": mark.step, "tokens": mark.tokens, "hours": mark.hours, "detail": mark.details},
            name=mark.run,
        )
        for mark in marks
    ]
    figures: dict[str, Any] = {}
    for number, chart in enumerate(charts):
        sources = [
            ColumnDataSource(
                {
                    "step": curve.step,
                    "tokens": curve.tokens,
                    "hours": curve.hours,
                    "value": curve.values,
                },
                name=curve.label,
            )
            for curve in chart.curves
        ]
        # Bokeh cannot change the scale of an axis. Both figures share the data.
        for scale in ("linear", "log") if chart.has_log_axes else ("only",):
            figure = _figure(chart, scale)
            for mark, source in zip(marks, event_sources, strict=True):
                _add_events(figure, mark, source, is_visible=shows_events)
            for curve, source in zip(chart.curves, sources, strict=True):
                _add_curve(figure, curve, source)
            if len(chart.curves) > 1:
                _place_legend(figure)
            else:
                figure.legend.visible = False
            figures[f"{number} {scale}"] = figure
    # Bokeh warns of the hidden figures, which have no range yet.
    resources = Resources(mode="inline", components=["bokeh"], log_level="error").render_js()
    script, divisions = components(figures)
    html = [
        "".join(part for name, part in divisions.items() if name.split()[0] == str(number))
        for number in range(len(charts))
    ]
    return Drawing(html, f"{resources}\n{script}")


def _figure(chart: Chart, scale: str) -> Any:
    from bokeh.models import BasicTickFormatter
    from bokeh.plotting import figure

    axis = "log" if scale == "log" else "linear"
    num_entries = len(chart.curves) if len(chart.curves) > 1 else 0
    plot: Any = figure(
        name=chart.title,
        tags=[scale],
        height=HEIGHT + LEGEND_LINE * num_entries,
        sizing_mode="stretch_width",
        tools=TOOLS,
        active_scroll=None,
        x_axis_type=axis,
        y_axis_type=axis,
        x_axis_label="step",
        y_axis_label=chart.unit,
        visible=scale != "log",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_alpha=0,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    if axis == "linear":
        plot.xaxis.formatter = BasicTickFormatter(power_limit_high=6)
        plot.yaxis.formatter = BasicTickFormatter(power_limit_high=6, power_limit_low=-5)
    return plot


def _place_legend(plot: Any) -> None:
    """Move the legend above the curves. A click on an entry hides its curve."""
    legend = plot.legend[0]
    legend.click_policy = "hide"
    legend.location = "top_left"
    legend.background_fill_alpha = 0
    legend.border_line_alpha = 0
    legend.padding = 0
    legend.spacing = 0
    legend.label_text_font_size = "12px"
    plot.add_layout(legend, "above")


def _add_curve(plot: Any, curve: Curve, source: Any) -> None:
    plot.line(
        "step",
        "value",
        source=source,
        name=CURVE,
        legend_label=_legend(curve),
        line_color=curve.color,
        line_width=1 if curve.is_raw else 2,
        line_alpha=0.6 if curve.is_raw else 1,
        line_dash="dashed" if curve.is_dashed else "solid",
    )
    if curve.has_markers or len(curve.values) == 1:
        plot.scatter(
            "step",
            "value",
            source=source,
            name=CURVE,
            legend_label=_legend(curve),
            color=curve.color,
            size=7,
        )


def _add_events(plot: Any, mark: EventMarks, source: Any, *, is_visible: bool) -> None:
    plot.vspan(
        "step",
        source=source,
        name=f"event:{mark.kind}",
        level="glyph",  # above the grid; the curves are added later
        visible=is_visible,
        line_color=mark.color,
        line_width=1.5,
        line_alpha=0.8,
        line_dash="dotted",
    )


def _legend(curve: Curve) -> str:
    """Return the label of a curve. Without `$$`, for which Bokeh would load a package for formulas."""
    return curve.label.replace("$$", "$ $")


# ---- pictures


def plot(histories: Sequence[History], metrics: Sequence[str], axis: str, path: Path) -> None:
    """Draw one chart for each metric, one below the other, and write them to `path`.

    metrics: keys of metrics.jsonl. axis: a key of `AXES`. Raises OSError, and ValueError if no run
    has a value of a metric.
    """
    charts = [build_chart(histories, metric) for metric in metrics]
    with picture(path, PICTURE_WIDTH, PICTURE_HEIGHT * len(charts)) as figure:
        panels = figure.subplots(len(charts), sharex=True, squeeze=False)[:, 0]
        for panel, metric, chart in zip(panels, metrics, charts, strict=True):
            _draw_chart(panel, metric, chart, axis)
        panels[-1].set_xlabel(AXES[axis])


def _draw_chart(panel: Any, metric: str, chart: Chart, axis: str) -> None:
    for number, curve in enumerate(chart.curves):
        thinned = curve.thinned(MAX_POINTS)
        is_point = curve.has_markers or len(thinned.values) == 1
        (line,) = panel.plot(
            getattr(thinned, axis),
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
