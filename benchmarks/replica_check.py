r"""Cost of `resilience.replica_check_freq`: one comparison of the replicas relative to one training step.

    torchrun --nproc_per_node 2 benchmarks/replica_check.py [--freq 100] [--steps 8] \
        --job.config_file TOML [--section.key value ...]

Prints medians of CPU time and wall time on rank 0, and how much a comparison every `--freq` steps
adds to a step. A comparison hashes all weights of a rank, copies the hash to the host and gathers
it. Use a quiet machine for wall time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from torchtitan_like.build import build_checkpointer
from torchtitan_like.distributed.world import launched_as
from torchtitan_like.launch import join, read_config
from torchtitan_like.resilience.position import RankPosition
from torchtitan_like.resilience.replicas import Replicas
from torchtitan_like.resilience.requests import Requests
from torchtitan_like.train import Trainer


def seconds(call: Callable[[], object], num: int) -> tuple[float, float]:
    """Median CPU and wall seconds of a call, after two that are not counted."""
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
    with tempfile.TemporaryDirectory() as folder:
        settings += [f"--job.dump_folder={folder}"]
        settings += ["--checkpoint.no-enable", "--validation.no-enable"]
        config = read_config(settings, launched.world_size)
        world = join(config, launched)
        checkpointer = build_checkpointer(config.checkpoint, config.job, config.model, world)
        starts = checkpointer.find_start(config.training.steps)
        trainer = Trainer(config, world, checkpointer, starts, Requests(), RankPosition())

        def step() -> None:
            number = trainer.progress.step + 1
            fetched = trainer.fetch(number)
            trainer.train_step(number, fetched, fetched.agreement.wait())
            if world.device.type == "cuda":
                torch.cuda.synchronize()

        of_step = seconds(step, options.steps)
        replicas = Replicas(1, world, trainer.optimizer.named)
        of_check = seconds(lambda: replicas.check(1), options.steps)
        trainer.close()
        checkpointer.close()
        world.leave()
    if launched.rank == 0:
        num = sum(p.numel() for _, p in trainer.optimizer.named)
        print(f"{num:,} parameters, {launched.world_size} ranks")
        for name, one, other in zip(("CPU", "wall"), of_step, of_check, strict=True):
            share = other / options.freq / one
            times = f"step {1e3 * one:.1f} ms, comparison {1e3 * other:.2f} ms"
            print(f"{name}: {times}, every {options.freq} steps {share:.3%}")


if __name__ == "__main__":
    main()
