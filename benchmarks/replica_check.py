r"""Cost of `resilience.replica_check_freq`: a comparison of replicas relative to a training step.

    torchrun --nproc_per_node=2 benchmarks/replica_check.py [--freq 100] [--steps 8] \
        --job.config_file TOML [--section.key value ...]

Prints medians of CPU time and wall time on rank 0, and the relative cost of a comparison every
`--freq` steps. A comparison hashes all weights of a rank, copies the hash to the host and gathers
it. Measure wall time on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from torchtitan_like.distributed.world import launched_as
from torchtitan_like.resilience.corruption import Replicas
from torchtitan_like.run import open_trainer, resolve_run


def median_seconds(call: Callable[[], object], num: int) -> tuple[float, float]:
    """Return the median CPU and wall seconds of a call, after two warm-up calls."""
    readings = []
    for _ in range(num + 2):
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        readings.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu_s, wall_s = zip(*readings[2:], strict=True)
    return statistics.median(cpu_s), statistics.median(wall_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--freq", type=int, default=100, help="steps between two comparisons")
    parser.add_argument("--steps", type=int, default=8, help="steps and comparisons to time")
    options, settings = parser.parse_known_args()
    torch.set_num_threads(1)
    launched = launched_as()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as resources:
        settings += [f"--job.dump_folder={folder}"]
        settings += ["--checkpoint.no-enable", "--validation.no-enable"]
        run = resolve_run(settings, launched.world_size)
        trainer = resources.enter_context(open_trainer(run, launched))

        def step() -> None:
            number = trainer.progress.step + 1
            fetched = trainer.fetch(number)
            trainer.train_step(number, fetched, fetched.agreement.wait())
            if trainer.world.device.type == "cuda":
                torch.cuda.synchronize()

        step_times = median_seconds(step, options.steps)
        replicas = Replicas(1, trainer.world, trainer.optim.optimizer.named)
        check_times = median_seconds(lambda: replicas.check(1), options.steps)
    if launched.rank == 0:
        num = sum(p.numel() for _, p in trainer.optim.optimizer.named)
        print(f"{num:,} parameters, {launched.world_size} ranks")
        for name, step_s, check_s in zip(("CPU", "wall"), step_times, check_times, strict=True):
            share = check_s / options.freq / step_s
            times = f"step {1e3 * step_s:.1f} ms, comparison {1e3 * check_s:.2f} ms"
            print(f"{name}: {times}, every {options.freq} steps {share:.3%}")


if __name__ == "__main__":
    main()
