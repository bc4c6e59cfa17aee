"""Run a scaling ladder: train smaller models, fit a scaling law, and predict the target's loss."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_like.bench import results
from torchtitan_like.bench.execution import Experiment, make_plans, run_all, write_plans
from torchtitan_like.bench.results import DONE, Row
from torchtitan_like.bench.run_list import BenchRun, check_runs
from torchtitan_like.bench.rungs import Rung, list_rungs
from torchtitan_like.bench.scaling_law import Prediction, ScalingLaw, fit_law, num_fitted
from torchtitan_like.check import load_for_command
from torchtitan_like.config import ConfigError, JobConfig, Problem
from torchtitan_like.config.arguments import ORIGIN, last_value
from torchtitan_like.config.loader import CONFIG_FILE
from torchtitan_like.config.toml_text import extending_toml, path_to_extend
from torchtitan_like.plan.gpus import Gpu, load_gpu
from torchtitan_like.plan.remedies import find_remedies
from torchtitan_like.report.columns import Floats
from torchtitan_like.report.page import Table
from torchtitan_like.util.bundle import find_config
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.output import show
from torchtitan_like.util.pictures import PALETTE, picture
from torchtitan_like.util.plan_file import PlanFile
from torchtitan_like.util.units import GIB

NAME = "ladder"  # of the files
KEYS = ("model.args.dim", "model.args.n_layers", "model.args.n_heads", "training.steps")
HOUR = 3600.0
PICTURE_SIZE = (7.6, 4.2)  # inches
NUM_CURVE_POINTS = 60


@dataclass(frozen=True, kw_only=True)
class Ladder(Experiment):
    """The arguments of `titan ladder`.

    ratios: of tokens to parameters, ascending. only_writes: the TOML files, without runs. picture:
    of the law; None: none is drawn.
    """

    num_rungs: int
    factor: float
    ratios: tuple[float, ...]
    only_writes: bool
    picture: Path | None


def run_ladder(ladder: Ladder) -> int:
    """Write the TOML files, run what is not done, and predict the target. Returns the exit code.

    Raises ConfigError, and LaunchError or ValueError for other wrong arguments.
    """
    _check_points(ladder.num_rungs, len(ladder.ratios))
    ranks = ladder.ranks()
    gpu = None if ladder.gpu is None else load_gpu(ladder.gpu)
    config, _ = load_for_command(
        ladder.settings, ranks.number, training=True, device_type=ranks.device_type
    )
    rungs, targets = list_rungs(
        config, ranks.number, ladder.num_rungs, ladder.factor, ladder.ratios
    )
    runs, target_runs = (
        check_runs(
            ladder.settings,
            {rung.name: rung.settings for rung in some},
            repeats,
            ranks.number,
            ranks.device_type,
        )
        for some, repeats in ((rungs, ladder.num_repeats), (targets, 1))
    )
    chosen = ladder.choose(runs)
    plans: dict[str, PlanFile] = {}
    if gpu is not None:
        others = target_runs if ladder.array_index is None else []
        plans = make_plans([*chosen, *others], ranks.number, gpu)
        _require_fit(chosen, plans, ranks.number, gpu)
    runs = write_configs(ladder.settings, runs)
    write_configs(ladder.settings, target_runs)
    show(
        f"Wrote {runs[0].folder.parent}/{{{','.join(rung.name for rung in rungs + targets)}}}.toml"
    )
    results.show_table(plan_table([*rungs, *targets], plans, ranks.number))
    if ladder.only_writes:
        return 0
    chosen = ladder.choose(runs)
    write_plans(chosen, plans)
    codes, is_stopped = run_all(chosen, len(runs), ranks.options, NAME)
    if is_stopped or ladder.array_index is not None:
        return list(codes.values())[-1] if codes else 0
    rows = results.collect(runs, KEYS, codes)
    report(rungs, targets, runs, rows, ladder.picture)
    return results.exit_code(rows)


def _check_points(num_rungs: int, num_ratios: int) -> None:
    """Raise ValueError if a law cannot be fitted to so many rungs, with an error band."""
    num_needed = num_fitted(_num_inputs(num_ratios)) + 1
    smallest = max(3, math.ceil(num_needed / num_ratios))
    if num_rungs < smallest:
        ratios = f" with {num_ratios} values of --tokens-per-param" if num_ratios > 1 else ""
        raise ValueError(
            f"--rungs {num_rungs}: the law has {num_needed - 1} numbers to fit, and its error band "
            f"needs another point{ratios}. Expected at least {smallest} rungs: add some"
        )


def _num_inputs(num_ratios: int) -> int:
    """Return the inputs of the law: N, and D if it is not proportional to N."""
    return min(2, num_ratios)


def _require_fit(
    runs: Sequence[BenchRun], plans: Mapping[str, PlanFile], num_ranks: int, gpu: Gpu
) -> None:
    """Raise ConfigError if a run does not fit on the GPU."""
    problems = []
    for run in {run.variant: run for run in runs}.values():
        plan = plans.get(run.variant)
        if plan is None or plan.fullest <= gpu.memory_gib:
            continue
        needed, available = (round(gib * GIB) for gib in (plan.fullest, gpu.memory_gib))
        remedies = [
            f"{' '.join(remedy.settings)} ({remedy.cost})"
            for remedy in find_remedies(run.config, num_ranks, gpu)
        ]
        problems.append(
            Problem(
                "--plan",
                gpu.key,
                f"a GPU on which all rungs fit; {run.variant} needs {needed:,} bytes of the "
                f"{available:,} bytes of {gpu.name}",
                f"use one of {'; '.join(remedies)}" if remedies else "use more ranks",
                ORIGIN,
            )
        )
    if problems:
        raise ConfigError(problems)


def write_configs(settings: Sequence[str], runs: Sequence[BenchRun]) -> list[BenchRun]:
    """Write the TOML file of each variant, and return the runs that start from these files.

    A file extends the one in `settings`, and has the folder and the seed of the first repeat.
    """
    given = last_value(settings, CONFIG_FILE)
    assert given is not None  # `titan ladder` expects CONFIG
    written: set[Path] = set()
    started = []
    for run in runs:
        path = run.folder.parent / f"{run.variant}.toml"
        if path not in written:
            extends = path_to_extend(given, find_config(given), path)
            own = {"job.dump_folder": str(run.folder), "debug.seed": run.seed}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(
                path, extending_toml(run.config, own, extends, "Written by `titan ladder`.")
            )
            written.add(path)
        repeat = [f"--debug.seed={run.seed}", f"--job.dump_folder={run.folder}"]
        started.append(replace(run, argv=[f"--job.config_file={path}", *repeat]))
    return started


def plan_table(rungs: Sequence[Rung], plans: Mapping[str, PlanFile], num_ranks: int) -> Table:
    """Return the cost of each rung and of the target: of one run, as a table."""
    head = ["rung", "width x layers", "parameters", "tokens", "steps", "FLOPs"]
    if plans:
        head += ["GiB", "step, s", "GPU-hours"]
    lines = []
    for rung in rungs:
        line = [rung.name, rung.size, f"{rung.num_params:,}", f"{rung.tokens:,}"]
        line += [f"{rung.steps:,}", f"{rung.flops:.3g}"]
        plan = plans.get(rung.name)
        if plan is not None:
            line.append(f"{plan.fullest:.2f}")
        if plan is not None and plan.step_seconds is not None:
            hours = plan.step_seconds * rung.steps * num_ranks / HOUR
            line += [f"{plan.step_seconds:.4g}", f"{hours:.3g}"]
        lines.append(line + ["–"] * (len(head) - len(line)))
    return Table("Cost", head, lines, "")


# ---- results


def report(
    rungs: Sequence[Rung],
    targets: Sequence[Rung],
    runs: Sequence[BenchRun],
    rows: Sequence[Row],
    path: Path | None,
) -> None:
    """Fit the law, write ladder.csv, ladder.json and the page, and print the prediction.

    path: of a picture; None: none is drawn.
    """
    loss_key, loss_name = _loss_of(runs[0].config)
    by_name = {rung.name: rung for rung in rungs}
    points = [
        (by_name[row["variant"]], row[loss_key])
        for row in rows
        if row["state"] == DONE and math.isfinite(row.get(loss_key) or math.nan)
    ]
    num_inputs = _num_inputs(len(targets))
    law = _fit(points, num_inputs)
    last = max(rung.number for rung in rungs)
    smaller_law = _fit([point for point in points if point[0].number != last], num_inputs)
    content: dict[str, Any] = {"loss": loss_name, "law": law and law.as_json()}
    lines = [f"Loss: {loss_name}"]
    if law is None:
        lines.append(
            f"No law: {len({rung.name for rung, _ in points})} of {len(rungs)} rungs are done. "
            f"Expected at least {num_fitted(num_inputs)}: the same command runs the others"
        )
    else:
        spread = f"root mean square error {100 * np.sqrt(np.mean(law.errors**2)):.2f} %"
        lines.append(f"Law: {law}, N parameters, D tokens; {spread}")
    content["held_out"] = []
    for rung in (rung for rung in rungs if rung.number == last):
        losses = [loss for other, loss in points if other == rung]
        if smaller_law is None or not losses:
            continue
        predicted, measured = _predict(smaller_law, rung), float(np.mean(losses))
        error = predicted.loss / measured - 1
        lines.append(
            f"{rung.name} from the smaller rungs: predicted {predicted}, measured {measured:.4f}: "
            f"{100 * error:+.2f} %"
        )
        content["held_out"].append(
            _as_json(rung, predicted) | {"measured": measured, "relative_error": error}
        )
    content["predictions"] = []
    for target in targets if law is not None else []:
        predicted = _predict(law, target)
        lines.append(
            f"{target.name}, {target.num_params:,} parameters and {target.tokens:,} tokens: "
            f"predicted loss {predicted}"
        )
        content["predictions"].append(_as_json(target, predicted))
    for row in rows:
        rung = by_name[row["variant"]]
        row["law_loss"] = row.get(loss_key)
        row["fitted_loss"] = None if law is None else _predict(law, rung).loss
    numbered = [_with_rung(by_name[row["variant"]], row) for row in rows]
    table = _result_table(rungs, numbered)._replace(note=". ".join([*lines, ""]).strip())
    results.write_results(NAME, runs, numbered, table)
    file = runs[0].folder.parent / f"{NAME}.json"
    write_atomically(file, json.dumps(content, indent=2) + "\n")
    show(f"Wrote {file}")
    if path is not None and law is not None:
        draw_law(path, law, points, targets, loss_name)
        show(f"Wrote {path}")
    for line in lines:
        show(line)


def _loss_of(config: JobConfig) -> tuple[str, str]:
    """Return the column of `results.collect` that is fitted, and its description."""
    if config.validation.enable:
        dataset = next(iter(config.validation.sources), config.validation.dataset)
        return "validation_loss", f"last validation loss of {dataset}"
    return "loss", "training loss, mean of the last rows"


def _inputs(rung: Rung, num_inputs: int) -> Floats:
    return np.array([rung.num_params, rung.tokens][:num_inputs], dtype=np.float64)


def _fit(points: Sequence[tuple[Rung, float]], num_inputs: int) -> ScalingLaw | None:
    """Return the law of some runs. None if there are too few different ones."""
    if len({rung.name for rung, _ in points}) < num_fitted(num_inputs):
        return None
    inputs = np.stack([_inputs(rung, num_inputs) for rung, _ in points])
    return fit_law(inputs, np.array([loss for _, loss in points]))


def _predict(law: ScalingLaw, rung: Rung) -> Prediction:
    return law.predict(_inputs(rung, len(law.exponents)))


def _as_json(rung: Rung, predicted: Prediction) -> dict[str, Any]:
    sizes = {"params": rung.num_params, "tokens": rung.tokens, "flops": rung.flops}
    return {"rung": rung.name, **sizes, **predicted._asdict()}


def _with_rung(rung: Rung, row: Row) -> Row:
    """Return the row of a run with the columns of its rung at the start."""
    return {
        "rung": rung.number,
        "tokens_per_param": rung.ratio,
        "params": rung.num_params,
        "planned_tokens": rung.tokens,
        "flops": rung.flops,
        "law_loss": row["law_loss"],
        "fitted_loss": row["fitted_loss"],
        **row,
    }


def _result_table(rungs: Sequence[Rung], rows: Sequence[Row]) -> Table:
    head = ["rung", "parameters", "tokens", "FLOPs", "runs", "loss", "fitted", "error, %"]
    lines = []
    for rung in rungs:
        repeats = [row for row in rows if row["variant"] == rung.name]
        losses = [row["law_loss"] for row in repeats if row["law_loss"] and row["state"] == DONE]
        fitted = repeats[0]["fitted_loss"]
        states = sorted({row["state"] for row in repeats} - {DONE})
        num_done = sum(row["state"] == DONE for row in repeats)
        line = [rung.name, f"{rung.num_params:,}", f"{rung.tokens:,}", f"{rung.flops:.3g}"]
        line.append(", ".join([f"{num_done} of {len(repeats)} done", *states]))
        line.append(str(results.interval(losses)) if losses else "–")
        line.append("–" if fitted is None else f"{fitted:.4f}")
        has_error = bool(losses) and fitted is not None
        line.append(f"{100 * (fitted / np.mean(losses) - 1):+.2f}" if has_error else "–")
        lines.append(line)
    return Table("Scaling ladder", head, lines, "")


def draw_law(
    path: Path,
    law: ScalingLaw,
    points: Sequence[tuple[Rung, float]],
    targets: Sequence[Rung],
    loss_name: str,
) -> None:
    """Draw the runs, the law with its band, and the predictions. Raises OSError."""
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
        panel.set_xlabel("parameters")
        panel.set_title(loss_name, loc="left", fontsize="medium")
        panel.grid(visible=True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize="small")
