"""`titan plan`: the memory of a configuration, by a dry run."""

from __future__ import annotations

import argparse
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
)
from torchtitan_like.cli.settings import HelpWithSettings, with_config
from torchtitan_like.plan.gpus import DEFAULT_GPU
from torchtitan_like.util.output import show_error

NOTHING_FITS = 1
EXAMPLE = "titan plan debug_model.toml --world-size 2 --gpu h100-80g"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="the TOML file to dry-run")
    parser.add_argument(
        "--world-size", type=positive_int, metavar="N", help="ranks of the dry run (required)"
    )
    parser.add_argument(
        "--gpu",
        default=DEFAULT_GPU,
        metavar="NAME",
        help=f"a GPU by name, or a TOML file that describes one (default: {DEFAULT_GPU})",
    )
    parser.add_argument(
        "--rank-of-stage",
        default="all",
        metavar="STAGE",
        help="the pipeline rank to dry-run, from 0; default: all, one rank of each",
    )
    add_json_flag(parser)
    parser.add_argument("-h", "--help", action=HelpWithSettings)
    parser.epilog = (
        "Runs two steps of the trainer under fake tensors on ranks that do not exist, and prints the\n"
        "memory of a GPU by what it holds. Needs no GPU. Returns 0 if it fits, 1 if not, 2 for wrong\n"
        "arguments, and 78 for a configuration that cannot work.\n"
        "`titan plan search` finds the fastest layouts that fit. `titan plan compare` compares a run\n"
        "with its plan.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
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
    from torchtitan_like.plan.gpus import load_gpu
    from torchtitan_like.preflight import load_checked
    from torchtitan_like.util.modules import searching_modules_in

    try:
        gpu = load_gpu(arguments.gpu)
    except ValueError as error:
        show_error(f"--gpu: {error}")
        return FAILED
    settings = with_config(arguments.config, arguments.settings, show_error)
    try:
        with searching_modules_in(Path.cwd()), redirect_stdout(sys.stderr):
            config, warnings = load_checked(
                settings, arguments.world_size, training=False, device_type="cuda"
            )
    except ConfigError as error:
        show_error(str(error))
        return os.EX_CONFIG
    if warnings:
        show_error(report(warnings))
    num_stages = config.parallelism.pipeline_parallel_degree
    stage = arguments.rank_of_stage
    if stage != "all" and not (stage.isdecimal() and int(stage) < num_stages):
        show_error(
            f"--rank-of-stage {stage}: expected all, or a pipeline rank from 0 to "
            f"{num_stages - 1}: correct it"
        )
        return FAILED
    return _print_memory(config, arguments, gpu, None if stage == "all" else [int(stage)])


def _print_memory(
    config: Any, arguments: argparse.Namespace, gpu: Any, stages: list[int] | None
) -> int:
    from torchtitan_like.plan.dry_memory import assumptions, plan_memory, unsupported
    from torchtitan_like.plan.memory_report import as_json, fits, lines

    if problem := unsupported(config):
        show_error(problem)
        return os.EX_CONFIG
    memories = plan_memory(config, arguments.world_size, gpu, stages)
    notes = assumptions(config)
    if arguments.json:
        print_json(as_json(memories, gpu, notes))
    else:
        print("\n".join(lines(memories, gpu, notes)))
    return 0 if fits(memories, gpu) else NOTHING_FITS
