"""Fit the constants of a cluster to measured steps of runs, and write its file for `titan plan`.

    python -m benchmarks.fit_runs outputs/run_a outputs/run_b -o my_cluster.toml --gpu h100-80g

The configuration of each run is dry-run. At most two constants are fitted, and no more than there
are runs. Each run is predicted from the others; the largest error is the error band.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.calibrate import description_text, output_path, write_files
from torchtitan_like.check import load_for_command
from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.plan.clusters import (
    DEFAULT_CLUSTER,
    Cluster,
    load_cluster,
    upper_bound,
)
from torchtitan_like.plan.dry_memory import dry_runs
from torchtitan_like.plan.dry_run import DryRun
from torchtitan_like.plan.gpus import Gpu, load_gpu
from torchtitan_like.plan.timeline import step_time
from torchtitan_like.report.recorded import RecordedRun, measured_steps, read_run
from torchtitan_like.util.output import ProgressLine
from torchtitan_like.util.plan_file import TIME_STEP
from torchtitan_like.util.run_directory import CONFIG

# Standard deviations of the fit, relative: of a run (the same TOML is published with +-6 %), and of
# the constants from those of the cluster from which it starts.
RUN_NOISE, CONSTANT_SPREAD = 0.04, 0.15
NUM_ITERATIONS = 4
STEP = 0.02  # of a logarithm, to differentiate


class Sample(NamedTuple):
    """A measured step. predict: returns its predicted seconds on a cluster."""

    name: str
    seconds: float
    predict: Callable[[Cluster], float]

    def error(self, cluster: Cluster) -> float:
        """Return how far the prediction is above the measurement, as a fraction of it."""
        return self.predict(cluster) / self.seconds - 1


def fit(
    samples: Sequence[Sample],
    cluster: Cluster,
    constants: Sequence[str],
    prior: Cluster | None = None,
) -> Cluster:
    """Return a cluster with the most likely constants, by Gauss-Newton on logarithms.

    cluster: has all other fields. prior: what is expected of the constants; `cluster` by default.
    """
    expected = [math.log(getattr(prior or cluster, constant)) for constant in constants]
    bounds = [math.log(upper_bound(constant)) for constant in constants]

    def with_constants(values: Sequence[float]) -> Cluster:
        fields: dict[str, Any] = dict(zip(constants, map(math.exp, values), strict=True))
        return replace(cluster, **fields)

    def residuals(values: Sequence[float]) -> torch.Tensor:
        candidate = with_constants(values)
        errors = [math.log1p(sample.error(candidate)) / RUN_NOISE for sample in samples]
        spread = [(v - e) / CONSTANT_SPREAD for v, e in zip(values, expected, strict=True)]
        return torch.tensor(errors + spread, dtype=torch.float64)

    now = list(expected)
    for _ in range(NUM_ITERATIONS):
        base = residuals(now)
        columns = []
        for index in range(len(now)):
            # Downward, where no bound is.
            moved = [v - STEP * (i == index) for i, v in enumerate(now)]
            columns.append((base - residuals(moved)) / STEP)
        change = torch.linalg.lstsq(torch.stack(columns, 1), -base.unsqueeze(1)).solution
        now = [
            min(v + float(delta), bound)
            for v, delta, bound in zip(now, change.squeeze(1), bounds, strict=True)
        ]
    fitted = with_constants(now)
    return replace(fitted, **{name: round(getattr(fitted, name), 3) for name in constants})


def leave_one_out(
    samples: Sequence[Sample], cluster: Cluster, constants: Sequence[str]
) -> list[float]:
    """Return the error of each sample, predicted with constants fitted to the others.

    Never more constants than samples. Empty for one sample.
    """
    errors = []
    for index, sample in enumerate(samples):
        if others := [*samples[:index], *samples[index + 1 :]]:
            errors.append(sample.error(fit(others, cluster, constants[: len(others)])))
    return errors


# ---- runs


class MeasuredRun(NamedTuple):
    """A run directory. seconds: median of its steady steps. runs: dry runs of its configuration."""

    path: Path
    seconds: float
    config: JobConfig
    runs: list[DryRun]

    def sample(self, gpu: Gpu) -> Sample:
        """Return what `fit` needs."""
        return Sample(
            self.path.resolve().name,
            self.seconds,
            lambda cluster: step_time(self.runs, self.config, gpu, cluster).seconds,
        )


def read_measured(path: Path, gpu: Gpu) -> MeasuredRun:
    """Read a run directory, and dry-run its configuration.

    Raises ValueError if it has no steady steps, was trained on another kind of device, or cannot be
    planned; ConfigError if its configuration does not work here.
    """
    recorded = read_run(path)
    seconds = _steady_seconds(recorded)
    attempt = recorded.attempts[-1]
    if attempt.num_ranks is None:
        raise ValueError(
            f"{path} does not record its number of ranks. Expected a start event, or heartbeats: "
            "leave it out"
        )
    facts = attempt.environment.get("facts.json")
    if facts is not None:
        device_type = "cuda" if json.loads(facts).get("gpus") else "cpu"
        if device_type != gpu.device_type:
            raise ValueError(
                f"{path} was trained on {DEVICES[device_type]}. Expected {DEVICES[gpu.device_type]}, "
                f"as {gpu.key} describes: leave it out, or name its device with --gpu"
            )
    config, _ = load_for_command(
        ["--job.config_file", str(path / CONFIG)],
        attempt.num_ranks,
        training=False,
        device_type=gpu.device_type,
    )
    return MeasuredRun(path, seconds, config, dry_runs(config, attempt.num_ranks, gpu))


DEVICES = {"cuda": "GPUs", "cpu": "CPUs"}


def _steady_seconds(recorded: RecordedRun) -> float:
    measured = measured_steps(recorded).step_seconds if recorded.attempts else None
    if measured is None:
        raise ValueError(
            f"{recorded.path} has no steady step. Expected a log line after step {TIME_STEP} of the "
            "newest attempt: train for longer, lower metrics.log_freq, or leave it out"
        )
    return measured


def constants_to_fit(runs: Sequence[MeasuredRun], cluster: Cluster) -> list[str]:
    """Return at most two constants, and at most one for each run, the most important first."""
    constants = ["matmul_factor"]
    if any(run.config.parallelism.enable_async_tensor_parallel for run in runs):
        constants.append("async_tp_hidden")
    elif any(run.runs[0].dims.world_size > cluster.gpus_per_node for run in runs):
        constants.append("inter_node_gb_s")
    return constants[: len(runs)]


class Fitted(NamedTuple):
    """A cluster fitted to runs.

    errors: of each run, with the constants fitted to all. left_out: with those fitted to the others.
    """

    cluster: Cluster
    constants: list[str]
    samples: list[Sample]
    errors: list[float]
    left_out: list[float]

    def lines(self) -> list[str]:
        """Return a line for each run and constant, and the error band."""
        lines = [f"{'run':34}{'measured, s':>12}{'fitted, s':>12}{'error':>10}{'left out':>10}"]
        for index, sample in enumerate(self.samples):
            predicted = sample.seconds * (1 + self.errors[index])
            left_out = f"{100 * self.left_out[index]:+.1f} %" if self.left_out else "-"
            lines.append(
                f"{sample.name:34}{sample.seconds:12.4g}{predicted:12.4g}"
                f"{100 * self.errors[index]:+8.1f} %{left_out:>10}"
            )
        for constant in self.constants:
            lines.append(f"{constant} = {getattr(self.cluster, constant):g}")
        lines.append(f"Error band: +-{self.cluster.error_percent:g} %, {self.cluster.error_source}")
        return lines


def fit_runs(runs: Sequence[MeasuredRun], gpu: Gpu, start: Cluster, key: str) -> Fitted:
    """Return the cluster with constants fitted to runs. Its error band is the largest error left out.

    start: has all other fields. With one run, the band is that of `start`.
    """
    samples = [run.sample(gpu) for run in runs]
    constants = constants_to_fit(runs, start)
    cluster = fit(samples, start, constants)
    left_out = leave_one_out(samples, start, constants)
    number = f"{len(runs)} run" + ("s" if len(runs) > 1 else "")
    percent, source = (
        start.error_percent,
        f"that of cluster {start.key}: one run has no other to test",
    )
    if left_out:
        percent = min(100, max(1, math.ceil(100 * max(map(abs, left_out)))))
        source = f"the largest error of {number}, each predicted from the others"
    cluster = replace(
        cluster,
        key=key,
        name=f"{start.name}, fitted to {number}",
        gpu=gpu.key,
        error_percent=percent,
        error_source=source,
        fitted_rows=tuple(sample.name for sample in samples),
    )
    errors = [sample.error(cluster) for sample in samples]
    return Fitted(cluster, constants, samples, errors, left_out)


def fitted_text(fitted: Fitted, output: Path, gpu_file: str) -> str:
    """Return the TOML of the cluster. gpu_file: path of the device's file; "" for a shipped one."""
    cluster = fitted.cluster
    if gpu_file:
        cluster = replace(cluster, gpu=os.path.relpath(gpu_file, output.parent))
    comment = (
        f"benchmarks/fit_runs.py has fitted {', '.join(fitted.constants)} to the steps of "
        "`fitted_rows`."
    )
    return description_text(cluster, comment)


def main(argv: Sequence[str] | None = None) -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--output", type=output_path, required=True, metavar="FILE")
    parser.add_argument("--gpu", help="default: the device of --cluster")
    parser.add_argument("--cluster", default=DEFAULT_CLUSTER, help="name or file to start from")
    arguments = parser.parse_args(argv)
    progress = ProgressLine("runs")
    started = time.monotonic()
    measured = []
    try:
        start = load_cluster(arguments.cluster)
        device = arguments.gpu or start.gpu
        if not device:
            raise ValueError(f"cluster {start.key} has no device: give --gpu NAME")
        gpu = load_gpu(device)
        for number, path in enumerate(arguments.runs):
            progress("dry runs", number, len(arguments.runs), time.monotonic() - started)
            measured.append(read_measured(path, gpu))
        progress("dry runs", len(measured), len(measured), time.monotonic() - started)
        fitted = fit_runs(measured, gpu, start, arguments.output.stem)
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    print("\n".join(fitted.lines()))
    gpu_file = device if device.endswith(".toml") else ""
    write_files({arguments.output: fitted_text(fitted, arguments.output, gpu_file)})


if __name__ == "__main__":
    main()
