"""All ranks make the same decision if one rank corrupts a gradient after the reduction."""

import pytest
import torch

from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.resilience.corruption import bits_hash
from torchtitan_like.util.exit_codes import ExitCode

DDP = {"parallelism.data_parallel_replicate_degree": 2}
TP = {"parallelism.tensor_parallel_degree": 2}
SHARD_2 = {"parallelism.data_parallel_shard_degree": 2}
PP = {
    "parallelism.pipeline_parallel_degree": 2,
    "parallelism.pipeline_parallel_schedule": "GPipe",
    "parallelism.pipeline_parallel_microbatch_size": 4,
}
CP = {"parallelism.context_parallel_degree": 2}
SIMPLE = {"parallelism.data_parallel_impl": "simple_fsdp"}
# name -> (ranks, data-parallel ranks, settings)
LAYOUTS = {
    "ddp": (2, 2, DDP),
    "fsdp2": (2, 2, {}),
    "tp": (2, 1, TP),
    "pp": (2, 1, PP),
    "cp": (2, 1, CP),
    "simple_fsdp": (2, 2, SIMPLE),
    "simple_fsdp ddp": (2, 2, SIMPLE | DDP),
    "hsdp": (4, 4, DDP | SHARD_2),
    "ddp x tp": (4, 2, DDP | TP),
    "fsdp2 x tp": (4, 2, SHARD_2 | TP),
    "ddp x pp": (4, 2, DDP | PP),
    "ddp x cp": (4, 2, DDP | CP),
}
REGULAR_LAYOUTS = ("tp", "simple_fsdp ddp")
ALL_LAYOUTS = [
    pytest.param(name, marks=[] if name in REGULAR_LAYOUTS else pytest.mark.nightly)
    for name in LAYOUTS
]
BAD_STEP = 3


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_hashes(trainer) -> dict[tuple, int]:
    """Return the hash of each local shard by parameter and shard index."""
    hashes = {}
    for name, parameter in trainer.optim.optimizer.named:
        shard = ()
        if hasattr(parameter, "placements"):
            coordinate = parameter.device_mesh.get_coordinate()
            sharded = (i for i, p in enumerate(parameter.placements) if not p.is_replicate())
            shard = tuple(coordinate[i] for i in sharded)
        hashes[name, shard] = int(bits_hash(parameter))
    return hashes


def corrupt_reduced_gradient(trainer, value: float, bad_step: int) -> None:
    """Multiply one element of a correct gradient on the last rank, to simulate a flipped bit.

    The element belongs to a norm weight, which tensor parallelism replicates too.
    """
    if trainer.world.rank != trainer.world.size - 1:
        return
    parameter = next(p for name, p in trainer.optim.optimizer.named if "norm" in name)

    def corrupt(p: torch.Tensor) -> None:
        if trainer.progress.step + 1 == bad_step:
            local(p.grad).view(-1)[0] *= value

    if not trainer.optim.optimizer.is_atomic:
        parameter.register_post_accumulate_grad_hook(corrupt)
        hooks = parameter._post_accumulate_grad_hooks
        update, corruption = hooks.items()
        hooks.clear()
        hooks.update([corruption, update])  # autograd calls them in the order of insertion
        return
    clip = trainer.optim.optimizer.clip_gradients

    def corrupt_and_clip(max_norm: float) -> torch.Tensor:
        corrupt(parameter)
        return clip(max_norm)

    trainer.optim.optimizer.clip_gradients = corrupt_and_clip


def train_with_corrupt_gradient(argv, value=float("nan"), bad_step=BAD_STEP):
    """Return exit code, last step, skipped steps, and hashes before the step and at the end."""
    trainer = build(argv)
    corrupt_reduced_gradient(trainer, value, bad_step)
    before, rows, step = {}, [], trainer.train_step

    def train_step(number, *args):
        if number == bad_step:
            before.update(shard_hashes(trainer))
        return step(number, *args)

    trainer.train_step = train_step
    trainer.metrics.observers.append(rows.extend)
    code = trainer.train()
    after = shard_hashes(trainer)
    release(trainer)
    skipped = [row["step"] for row in rows if row["skipped"]]
    return code, trainer.progress.step, skipped, before, after


def hashes_at_start(argv):
    trainer = build(argv)
    step, hashes = trainer.progress.step, shard_hashes(trainer)
    release(trainer)
    return step, hashes


def arguments(tmp_path, layout, **changes):
    num_ranks, data_ranks, settings = LAYOUTS[layout]
    changes = {
        "training.local_batch_size": 8 // data_ranks,
        "checkpoint.enable": "true",
        "checkpoint.interval": 100,
        "checkpoint.last_save_model_only": "false",
        **changes,
    }
    return num_ranks, options(str(tmp_path / "run"), "float32", **settings, **changes)


def merge_hashes(hashes_by_rank: list[dict[tuple, int]]) -> dict[tuple, int]:
    """Return one hash per shard; fail if the replicas of a shard differ."""
    merged: dict[tuple, int] = {}
    for hashes in hashes_by_rank:
        for key, value in hashes.items():
            assert merged.setdefault(key, value) == value, f"copies of {key} differ"
    return merged


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_all_ranks_stop_and_save_the_last_finite_weights(tmp_path, layout):
    num_ranks, argv = arguments(tmp_path, layout, **{"training.steps": 8})
    endings = run_ranks(train_with_corrupt_gradient, num_ranks, argv)
    assert {ending[:2] for ending in endings} == {(ExitCode.BAD_NUMBERS, BAD_STEP - 1)}
    assert [skipped for _, _, skipped, _, _ in endings] == [[3, 4, 5]] * num_ranks
    before = merge_hashes([ending[3] for ending in endings])
    after = merge_hashes([ending[4] for ending in endings])
    assert before == after
    assert [step.step for step in published_steps(tmp_path / "run/checkpoint")] == [BAD_STEP - 1]
    starts = run_ranks(hashes_at_start, num_ranks, argv)
    assert {step for step, _ in starts} == {BAD_STEP - 1}
    assert merge_hashes([hashes for _, hashes in starts]) == before


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_all_ranks_skip_the_same_step_and_replicas_stay_equal(tmp_path, layout):
    num_ranks, argv = arguments(tmp_path, layout, **{"resilience.on_nonfinite": "skip"})
    endings = run_ranks(train_with_corrupt_gradient, num_ranks, argv)
    assert [ending[:3] for ending in endings] == [(ExitCode.DONE, 5, [BAD_STEP])] * num_ranks
    before = merge_hashes([ending[3] for ending in endings])
    after = merge_hashes([ending[4] for ending in endings])
    assert before.keys() == after.keys() and before != after


@pytest.mark.parametrize("layout", ["ddp", pytest.param("ddp x tp", marks=pytest.mark.nightly)])
def test_finite_corruption_on_one_replica_is_a_spike_on_all_ranks(tmp_path, layout):
    spikes = {"resilience.on_spike": "skip", "resilience.spike_window": 8, "training.steps": 11}
    num_ranks, argv = arguments(tmp_path, layout, **spikes)
    endings = run_ranks(train_with_corrupt_gradient, num_ranks, argv, 1e7, 10)
    assert [ending[:3] for ending in endings] == [(ExitCode.DONE, 11, [10])] * num_ranks
    merge_hashes([ending[4] for ending in endings])


@pytest.mark.parametrize("layout", ["ddp", "tp"])
def test_optimizer_in_backward_stops_all_ranks_without_checkpoint(tmp_path, layout):
    """Some weights are updated before the gradient norm exists, so replicas may differ."""
    early = {"optimizer.early_step_in_backward": "true", "training.steps": 8}
    num_ranks, argv = arguments(tmp_path, layout, **early)
    endings = run_ranks(train_with_corrupt_gradient, num_ranks, argv)
    expected = (ExitCode.BAD_NUMBERS, BAD_STEP - 1, [3, 4, 5])
    assert [ending[:3] for ending in endings] == [expected] * num_ranks
    assert published_steps(tmp_path / "run/checkpoint") == []
