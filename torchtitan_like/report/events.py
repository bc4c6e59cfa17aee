"""Events of a run in words, and their colors, for `titan run watch` and pages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torchtitan_like.report.tolerant import Row, as_time

# One color for a category on the whole page. Class of time -> color:
CLASS_COLORS = {
    "training": "#009e73",
    "start_up": "#56b4e9",
    "checkpoint": "#0072b2",
    "validation": "#cc79a7",
    "stall": "#d55e00",
    "skipped": "#8c564b",
    "repeated": "#e69f00",
    "shutdown": "#7f7f7f",
    "stopped": "#b5b5b5",
}
# Kind of event -> color; kinds that are not listed are gray.
EVENT_COLORS = {
    "save": CLASS_COLORS["checkpoint"],
    "spike": "#d62728",
    "spike_end": "#ff9896",
    "bad_step": CLASS_COLORS["skipped"],
    "skipped step": CLASS_COLORS["skipped"],
    "stop": CLASS_COLORS["shutdown"],
    "resume": CLASS_COLORS["start_up"],
    "resume on another layout": CLASS_COLORS["start_up"],
    "config change": "#9467bd",
}
OTHER_EVENT_COLOR = CLASS_COLORS["stopped"]
HIDDEN_EVENTS = ("start", "spike_bundle")  # at the step of a resume or a spike; listed, not drawn

MAX_DETAIL = 400  # characters
# Fields that every event has, or that the table of attempts shows: `began` of a start.
COMMON_FIELDS = ("event", "time", "step")


def event_line(event: Row) -> str:
    """Return the line of an event in `titan run watch`, with its local time."""
    seconds = as_time(event.get("time"))
    clock = "" if seconds is None else time.strftime("%H:%M:%S ", time.localtime(seconds))
    step = "" if event.get("step") is None else f" at step {event['step']}"
    return f"{clock}{event['event']}{step}: {event_detail(event)}".removesuffix(": ")


def event_detail(event: Row) -> str:
    """Return the fields of an event in words, without the fields that every event has."""
    is_start = event.get("event") == "start"
    fields = {
        key: value
        for key, value in event.items()
        if key not in COMMON_FIELDS and not (is_start and key == "began")
    }
    return ", ".join(_describe_field(key, value) for key, value in fields.items())[:MAX_DETAIL]


def _describe_field(key: str, value: object) -> str:
    text = format_value(value)
    if key == "seconds" and isinstance(value, (int, float)):
        return f"{value:,.2f} s"
    if key == "num_ranks":
        return f"{text} rank{'' if value == 1 else 's'}"
    if key == "modules" and isinstance(value, Mapping):
        return f"{len(value)} modules"
    if key == "layout" and isinstance(value, Mapping):
        degrees = {name: degree for name, degree in value.items() if degree != 1}
        return format_value(degrees) or "one rank in each dimension"
    if key in ("form", "path", "source", "how", "outcome", "bundle"):
        return text
    return f"{key.replace('_', ' ')} {text}"


def format_value(value: Any) -> str:
    """Return a value of a file in words: at most 5 digits, tables as "name value" pairs."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_value(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, value))
    return "none" if value is None else str(value)
