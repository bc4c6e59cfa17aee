"""`titan train` and `titan check`: train, or only check a configuration."""

from __future__ import annotations

import argparse
import os
import sys

from torchtitan_like.cli.common import names_config, positive_int, settings_of
from torchtitan_like.util.exit_codes import WRONG_INPUT

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
    from torchtitan_like.util.output import show_error

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
