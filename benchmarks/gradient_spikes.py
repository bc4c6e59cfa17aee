"""Where do large gradient norms of MoE runs come from? `docs/benchmarks/2026-11-26-moe-gradients-h200.md`.

    python benchmarks/gradient_spikes.py runs FOLDER --processes 12 --seconds 100 -- --compile.enable
    python benchmarks/gradient_spikes.py check FOLDER --perturbation 2

`runs` starts equal short runs of one model, several at once on a device, and compares the norm of
each parameter's gradient bit by bit. Arguments after `--` go to the trainer.

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
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchtitan_like.run import main as train
from torchtitan_like.step import StepRunner

STEPS = 14


def trainer_arguments(family: str, folder: Path, dtype: str) -> list[str]:
    return [
        f"--job.config_file=torchtitan_like/train_configs/{family}.toml",
        f"--job.dump_folder={folder}",
        "--debug.seed=7",
        f"--training.steps={STEPS}",
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


def one_run(folder: Path, arguments: list[str]) -> None:
    """Train, and write the norms of the gradients of each step to FOLDER/norms.json."""
    compute, norms, names = StepRunner.compute_gradients, [], []

    def recorded(runner: StepRunner, *args: Any, **options: Any) -> Any:
        losses = compute(runner, *args, **options)
        found = gradients(runner)
        names[:] = found
        norms.append(torch.stack(torch._foreach_norm([*found.values()], dtype=torch.float64)))
        if len(norms) == STEPS:
            (folder / "norms.json").write_text(json.dumps([names, torch.stack(norms).tolist()]))
        return losses

    StepRunner.compute_gradients = recorded  # type: ignore[method-assign]
    train(arguments)


def start_run(folder: Path, family: str, dtype: str, rest: list[str]) -> tuple[list[str], Any]:
    folder.mkdir(parents=True)
    argv = [sys.executable, __file__, "one", str(folder), "--family", family, "--dtype", dtype]
    with open(folder / "log", "w") as log:
        subprocess.run([*argv, "--", *rest], stdout=log, stderr=log, check=False)
    try:
        names, norms = json.loads((folder / "norms.json").read_text())
    except OSError:
        print(f"{folder}: no result; its log ends with {(folder / 'log').read_text()[-200:]!r}")
        return [], None
    return names, norms


def many_runs(folder: Path, arguments: argparse.Namespace) -> None:
    end = time.monotonic() + arguments.seconds

    def loop(worker: int) -> list[tuple[list[str], Any]]:
        found = []
        while time.monotonic() < end:
            name = folder / f"{worker}-{len(found)}"
            found.append(start_run(name, arguments.family, arguments.dtype, arguments.rest))
        return found

    with concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool:
        results = [r for rs in pool.map(loop, range(arguments.processes)) for r in rs if r[1]]
    print(f"{len(results)} runs of {STEPS} steps")
    if not results:
        sys.exit(2)
    for step in range(STEPS):
        kinds = collections.Counter(tuple(norms[step]) for _, norms in results)
        totals = sorted(math.hypot(*kind) for kind in kinds)
        print(f"step {step + 1}: {len(kinds)} kinds, norm {totals[0]:.4g} to {totals[-1]:.4g}")


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
    train(trainer_arguments(arguments.family, folder, "float32") + arguments.rest)
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
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=100)
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
        base = trainer_arguments(arguments.family, arguments.folder, arguments.dtype)
        one_run(arguments.folder, base + arguments.rest)


if __name__ == "__main__":
    main()
