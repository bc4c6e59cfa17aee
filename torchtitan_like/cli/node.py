"""`titan node`: check and measure machines."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan_like.cli.common import (
    ProgressLine,
    end_rank,
    non_negative_int,
    non_negative_number,
    parse_value,
    positive_int,
    positive_number,
    run_checked,
)
from torchtitan_like.util.exit_codes import WRONG_INPUT, ExitCode
from torchtitan_like.util.output import show_error, show_problem

BAD = 1
SECONDS = 60  # of the measurement for a cluster file
MAX_SECONDS = 300
OF_CLUSTER_FILE = ("gpu", "seconds", "from", "cluster")  # options that need --output


# ---- titan node check


def configure_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--gpus", type=non_negative_int, metavar="N", help="number of GPUs that must be present"
    )
    parser.add_argument(
        "--host-memory-gib",
        type=non_negative_number,
        default=0,
        metavar="N",
        help="GiB that must be available",
    )
    parser.add_argument(
        "--known-bad", type=Path, metavar="FILE", help="file of GPU UUIDs that must not be used"
    )
    parser.add_argument(
        "--no-pairs", action="store_true", help="skip the all-reduce of every pair of GPUs"
    )
    parser.add_argument(
        "--ranks", action="store_true", help="under a launcher: check all ranks together"
    )
    parser.add_argument(
        "--memory-gib",
        type=non_negative_number,
        default=0,
        metavar="N",
        help="GiB that each rank allocates",
    )
    parser.add_argument("--backend", help="default: nccl on GPUs, else gloo")
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=60,
        metavar="SECONDS",
        help="for ranks to find each other (default: 60)",
    )
    parser.epilog = (
        "Prints `<host> is OK` and returns 0, or `<host> is BAD: ...` and returns 1. Checks\n"
        "number of GPUs, uncorrected memory errors, pending row remaps, slowdown by hardware,\n"
        "temperature, Xid errors in the kernel log, and every pair of GPUs.\n"
        "With --ranks every rank prints its device and cores, or what is broken:\n"
        "  torchrun --nproc_per_node=8 --no-python titan node check --ranks\n"
        "  srun --ntasks-per-node 8 titan node check --ranks  (MASTER_ADDR: the first host)\n\n"
        "example: titan node check --gpus 0"
    )


def run_check(arguments: argparse.Namespace) -> int:
    """Check the machine or the ranks. Returns the exit code."""
    if arguments.ranks:
        from torchtitan_like.node.ranks import check_ranks
        from torchtitan_like.resilience.end import end_process

        is_ok = check_ranks(arguments.backend, arguments.timeout, arguments.memory_gib)
        end_process(0 if is_ok else BAD)

    from torchtitan_like.node.machine import check_machine

    try:
        known_bad = set(arguments.known_bad.read_text().split()) if arguments.known_bad else set()
    except OSError as error:
        show_error(
            f"{arguments.known_bad} cannot be read: {error.strerror}. "
            "Expected one GPU UUID per line. Correct --known-bad."
        )
        return WRONG_INPUT
    report = check_machine(
        num_gpus=arguments.gpus,
        known_bad=known_bad,
        host_memory_gib=arguments.host_memory_gib,
        checks_pairs=not arguments.no_pairs,
        timeout=arguments.timeout,
    )
    print(report.line())
    return BAD if report.problems else 0


# ---- titan node bench


def configure_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    network = parser.add_argument_group("all-reduce")
    network.add_argument(
        "--sizes",
        type=_sizes,
        metavar="LIST",
        help="bytes of each rank's float32 tensor, as 32KB,1MiB,4GB; default: 64KB to 4GB, or to "
        "64MB without GPUs",
    )
    network.add_argument(
        "--advertised",
        type=positive_number,
        metavar="GBPS",
        help="GB/s of a link in one direction",
    )
    network.add_argument(
        "--parts", type=positive_int, metavar="N", help="also send each size as N tensors"
    )
    network.add_argument(
        "--flags", action="store_true", help="also compare two ways to agree on a yes or no"
    )
    network.add_argument("--backend", help="default: nccl on GPUs, else gloo")
    network.add_argument("--warmup", type=non_negative_int, metavar="N", help="(default: 3)")
    network.add_argument("--repeat", type=positive_int, metavar="N", help="(default: 10)")
    machine = parser.add_argument_group("cluster file")
    machine.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="also measure compute, and write the cluster file (.toml) of titan plan",
    )
    machine.add_argument(
        "--gpu",
        metavar="NAME",
        help="the GPU: its name, or a TOML file with its data sheet (default: measure the CPU; with "
        "--from, the device of --cluster)",
    )
    machine.add_argument(
        "--seconds",
        type=_seconds,
        metavar="N",
        help=f"of the measurement, at most {MAX_SECONDS} (default: {SECONDS})",
    )
    machine.add_argument(
        "--from",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="measure nothing: fit the constants to the steps of these run folders",
    )
    machine.add_argument(
        "--cluster",
        metavar="NAME",
        help="with --from: the cluster whose constants are fitted, as a name or a file "
        '(default: "default")',
    )
    parser.epilog = (
        "Start one process per GPU:\n"
        "  torchrun --nproc_per_node=8 --no-python titan node bench --advertised 450\n"
        "  srun --ntasks-per-node 8 titan node bench    (MASTER_ADDR names the first host)\n"
        "algbw is bytes / time. busbw is algbw x 2 (n - 1) / n for n ranks: the load of each link.\n"
        "Compare busbw with --advertised; 80 % of it is usual for large tensors. FSDP sends the\n"
        "weights of one block at a time, so measure at that size.\n\n"
        "With -o: measures matrix products, kernels limited by memory, and collectives; on a CPU also\n"
        "attention and small operators, for FILE_device.toml, which the cluster file names.\n"
        "With --from: dry-runs the configuration of each run, and fits up to three constants, never\n"
        "more than runs. Each run is predicted from the others; the largest error is the error band.\n"
        "Use the file: titan plan X.toml --world-size 2 --cluster FILE. Returns 0, 2 for wrong\n"
        "arguments or runs, and 78 if a run's configuration does not work here. Ctrl-C ends it with\n"
        "130 and writes nothing.\n\n"
        "example: titan node bench --sizes 32KB,1MB --repeat 3"
    )


def _sizes(text: str) -> list[int]:
    """Parse a list of sizes. Raises argparse.ArgumentTypeError."""
    from torchtitan_like.node.bench import parse_size

    expected = "numbers with KB, MB, GB, KiB, MiB, GiB or nothing, and commas between them"
    return parse_value(text, lambda sizes: list(map(parse_size, sizes.split(","))), bool, expected)


def _seconds(text: str) -> float:
    """Parse the seconds of a measurement. Raises argparse.ArgumentTypeError."""
    expected = f"a number above 0, at most {MAX_SECONDS}"
    return parse_value(text, float, lambda seconds: 0 < seconds <= MAX_SECONDS, expected)


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure the network, or write a cluster file. Returns the exit code."""
    from torchtitan_like.node.bench import run_bench

    given = {key for key, value in vars(arguments).items() if value not in (None, False)}
    if arguments.output is not None:
        if others := given - {"output", *OF_CLUSTER_FILE}:
            show_error(f"--{min(others)} does not apply to a cluster file (-o): remove it")
            return WRONG_INPUT
        return _write_cluster(arguments)
    if others := given & {*OF_CLUSTER_FILE}:
        show_error(f"--{min(others)} applies to a cluster file only. Expected -o FILE: add it")
        return WRONG_INPUT

    run_bench(
        arguments.sizes,
        advertised=arguments.advertised,
        num_tensors=arguments.parts or 1,
        measures_flags=arguments.flags,
        backend=arguments.backend,
        warmup=3 if arguments.warmup is None else arguments.warmup,
        repeat=arguments.repeat or 10,
    )
    return end_rank(0)


def _write_cluster(arguments: argparse.Namespace) -> int:
    """Measure or fit, and write. Returns the exit code."""
    output: Path = arguments.output
    if output.suffix != ".toml":
        show_error(f"-o {output}: expected a name that ends with .toml: rename it")
        return WRONG_INPUT
    if not output.parent.is_dir():
        show_error(f"-o {output}: there is no folder {output.parent}: create it, or name another")
        return WRONG_INPUT
    runs = getattr(arguments, "from")
    if arguments.cluster is not None and runs is None:
        show_error(f"--cluster {arguments.cluster}: expected --from RUN next to it: leave it out")
        return WRONG_INPUT
    try:
        if runs is not None:
            return run_checked(lambda: _fit(arguments, runs), ValueError)
        return end_rank(run_checked(lambda: _measure(arguments), ValueError))
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
        return WRONG_INPUT
    *_, cluster = files
    names = " and ".join(map(str, files))
    show_error(f"Wrote {names}. Use it: titan plan X.toml --world-size N --cluster {cluster}")
    return 0


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
        arguments.output, gpu, arguments.seconds or SECONDS, ProgressLine("measurements")
    )
    if launched_ranks(os.environ).rank != 0:
        return 0
    print("\n".join(measured.lines()))
    return _write(files)


def _fit(arguments: argparse.Namespace, runs: Sequence[Path]) -> int:
    from torchtitan_like.config import ConfigError
    from torchtitan_like.plan.clusters import DEFAULT_CLUSTER, load_cluster
    from torchtitan_like.plan.fit import fit_runs, fitted_text, read_measured
    from torchtitan_like.plan.gpus import load_gpu

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
    for number, path in enumerate(runs):
        progress("dry runs", number, len(runs), time.monotonic() - started)
        try:
            measured.append(read_measured(path, gpu))
        except ConfigError as error:
            show_error(f"{path}: {error}")
            return os.EX_CONFIG
    progress("dry runs", len(measured), len(measured), time.monotonic() - started)
    fitted = fit_runs(measured, gpu, start, arguments.output.stem)
    print("\n".join(fitted.lines()))
    gpu_file = device if device.endswith(".toml") else ""
    return _write({arguments.output: fitted_text(fitted, arguments.output, gpu_file)})
