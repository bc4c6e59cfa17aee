"""Run a bench: one run after the other, through the launcher of `titan train`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torchtitan_like.bench import results
from torchtitan_like.bench.run_list import BenchRun, list_runs_of_bench
from torchtitan_like.config import JobConfig
from torchtitan_like.launcher.launch import launch
from torchtitan_like.launcher.local_devices import inspect_machine
from torchtitan_like.launcher.options import read_options
from torchtitan_like.plan.gpus import Gpu, load_gpu
from torchtitan_like.util.exit_codes import LAUNCHER_SIGNALS, ExitCode
from torchtitan_like.util.output import ProgressLine, show, show_error
from torchtitan_like.util.plan_file import (
    PLAN,
    PlanFile,
    differences,
    read_plan,
    settings_of,
    write_plan,
)

# Ends of a run that end the bench too: Ctrl-C, SIGTERM, a deadline, low memory.
ENDS_OF_BENCH = (ExitCode.INTERRUPTED, ExitCode.REQUEUE)


@dataclass(frozen=True)
class Bench:
    """The arguments of `titan bench`.

    settings: the config file and settings of all runs. vary: texts as `run_list.parse_vary` reads.
    nproc: ranks of a run, as the launcher reads it. gpu: whose plans are made; None: no plans.
    array_index: the only run to start; None: all of them.
    """

    settings: list[str]
    vary: list[str]
    is_grid: bool
    num_repeats: int
    nproc: str | None
    gpu: str | None
    array_index: int | None
    only_collects: bool


def run_bench(bench: Bench) -> int:
    """Run what is not done, then write the CSV file and the page. Returns the exit code.

    Raises ConfigError, and LaunchError or ValueError for other wrong arguments.
    """
    options = {"nproc": bench.nproc}
    machine = inspect_machine(os.environ)
    plan = read_options(options, os.environ, machine)
    if plan.max_nodes > 1:
        raise ValueError(
            f"NNODES={plan.max_nodes} is set. Expected one machine, because a bench starts each run "
            "on its own: unset it"
        )
    gpu = None if bench.gpu is None else load_gpu(bench.gpu)
    runs, keys = list_runs_of_bench(
        bench.settings,
        bench.vary,
        bench.num_repeats,
        plan.num_ranks,
        None if machine.num_gpus else "cpu",
        is_grid=bench.is_grid,
    )
    chosen = [] if bench.only_collects else runs
    if bench.array_index is not None:
        if bench.array_index >= len(runs):
            raise ValueError(
                f"--array-index {bench.array_index}: expected an index of the {len(runs)} runs, 0 to "
                f"{len(runs) - 1}: correct it"
            )
        chosen = [runs[bench.array_index]]
    if gpu is not None:
        write_plans(chosen, plan.num_ranks, gpu)
    codes, is_stopped = run_all(chosen, len(runs), options)
    if is_stopped or bench.array_index is not None:
        return list(codes.values())[-1] if codes else 0
    rows = results.collect(runs, keys, codes)
    results.write_results(runs, rows, keys)
    return results.exit_code(rows)


def run_all(
    runs: Sequence[BenchRun], num_runs: int, options: Mapping[str, str | None]
) -> tuple[dict[int, int], bool]:
    """Run what is not done. Returns the exit code of each run that was started, by its index.

    num_runs: of the bench. options: of the launcher, by `Option.key`. The second value is True if
    the bench was stopped: started again, it continues the last run. A failed run does not end it.
    """
    waiting = [run for run in runs if not run.is_done]
    total = sum(run.config.training.steps for run in waiting)
    progress = ProgressLine("steps")
    started = time.monotonic()
    num_steps = 0
    codes: dict[int, int] = {}
    if len(waiting) < len(runs):
        show(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already")
    for run in waiting:
        show(f"Run {run.index + 1} of {num_runs}, index {run.index}: {run.name}")
        with restored_signals():
            codes[run.index] = launch(options, run.argv, run.argv)
        num_steps += run.config.training.steps
        progress("bench", num_steps, total, time.monotonic() - started)
        if codes[run.index] in ENDS_OF_BENCH and not _was_killed_alone(run):
            show_error(f"The bench stopped in {run.name}. The same command continues it.")
            return codes, True
    return codes, False


def _was_killed_alone(run: BenchRun) -> bool:
    """Return True if a person stopped only this run, with `titan run stop`."""
    return (run.folder / run.config.resilience.kill_switch_path).expanduser().exists()


@contextmanager
def restored_signals() -> Iterator[None]:
    """Restore the handlers of signals afterwards: the launcher ends with all of them ignored."""
    handlers = {signum: signal.getsignal(signum) for signum in LAUNCHER_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def write_plans(runs: Sequence[BenchRun], num_ranks: int, gpu: Gpu) -> None:
    """Write plan.json into the folder of each run that has none of its configuration and GPU.

    A run whose dry run fails has no plan.
    """
    plans: dict[str, PlanFile] = {}
    for run in runs:
        path = run.folder / PLAN
        settings = settings_of(run.config.model_dump(), num_ranks)
        if path.exists():
            plan = read_plan(path)
            if plan.gpu == gpu.key and not differences(plan, settings):
                continue
        if run.variant not in plans:
            show_error(f"Planning {run.variant}")
            try:
                plans[run.variant] = plan_of_run(run.config, num_ranks, gpu)
            except RuntimeError as error:  # the dry run fails
                show_error(f"No plan of {run.variant}: {error}")
                continue
        run.folder.mkdir(parents=True, exist_ok=True)
        write_plan(path, plans[run.variant])


def plan_of_run(config: JobConfig, num_ranks: int, gpu: Gpu) -> PlanFile:
    """Return the predicted memory and step time. Raises RuntimeError if it does not train."""
    from torchtitan_like.plan.clusters import typical_cluster  # these import torch
    from torchtitan_like.plan.dry_memory import dry_runs, memory_of_all
    from torchtitan_like.plan.plan_report import plan_of
    from torchtitan_like.plan.timeline import step_time

    cluster = typical_cluster(gpu.key, num_ranks)
    runs = dry_runs(config, num_ranks, gpu)
    memories = memory_of_all(runs, config, gpu)
    try:
        seconds = step_time(runs, config, gpu, cluster)
    except ValueError as error:  # the GPU has no peak for a dtype
        show_error(f"No step time: {error}")
        seconds = None
    return plan_of(config, num_ranks, memories, seconds, gpu, cluster)
