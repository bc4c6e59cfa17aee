"""`titan plan`: the memory and step time of a configuration, or the layouts that fit a cluster."""

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
    positive_number,
    print_json,
)
from torchtitan_like.cli.settings import HelpWithSettings, with_config
from torchtitan_like.plan.clusters import DEFAULT_CLUSTER
from torchtitan_like.plan.gpus import DEFAULT_GPU
from torchtitan_like.plan.layouts import NETS
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
        "--cluster",
        default=DEFAULT_CLUSTER,
        metavar="NAME",
        help="a cluster by name, or a TOML file that describes one, for the step time "
        f"(default: {DEFAULT_CLUSTER})",
    )
    parser.add_argument(
        "--rank-of-stage",
        default="all",
        metavar="STAGE",
        help="the pipeline rank to dry-run, from 0; default: all, one rank of each",
    )
    add_json_flag(parser)
    parser.add_argument(
        "--params", type=positive_number, metavar="N", help="without CONFIG: parameters, e.g. 8e9"
    )
    parser.add_argument(
        "--gpus", type=positive_int, metavar="N", help="with --params: GPUs of all machines"
    )
    parser.add_argument(
        "--nodes", type=positive_int, default=1, metavar="N", help="machines (default: 1)"
    )
    parser.add_argument(
        "--gpu-mem",
        type=positive_number,
        default=80,
        metavar="GIB",
        help="memory of a GPU, GiB (default: 80)",
    )
    parser.add_argument(
        "--host-mem",
        type=float,
        default=1024,
        metavar="GIB",
        help="main memory of a machine, GiB (default: 1024)",
    )
    parser.add_argument(
        "--net",
        choices=NETS,
        default="fast",
        help="between machines: 8 x 400 Gbit/s of each, or 100 Gbit/s (default: fast)",
    )
    parser.add_argument(
        "--seq-len",
        type=positive_int,
        default=8192,
        metavar="N",
        help="tokens of a sample (default: 8192)",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=float,
        default=2**20,
        metavar="N",
        help="tokens of a step, about (default: 1,048,576)",
    )
    parser.add_argument(
        "--tflops",
        type=float,
        default=400,
        metavar="N",
        help="TFLOP/s that a GPU reaches (default: 400, which is 40 %% of an H100's 989)",
    )
    parser.add_argument("-h", "--help", action=HelpWithSettings)
    parser.epilog = (
        "With CONFIG: runs two steps of the trainer under fake tensors on ranks that do not exist,\n"
        "and prints the memory of a GPU by what it holds, and the time of a step by its parts. Returns\n"
        "0 if it fits, 1 if not, and 78 for a configuration that cannot work.\n"
        "With --params: prints the layouts that fit, fastest first, with their memory by parts, and\n"
        "the config lines of the first ones. The times only order the layouts and are not a forecast.\n"
        "Returns 0, or 1 if no layout fits.\n"
        "Needs no GPU. Returns 2 for wrong arguments.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns the exit code."""
    names = {word.partition("=")[0].replace("-", "_") for word in arguments.settings}
    has_config = arguments.config is not None or "__job.config_file" in names
    required = ("world_size",) if has_config else ("params", "gpus")
    excluded = ("params", "gpus") if has_config else ("world_size",)
    problems = [
        f"--{name.replace('_', '-')} is missing"
        for name in required
        if getattr(arguments, name) is None
    ]
    unused = [
        f"--{name.replace('_', '-')}" for name in excluded if getattr(arguments, name) is not None
    ]
    if not has_config:
        unused += arguments.settings
    problems += [f"{word} does not belong to this form of the command" for word in unused]
    if problems:
        show_error(
            f"titan plan: {problems[0]}. Expected CONFIG and --world-size N, or --params N and "
            "--gpus N: correct the arguments"
        )
        return FAILED
    return _dry_run(arguments) if has_config else _list_layouts(arguments)


def _dry_run(arguments: argparse.Namespace) -> int:
    from torchtitan_like.config import ConfigError
    from torchtitan_like.config.problems import report
    from torchtitan_like.plan.clusters import load_cluster
    from torchtitan_like.plan.gpus import load_gpu
    from torchtitan_like.preflight import load_checked
    from torchtitan_like.util.modules import searching_modules_in

    try:
        gpu = load_gpu(arguments.gpu)
    except ValueError as error:
        show_error(f"--gpu: {error}")
        return FAILED
    try:
        cluster = load_cluster(arguments.cluster)
    except ValueError as error:
        show_error(f"--cluster: {error}")
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
    return _print_plan(config, arguments, gpu, cluster, None if stage == "all" else [int(stage)])


def _print_plan(
    config: Any, arguments: argparse.Namespace, gpu: Any, cluster: Any, stages: list[int] | None
) -> int:
    from torchtitan_like.plan import memory_report, time_report
    from torchtitan_like.plan.dry_memory import assumptions, dry_runs, unsupported
    from torchtitan_like.plan.ledger import memory_of
    from torchtitan_like.plan.timeline import step_time

    if problem := unsupported(config):
        show_error(problem)
        return os.EX_CONFIG
    runs = dry_runs(config, arguments.world_size, gpu, stages)
    memories = [memory_of(run) for run in runs]
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
    return 0 if memory_report.fits(memories, gpu) else NOTHING_FITS


def _list_layouts(arguments: argparse.Namespace) -> int:
    """Print the layouts of a model of about `--params` parameters."""
    from torchtitan_like.plan.layouts import Cluster, model_of
    from torchtitan_like.plan.report import report
    from torchtitan_like.plan.search import global_batch, suggest

    if arguments.gpus % arguments.nodes:
        show_error(
            f"--gpus {arguments.gpus} is not a multiple of --nodes {arguments.nodes}. Expected "
            "equally many GPUs on each machine: change one of them"
        )
        return FAILED
    model = model_of(arguments.params)
    cluster = Cluster(
        arguments.gpus,
        arguments.nodes,
        arguments.gpu_mem,
        NETS[arguments.net],
        arguments.tflops * 1e12,
        arguments.host_mem,
    )
    batch = global_batch(arguments.tokens_per_step, arguments.seq_len, arguments.gpus)
    suggestions = suggest(model, cluster, batch, arguments.seq_len)
    print("\n".join(report(model, cluster, batch, arguments.seq_len, suggestions)))
    return 0 if suggestions else NOTHING_FITS
