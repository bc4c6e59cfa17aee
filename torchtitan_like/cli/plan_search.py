"""`titan plan search`: the fastest layouts of a configuration that fit, without GPUs."""

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
    show_problem,
)
from torchtitan_like.cli.hardware import add_hardware, load_hardware
from torchtitan_like.cli.progress import ProgressLine
from torchtitan_like.cli.settings import HelpWithSettings, with_config
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.output import show_error

NOTHING_FITS = 1


def configure_search(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="the TOML file whose layout is searched"
    )
    parser.add_argument(
        "--world-size", type=positive_int, metavar="N", help="GPUs of all nodes (required)"
    )
    add_hardware(parser)
    parser.add_argument(
        "--global-batch-tokens",
        type=positive_number,
        metavar="N",
        help="tokens of a step, rounded to a power of two of samples (default: of CONFIG)",
    )
    parser.add_argument(
        "--max-memory",
        type=positive_number,
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
    parser.add_argument("-h", "--help", action=HelpWithSettings)
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
    from torchtitan_like.config import ConfigError
    from torchtitan_like.config.problems import report
    from torchtitan_like.preflight import load_checked
    from torchtitan_like.util.modules import searching_modules_in
    from torchtitan_like.util.pictures import check_picture

    names = {word.partition("=")[0].replace("-", "_") for word in arguments.settings}
    if arguments.config is None and "__job.config_file" not in names:
        show_error("titan plan search: CONFIG is missing. Expected a TOML file: name it")
        return FAILED
    if arguments.world_size is None:
        show_error(
            "titan plan search: --world-size is missing. Expected the number of GPUs: give it"
        )
        return FAILED
    if arguments.max_memory > 1:
        show_error(
            f"--max-memory {arguments.max_memory:g}: expected a fraction of at most 1, such as "
            "0.92: correct it"
        )
        return FAILED
    try:
        gpu, cluster = load_hardware(arguments)
        if arguments.svg is not None:
            check_picture(arguments.svg)
    except ValueError as error:
        show_error(str(error))
        return FAILED
    settings = with_config(arguments.config, arguments.settings, show_error)
    try:
        with searching_modules_in(Path.cwd()), redirect_stdout(sys.stderr):
            # Without the ranks: the layout of the file need not fit their number.
            config, warnings = load_checked(
                settings, None, training=False, device_type=gpu.device_type
            )
    except ConfigError as error:
        show_error(str(error))
        return os.EX_CONFIG
    if warnings:
        show_error(report(warnings))
    try:
        return _search(arguments, config, gpu, cluster, settings)
    except KeyboardInterrupt:
        show_error("\nInterrupted: no layout is written")
        return int(ExitCode.INTERRUPTED)


def _search(
    arguments: argparse.Namespace, config: Any, gpu: Any, cluster: Any, settings: list[str]
) -> int:
    from torchtitan_like.plan import search_report
    from torchtitan_like.plan.search import global_batch_of, search, space_of
    from torchtitan_like.plan.time_report import caveats
    from torchtitan_like.util.files import write_atomically

    output: Path | None = arguments.output
    base = Path(config.job.config_file)
    if output is not None and output.resolve() == base.resolve():
        show_error(f"-o {output}: expected another file than CONFIG, which it extends: rename it")
        return FAILED
    world_size: int = arguments.world_size
    samples = global_batch_of(config, world_size, arguments.global_batch_tokens)
    space = space_of(config, world_size, cluster.gpus_per_node, samples)
    try:
        found = search(space, gpu, cluster, arguments.max_memory, ProgressLine("dry runs"))
    except ValueError as error:  # the GPU has no peak for a dtype
        show_error(f"--gpu {gpu.key}: {error}")
        return FAILED
    notes = [*found.notes(), *caveats(gpu, cluster)]
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
            return FAILED
        show_error(f"Wrote {arguments.svg}")
    given = arguments.config or str(base)
    target = output or Path("best.toml")
    text = search_report.toml_of(
        found.ranked[0][0], space, search_report.path_to_extend(given, base, target)
    )
    if output is not None:
        try:
            write_atomically(output, text)
        except OSError as error:
            show_problem(error)
            return FAILED
        show_error(f"Wrote {output}. Check it: titan check {output} --world-size {world_size}")
    elif not arguments.json:
        print(f"\n{text}", end="")
    return 0
