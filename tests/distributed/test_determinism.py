"""Runs are reproducible bit for bit; random numbers depend on seed and sample, not on layout."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

import torchtitan_like.step as step_module
from tests.distributed.parity import build, options, release, run_cell
from tests.harness.rank_pool import run_ranks


def equal_runs(folder, argv):
    """Return whether two runs have bit-equal losses, norms, gradients and weights."""
    try:
        first, second = (
            run_cell(["--job.dump_folder", f"{folder}/{number}", *argv]) for number in (1, 2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    if first is None:
        return True
    leaves = [torch.utils._pytree.tree_leaves(asdict(trace)) for trace in (first, second)]
    return all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, {}),
        pytest.param(2, {"training.local_batch_size": 4}, marks=pytest.mark.nightly),
        (2, {"training.local_batch_size": 2, "training.mixed_precision_param": "bfloat16"}),
        pytest.param(
            4,
            {"training.local_batch_size": 2, "parallelism.data_parallel_replicate_degree": 2},
            marks=pytest.mark.nightly,
        ),
        (2, {"training.local_batch_size": 4, "debug.deterministic": "true"}),
    ],
    ids=["one", "fsdp", "fsdp-bf16-accumulate", "hsdp", "deterministic"],
)
def test_repeated_run_is_bit_equal(tmp_path, world_size, overrides):
    argv = options(str(tmp_path / "run"), "float32", **overrides)
    index = argv.index("--job.dump_folder")
    assert all(run_ranks(equal_runs, world_size, str(tmp_path), argv[:index] + argv[index + 2 :]))


def random_draws(argv):
    """Return (first sample, random number) of each micro-batch.

    Between steps the ranks draw other numbers from the same generator.
    """
    trainer = build(argv)
    drawn, derive = [], step_module.derive_seed
    step_module.derive_seed = lambda seed, sample: drawn.append(sample) or derive(seed, sample)
    trainer.parts[0].register_forward_pre_hook(
        lambda module, args: drawn.append(torch.rand(()).item())
    )
    try:
        for step in (1, 2):
            torch.rand(step + trainer.world.rank)
            fetched = trainer.fetch(step)
            trainer.train_step(step, fetched, fetched.agreement.wait())
    finally:
        step_module.derive_seed = derive
    release(trainer)
    return list(zip(drawn[::2], drawn[1::2], strict=True))


def test_random_numbers_of_a_micro_batch_do_not_depend_on_layout(tmp_path):
    drawn = []
    for world_size in (1, 2, 4):
        argv = options(
            str(tmp_path / str(world_size)), "float32", **{"training.local_batch_size": 2}
        )
        drawn.append(
            sorted(pair for pairs in run_ranks(random_draws, world_size, argv) for pair in pairs)
        )
    assert [sample for sample, _ in drawn[0]] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert len({number for _, number in drawn[0]}) == 8
    assert drawn[0] == drawn[1] == drawn[2]
