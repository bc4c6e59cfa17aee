"""Compute the numbers of a run's report, from all of its rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.report.columns import Floats
from torchtitan_like.report.history import (
    Changes,
    History,
    diff_settings,
    validation_loss,
    validation_sets,
)
from torchtitan_like.util.plan_file import EVENT as PLAN_EVENT

QUARTERS = (0.25, 0.5, 0.75, 1.0)  # of the shortest run, where losses are compared
# Key of metrics.jsonl -> how a run's value follows from the values of its log steps.
MEDIANS = ("tps", "tflops", "mfu", "step_s", "data_loading_percent")


def smoothing_window(num_rows: int) -> int:
    """Return the number of rows of which the smoothed loss is the mean: 1 %, but at least 10."""
    return max(10, num_rows // 100)


def smoothed_loss(history: History) -> Floats:
    """Return the mean loss of the last `smoothing_window` rows, float64 (rows,)."""
    loss = history.run.metrics.get("loss")
    return moving_mean(loss, smoothing_window(len(loss)))


def summarize(history: History) -> dict[str, Any]:
    """Return the numbers of one run."""
    run, goodput = history.run, history.goodput
    loss = run.metrics.get("loss")
    newest = next((a.recorded for a in reversed(history.attempts) if a.recorded.model), None)
    tokens = _last(history.tokens)
    wall = goodput.wall
    return {
        "name": run.name,
        "path": run.path,
        "description": run.config.get("job.description"),
        "model": newest.model if newest else _configured_model(run.config),
        "num_parameters": newest.num_parameters if newest else None,
        "state": run.state.name,
        "state_reason": run.state.reason,
        "state_detail": run.state.detail,
        "step": _last(history.step),
        "total_steps": run.config.get("training.steps"),
        "num_rows": run.metrics.num_rows,
        "tokens": tokens,
        "wall_seconds": wall,
        "tokens_per_wall_second": tokens / wall if tokens is not None and wall > 0 else None,
        "goodput": goodput.share,
        "goodput_seconds": goodput.seconds,
        "loss": {
            "first": _first(loss),
            "last": _last(loss),
            "last_smoothed": _last(smoothed_loss(history)),
            "smoothing_window": smoothing_window(len(loss)),
            "min": _extreme(history.step, loss, np.nanargmin),
            "max": _extreme(history.step, loss, np.nanargmax),
            "num_nonfinite": int(np.count_nonzero(~np.isfinite(loss))),
        },
        "validation": {
            name: _summarize_validation(*validation_loss(rows))
            for name, rows in validation_sets(run).items()
        },
        "num_skipped_steps": int(np.count_nonzero(run.metrics.get("skipped") > 0)),
        "median": {key: _median(run.metrics.get(key)) for key in MEDIANS},
        "max_memory_gib": _max(run.metrics.get("memory_gib")),
        "data_wait_seconds": float(np.nansum(run.metrics.get("data_loading_s"))),
        "attempts": [
            {
                "number": attempt.recorded.number,
                "start": attempt.times.start,
                "end": attempt.times.end,
                "first_step": attempt.first_step,
                "last_step": attempt.last_step,
                "num_ranks": attempt.recorded.num_ranks,
                "layout": attempt.recorded.started.get("layout"),
                "ended": attempt.ended,
                "goodput_seconds": attempt.seconds,
                "config_changes": changes_as_json(attempt.changes),
                "num_warnings": sum(warning.count for warning in attempt.recorded.warnings),
                "error": attempt.recorded.error,
            }
            for attempt in history.attempts
        ],
        "num_events": dict(Counter(str(event["event"]) for event in history.events)),
        "events": history.events,
        "plan": plan_event(history),
        "checkpoints": [asdict(checkpoint) for checkpoint in run.checkpoints],
        "evals": run.evals,
        "num_clock_jumps": goodput.num_clock_jumps,
        "problems": run.problems,
    }


def plan_event(history: History) -> dict[str, Any] | None:
    """Return the newest comparison with the plan of the configuration; None without one."""
    return next((e for e in reversed(history.events) if e["event"] == PLAN_EVENT), None)


def compare(histories: Sequence[History]) -> dict[str, Any]:
    """Return what differs between runs: settings, and losses at equal tokens and equal time."""
    configs = [history.run.config for history in histories]
    keys = sorted({key for other in configs[1:] for key in diff_settings(configs[0], other)})
    return {
        "config_differences": {key: [config.get(key) for config in configs] for key in keys},
        "loss_at_equal_tokens": losses_at(histories, [h.tokens for h in histories]),
        "loss_at_equal_hours": losses_at(histories, [h.hours(h.time) for h in histories]),
    }


def changes_as_json(changes: Changes) -> dict[str, list[Any]]:
    """Return changed settings with their values before and after."""
    return {key: list(values) for key, values in changes.items()}


def losses_at(histories: Sequence[History], positions: Sequence[Floats]) -> list[dict[str, Any]]:
    """Return the smoothed loss of each run at quarters of the shortest run.

    positions: tokens, hours or seconds of the rows of each run. None where a run has no row up to there.
    """
    ends = [_max(values) for values in positions]
    if any(end is None or end <= 0 for end in ends):
        return []
    shortest = min(end for end in ends if end is not None)
    losses = [smoothed_loss(history) for history in histories]
    table = []
    for quarter in QUARTERS:
        limit = quarter * shortest
        row: dict[str, Any] = {"at": limit, "loss": [], "step": []}
        for history, values, loss in zip(histories, positions, losses, strict=True):
            reached = np.flatnonzero((values <= limit) & np.isfinite(loss))
            row["loss"].append(float(loss[reached[-1]]) if len(reached) else None)
            row["step"].append(int(history.step[reached[-1]]) if len(reached) else None)
        table.append(row)
    return table


def _configured_model(config: dict[str, Any]) -> str | None:
    names = [str(config[key]) for key in ("model.name", "model.flavor") if key in config]
    return " ".join(names) or None


def _summarize_validation(step: Floats, loss: Floats) -> dict[str, Any]:
    return {
        "num": len(loss),
        "last": _last(loss),
        "best": _extreme(step, loss, np.nanargmin),
    }


def _extreme(step: Floats, values: Floats, choose: Any) -> dict[str, float] | None:
    """Return the value and step that `choose` selects among the finite values; None without any."""
    finite = np.where(np.isfinite(values), values, math.nan)
    if np.isnan(finite).all():
        return None
    index = int(choose(finite))
    return {"value": float(values[index]), "step": int(step[index])}


def _first(values: Floats) -> float | None:
    return _number(values[0]) if len(values) else None


def _last(values: Floats) -> float | None:
    return _number(values[-1]) if len(values) else None


def _max(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return _number(finite.max()) if len(finite) else None


def _median(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return _number(np.median(finite)) if len(finite) else None


def _number(value: Any) -> float:
    """Return an int if the value is integral, as counts are in the files."""
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


Indices = NDArray[np.int64]


def decimate(values: NDArray[np.float64], max_points: int) -> Indices:
    """Return the sorted indices of at most `max_points` finite values that show the same curve.

    values: float64 (rows,). The rows are divided into buckets of equal size. The smallest and the
    largest value of each bucket are kept, and the first and last finite value of the curve.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= max_points:
        return finite
    num_buckets = max(1, (max_points - 2) // 2)
    starts = np.arange(num_buckets + 1) * len(finite) // num_buckets
    kept = {int(finite[0]), int(finite[-1])}
    for start, end in zip(starts, starts[1:], strict=False):
        bucket = finite[start:end]
        heights = values[bucket]
        kept |= {int(bucket[heights.argmin()]), int(bucket[heights.argmax()])}
    return np.array(sorted(kept), dtype=np.int64)


def moving_mean(
    values: NDArray[np.float64], window: int, *, is_centered: bool = False
) -> NDArray[np.float64]:
    """Return for each finite value the mean of the last `window` finite values up to it.

    values: float64 (rows,). is_centered: of the values around it, `window // 2` on
    each side. Others are NaN.
    """
    is_finite = np.isfinite(values)
    finite = values[is_finite]
    sums = np.concatenate([[0.0], np.cumsum(finite)])
    indices = np.arange(len(finite))
    before, after = (window // 2, window // 2) if is_centered else (window - 1, 0)
    starts = np.maximum(0, indices - before)
    ends = np.minimum(len(finite), indices + after + 1)
    means = np.full(len(values), np.nan)
    means[is_finite] = (sums[ends] - sums[starts]) / (ends - starts)
    return means
