"""Compare the CPU seconds of real steps with those that `titan plan` predicts.

    torchrun --nproc_per_node=2 --no-python titan node bench -o cpu.toml
    python -m benchmarks.plan_cpu --cluster cpu.toml [--layouts "debug fsdp,S tp"] [--steps 20]

Each layout trains on gloo ranks of this machine, one thread each. Measured is the CPU time of a
rank's process in a step, the median over the steps after the first two. It does not depend on other
processes as wall time does. It contains no waiting: neither the bubble of a pipeline nor that for a
peer. So the prediction is the sum of the durations of a rank's work. Of the ranks, the one with the
most counts. Measured layouts are kept in --cache, so that the command can be continued.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from torchtitan_like.check import load_checked
from torchtitan_like.plan.clusters import Cluster, load_cluster
from torchtitan_like.plan.dry_memory import dry_runs
from torchtitan_like.plan.dry_run import DryRun
from torchtitan_like.plan.durations import durations
from torchtitan_like.plan.gpus import Gpu, load_gpu

ROOT = Path(__file__).resolve().parents[1]
WARMUP = 2  # steps
TOLERANCE = 0.15


class Layout(NamedTuple):
    """A number of ranks, and settings that differ from `SETTINGS`."""

    ranks: int
    settings: dict[str, object]


SETTINGS: dict[str, object] = {
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    "model.hf_assets_path": str(ROOT / "tests/assets/tokenizer"),
    "training.dataset": "shakespeare",
    "training.mixed_precision_param": "float32",
    "activation_checkpoint.mode": "none",
    "metrics.log_freq": 1000,
    "lr_scheduler.warmup_steps": 2,
}
# debug: a rank's batch of train_configs/debug_model.toml. S: of benchmarks/trainer.py.
SIZES: dict[str, dict[str, object]] = {
    "debug": {"training.local_batch_size": 4, "training.seq_len": 256},
    "S": {"training.local_batch_size": 1, "training.seq_len": 2048},
}
TP = "parallelism.tensor_parallel_degree"
CP = "parallelism.context_parallel_degree"
PP = "parallelism.pipeline_parallel_degree"
REPLICAS = "parallelism.data_parallel_replicate_degree"
PIPELINE = {PP: 2, "training.local_batch_size": 4, "training.seq_len": 512}
KINDS: dict[str, dict[str, Layout]] = {
    "debug": {
        "1 rank": Layout(1, {}),
        "full AC": Layout(1, {"activation_checkpoint.mode": "full"}),
        "ddp": Layout(2, {REPLICAS: 2, "parallelism.data_parallel_shard_degree": 1}),
        "fsdp": Layout(2, {}),
        "tp": Layout(2, {TP: 2}),
        "pp": Layout(2, {PP: 2}),
    },
    "S": {
        "1 rank": Layout(1, {}),
        "selective AC": Layout(1, {"activation_checkpoint.mode": "selective"}),
        "fsdp": Layout(2, {}),
        "tp": Layout(2, {TP: 2}),
        "pp": Layout(2, PIPELINE),
        "cp": Layout(2, {CP: 2}),
    },
}
LAYOUTS = {
    f"{size} {name}": Layout(layout.ranks, {**SIZES[size], **layout.settings})
    for size, layouts in KINDS.items()
    for name, layout in layouts.items()
}


def arguments_of(layout: Layout) -> list[str]:
    """Return the arguments of the trainer."""
    settings = {**SETTINGS, **layout.settings}
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


# ---- predicted


def predict(layout: Layout, gpu: Gpu, cluster: Cluster) -> float:
    """Return the CPU seconds of a step of the rank that takes the most."""
    config, _ = load_checked(
        arguments_of(layout), layout.ranks, training=False, device_type=gpu.device_type
    )
    return max(work_seconds(run, gpu, cluster) for run in dry_runs(config, layout.ranks, gpu))


def work_seconds(run: DryRun, gpu: Gpu, cluster: Cluster) -> float:
    """Return the sum of the durations of the last step."""
    start, end = (mark.num_work for mark in run.recording.marks[-2:])
    return sum(durations(run.recording, gpu, cluster)[start:end])


# ---- measured


def measure(name: str, steps: int, folder: Path) -> float:
    """Return the CPU seconds of a step of the rank that takes the most."""
    layout = LAYOUTS[name]
    out = Path(tempfile.mkdtemp(dir=folder))
    runner = [sys.executable]
    if layout.ranks > 1:
        runner += ["-m", "torch.distributed.run", "--nproc-per-node", str(layout.ranks)]
        runner += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    child = [
        "-m",
        "benchmarks.plan_cpu",
        "--child",
        name,
        "--steps",
        str(steps),
        "--folder",
        str(out),
    ]
    process = subprocess.run(
        [*runner, *child],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(f"{name} failed ({process.returncode}):\n{process.stderr[-3000:]}")
    return max(json.loads(path.read_text()) for path in out.glob("rank-*.json"))


def run_rank(name: str, steps: int, folder: Path) -> None:
    """Train, and write the median CPU seconds of this rank's steps."""
    arguments = [
        *arguments_of(LAYOUTS[name]),
        *("--job.dump_folder", str(folder / "run"), "--training.steps", str(WARMUP + steps)),
        *("--data.cache_folder", str(folder.parent / "tokens")),
    ]
    from torchtitan_like.process_start import begin_rank

    begin_rank(arguments)
    from torchtitan_like import run, train

    readings: list[float] = []

    class TimedTrainer(train.Trainer):
        def train_step(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            readings.append(time.process_time())
            return super().train_step(*args, **kwargs)

        def _finish(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            readings.append(time.process_time())
            return super()._finish(*args, **kwargs)

    run.Trainer = TimedTrainer  # type: ignore[misc]
    code = run.main(arguments)
    assert code == 0, code
    timed = readings[WARMUP:]
    seconds = [after - before for before, after in zip(timed, timed[1:], strict=False)]
    assert len(seconds) == steps, len(seconds)
    path = folder / f"rank-{os.environ.get('RANK', 0)}.json"
    path.write_text(json.dumps(statistics.median(seconds)))


def main() -> None:
    """Measure and predict each layout, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", help="the file that `titan node bench` has written")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="separated by commas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cache", type=Path, default=ROOT / "outputs/plan_cpu")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_rank(arguments.child, arguments.steps, arguments.folder)
        return
    cluster = load_cluster(arguments.cluster)
    gpu = load_gpu(cluster.gpu)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    print(
        "| layout | ranks | predicted, s | measured, s | error |\n| --- | --- | --- | --- | --- |"
    )
    errors = []
    for name in arguments.layouts.split(","):
        kept = arguments.cache / f"{name}, {arguments.steps} steps.json"
        if not kept.exists():
            with tempfile.TemporaryDirectory() as folder:
                kept.write_text(json.dumps(measure(name, arguments.steps, Path(folder))))
        measured = json.loads(kept.read_text())
        predicted = predict(LAYOUTS[name], gpu, cluster)
        errors.append(predicted / measured - 1)
        print(
            f"| {name} | {LAYOUTS[name].ranks} | {predicted:.3f} | {measured:.3f} "
            f"| {100 * errors[-1]:+.1f} % |",
            flush=True,
        )
    num_close = sum(abs(error) <= TOLERANCE for error in errors)
    print(f"\n{num_close} of {len(errors)} layouts within {100 * TOLERANCE:g} %")


if __name__ == "__main__":
    main()
