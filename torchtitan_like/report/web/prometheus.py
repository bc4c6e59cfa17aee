"""The numbers of runs in the text format of Prometheus, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from torchtitan_like.report.web.status import STATES, RunStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Gauge(NamedTuple):
    """A number of each run. read: returns it at a Unix time; None if it is unknown."""

    name: str
    help: str
    read: Callable[[RunStatus, float], float | None]


GAUGES = (
    Gauge("step", "Newest step", lambda run, now: run.step),
    Gauge("total_steps", "Steps of the whole run", lambda run, now: run.total_steps),
    Gauge("tokens", "Tokens that were trained on", lambda run, now: run.tokens),
    Gauge("loss", "Loss of the newest step in nats per token", lambda run, now: run.loss),
    Gauge("grad_norm", "Gradient norm before clipping", lambda run, now: run.grad_norm),
    Gauge(
        "tokens_per_second_per_device",
        "Tokens per second on each device at the newest log step",
        lambda run, now: run.tps,
    ),
    Gauge(
        "mfu_percent", "Model FLOPs utilization at the newest log step", lambda run, now: run.mfu
    ),
    Gauge(
        "step_age_seconds",
        "Seconds since the newest step",
        lambda run, now: None if run.updated is None else max(0.0, now - run.updated),
    ),
    Gauge(
        "seconds_left",
        "Seconds until the last step, without checkpoints and validation",
        lambda run, now: run.seconds_left,
    ),
)


def render_metrics(statuses: Mapping[str, RunStatus], now: float) -> str:
    """Return the lines for some runs by name. now: Unix time."""
    return "\n".join(_lines(statuses, now)) + "\n"


def _lines(statuses: Mapping[str, RunStatus], now: float) -> Iterator[str]:
    for gauge in GAUGES:
        yield f"# HELP titan_run_{gauge.name} {gauge.help}."
        yield f"# TYPE titan_run_{gauge.name} gauge"
        for name, status in statuses.items():
            value = gauge.read(status, now)
            if value is not None:
                yield f'titan_run_{gauge.name}{{run="{_escape(name)}"}} {_number(value)}'
    yield "# HELP titan_run_state 1 for the state of the run, 0 for the other states."
    yield "# TYPE titan_run_state gauge"
    for name, status in statuses.items():
        for state in STATES:
            is_state = int(status.state == state)
            yield f'titan_run_state{{run="{_escape(name)}",state="{state}"}} {is_state}'


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else f"{'+' if value > 0 else '-'}Inf"
