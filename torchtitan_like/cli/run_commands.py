"""`titan run`: list, watch, report, compare, replay, save and stop runs."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from torchtitan_like.cli.common import (
    add_json_flag,
    positive_number,
    print_json,
    run_checked,
    run_path,
)
from torchtitan_like.util.exit_codes import WRONG_INPUT, ExitCode
from torchtitan_like.util.output import show_error, show_problem
from torchtitan_like.util.pictures import METADATA, check_picture

DIFFERENT = 1
DEFAULT_PAGE = Path("report.html")
AXES = ("step", "tokens", "hours")  # the default first
NOT_REPRODUCED = 1


# ---- titan run ls


def configure_ls(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path(),
        help="the folder of a run, or one that contains runs; default: the current folder",
    )
    add_json_flag(parser)
    parser.epilog = (
        "State is one of:\n"
        "  running     a rank has moved within a minute, or within 5 typical steps\n"
        "  hung        no rank has, or a process on this machine is gone without an error\n"
        "  stopped     with the reason of exit.json; error: an error record; killed: all processes\n"
        "              on this machine are gone; lost: no sign for an hour\n"
        "  unreadable  exit.json or an error record is damaged\n"
        "titan run watch and titan run report show the same. --json has details. Searches three\n"
        "levels of folders. Returns 2 if there is no run.\n\n"
        "example: titan run ls outputs"
    )


def run_ls(arguments: argparse.Namespace) -> int:
    """Print the list. Returns the exit code."""
    from torchtitan_like.report.runs import HEADER, list_runs

    def action() -> int:
        now = time.time()
        runs = list_runs(arguments.folder, now)
        if arguments.json:
            print_json([asdict(summary) for summary in runs])
        else:
            print("\n".join([HEADER, *(summary.format_row(now) for summary in runs)]))
        return 0

    return run_checked(action, ValueError)


# ---- titan run watch


def configure_watch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", type=run_path, help="the folder of the run (job.dump_folder)")
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument(
        "--every",
        type=positive_number,
        default=5,
        metavar="SECONDS",
        help="between updates (default: 5)",
    )
    parser.epilog = (
        "Shows step, loss, speed, memory, time left, disk space in checkpoints, the position of each\n"
        "rank; in a terminal also a progress bar, the curve of the loss and the last events. Reads\n"
        "files only, so any machine with access to the folder can run it. Updates until the run has\n"
        "ended, or until Ctrl-C. Returns 2 if the folder is not a run.\n\n"
        "example: titan run watch outputs --once"
    )


def run_watch(arguments: argparse.Namespace) -> int:
    """Show the status. Returns the exit code."""
    from torchtitan_like.report.watch import watch_run

    def action() -> int:
        watch_run(arguments.run, None if arguments.once else arguments.every)
        return 0

    try:
        return run_checked(action, ValueError)
    except KeyboardInterrupt:
        return 0


# ---- titan run compare


def configure_compare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "a", type=run_path, metavar="A", help="the folder of a run, or its metrics.jsonl"
    )
    parser.add_argument(
        "b",
        type=run_path,
        metavar="B",
        help="the other run, or a plan of A's configuration, a .json file of titan plan -o",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--data-only", action="store_true", help="compare the data of each step, not its results"
    )
    mode.add_argument(
        "--environment",
        action="store_true",
        help="compare variables, packages, machine and git state of the newest attempts. "
        "A and B may also be folders of attempts",
    )
    add_json_flag(parser)
    parser.epilog = (
        "Compares keys that a layout or a restart must not change, to the last bit. For loss and\n"
        "gradient norm it also prints the largest relative difference. Returns 0 if all steps in\n"
        "both runs are equal, 1 if not, and 2 if there is nothing to compare.\n\n"
        "With a plan: compares memory and step time of rank 0, from the newest attempt, and lists what\n"
        "each module keeps in memory. A run of X.toml does so itself if X.plan.json is next to it.\n"
        "Returns 0 if all are within 10 % of the plan, 1 if not, and 2 for a plan of another\n"
        "configuration, or with nothing to compare.\n\n"
        "example: titan run compare outputs_a outputs_b"
    )


def run_compare(arguments: argparse.Namespace) -> int:
    """Print the comparison. Returns the exit code."""
    if arguments.b.suffix == ".json":
        action = _compare_with_plan
    elif arguments.environment:
        action = _compare_environments
    else:
        action = _compare_metrics
    return run_checked(lambda: action(arguments), ValueError)


def _compare_with_plan(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.compare import compare_with_plan

    if arguments.environment or arguments.data_only:
        raise ValueError(
            f"{arguments.b} is a plan, which has neither data nor an environment. Expected a run "
            "with --data-only or --environment. Remove the option."
        )
    comparison = compare_with_plan(arguments.a, arguments.b)
    if arguments.json:
        print_json(comparison.as_json())
    else:
        print("\n".join(comparison.lines()))
    return 0 if comparison.is_within_tolerance else DIFFERENT


def _compare_metrics(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.compare import compare_runs

    comparison = compare_runs(arguments.a, arguments.b, data_only=arguments.data_only)
    if arguments.json:
        print_json(comparison.as_json())
    else:
        print("\n".join(comparison.lines()))
    return 0 if comparison.is_equal else DIFFERENT


def _compare_environments(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.compare import compare_environments, format_environments

    differences = compare_environments(arguments.a, arguments.b)
    is_equal = not any(differences.values())
    if arguments.json:
        print_json({"equal": is_equal, "files": differences})
    else:
        print("\n".join(format_environments(arguments.a, arguments.b, differences)))
    return 0 if is_equal else DIFFERENT


# ---- titan run report


def configure_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "runs",
        type=run_path,
        nargs="+",
        metavar="RUN",
        help="the folder of a run (job.dump_folder)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the HTML file to write, or a .svg or .png file with curves (default: {DEFAULT_PAGE}; "
        "none with --json)",
    )
    parser.add_argument(
        "--metric",
        action="append",
        dest="metrics",
        metavar="KEY",
        help="of a picture: a key of metrics.jsonl, such as grad_norm or sources.web.loss; repeat it "
        "for several charts (default: loss)",
    )
    parser.add_argument(
        "--axis",
        choices=AXES,
        help=f"of a picture: the horizontal axis (default: {AXES[0]})",
    )
    parser.add_argument(
        "--redact",
        action="store_true",
        help="leave out environment, paths, host names and log text",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--every",
        type=positive_number,
        metavar="SECONDS",
        help="write the page again until all runs have ended; it reloads itself in the browser",
    )
    add_json_flag(mode)
    parser.epilog = (
        "The page is one file that needs no network: goodput, curves with all events, attempts,\n"
        "checkpoints, settings, warnings and the last error. Several runs are drawn together.\n"
        "Reads files only, also of a damaged or a live run. --every ends when each run has an\n"
        "exit.json, or with Ctrl-C. Needs the extra `report`; --json does not.\n"
        "A picture needs the extra `plot`. Its chart of the loss also has the mean and the validation\n"
        "losses. The same rows give the same bytes of an SVG file.\n"
        "Returns 2 if a folder is not a run, or if no run has the metric.\n\n"
        "example: titan run report outputs -o report.html"
    )


def run_report(arguments: argparse.Namespace) -> int:
    """Write the page or print the numbers. Returns the exit code."""
    suffix = (arguments.output or DEFAULT_PAGE).suffix
    if suffix in METADATA or arguments.metrics or arguments.axis:
        action = _draw_curves
    else:
        action = _print_numbers if arguments.json else _write_pages
    try:
        return run_checked(lambda: action(arguments), ValueError)
    except KeyboardInterrupt:
        return 0


def _print_numbers(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.figures import require_bokeh
    from torchtitan_like.report.history import read_histories
    from torchtitan_like.report.page import write_page
    from torchtitan_like.report.summary import compare, summarize

    page: Path | None = arguments.output
    if page is not None:
        require_bokeh()
    histories = read_histories(arguments.runs, is_redacted=arguments.redact)
    if page is not None:
        write_page(page, histories, is_redacted=arguments.redact)
    numbers = [summarize(history) for history in histories]
    print_json({"runs": numbers, "comparison": compare(histories)})
    return 0


def _draw_curves(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.figures import plot
    from torchtitan_like.report.history import read_histories

    if arguments.redact or arguments.every or arguments.json:
        raise ValueError(
            "--redact, --every and --json are options of a page. Expected none of them with a "
            "picture. Remove them."
        )
    picture: Path = arguments.output or DEFAULT_PAGE
    check_picture(picture)
    histories = read_histories(arguments.runs, is_redacted=False)
    for history in histories:
        for problem in history.run.problems:
            show_error(f"{history.run.name}: {problem}")
    plot(histories, arguments.metrics or ["loss"], arguments.axis or AXES[0], picture)
    print(f"Wrote {picture}")
    return 0


def _write_pages(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.figures import require_bokeh
    from torchtitan_like.report.page import write_pages
    from torchtitan_like.util.units import format_bytes

    require_bokeh()
    page = arguments.output or DEFAULT_PAGE
    sizes = write_pages(page, arguments.runs, arguments.every, is_redacted=arguments.redact)
    for num_bytes in sizes:
        print(f"Wrote {page} ({format_bytes(num_bytes)})", flush=True)
    return 0


# ---- titan run replay


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
    parser.epilog = (
        "Loads the checkpoint before the step, trains the steps between, and runs the step on\n"
        "the same samples. Shows the first module with an inf or nan, and the parameters that\n"
        "have one in gradient or value. Writes nothing into the run's folder. Type it in the\n"
        "folder where the run was started: settings may contain relative paths. Model and\n"
        "optimizer must fit into one process. Returns 0 if the numbers are reproduced, 1 if not,\n"
        "2 if the bundle or the checkpoint cannot be used, and 78 for a setting that cannot work.\n\n"
        "example: titan run replay outputs/attempts/1/bad-steps/step-5.json"
    )


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay the step and print the result. Returns the exit code."""
    from torchtitan_like.checkpoint.errors import ChangedError, CheckpointError
    from torchtitan_like.config import ConfigError
    from torchtitan_like.data.data_errors import DataError
    from torchtitan_like.monitor.log import init_logger
    from torchtitan_like.replay import BundleError, format_replay, is_reproduced, replay_bundle
    from torchtitan_like.util.jsonl import encode

    init_logger()
    try:
        bundle, replay = replay_bundle(arguments.bundle, arguments.settings)
    except (BundleError, ConfigError, CheckpointError, ChangedError, DataError) as error:
        show_error(str(error))
        return int(ExitCode.BAD_CONFIG) if isinstance(error, ConfigError) else WRONG_INPUT
    print("\n".join(format_replay(bundle, replay)))
    reproduced = is_reproduced(bundle, replay)
    if arguments.out is not None:
        try:
            arguments.out.write_bytes(encode({**asdict(replay), "reproduced": reproduced}))
        except OSError as error:
            show_problem(error)
            return WRONG_INPUT
    return 0 if reproduced else NOT_REPRODUCED


# ---- titan run save


def configure_save(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", type=run_path, help="the folder of the run (job.dump_folder)")
    parser.add_argument(
        "--export", action="store_true", help="write a Hugging Face export, not a checkpoint"
    )
    parser.epilog = (
        "Creates the file of resilience.save_switch_path (SAVE), or EXPORT. The run removes it\n"
        "and saves within its next steps. Returns 2 if the run has ended or checkpoints are\n"
        "disabled.\n\n"
        "example: titan run save outputs"
    )


def run_save(arguments: argparse.Namespace) -> int:
    """Create the switch file. Returns the exit code."""
    from torchtitan_like.report.runs import request_save

    def action() -> int:
        print(request_save(arguments.run, time.time(), export=arguments.export))
        return 0

    return run_checked(action, ValueError)


# ---- titan run stop


def configure_stop(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", type=run_path, help="the folder of the run (job.dump_folder)")
    parser.add_argument("--clear", action="store_true", help="allow runs in this folder again")
    parser.epilog = (
        "Creates the file of resilience.kill_switch_path (KILL). The run saves and ends with code\n"
        "130 within its next steps. Queued jobs of this run end at once while the file exists.\n\n"
        "example: titan run stop outputs"
    )


def run_stop(arguments: argparse.Namespace) -> int:
    """Create or remove the kill switch. Returns the exit code."""
    from torchtitan_like.report.runs import clear_stop, request_stop

    def action() -> int:
        if arguments.clear:
            print(clear_stop(arguments.run))
        else:
            print(request_stop(arguments.run, time.time()))
        return 0

    return run_checked(action, ValueError)
