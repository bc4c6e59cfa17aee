r"""Measure the cost of balancing experts and of their metrics, relative to a training step.

    python benchmarks/expert_balance.py [--steps 8] [--methods bias ...] [--section.key value ...]

Trains the Qwen3 debug model with experts (8 layers, 64 experts) on 2,048 tokens per step, with each
`load_balance`. Every step is logged. Prints medians of the CPU time of the whole step, and of the
code that counts choices, computes the router's losses, updates biases, and computes the metrics.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from torchtitan_like.distributed.world import launched_as
from torchtitan_like.models.argument_rules import BALANCE_METHODS as METHODS
from torchtitan_like.models.layers import balance, moe
from torchtitan_like.run import open_trainer, resolve_run
from torchtitan_like.train import Trainer

SETTINGS = {
    "model.name": "qwen3",
    "model.flavor": "debugmodel_moe",
    "model.hf_assets_path": Path(__file__).resolve().parents[1] / "tests/assets/tokenizer",
    "training.local_batch_size": 8,
    "training.seq_len": 256,
    "training.steps": 100,
    "metrics.log_freq": 1,
    "activation_checkpoint.mode": "none",
}


class Stopwatch:
    """Adds up the CPU time of functions, by part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.thread_time() - started

        return run


def observe(watch: Stopwatch, trainer: Trainer) -> None:
    """Time the functions that balancing and metrics add to a step."""
    moe.count_in_backward = watch.timed("count", moe.count_in_backward)
    moe.add_router_losses = watch.timed("losses", moe.add_router_losses)
    moe.sample_fractions = watch.timed("losses", moe.sample_fractions)
    for part, function in (("count", balance._CountInBackward), ("losses", balance._RouterLosses)):
        kind: Any = function
        kind.backward = staticmethod(watch.timed(part, kind.backward))
    balancer: Any = trainer.optim.balancer
    balancer.prepare = watch.timed("update", balancer.prepare)
    balancer.update = watch.timed("update", balancer.update)
    experts: Any = trainer.metrics.experts
    balancer.read = watch.timed("metrics", balancer.read)
    experts.row = watch.timed("metrics", experts.row)


def measure(method: str, num_steps: int, settings: list[str]) -> tuple[float, dict[str, float]]:
    """Return median CPU seconds of a step, and of each part within it."""
    launched = launched_as()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as resources:
        argv = [f"--{key}={value}" for key, value in SETTINGS.items()]
        argv += [f"--job.dump_folder={folder}", f"--model.args.load_balance={method}", *settings]
        run = resolve_run(argv, launched.world_size)
        trainer = resources.enter_context(open_trainer(run, launched))
        saved = (moe.count_in_backward, moe.add_router_losses, moe.sample_fractions)
        backwards = [balance._CountInBackward.backward, balance._RouterLosses.backward]
        watch = Stopwatch()
        observe(watch, trainer)
        steps, parts = [], []
        try:
            for _ in range(num_steps + 2):
                number = trainer.progress.step + 1
                inputs = trainer.fetch(number)
                watch.seconds.clear()
                started = time.process_time()
                record = trainer.train_step(number, inputs, inputs.agreement.wait())
                trainer.metrics.record(record)
                trainer.metrics.log(number, trainer.optim.expert_loads())
                steps.append(time.process_time() - started)
                parts.append(dict(watch.seconds))
        finally:
            moe.count_in_backward, moe.add_router_losses, moe.sample_fractions = saved
            kinds: list[Any] = [balance._CountInBackward, balance._RouterLosses]
            for kind, backward in zip(kinds, backwards, strict=True):
                kind.backward = staticmethod(backward)
    names = parts[-1]
    medians = {name: statistics.median(part[name] for part in parts[2:]) for name in names}
    return statistics.median(steps[2:]), medians


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="steps to time")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    options, settings = parser.parse_known_args()
    torch.set_num_threads(1)
    for method in options.methods:
        step, parts = measure(method, options.steps, settings)
        total = sum(parts.values())
        detail = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in parts.items())
        print(
            f"{method}: step {step:.3f} s CPU; {detail}; together {1e3 * total:.2f} ms, "
            f"{100 * total / step:.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
