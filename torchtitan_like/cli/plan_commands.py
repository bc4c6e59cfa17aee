"""`titan plan`: memory, step time and layouts of a configuration, by dry runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.cli.common import (
    add_json_flag,
    fraction,
    names_config,
    positive_int,
    positive_number,
    print_json,
    settings_of,
)
from torchtitan_like.util.exit_codes import WRONG_INPUT, ExitCode
from torchtitan_like.util.output import ProgressLine, show_error, show_problem

if TYPE_CHECKING:
    from torchtitan_like.config import JobConfig
    from torchtitan_like.plan.clusters import Cluster
    from torchtitan_like.plan.gpus import Gpu

NOTHING_FITS = 1


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add `--gpu` and `--cluster`."""
    from torchtitan_like.plan.clusters import DEFAULT_CLUSTER
    from torchtitan_like.plan.gpus import DEFAULT_GPU

    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="a GPU by name, or a TOML file that describes one (default: the cluster's, else "
        f"{DEFAULT_GPU})",
    )
    parser.add_argument(
        "--cluster",
        default=DEFAULT_CLUSTER,
        metavar="NAME",
        help="a cluster by name, or a TOML file that describes one, for the step time "
        f"(default: {DEFAULT_CLUSTER})",
    )


def _load_hardware(arguments: argparse.Namespace) -> tuple[Gpu, Cluster]:
    """Read the files of `--gpu` and `--cluster`. Raises ValueError that names the option."""
    from torchtitan_like.plan.clusters import DEFAULT_CLUSTER, load_cluster, typical_cluster
    from torchtitan_like.plan.gpus import DEFAULT_GPU, load_gpu

    try:
        cluster = load_cluster(arguments.cluster)
    except ValueError as error:
        raise ValueError(f"--cluster: {error}") from None
    try:
        gpu = load_gpu(arguments.gpu or cluster.gpu or DEFAULT_GPU)
    except ValueError as error:
        raise ValueError(f"--gpu: {error}") from None
    if arguments.cluster == DEFAULT_CLUSTER:
        cluster = typical_cluster(gpu.key, arguments.world_size)
    return gpu, cluster


def _load_config(
    arguments: argparse.Namespace, gpu: Gpu, world_size: int | None
) -> JobConfig | None:
    """Return the checked configuration, and print its warnings. None after printing its errors."""
    from torchtitan_like.check import load_for_command
    from torchtitan_like.config import ConfigError
    from torchtitan_like.config.problems import report

    settings = settings_of(arguments)
    try:
        config, warnings = load_for_command(
            settings, world_size, training=False, device_type=gpu.device_type
        )
    except ConfigError as error:
        show_error(str(error))
        return None
    if warnings:
        show_error(report(warnings))
    return config


# ---- titan plan


def configure_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="the TOML file to dry-run")
    parser.add_argument(
        "--world-size", type=positive_int, required=True, metavar="N", help="ranks of the dry run"
    )
    _add_hardware(parser)
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
    parser.epilog = (
        "Runs two steps of the trainer under fake tensors on ranks that do not exist, and prints the\n"
        "memory of a GPU by what it holds, and the time of a step by its parts. Needs no GPU. Returns\n"
        "0 if it fits, 1 if not, 2 for wrong arguments, and 78 for a configuration that cannot work.\n"
        "A run of X.toml compares itself with X.plan.json (-o). `titan run compare` does so afterwards.\n"
        "`titan plan search` finds the fastest layouts that fit.\n\n"
        "example: titan plan debug_model.toml --world-size 2 --gpu h100-80g"
    )


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns the exit code."""
    from torchtitan_like.util.pictures import check_picture

    if not names_config(arguments):
        show_error("titan plan: CONFIG is missing. Expected a TOML file: name it")
        return WRONG_INPUT
    try:
        gpu, cluster = _load_hardware(arguments)
        if arguments.svg is not None:
            check_picture(arguments.svg / "memory.svg")
    except ValueError as error:
        show_error(str(error))
        return WRONG_INPUT
    config = _load_config(arguments, gpu, arguments.world_size)
    if config is None:
        return os.EX_CONFIG
    if arguments.quick:
        from torchtitan_like.plan.closed_form import quick_estimate

        print(quick_estimate(config, gpu))
        return 0
    num_stages = config.parallelism.pipeline_parallel_degree
    stage = arguments.rank_of_stage
    if stage != "all" and not (stage.isdecimal() and int(stage) < num_stages):
        show_error(
            f"--rank-of-stage {stage}: expected all, or a pipeline rank from 0 to "
            f"{num_stages - 1}: correct it"
        )
        return WRONG_INPUT
    if stage != "all" and arguments.output is not None:
        show_error("-o: expected a plan of all stages: leave --rank-of-stage out")
        return WRONG_INPUT
    return _print_plan(config, arguments, gpu, cluster, None if stage == "all" else [int(stage)])


def _print_plan(
    config: JobConfig,
    arguments: argparse.Namespace,
    gpu: Gpu,
    cluster: Cluster,
    stages: list[int] | None,
) -> int:
    from torchtitan_like.plan import plan_report
    from torchtitan_like.plan.dry_memory import assumptions, dry_runs, memory_of_all
    from torchtitan_like.plan.timeline import step_time
    from torchtitan_like.util.plan_file import write_plan

    runs = dry_runs(config, arguments.world_size, gpu, stages, ProgressLine("dry runs"))
    memories = memory_of_all(runs, config, gpu)
    notes = [*plan_report.allocator_note(gpu), *assumptions(config)]
    time = None
    if len(runs) == runs[0].dims.pp:  # a step waits for all stages
        try:
            time = step_time(runs, config, gpu, cluster)
        except ValueError as error:
            notes.append(f"no step time: {error}")
    if arguments.json:
        plan = plan_report.memory_as_json(memories, gpu, notes)
        plan["time"] = None if time is None else plan_report.time_as_json(time, gpu, cluster)
        print_json(plan)
    else:
        print("\n".join(plan_report.memory_lines(memories, gpu, notes)))
        if time is not None:
            print("\n".join(plan_report.time_lines(time, gpu, cluster)))
    if arguments.output is not None:
        try:
            write_plan(
                arguments.output,
                plan_report.plan_of(config, arguments.world_size, memories, time, gpu, cluster),
            )
        except OSError as error:
            show_problem(error)
            return WRONG_INPUT
        show_error(f"Wrote {arguments.output}")
    if arguments.svg is not None:
        from torchtitan_like.plan.plan_pictures import draw_plan

        try:
            for path in draw_plan(arguments.svg, runs, memories, time, config, gpu, cluster):
                show_error(f"Wrote {path}")
        except (OSError, ValueError) as error:
            show_problem(error)
            return WRONG_INPUT
    return 0 if plan_report.fits(memories, gpu) else NOTHING_FITS


# ---- titan plan search


def configure_search(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="the TOML file whose layout is searched"
    )
    parser.add_argument(
        "--world-size", type=positive_int, required=True, metavar="N", help="GPUs of all nodes"
    )
    _add_hardware(parser)
    parser.add_argument(
        "--global-batch-tokens",
        type=positive_number,
        metavar="N",
        help="tokens of a step, rounded to a power of two of samples (default: of CONFIG)",
    )
    parser.add_argument(
        "--max-memory",
        type=fraction,
        default=0.92,
        metavar="FRACTION",
        help="of a GPU's memory that a layout may use (default: 0.92)",
    )
    parser.add_argument(
        "--tokens",
        type=positive_number,
        default=15e12,
        metavar="N",
        help="tokens of the whole training, for days and cost (default: 15e12)",
    )
    parser.add_argument(
        "--price-per-hour", type=positive_number, metavar="P", help="of one GPU, for the cost"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="TOML", help="write the best layout to this file"
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="draw memory and step time of the layouts as .svg or .png (extra `plot`)",
    )
    add_json_flag(parser)
    parser.epilog = (
        "Enumerates degrees (also of experts), micro-batches, recomputation, resharding, schedules and\n"
        "stages. Model, sequence length and samples of a step are those of CONFIG. So are settings on\n"
        "the command line: --parallelism.tensor_parallel_degree 8 searches layouts with that degree only.\n"
        "Rules of the configuration and formulas choose 12 layouts, which are dry-run with a few\n"
        "layers; if fewer than 3 fit, up to 12 smaller ones follow. Each is timed as given, compiled, and\n"
        "with asynchronous tensor parallelism, the best 3 in float8, too. Then the best 3 are dry-run\n"
        "with all layers.\n"
        "Needs no GPU. Returns 0 if a layout fits, 1 if none does, 2 for wrong arguments, and 78 for\n"
        "a configuration that cannot work. Ctrl-C ends it with 130.\n\n"
        "example: titan plan search llama3_8b.toml --world-size 64 -o best.toml"
    )


def run_search(arguments: argparse.Namespace) -> int:
    """Search, print and write. Returns the exit code."""
    from torchtitan_like.util.pictures import check_picture

    if not names_config(arguments):
        show_error("titan plan search: CONFIG is missing. Expected a TOML file: name it")
        return WRONG_INPUT
    try:
        gpu, cluster = _load_hardware(arguments)
        if arguments.svg is not None:
            check_picture(arguments.svg)
    except ValueError as error:
        show_error(str(error))
        return WRONG_INPUT
    # Without the ranks: the layout of the file need not fit their number.
    config = _load_config(arguments, gpu, None)
    if config is None:
        return os.EX_CONFIG
    try:
        return _search(arguments, config, gpu, cluster)
    except KeyboardInterrupt:
        show_error("\nInterrupted: no layout is written")
        return int(ExitCode.INTERRUPTED)


def _search(arguments: argparse.Namespace, config: JobConfig, gpu: Gpu, cluster: Cluster) -> int:
    from torchtitan_like.config.toml_text import path_to_extend
    from torchtitan_like.plan import search_report
    from torchtitan_like.plan.plan_report import allocator_note, caveats
    from torchtitan_like.plan.search import global_batch_of, search, space_of
    from torchtitan_like.util.files import write_atomically

    output: Path | None = arguments.output
    assert config.job.config_file is not None  # run_search expects CONFIG
    base = Path(config.job.config_file)
    if output is not None and output.resolve() == base.resolve():
        show_error(f"-o {output}: expected another file than CONFIG, which it extends: rename it")
        return WRONG_INPUT
    world_size: int = arguments.world_size
    samples = global_batch_of(config, world_size, arguments.global_batch_tokens)
    space = space_of(config, world_size, cluster.gpus_per_node, samples)
    try:
        found = search(space, gpu, cluster, arguments.max_memory, ProgressLine("dry runs"))
    except ValueError as error:  # the GPU has no peak for a dtype
        show_error(f"--gpu {gpu.key}: {error}")
        return WRONG_INPUT
    notes = [*allocator_note(gpu), *found.notes(), *caveats(gpu, cluster)]
    request = search_report.Request(
        gpu, cluster, arguments.max_memory, arguments.tokens, arguments.price_per_hour
    )
    if arguments.json:
        print_json(search_report.as_json(found, request) | {"notes": notes})
    else:
        print("\n".join(search_report.lines(found, request)))
        for note in notes:
            print(f"Note: {note}")
    if not found.ranked:
        return NOTHING_FITS
    if arguments.svg is not None:
        from torchtitan_like.plan.plan_pictures import draw_layouts

        try:
            draw_layouts(found.ranked, gpu, arguments.max_memory, arguments.svg)
        except OSError as error:
            show_problem(error)
            return WRONG_INPUT
        show_error(f"Wrote {arguments.svg}")
    given = arguments.config or str(base)
    target = output or Path("best.toml")
    extends = path_to_extend(given, base, target)
    text = search_report.toml_of(found.ranked[0][0], space, extends)
    if output is not None:
        try:
            write_atomically(output, text)
        except OSError as error:
            show_problem(error)
            return WRONG_INPUT
        show_error(f"Wrote {output}. Check it: titan check {output} --world-size {world_size}")
    elif not arguments.json:
        print(f"\n{text}", end="")
    return 0
