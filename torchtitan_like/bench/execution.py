"""Run a bench: one run after the other, through the launcher of `titan train`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_like.bench import results
from torchtitan_like.bench.run_list import BenchRun, list_runs_of_bench
from torchtitan_like.check import DeviceType
from torchtitan_like.config import JobConfig
from torchtitan_like.launcher.launch import launch
from torchtitan_like.launcher.local_devices import inspect_machine
from torchtitan_like.launcher.options import read_options
from torchtitan_like.plan.gpus import Gpu, load_gpu
from torchtitan_like.report.state import newest_stop, numbers_of_ranks
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

# Ends of a run that end the bench too: Ctrl-C, SIGTERM, a deadline.
ENDS_OF_BENCH = (ExitCode.INTERRUPTED, ExitCode.REQUEUE)
# Causes of stop events with these codes that end only one run: `titan run stop`, low memory.
CAUSES_OF_ONE_RUN = ("kill", "host_memory", "gpu_memory")


class Ranks(NamedTuple):
    """The ranks of each run. options: see `launch`."""

    options: dict[str, str | None]
    number: int
    device_type: DeviceType | None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The arguments that `titan bench` and `titan ladder` share.

    settings: the config file and settings of all runs. nproc: ranks of a run, as the launcher reads
    it. gpu: name of the GPU to plan for; None: no plans. array_index: the only run to start; None:
    all.
    """

    settings: list[str]
    num_repeats: int
    nproc: str | None
    gpu: str | None
    array_index: int | None
    only_collects: bool

    def ranks(self) -> Ranks:
        """Return the ranks. Raises LaunchError, and ValueError if there are several machines."""
        options = {"nproc": self.nproc}
        machine = inspect_machine(os.environ)
        plan = read_options(options, os.environ, machine)
        if plan.max_nodes > 1:
            raise ValueError(
                f"NNODES={plan.max_nodes} is set. Expected one machine, because each run starts "
                "on its own: unset it"
            )
        return Ranks(options, plan.num_ranks, None if machine.num_gpus else "cpu")

    def choose(self, runs: Sequence[BenchRun], num_ranks: int) -> list[BenchRun]:
        """Return the runs to start.

        Raises ValueError if none has the index of the array, or if one has run on another number of
        ranks: its batch and its speed may differ.
        """
        if self.only_collects:
            return []
        for run in runs:
            others = numbers_of_ranks(run.folder) - {num_ranks}
            if others:
                before = min(others)
                raise ValueError(
                    f"{run.folder} ran on {before} ranks, now there are {num_ranks}. Expected the "
                    f"same number for all runs: give --nproc {before}, or choose another folder"
                )
        if self.array_index is None:
            return list(runs)
        if self.array_index >= len(runs):
            raise ValueError(
                f"--array-index {self.array_index}: expected an index of the {len(runs)} runs, 0 to "
                f"{len(runs) - 1}: correct it"
            )
        return [runs[self.array_index]]


@dataclass(frozen=True, kw_only=True)
class Bench(Experiment):
    """The arguments of `titan bench`. vary: texts as `run_list.parse_vary` reads."""

    vary: list[str]
    is_grid: bool


def run_bench(bench: Bench) -> int:
    """Run what is not done, then write the CSV file and the page. Returns the exit code.

    Raises ConfigError, and LaunchError or ValueError for other wrong arguments.
    """
    ranks = bench.ranks()
    gpu = None if bench.gpu is None else load_gpu(bench.gpu)
    runs, keys = list_runs_of_bench(
        bench.settings,
        bench.vary,
        bench.num_repeats,
        ranks.number,
        ranks.device_type,
        is_grid=bench.is_grid,
    )
    chosen = bench.choose(runs, ranks.number)
    if gpu is not None:
        write_plans(chosen, make_plans(chosen, ranks.number, gpu))
    codes, is_stopped = run_all(chosen, len(runs), ranks.options, "bench")
    if is_stopped or bench.array_index is not None:
        return list(codes.values())[-1] if codes else 0
    rows, histories = results.collect(runs, keys, codes)
    path = runs[0].folder.parent / "bench"
    results.write_results(path, rows, histories, results.table_of(rows, keys))
    return results.exit_code(rows)


def run_all(
    runs: Sequence[BenchRun], num_runs: int, options: Mapping[str, str | None], title: str
) -> tuple[dict[int, int], bool]:
    """Run what is not done. Returns the exit code of each run that was started, by its index.

    num_runs: of the whole bench. options: see `launch`. title: "bench" or "ladder".
    The second value is True if it was stopped: started again, it continues the last run. A failed
    run does not end it, nor does one that was stopped alone (`titan run stop`) or for which memory
    ran low.
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
        begun = time.time()
        with restored_signals():
            codes[run.index] = launch(options, run.argv, run.argv)
        num_steps += run.config.training.steps
        progress(title, num_steps, total, time.monotonic() - started)
        if codes[run.index] in ENDS_OF_BENCH and not _ended_alone(run, begun):
            show_error(f"The {title} stopped in {run.name}. The same command continues it.")
            return codes, True
    return codes, False


def _ended_alone(run: BenchRun, begun: float) -> bool:
    """Return True if only this run was stopped. begun: Unix time at which it was started."""
    stop = newest_stop(run.folder)
    return stop.get("time", 0.0) >= begun and stop.get("cause") in CAUSES_OF_ONE_RUN


@contextmanager
def restored_signals() -> Iterator[None]:
    """Restore the handlers of signals afterwards: the launcher ends with all of them ignored."""
    handlers = {signum: signal.getsignal(signum) for signum in LAUNCHER_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def make_plans(runs: Sequence[BenchRun], num_ranks: int, gpu: Gpu) -> dict[str, PlanFile]:
    """Return the plan of each variant. A run whose folder has one is not planned again.

    A variant whose dry run fails has no plan.
    """
    plans: dict[str, PlanFile] = {}
    for run in runs:
        if run.variant in plans:
            continue
        path = run.folder / PLAN
        settings = settings_of(run.config.model_dump(), num_ranks)
        if path.exists():
            plan = read_plan(path)
            if plan.gpu == gpu.key and not differences(plan, settings):
                plans[run.variant] = plan
                continue
        show_error(f"Planning {run.variant}")
        try:
            plans[run.variant] = plan_of_run(run.config, num_ranks, gpu)
        except RuntimeError as error:  # the dry run fails
            show_error(f"No plan of {run.variant}: {error}")
    return plans


def write_plans(runs: Sequence[BenchRun], plans: Mapping[str, PlanFile]) -> None:
    """Write plan.json into the folder of each run whose variant has a plan."""
    for run in runs:
        if plan := plans.get(run.variant):
            run.folder.mkdir(parents=True, exist_ok=True)
            write_plan(run.folder / PLAN, plan)


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
