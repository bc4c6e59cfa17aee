"""Run a scaling ladder: train the rungs through the bench, and report what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_like.bench import results
from torchtitan_like.bench.execution import Experiment, make_plans, run_all, write_plans
from torchtitan_like.bench.ladder_report import NAME, num_inputs, write_report
from torchtitan_like.bench.run_list import BenchRun, check_runs
from torchtitan_like.bench.rungs import Rung, list_rungs
from torchtitan_like.bench.scaling_law import num_fitted
from torchtitan_like.check import load_for_command
from torchtitan_like.config import ConfigError, Problem
from torchtitan_like.config.arguments import ORIGIN, last_value
from torchtitan_like.config.loader import CONFIG_FILE
from torchtitan_like.config.toml_text import extending_toml, path_to_extend
from torchtitan_like.plan.gpus import Gpu, load_gpu
from torchtitan_like.plan.remedies import find_remedies
from torchtitan_like.report.page import Table
from torchtitan_like.util.bundle import find_config
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.output import show, show_error
from torchtitan_like.util.plan_file import PlanFile
from torchtitan_like.util.units import GIB

KEYS = ("model.args.dim", "model.args.n_layers", "model.args.n_heads", "training.steps")
HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Ladder(Experiment):
    """The arguments of `titan ladder`.

    ratios: tokens per parameter, ascending. only_writes: True to write the TOML files and run
    nothing. picture: path of a picture of the law; None: none is drawn.
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
    chosen = ladder.choose(runs, ranks.number)
    plans: dict[str, PlanFile] = {}
    if gpu is not None:
        planned = chosen if ladder.array_index is not None else [*chosen, *target_runs]
        plans = make_plans(planned, ranks.number, gpu)
        _require_fit(chosen, plans, ranks.number, gpu)
        write_plans(planned, plans)
    started = write_configs(ladder.settings, runs)
    write_configs(ladder.settings, target_runs)
    names = ",".join(rung.name for rung in [*rungs, *targets])
    show(f"Wrote {runs[0].folder.parent}/{{{names}}}.toml")
    results.show_table(plan_table([*rungs, *targets], plans, ranks.number))
    if ladder.only_writes:
        return 0
    chosen = [started[run.index] for run in chosen]
    codes, is_stopped = run_all(chosen, len(runs), ranks.options, NAME)
    if is_stopped or ladder.array_index is not None:
        return list(codes.values())[-1] if codes else 0
    rows, histories = results.collect(runs, KEYS, codes)
    write_report(rungs, targets, runs, rows, histories, ladder.picture)
    return results.exit_code(rows)


def _check_points(num_rungs: int, num_ratios: int) -> None:
    """Raise ValueError if a law cannot be fitted to so many rungs, with an error band."""
    num_needed = num_fitted(num_inputs(num_ratios)) + 1
    smallest = max(3, math.ceil(num_needed / num_ratios))
    if num_rungs < smallest:
        ratios = f" with {num_ratios} values of --tokens-per-param" if num_ratios > 1 else ""
        raise ValueError(
            f"--rungs {num_rungs}: the law has {num_needed - 1} numbers to fit, and its error band "
            f"needs another point{ratios}. Expected at least {smallest} rungs: add some"
        )


def _require_fit(
    runs: Sequence[BenchRun], plans: Mapping[str, PlanFile], num_ranks: int, gpu: Gpu
) -> None:
    """Raise ConfigError if a run does not fit on the GPU."""
    needed = {name: plan.fullest for name, plan in plans.items() if plan.fullest > gpu.memory_gib}
    refused = [run for run in {run.variant: run for run in runs}.values() if run.variant in needed]
    if not refused:
        return
    fullest = max(refused, key=lambda run: needed[run.variant])
    show_error(f"Searching for a change with which {fullest.variant} fits")
    remedy = "use more ranks, or fewer or smaller rungs"
    for change in find_remedies(fullest.config, num_ranks, gpu):
        remedy = f"{fullest.variant} fits with {' '.join(change.settings)} ({change.cost})"
        break
    raise ConfigError(
        Problem(
            "--plan",
            gpu.key,
            f"a GPU on which all rungs fit; {run.variant} needs "
            f"{round(needed[run.variant] * GIB):,} bytes of the {round(gpu.memory_gib * GIB):,} "
            f"bytes of {gpu.name}",
            remedy,
            ORIGIN,
        )
        for run in refused
    )


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
