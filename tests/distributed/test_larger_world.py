"""A trainer on some ranks of a larger default group, while the others do something else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parity import options
from tests.harness.rank_pool import run_in_new_processes, run_ranks
from tests.harness.runner import trainer_environment
from torchtitan_like.inference.generation import Sampling, generate
from torchtitan_like.run import open_run

STEPS = 3
# With sequence parallelism, `generate` would need prompts of an even length.
TP = {
    "parallelism.tensor_parallel_degree": 2,
    "parallelism.enable_sequence_parallel": "false",
}
LAYOUTS: dict[str, dict[str, object]] = {"fsdp": {}, "tp": TP}
ALL_REDUCES = 50


def train(argv, group=None):
    """Train, and generate after each step. Return losses, norms and tokens."""
    numbers = []
    with open_run("debug_model.toml", *argv, group=group) as trainer:
        for step in range(1, STEPS + 1):
            inputs = trainer.fetch(step)
            record = trainer.train_step(step, inputs, inputs.agreement.wait())
            norm = record.grad_norm.item()
            shares = trainer.world.step_group.gather(record.loss_share.double().reshape(1))
            trainer.parts.eval()
            text = generate(
                trainer.parts[0], [1, 2, 3], num_tokens=4, sampling=Sampling(), context=32
            )
            trainer.parts.train()
            numbers.append((shares.flatten().tolist(), norm, text.ids))
    return numbers


def train_on_ranks_1_and_2(argv):
    """Ranks 1 and 2 train. Ranks 0 and 3 all-reduce, and make no group for the trainers."""
    rank = dist.get_rank()
    pairs = {(1, 2): dist.new_group([1, 2]), (0, 3): dist.new_group([0, 3])}
    if rank in (1, 2):
        return train(argv, pairs[1, 2])
    total = torch.zeros(1)
    for _ in range(ALL_REDUCES):
        total += 1
        dist.all_reduce(total, group=pairs[0, 3])
        total /= 2
    return total.item()


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("tp", marks=pytest.mark.nightly)])
def test_some_ranks_train_while_others_do_other_collectives(layout: str, tmp_path: Path) -> None:
    """They have the numbers of two ranks alone, bit for bit."""
    changes = {"training.local_batch_size": 4 if layout == "fsdp" else 8, **LAYOUTS[layout]}
    small = {**changes, "training.steps": STEPS}
    alone = run_ranks(train, 2, options(str(tmp_path / "alone"), "float32", **small))
    argv = options(str(tmp_path / "some"), "float32", **small)
    first, *trained, last = run_in_new_processes(train_on_ranks_1_and_2, 4, argv)
    assert first == last == ALL_REDUCES
    assert trained == alone


@pytest.mark.nightly
def test_the_documented_program_trains_and_generates(repo_root: Path, tmp_path: Path) -> None:
    guide = (repo_root / "docs/guides/library.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "post_training.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4",
         str(tmp_path / "post_training.py"), f"--job.dump_folder={tmp_path / 'outputs'}"],
        cwd=repo_root, env=trainer_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^step (\d+): grad_norm [\d.]+, ['\"]", done.stdout, re.MULTILINE) == [
        "5",
        "10",
    ]
