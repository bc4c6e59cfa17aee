"""`titan train`: train on this machine, in one process or under torchrun."""

from __future__ import annotations

import argparse
import os

from torchtitan_like.cli.settings import HelpWithSettings, with_config
from torchtitan_like.launcher.options import OPTIONS

DEFAULT_CONFIG = "debug_model.toml"


def configure_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
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
    parser.add_argument("-h", "--help", action=HelpWithSettings)
    parser.epilog = (
        "A name in [brackets] is the environment variable that is used if the option is not given.\n"
        "One process trains without torchrun, several under it. Returns 0 when the run is done, 1 after a\n"
        "crash, and 78 for a configuration that cannot work (nothing is started). Otherwise, returns the\n"
        "code in the run folder's exit.json.\n\n"
        "example: titan train debug_model.toml --nproc 2 --training.steps 2"
    )


def run_train(arguments: argparse.Namespace) -> int:
    """Train. Returns the exit code."""
    from torchtitan_like.launcher.run import launch
    from torchtitan_like.util.output import show

    config = arguments.config
    names = {word.partition("=")[0].replace("-", "_") for word in arguments.settings}
    if config is None and "__job.config_file" not in names:
        config = os.environ.get("CONFIG_FILE") or DEFAULT_CONFIG
    settings = with_config(config, arguments.settings, show)
    options = {option.key: getattr(arguments, option.key) for option in OPTIONS}
    return launch(options, settings, arguments.words)
