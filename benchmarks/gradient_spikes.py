"""Where do large gradient norms of MoE runs come from? `docs/benchmarks/2026-11-26-moe-gradients-h200.md`.

    python benchmarks/gradient_spikes.py runs FOLDER --processes 10 --runs 20 -- --compile.enable
    python benchmarks/gradient_spikes.py check FOLDER --perturbation 2

`runs` starts equal runs of one model, several at once on a device, and compares the norm of each
parameter's gradient bit by bit. A spike is a gradient norm above twice the median of all runs at
that step. It exits with 1 if there is one. Arguments after `--` go to the trainer.

`check` trains on the CPU in float32 from slightly changed initial weights. At the first gradient
norm above --above it computes the same gradient in float64, and the slope of the loss along it by
finite differences. It exits with 1 if they differ by more than 1 %, with 2 if no norm was large.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import copy
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchtitan_like.run import main as train
from torchtitan_like.step import StepRunner

SPIKE = 2.0  # times the median of all runs


def trainer_arguments(family: str, folder: Path, dtype: str, steps: int) -> list[str]:
    return [
        f"--job.config_file=torchtitan_like/train_configs/{family}.toml",
        f"--job.dump_folder={folder}",
        "--debug.seed=7",
        f"--training.steps={steps}",
        "--training.seq_len=256",
        "--training.local_batch_size=4",
        f"--training.mixed_precision_param={dtype}",
        "--lr_scheduler.warmup_steps=2",
        "--metrics.log_freq=1",
        "--metrics.no-enable_tensorboard",
        "--validation.no-enable",
        "--checkpoint.no-enable",
    ]


def gradients(runner: StepRunner) -> dict[str, torch.Tensor]:
    named = (item for part in runner.model.parts for item in part.named_parameters())
    return {name: p.grad.detach() for name, p in named if p.grad is not None}


def one_run(folder: Path, arguments: list[str], steps: int) -> None:
    """Train, and write the norms of the gradients of each step to FOLDER/norms.json."""
    compute, norms, names = StepRunner.compute_gradients, [], []

    def recorded(runner: StepRunner, *args: Any, **options: Any) -> Any:
        losses = compute(runner, *args, **options)
        found = gradients(runner)
        names[:] = found
        norms.append(torch.stack(torch._foreach_norm([*found.values()], dtype=torch.float64)))
        if len(norms) == steps:
            (folder / "norms.json").write_text(json.dumps([names, torch.stack(norms).tolist()]))
        return losses

    StepRunner.compute_gradients = recorded  # type: ignore[method-assign]
    train(arguments)


def start_run(folder: Path, arguments: argparse.Namespace) -> Any:
    """Run once in a new process. Return the norms of each step, None if it failed."""
    folder.mkdir(parents=True)
    argv = [sys.executable, __file__, "one", str(folder), "--family", arguments.family]
    argv += ["--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    with open(folder / "log", "w") as log:
        subprocess.run([*argv, "--", *arguments.rest], stdout=log, stderr=log, check=False)
    try:
        return json.loads((folder / "norms.json").read_text())[1]
    except OSError:
        print(f"{folder}: no result; its log ends with {(folder / 'log').read_text()[-200:]!r}")
        return None


def many_runs(folder: Path, arguments: argparse.Namespace) -> None:
    """Compare the norms of equal runs at each step. Exits with 2 if no run ended."""
    end = time.monotonic() + arguments.seconds

    def run(number: int) -> Any:
        return start_run(folder / str(number), arguments) if time.monotonic() < end else None

    with concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool:
        results = [norms for norms in pool.map(run, range(arguments.runs)) if norms]
    print(f"{len(results)} of {arguments.runs} runs of {arguments.steps} steps")
    if not results:
        sys.exit(2)
    num_spikes = 0
    for step, rows in enumerate(zip(*results, strict=True), start=1):
        kinds = collections.Counter(map(tuple, rows))
        totals = sorted(math.hypot(*row) for row in rows)
        limit = SPIKE * statistics.median(totals)
        spikes = sum(not total <= limit for total in totals)  # NaN is one too
        num_spikes += spikes
        if spikes or step in (1, arguments.steps) or step % 10 == 0:
            print(f"step {step}: {len(kinds)} kinds, norm {totals[0]:.4g} to {totals[-1]:.4g}")
    print(f"{num_spikes} spikes in {len(results) * arguments.steps} steps")
    sys.exit(num_spikes > 0)


def check(folder: Path, arguments: argparse.Namespace) -> None:
    """Train until a large norm, and exit with the result of `slopes`; with 2 if no norm was large."""
    compute = StepRunner.compute_gradients
    generator = torch.Generator().manual_seed(arguments.perturbation)

    def examined(runner: StepRunner, step: int, batch: Any, num_valid: int, **options: Any) -> Any:
        (model,) = runner.model.parts
        if step == 1:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + (torch.rand(p.shape, generator=generator) - 0.5) / 256)
        losses = compute(runner, step, batch, num_valid, **options)
        found = gradients(runner)
        norm = math.hypot(*(g.norm().item() for g in found.values()))
        print(f"step {step}: gradient norm {norm:.4f}", flush=True)
        if norm < arguments.above:
            return losses
        is_right = slopes(copy.deepcopy(model).double(), batch, num_valid, norm)
        os._exit(0 if is_right else 1)

    StepRunner.compute_gradients = examined  # type: ignore[method-assign]
    base = trainer_arguments(arguments.family, folder, "float32", arguments.steps)
    train(base + arguments.rest)
    print(f"no gradient norm above {arguments.above}; try another --perturbation")
    sys.exit(2)


def slopes(model: Any, batch: Any, num_valid: int, norm: float) -> bool:
    """Compare `norm` with float64: the gradient, and the loss on both sides along it."""
    tokens, labels = (torch.as_tensor(x).flatten(0, -2) for x in (batch.tokens, batch.labels))

    def loss() -> torch.Tensor:
        total: torch.Tensor = model(tokens, labels) / num_valid
        return total

    model.zero_grad()
    loss().backward()
    exact = math.hypot(*(p.grad.norm().item() for p in model.parameters()))
    print(f"float64: gradient norm {exact:.4f}")
    values = []
    with torch.no_grad():
        for side in (1, -2):
            for p in model.parameters():
                p.add_(p.grad, alpha=side * 1e-7 / exact)
            values.append(loss().item())
    slope = (values[0] - values[1]) / 2e-7
    print(f"float64: slope of the loss along the gradient {slope:.4f}", flush=True)
    return abs(exact / norm - 1) < 0.01 and abs(slope / norm - 1) < 0.01


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["runs", "check", "one"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default="deepseek_v3_debug")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=100, help="in which a run may start")
    parser.add_argument("--above", type=float, default=3)
    parser.add_argument("--perturbation", type=int, default=2, help="seed of the changed weights")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:end])
    arguments.rest = sys.argv[end + 1 :]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.what == "runs":
        many_runs(arguments.folder, arguments)
    elif arguments.what == "check":
        check(arguments.folder, arguments)
    else:
        base = trainer_arguments(
            arguments.family, arguments.folder, arguments.dtype, arguments.steps
        )
        one_run(arguments.folder, base + arguments.rest, arguments.steps)


if __name__ == "__main__":
    main()
