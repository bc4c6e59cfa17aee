"""`titan plan calibrate`: measure a machine or read runs, and write a cluster file."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.cli.common import (
    FAILED,
    catch_value_errors,
    end_rank,
    positive_number,
    show_problem,
)
from torchtitan_like.cli.progress import ProgressLine
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.output import show_error

if TYPE_CHECKING:
    from torchtitan_like.plan.calibrate import Measured
    from torchtitan_like.plan.fit import Fitted

MAX_SECONDS = 300


def configure_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", required=True, help="the cluster file to write"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="the GPU: its name, or a TOML file with its data sheet (default: measure the CPU; with "
        "--from, the device of --cluster)",
    )
    parser.add_argument(
        "--seconds",
        type=positive_number,
        default=60,
        metavar="N",
        help=f"of the measurement, at most {MAX_SECONDS} (default: 60)",
    )
    parser.add_argument(
        "--from",
        dest="runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="measure nothing: fit the constants to the steps of these run folders",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="with --from: the cluster whose constants are fitted, a name or a file (default: default)",
    )
    parser.epilog = (
        "Without --from: measures matrix products, kernels limited by memory, and on a CPU attention,\n"
        "small operators, and collectives of the ranks that a launcher started. Start one for each\n"
        "rank of the runs to plan, such as\n"
        "  torchrun --nproc_per_node=8 --no-python titan plan calibrate -o my_cluster.toml --gpu h100-80g\n"
        "On a CPU, it also writes FILE_device.toml, which the cluster file names.\n"
        "With --from: dry-runs the configuration of each run, and fits up to three constants, never\n"
        "more than runs. Each run is predicted from the others; the largest error is the error band.\n"
        "Use the file: titan plan X.toml --world-size 2 --cluster my_cluster.toml\n"
        "Returns 0, 2 for wrong arguments or runs, and 78 if a run's configuration does not work here.\n"
        "Ctrl-C ends it with 130 and writes nothing.\n\n"
        "example: titan plan calibrate -o my_cluster.toml --seconds 10"
    )


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Measure or fit, and write. Returns the exit code."""
    output: Path = arguments.output
    if output.suffix != ".toml":
        show_error(f"-o {output}: expected a name that ends with .toml: rename it")
        return FAILED
    if not output.parent.is_dir():
        show_error(f"-o {output}: there is no folder {output.parent}: create it, or name another")
        return FAILED
    if arguments.seconds > MAX_SECONDS:
        show_error(f"--seconds {arguments.seconds:g}: expected at most {MAX_SECONDS}: lower it")
        return FAILED
    if arguments.cluster is not None and arguments.runs is None:
        show_error(f"--cluster {arguments.cluster}: expected --from RUN next to it: leave it out")
        return FAILED
    try:
        if arguments.runs is not None:
            return catch_value_errors(lambda: _fit(arguments))
        return end_rank(catch_value_errors(lambda: _measure(arguments)))
    except KeyboardInterrupt:
        show_error("\nInterrupted: no cluster file is written")
        return int(ExitCode.INTERRUPTED)


def _write(files: dict[Path, str]) -> int:
    from torchtitan_like.util.files import write_atomically

    try:
        for path, text in files.items():
            write_atomically(path, text)
    except OSError as error:
        show_problem(error)
        return FAILED
    *_, cluster = files
    names = " and ".join(map(str, files))
    show_error(f"Wrote {names}. Use it: titan plan X.toml --world-size N --cluster {cluster}")
    return 0


# ---- measurements


def _measure(arguments: argparse.Namespace) -> int:
    import torch

    from torchtitan_like.node.ranks import launched_ranks
    from torchtitan_like.plan.calibrate import calibrate
    from torchtitan_like.plan.gpus import load_gpu

    gpu = None
    if arguments.gpu is not None:
        try:
            gpu = load_gpu(arguments.gpu)
        except ValueError as error:
            raise ValueError(f"--gpu: {error}") from None
        if gpu.device_type != "cuda":
            raise ValueError(
                f"--gpu {arguments.gpu}: it describes a CPU, which has no data sheet. Expected a GPU: "
                "leave --gpu out to measure the CPU"
            )
        if not torch.cuda.is_available():
            raise ValueError(
                f"--gpu {gpu.key}: torch {torch.__version__} finds no GPU. Expected one: leave --gpu "
                "out to measure the CPU"
            )
    measured, files = calibrate(
        arguments.output, gpu, arguments.seconds, ProgressLine("measurements")
    )
    if launched_ranks(os.environ).rank != 0:
        return 0
    print("\n".join(report(measured)))
    return _write(files)


def report(measured: Measured) -> list[str]:
    """Return a line for each measurement."""
    lines = []
    for product in measured.products:
        title = f"{' x '.join(map(str, product.shape))}, {product.dtype}"
        lines.append(f"{title:46}{product.flops / product.seconds / 1e9:12,.1f} GFLOP/s")
    kernels = measured.kernels
    lines.append(
        f"{'kernels limited by memory':46}{kernels.num_bytes / kernels.seconds / 1e9:12,.1f} GB/s"
    )
    lines.append(f"{'small operator':46}{measured.operator * 1e6:12,.1f} us")
    for pass_, attentions in measured.attention.items():
        for each in attentions:
            title = f"attention {pass_}, {each.rows:,} rows, {each.flops / each.scores:.0f} FLOPs a score"
            lines.append(f"{title:46}{each.flops / each.seconds / 1e9:12,.1f} GFLOP/s")
    for kind, collective in measured.collectives.items():
        for num_bytes, seconds in (collective.small, collective.large):
            title = f"{kind}, {measured.num_ranks} ranks, {num_bytes:,} B"
            lines.append(f"{title:46}{seconds * 1e6:12,.0f} us")
    if not measured.collectives:
        lines.append(f"{'collectives':46}{'skipped':>12}: start several ranks, or nodes of GPUs")
    return lines


# ---- runs


def _fit(arguments: argparse.Namespace) -> int:
    from torchtitan_like.config import ConfigError
    from torchtitan_like.plan.clusters import DEFAULT_CLUSTER, load_cluster
    from torchtitan_like.plan.fit import fit_runs, fitted_text, read_measured
    from torchtitan_like.plan.gpus import load_gpu
    from torchtitan_like.util.modules import searching_modules_in

    start = load_cluster(arguments.cluster or DEFAULT_CLUSTER)
    device = arguments.gpu or start.gpu
    if not device:
        raise ValueError(
            f"--from: cluster {start.key} is of no particular device. Expected --gpu NAME, or --cluster "
            "with the file of a device: name one"
        )
    gpu = load_gpu(device)
    progress = ProgressLine("runs")
    started = time.monotonic()
    measured = []
    for number, path in enumerate(arguments.runs):
        progress("dry runs", number, len(arguments.runs), time.monotonic() - started)
        try:
            with searching_modules_in(Path.cwd()), redirect_stdout(sys.stderr):
                measured.append(read_measured(path, gpu))
        except ConfigError as error:
            show_error(f"{path}: {error}")
            return os.EX_CONFIG
    progress("dry runs", len(measured), len(measured), time.monotonic() - started)
    fitted = fit_runs(measured, gpu, start, arguments.output.stem)
    print("\n".join(fit_report(fitted)))
    gpu_file = device if device.endswith(".toml") else ""
    return _write({arguments.output: fitted_text(fitted, arguments.output, gpu_file)})


def fit_report(fitted: Fitted) -> list[str]:
    """Return a line for each run and constant, and the error band."""
    lines = [f"{'run':34}{'measured, s':>12}{'fitted, s':>12}{'error':>10}{'left out':>10}"]
    for index, sample in enumerate(fitted.samples):
        predicted = sample.seconds * (1 + fitted.errors[index])
        left_out = f"{100 * fitted.left_out[index]:+.1f} %" if fitted.left_out else "-"
        lines.append(
            f"{sample.name:34}{sample.seconds:12.4g}{predicted:12.4g}"
            f"{100 * fitted.errors[index]:+8.1f} %{left_out:>10}"
        )
    for constant in fitted.constants:
        lines.append(f"{constant} = {getattr(fitted.cluster, constant):g}")
    lines.append(f"Error band: +-{fitted.cluster.error_percent:g} %, {fitted.cluster.error_source}")
    return lines
