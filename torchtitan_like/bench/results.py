"""The results of a bench: one row a run as CSV, and a page with curves and confidence intervals."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchtitan_like.bench.run_list import BenchRun
from torchtitan_like.report.columns import Floats
from torchtitan_like.report.figures import require_bokeh
from torchtitan_like.report.history import History, read_histories
from torchtitan_like.report.page import Table, write_page
from torchtitan_like.report.state import ERROR, KILLED, STOPPED, RunState, find_state, is_run
from torchtitan_like.report.summary import losses_at, summarize
from torchtitan_like.util.exit_codes import CRASH, ExitCode
from torchtitan_like.util.exit_codes import KILLED as KILLED_CODE
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.output import show, show_error
from torchtitan_like.util.plan_file import PLAN, read_plan

NOT_STARTED = "not started"
DONE = ExitCode.DONE.reason

Row = dict[str, Any]

# Columns that differ between repeats, with their titles on the page.
MEASURES = {
    "tps": "tokens/s of each device",
    "mfu": "MFU, %",
    "memory_gib": "memory, GiB",
    "loss_at_equal_tokens": "loss at equal tokens",
    "loss_at_equal_time": "loss at equal time",
    "validation_loss": "validation loss",
}
# Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom.
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
Z_95 = statistics.NormalDist().inv_cdf(0.975)
FORMULA = (
    "mean ± t · s / √n over n repeats with different seeds: 95 % confidence interval, with the "
    "standard deviation s (divisor n - 1) and the 0.975 quantile t of Student's t distribution "
    "with n - 1 degrees of freedom"
)


class Interval(NamedTuple):
    """A mean and the half-width of its 95 % confidence interval; None with less than 2 values."""

    mean: float
    half_width: float | None

    def __str__(self) -> str:
        mean = f"{self.mean:,.0f}" if abs(self.mean) >= 1000 else f"{self.mean:.4f}"
        return mean if self.half_width is None else f"{mean} ± {self.half_width:.2g}"


def t_quantile(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t distribution.

    Above 10 degrees of freedom: the expansion of Abramowitz and Stegun, 26.7.5, exact to 2e-4.
    """
    if degrees <= len(T_QUANTILES):
        return T_QUANTILES[degrees - 1]
    z = Z_95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))


def interval(values: Collection[float]) -> Interval:
    """Return the mean and its 95 % confidence interval. See `FORMULA`."""
    count, mean = len(values), statistics.fmean(values)
    if count < 2:
        return Interval(mean, None)
    return Interval(mean, t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count))


def difference(scores: Mapping[int, float], base: Mapping[int, float]) -> Interval | None:
    """Return the interval of score - base at equal seeds. None without a common seed.

    scores, base: by seed. Runs with the same seed read the same text from the same initial weights,
    so that their difference varies less than each of them.
    """
    changes = [score - base[seed] for seed, score in scores.items() if seed in base]
    return interval(changes) if changes else None


def step_seconds_so_far(history: History) -> Floats:
    """Return the seconds of all steps up to each row, float64 (rows,).

    Starts and pauses between attempts are left out: the first step of an attempt, which may compile,
    counts as a typical one.
    """
    seconds = np.diff(history.time, prepend=np.nan)
    is_first = np.diff(history.attempt_of, prepend=-1) != 0
    others = seconds[~is_first]
    seconds[is_first] = np.median(others) if len(others) else 0.0
    return np.cumsum(seconds)


# ---- rows


def collect(
    runs: Sequence[BenchRun], keys: Sequence[str], codes: Mapping[int, int]
) -> tuple[list[Row], list[History]]:
    """Return one row for each run (done, failed, or not started), and the runs with a step.

    keys: the varied settings. codes: exit codes of runs that this process has started, by index.
    """
    now = time.time()
    rows = [_row(run, keys, codes.get(run.index), now) for run in runs]
    histories = read_run_histories(runs)
    for index, history in histories.items():
        rows[index] |= _measure(history)
    _compare_losses(rows, histories)
    for row in rows:
        for measure, spread in intervals(rows, row["variant"]).items():
            row[f"{measure}_mean"] = spread.mean
            row[f"{measure}_ci95"] = spread.half_width
    return rows, list(histories.values())


def read_run_histories(runs: Sequence[BenchRun]) -> dict[int, History]:
    """Return the recorded runs by their index. Those without a step are left out."""
    started = [run for run in runs if is_run(run.folder)]
    histories = read_histories([run.folder for run in started], is_redacted=False)
    pairs = zip(started, histories, strict=True)
    return {run.index: history for run, history in pairs if len(history.step)}


def exit_code(rows: Sequence[Row]) -> int:
    """Return 0 if all runs are done, else the code of the first one that is not."""
    return next((int(row["exit_code"] or CRASH) for row in rows if row["state"] != DONE), 0)


def _row(run: BenchRun, keys: Sequence[str], code: int | None, now: float) -> Row:
    """Return what is known of a run without its metrics."""
    state = find_state(run.folder, now) if is_run(run.folder) else RunState(NOT_STARTED)
    name = state.reason if state.name == STOPPED else state.name
    if state.end is not None and (code is None or name == DONE):
        code = state.end.code
    elif code is None:
        code = {ERROR: CRASH, KILLED: KILLED_CODE}.get(state.reason)
    row: Row = {"run": run.index, "variant": run.variant}
    row |= {key: run.config.value_of(key) for key in keys}
    row |= {"seed": run.seed, "state": name, "exit_code": code}
    row["cause"] = "" if name == DONE else state.detail
    steps = run.config.training.steps
    if name == DONE and state.end is not None and state.end.step != steps:
        row["cause"] = f"its data ended at step {state.end.step} of {steps}"
    if (run.folder / PLAN).exists():
        plan = read_plan(run.folder / PLAN)
        row |= {"planned_gpu": plan.gpu, "planned_gib": plan.reserved}
        row["planned_step_s"] = plan.step_seconds
    return row


def _measure(history: History) -> Row:
    """Return what a run has measured."""
    summary = summarize(history)
    median = summary["median"]
    validation = [each["last"] for each in summary["validation"].values()]
    newest = history.run.attempts[-1] if history.run.attempts else None
    return {
        "steps": summary["step"],
        "tokens": summary["tokens"],
        "loss": summary["loss"]["last_smoothed"],
        "validation_loss": validation[0] if validation else None,
        "step_s": median["step_s"],
        "tps": median["tps"],
        "mfu": median["mfu"],
        "memory_gib": summary["max_memory_gib"],
        "ranks": None if newest is None else newest.num_ranks,
        "environment": "" if newest is None else describe_environment(newest.environment),
    }


def describe_environment(files: Mapping[str, str]) -> str:
    """Return torch, hardware, host and revision from the files of an attempt's environment."""
    facts = json.loads(files.get("facts.json") or "{}")
    commits = [line for line in files.get("git.txt", "").splitlines() if line.startswith("commit ")]
    gpus = facts.get("gpus") or []
    parts = [f"torch {facts.get('torch')}", f"Python {str(facts.get('python')).split()[0]}"]
    parts.append(f"{len(gpus)} x {gpus[0]}" if gpus else f"CPU {facts.get('cpu')}")
    parts += [f"host {facts.get('host')}", *commits[:1]]
    return "; ".join(parts)


def _compare_losses(rows: Sequence[Row], histories: Mapping[int, History]) -> None:
    """Add the smoothed losses at the tokens and at the time of the shortest run that is done."""
    done = [row for row in rows if row["state"] == DONE and row["run"] in histories]
    compared = [histories[row["run"]] for row in done]
    if not compared:
        return
    for measure, position, positions in (
        ("loss_at_equal_tokens", "equal_tokens", [history.tokens for history in compared]),
        ("loss_at_equal_time", "equal_seconds", [step_seconds_so_far(each) for each in compared]),
    ):
        losses = losses_at(compared, positions)
        if not losses:  # the shortest run has no second row
            continue
        for row, loss in zip(done, losses[-1]["loss"], strict=True):
            row |= {measure: loss, position: losses[-1]["at"]}


def values_by_seed(rows: Sequence[Row], variant: str, measure: str) -> dict[int, float]:
    """Return a measure of each repeat of a variant that is done."""
    return {
        row["seed"]: row[measure]
        for row in rows
        if row["variant"] == variant and row["state"] == DONE and row.get(measure) is not None
    }


def intervals(rows: Sequence[Row], variant: str) -> dict[str, Interval]:
    """Return the interval of each measure over the repeats of a variant that are done."""
    by_measure = {measure: values_by_seed(rows, variant, measure) for measure in MEASURES}
    return {measure: interval(values.values()) for measure, values in by_measure.items() if values}


# ---- output


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows with the columns of all of them. Raises OSError."""
    order: dict[str, None] = {}
    for row in rows:
        order |= dict.fromkeys(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(order), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def table_of(rows: Sequence[Row], keys: Sequence[str]) -> Table:
    """Return one line for each variant, with confidence intervals over its repeats.

    The last column compares the losses with those of the first variant at equal seeds.
    """
    planned = {"planned_gib": "planned memory, GiB", "planned_step_s": "planned step, s"}
    planned = {key: title for key, title in planned.items() if any(key in row for row in rows)}
    has_validation = any(row.get("validation_loss") is not None for row in rows)
    loss = "validation_loss" if has_validation else "loss_at_equal_tokens"
    base = rows[0]["variant"]
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        repeats = [row for row in rows if row["variant"] == variant]
        spreads = intervals(rows, variant)
        change = difference(values_by_seed(rows, variant, loss), values_by_seed(rows, base, loss))
        line = [variant, *(str(repeats[0][key]) for key in keys), describe_states(repeats)]
        line += [str(spreads.get(measure, "–")) for measure in MEASURES]
        line.append("–" if variant == base or change is None else f"{change}")
        line += [_text(repeats[0].get(key)) for key in planned]
        lines.append(line)
    titles = [*MEASURES.values(), f"{MEASURES[loss]}, difference to {base}"]
    head = ["variant", *keys, "runs", *titles, *planned.values()]
    return Table("Variants", head, lines, _note(rows))


def describe_states(repeats: Sequence[Row]) -> str:
    """Return how many repeats are done, and what happened to the others."""
    num_done = sum(row["state"] == DONE for row in repeats)
    others = {row["cause"] if row["state"] == DONE else row["state"] for row in repeats} - {""}
    return ", ".join([f"{num_done} of {len(repeats)} done", *sorted(others)])


def _note(rows: Sequence[Row]) -> str:
    note = (
        f"{FORMULA}. Medians over log steps; memory is the largest of rank 0. The difference is "
        "the mean over pairs of runs with the same seed."
    )
    compared: Row = next((row for row in rows if "equal_tokens" in row), {})
    if "equal_tokens" in compared:
        note += f" Losses at equal tokens are at {compared['equal_tokens']:,.0f} tokens."
    if "equal_seconds" in compared:
        note += f" Losses at equal time are at {compared['equal_seconds']:.1f} s of steps."
    return f"{note} Both are the end of the shortest run." if compared else note


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def write_results(
    path: Path, rows: Sequence[Row], histories: Sequence[History], table: Table
) -> None:
    """Write the CSV file and the page, and print the table. path: of both, without their suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(path.with_suffix(".csv"), rows)
    show(f"Wrote {path}.csv")
    try:
        require_bokeh()
    except ValueError as error:
        show_error(str(error))
    else:
        if histories:
            page = path.with_suffix(".html")
            write_page(page, histories, is_redacted=False, table=table)
            show(f"Wrote {page}")
    show_table(table)


def show_table(table: Table) -> None:
    """Print a table."""
    lines = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        show("  ".join(cells).rstrip())
