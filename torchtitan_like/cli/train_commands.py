"""`titan train`, `check`, `bench` and `ladder`: train once or often, or check a configuration."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

from torchtitan_like.cli.common import (
    names_config,
    non_negative_int,
    parse_value,
    positive_int,
    positive_number,
    settings_of,
)
from torchtitan_like.util.exit_codes import WRONG_INPUT
from torchtitan_like.util.output import show_error

DEFAULT_CONFIG = "debug_model.toml"
DOES_NOT_FIT = 1


# ---- titan train


def configure_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    from torchtitan_like.config.document import common_help
    from torchtitan_like.launcher.options import OPTIONS

    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help=f"the TOML file; default: $CONFIG_FILE, or {DEFAULT_CONFIG}",
    )
    for option in OPTIONS:
        parser.add_argument(
            f"--{option.name}", metavar=option.metavar, help=f"{option.help} [{option.variable}]"
        )
    parser.epilog = (
        f"{common_help()}\n\n"
        "A name in [brackets] is the environment variable that is used if the option is not given.\n"
        "One process trains without torchrun, several under it. Returns 0 when the run is done and 1 after a\n"
        "crash; before anything is started, 2 for wrong options and 78 for a configuration that cannot work.\n"
        "Otherwise, returns the code in the run folder's exit.json.\n\n"
        "example: titan train debug_model.toml --nproc 2 --training.steps 2"
    )


def run_train(arguments: argparse.Namespace) -> int:
    """Train. Returns the exit code."""
    from torchtitan_like.launcher.launch import launch
    from torchtitan_like.launcher.options import OPTIONS

    if not names_config(arguments):
        arguments.config = os.environ.get("CONFIG_FILE") or DEFAULT_CONFIG
    options = {option.key: getattr(arguments, option.key) for option in OPTIONS}
    return launch(options, settings_of(arguments), arguments.words)


# ---- titan check


def configure_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="the TOML file")
    parser.add_argument(
        "--world-size", type=positive_int, metavar="N", help="also check the layout on N ranks"
    )
    parser.add_argument(
        "--training",
        action="store_true",
        help="check as training does: files must exist and features must be available",
    )
    parser.add_argument(
        "--device-type",
        choices=("cpu", "cuda"),
        help="also check what depends on the device",
    )
    parser.add_argument(
        "--plan",
        metavar="GPU",
        help="also dry-run the configuration on this GPU, see titan plan (needs --world-size)",
    )
    parser.epilog = (
        "Prints the configuration as TOML, unless into a terminal, and warnings on stderr, and\n"
        "returns 0;\n"
        "or prints every problem on stderr and returns 78.\n"
        "With --plan: also prints on stderr whether it fits on the GPU, or up to three changes with\n"
        "which it fits, the cheapest first. Returns 1 if it does not fit.\n\n"
        "example: titan check debug_model.toml --world-size 2 --training.steps 100"
    )


def run_check(arguments: argparse.Namespace) -> int:
    """Check the configuration. Returns the exit code."""
    from torchtitan_like.check import load_for_command
    from torchtitan_like.config import ConfigError, dump_toml
    from torchtitan_like.config.problems import report

    gpu = None
    if arguments.plan is not None:
        from torchtitan_like.plan.gpus import load_gpu

        if arguments.world_size is None:
            show_error("titan check: --plan needs --world-size N next to it.")
            return WRONG_INPUT
        try:
            gpu = load_gpu(arguments.plan)
        except ValueError as error:
            show_error(f"titan check: --plan: {error}")
            return WRONG_INPUT
    settings = settings_of(arguments)
    try:
        config, warnings = load_for_command(
            settings,
            arguments.world_size,
            training=arguments.training,
            device_type=arguments.device_type,
        )
    except ConfigError as error:
        show_error(str(error))
        return os.EX_CONFIG
    # In a terminal, some hundred lines would hide the warnings.
    if sys.stdout.isatty():
        print("The configuration has no errors. To see it as TOML, redirect the output: > FILE")
    else:
        sys.stdout.write(dump_toml(config))
    if warnings:
        show_error(report(warnings))
    if gpu is None:
        return os.EX_OK
    from torchtitan_like.plan.remedies import check_fit

    is_fitting, lines = check_fit(config, arguments.world_size, gpu)
    show_error("\n".join(lines))
    return os.EX_OK if is_fitting else DOES_NOT_FIT


# ---- titan bench


def configure_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="the TOML file of the base")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="values of a setting; a semicolon between them allows commas in them; repeat it for "
        "other settings, each varied against the base",
    )
    parser.add_argument("--grid", action="store_true", help="run all combinations of the values")
    _add_experiment(parser, "variant")
    parser.epilog = (
        "All configurations are checked first. Each run has a folder below job.dump_folder, which\n"
        "then has bench.csv with one row a run, and bench.html (extra `report`) with all curves and\n"
        "95 % confidence intervals over the repeats. The same command continues after Ctrl-C or a\n"
        "kill, and skips the runs that are done. A run that fails does not end the bench.\n"
        "Returns 0 if all runs are done, else the code of the first run that is not; 2 for wrong\n"
        "arguments, 78 for configurations that cannot work.\n\n"
        "example: titan bench debug_model.toml --vary optimizer.lr=4e-4,16e-4 --repeat 3 "
        "--training.steps 20"
    )


def _add_experiment(parser: argparse.ArgumentParser, unit: str) -> argparse._ActionsContainer:
    """Add the arguments that `titan bench` and `titan ladder` share. Returns the group of modes.

    unit: "variant" or "rung", for the help.
    """
    parser.add_argument(
        "--repeat",
        type=positive_int,
        default=1,
        metavar="N",
        help=f"runs of each {unit}, with debug.seed, debug.seed + 1, ... (default: 1)",
    )
    parser.add_argument("--nproc", metavar="RANKS", help="of each run, see titan train [NGPU]")
    parser.add_argument(
        "--plan", metavar="GPU", help="also predict memory and step time on this GPU"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--array-index",
        type=non_negative_int,
        metavar="I",
        help="run only run I, from 0 [SLURM_ARRAY_TASK_ID]",
    )
    mode.add_argument(
        "--collect", action="store_true", help="run nothing, only write the CSV file and the page"
    )
    return mode


def run_bench(arguments: argparse.Namespace) -> int:
    """Run the bench, or one of its runs. Returns the exit code."""
    if not names_config(arguments):
        show_error("titan bench: CONFIG is missing. Expected a TOML file: name it")
        return WRONG_INPUT
    from torchtitan_like.bench import execution
    from torchtitan_like.config import ConfigError
    from torchtitan_like.launcher.options import LaunchError

    bench = execution.Bench(
        **_experiment(arguments, starts_runs=not arguments.collect),
        vary=arguments.vary,
        is_grid=arguments.grid,
    )
    try:
        return execution.run_bench(bench)
    except (ConfigError, LaunchError, ValueError) as error:
        show_error(str(error))
        return os.EX_CONFIG if isinstance(error, ConfigError) else WRONG_INPUT


def _experiment(arguments: argparse.Namespace, *, starts_runs: bool) -> dict[str, Any]:
    """Return the fields of `execution.Experiment`. starts_runs: False if none is to be trained."""
    index = arguments.array_index
    if index is None and starts_runs and os.environ.get("SLURM_ARRAY_TASK_ID"):
        index = int(os.environ["SLURM_ARRAY_TASK_ID"])
    return {
        "settings": settings_of(arguments),
        "num_repeats": arguments.repeat,
        "nproc": arguments.nproc,
        "gpu": arguments.plan,
        "array_index": index,
        "only_collects": arguments.collect,
    }


# ---- titan ladder


def configure_ladder(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="the TOML file of the target")
    parser.add_argument(
        "--rungs", type=positive_int, default=5, metavar="N", help="smaller models (default: 5)"
    )
    parser.add_argument(
        "--tokens-per-param",
        type=_ratios,
        default=(20.0,),
        metavar="R,R",
        help="tokens of a run / all of its parameters, with those of embeddings and of all experts. "
        "With several values, each model runs with each of them (default: 20)",
    )
    parser.add_argument(
        "--factor",
        type=_above_one,
        default=2.0,
        metavar="F",
        help="parameters of a rung / those of the one before (default: 2)",
    )
    mode = _add_experiment(parser, "rung")
    mode.add_argument(
        "--dry-run", action="store_true", help="only write the TOML files, and print their costs"
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="draw the law and the losses as .svg or .png (extra `plot`)",
    )
    parser.epilog = (
        "The target is predicted, and not run. Rungs are narrower and less deep in equal proportions,\n"
        'with heads of the same size; with model.parametrization = "mup" only narrower. Warmup and\n'
        "lr_scheduler.total_steps change in proportion to training.steps. All other settings are those\n"
        "of CONFIG. The vocabulary is one of them: embeddings can be most of a small model. Use\n"
        '"mup" or "completep", or the learning rate is not equally good for all rungs.\n\n'
        "With one value of --tokens-per-param, tokens D are proportional to parameters N, and the law\n"
        "is L = E + A / N^alpha. With several, it is L = E + A / N^alpha + B / D^beta. L is the last\n"
        "validation loss of the first dataset, or without validation the smoothed training loss.\n\n"
        "Writes rung-1.toml, ... and target.toml into job.dump_folder, each complete for titan train,\n"
        "then ladder.csv with one row a run, ladder.json with the law and its predictions, and\n"
        "ladder.html (extra `report`). The 95 % band is that of a measured loss: bootstrap of the\n"
        "residuals, widened by Student's t for few points. With --plan, nothing runs if a rung does not\n"
        "fit. The same command continues after Ctrl-C or a kill, and skips the runs that are done.\n"
        "Returns 0 if all runs are done, else the code of the first run that is not; 2 for wrong\n"
        "arguments, 78 for configurations that cannot work or do not fit.\n\n"
        "example: titan ladder debug_model.toml --rungs 4 --tokens-per-param 2 --dry-run"
    )


def _above_one(text: str) -> float:
    return parse_value(text, float, lambda x: 1 < x < math.inf, "a number above 1")


def _ratios(text: str) -> tuple[float, ...]:
    """Parse numbers above 0, separated by commas."""
    return tuple(sorted({positive_number(part) for part in text.split(",")}))


def run_ladder(arguments: argparse.Namespace) -> int:
    """Run the ladder, or one of its runs. Returns the exit code."""
    if not names_config(arguments):
        show_error("titan ladder: CONFIG is missing. Expected a TOML file: name it")
        return WRONG_INPUT
    from torchtitan_like.bench import ladder
    from torchtitan_like.config import ConfigError
    from torchtitan_like.launcher.options import LaunchError
    from torchtitan_like.util.pictures import check_picture

    try:
        if arguments.svg is not None:
            check_picture(arguments.svg)
        return ladder.run_ladder(
            ladder.Ladder(
                **_experiment(arguments, starts_runs=not (arguments.collect or arguments.dry_run)),
                num_rungs=arguments.rungs,
                factor=arguments.factor,
                ratios=arguments.tokens_per_param,
                only_writes=arguments.dry_run,
                picture=arguments.svg,
            )
        )
    except (ConfigError, LaunchError, ValueError) as error:
        show_error(str(error))
        return os.EX_CONFIG if isinstance(error, ConfigError) else WRONG_INPUT
