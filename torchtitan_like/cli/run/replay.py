"""`titan run replay`: run a non-finite step again, in one process."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from torchtitan_like.cli.common import show_problem
from torchtitan_like.cli.settings import HelpWithSettings
from torchtitan_like.util.output import show_error

NOT_REPRODUCED = 1


def configure_replay(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.usage = "%(prog)s BUNDLE [OPTIONS] [--section.key VALUE ...]"
    parser.add_argument(
        "bundle",
        type=Path,
        metavar="BUNDLE",
        help="attempts/<n>/bad-steps/step-<k>.json in the folder of a run",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument("-h", "--help", action=HelpWithSettings)
    parser.epilog = (
        "Loads the checkpoint before the step, trains the steps between, and runs the step on\n"
        "the same samples. Shows the first module with an inf or nan, and the parameters that\n"
        "have one in gradient or value. Writes nothing into the run's folder. Type it in the\n"
        "folder where the run was started: settings may contain relative paths. Model and\n"
        "optimizer must fit into one process. Returns 0 if the numbers are reproduced, 1 if not,\n"
        "78 if the bundle, a setting or the checkpoint cannot be used, and 74 if FILE cannot be\n"
        "written.\n\n"
        "example: titan run replay outputs/attempts/1/bad-steps/step-5.json"
    )


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay the step and print the result. Returns the exit code."""
    from torchtitan_like.checkpoint.errors import ChangedError, CheckpointError
    from torchtitan_like.config import ConfigError
    from torchtitan_like.data.errors import DataError
    from torchtitan_like.monitor.log import init_logger
    from torchtitan_like.replay import BundleError, format_replay, is_reproduced, replay_bundle
    from torchtitan_like.util.exit_codes import ExitCode
    from torchtitan_like.util.jsonl import encode

    init_logger()
    try:
        bundle, replay = replay_bundle(arguments.bundle, arguments.settings)
    except (BundleError, ConfigError, CheckpointError, ChangedError, DataError) as error:
        show_error(str(error))
        return int(ExitCode.BAD_CONFIG)
    print("\n".join(format_replay(bundle, replay)))
    reproduced = is_reproduced(bundle, replay)
    if arguments.out is not None:
        try:
            arguments.out.write_bytes(encode({**asdict(replay), "reproduced": reproduced}))
        except OSError as error:
            show_problem(error)
            return int(ExitCode.STORAGE)
    return 0 if reproduced else NOT_REPRODUCED
