"""`titan plan`: the memory and step time of a configuration, by a dry run."""

from __future__ import annotations

import argparse
import math
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from torchtitan_like.cli.common import (
    FAILED,
    add_json_flag,
    positive_int,
    print_json,
    show_problem,
)
from torchtitan_like.cli.hardware import add_hardware, load_hardware
from torchtitan_like.cli.progress import ProgressLine
from torchtitan_like.cli.settings import HelpWithSettings, with_config
from torchtitan_like.util.output import show_error
from torchtitan_like.util.units import GIB

NOTHING_FITS = 1
# Of mixed-precision AdamW: weight 4 + 2, gradient 4, states 8; and a quarter more for activations.
QUICK_BYTES, QUICK_FACTOR = 18, 1.25


def configure_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="the TOML file to dry-run")
    parser.add_argument(
        "--world-size", type=positive_int, metavar="N", help="ranks of the dry run (required)"
    )
    add_hardware(parser)
    parser.add_argument(
        "--rank-of-stage",
        default="all",
        metavar="STAGE",
        help="the pipeline rank to dry-run, from 0; default: all, one rank of each",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the plan to this file, such as X.plan.json next to X.toml",
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FOLDER",
        help="draw memory, streams and pipeline as FOLDER/*.svg (extra `plot`)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only divide 18 bytes x parameters x 1.25 by the GPU's memory",
    )
    add_json_flag(parser)
    parser.add_argument("-h", "--help", action=HelpWithSettings)
    parser.epilog = (
        "Runs two steps of the trainer under fake tensors on ranks that do not exist, and prints the\n"
        "memory of a GPU by what it holds, and the time of a step by its parts. Needs no GPU. Returns\n"
        "0 if it fits, 1 if not, 2 for wrong arguments, and 78 for a configuration that cannot work.\n"
        "A run of X.toml compares itself with X.plan.json (-o). `titan plan compare` does so afterwards.\n"
        "`titan plan search` finds the fastest layouts that fit.\n\n"
        "example: titan plan debug_model.toml --world-size 2 --gpu h100-80g"
    )


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns the exit code."""
    names = {word.partition("=")[0].replace("-", "_") for word in arguments.settings}
    is_missing = {
        "CONFIG": arguments.config is None and "__job.config_file" not in names,
        "--world-size": arguments.world_size is None,
    }
    if missing := [name for name, value in is_missing.items() if value]:
        show_error(
            f"titan plan: {missing[0]} is missing. Expected CONFIG and --world-size N: correct the "
            "arguments"
        )
        return FAILED
    return _dry_run(arguments)


def _dry_run(arguments: argparse.Namespace) -> int:
    from torchtitan_like.config import ConfigError
    from torchtitan_like.config.problems import report
    from torchtitan_like.preflight import load_checked
    from torchtitan_like.util.modules import searching_modules_in
    from torchtitan_like.util.pictures import check_picture

    try:
        gpu, cluster = load_hardware(arguments)
        if arguments.svg is not None:
            check_picture(arguments.svg / "memory.svg")
    except ValueError as error:
        show_error(str(error))
        return FAILED
    settings = with_config(arguments.config, arguments.settings, show_error)
    try:
        with searching_modules_in(Path.cwd()), redirect_stdout(sys.stderr):
            config, warnings = load_checked(
                settings, arguments.world_size, training=False, device_type=gpu.device_type
            )
    except ConfigError as error:
        show_error(str(error))
        return os.EX_CONFIG
    if warnings:
        show_error(report(warnings))
    if arguments.quick:
        print(_quick_estimate(config, gpu))
        return 0
    num_stages = config.parallelism.pipeline_parallel_degree
    stage = arguments.rank_of_stage
    if stage != "all" and not (stage.isdecimal() and int(stage) < num_stages):
        show_error(
            f"--rank-of-stage {stage}: expected all, or a pipeline rank from 0 to "
            f"{num_stages - 1}: correct it"
        )
        return FAILED
    if stage != "all" and arguments.output is not None:
        show_error("-o: expected a plan of all stages: leave --rank-of-stage out")
        return FAILED
    return _print_plan(config, arguments, gpu, cluster, None if stage == "all" else [int(stage)])


def _quick_estimate(config: Any, gpu: Any) -> str:
    from torchtitan_like.models.spec import get_spec, resolve_args

    spec = get_spec(config.model.name)
    num = spec.num_params(resolve_args(spec, config.model.flavor, config.model.args))
    gpus = num * QUICK_BYTES * QUICK_FACTOR / (gpu.memory_gib * GIB)
    return (
        f"{num:,} parameters x {QUICK_BYTES} bytes x {QUICK_FACTOR} / {gpu.memory_gib:g} GiB = "
        f"{gpus:.2f}: at least {math.ceil(gpus)} GPUs ({gpu.name})"
    )


def _print_plan(
    config: Any, arguments: argparse.Namespace, gpu: Any, cluster: Any, stages: list[int] | None
) -> int:
    from torchtitan_like.plan import memory_report, time_report
    from torchtitan_like.plan.dry_memory import assumptions, dry_runs, memory_of_all
    from torchtitan_like.plan.plan_file import plan_of
    from torchtitan_like.plan.timeline import step_time
    from torchtitan_like.util.plan_file import write_plan

    runs = dry_runs(config, arguments.world_size, gpu, stages, ProgressLine("dry runs"))
    memories = memory_of_all(runs, config, gpu)
    notes = assumptions(config)
    time = None
    if len(runs) == runs[0].dims.pp:  # a step waits for all stages
        try:
            time = step_time(runs, config, gpu, cluster)
        except ValueError as error:
            notes.append(f"no step time: {error}")
    if arguments.json:
        plan = memory_report.as_json(memories, gpu, notes)
        plan["time"] = None if time is None else time_report.as_json(time, gpu, cluster)
        print_json(plan)
    else:
        print("\n".join(memory_report.lines(memories, gpu, notes)))
        if time is not None:
            print("\n".join(time_report.lines(time, gpu, cluster)))
    if arguments.output is not None:
        try:
            write_plan(
                arguments.output,
                plan_of(config, arguments.world_size, memories, time, gpu, cluster),
            )
        except OSError as error:
            show_problem(error)
            return FAILED
        show_error(f"Wrote {arguments.output}")
    if arguments.svg is not None:
        from torchtitan_like.plan.plan_pictures import draw_plan

        try:
            for path in draw_plan(arguments.svg, runs, memories, time, config, gpu, cluster):
                show_error(f"Wrote {path}")
        except (OSError, ValueError) as error:
            show_problem(error)
            return FAILED
    return 0 if memory_report.fits(memories, gpu) else NOTHING_FITS
