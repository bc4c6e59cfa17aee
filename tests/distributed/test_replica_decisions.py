"""A gradient goes bad on one rank after the reduction: all ranks take the same decision."""

import pytest
import torch

from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.resilience.replicas import bits_hash
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
EVERY_TIME = ("ddp", "tp", "hsdp", "ddp x tp", "simple_fsdp ddp")
ALL_LAYOUTS = [
    pytest.param(name, marks=[] if name in EVERY_TIME else pytest.mark.nightly) for name in LAYOUTS
]
BAD_STEP = 3


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_hashes(trainer) -> dict[tuple, int]:
    """Hash of each local shard, by parameter and position among the shards."""
    hashes = {}
    for name, parameter in trainer.optimizer.named:
        shard = ()
        if hasattr(parameter, "placements"):
            coordinate = parameter.device_mesh.get_coordinate()
            sharded = (i for i, p in enumerate(parameter.placements) if not p.is_replicate())
            shard = tuple(coordinate[i] for i in sharded)
        hashes[name, shard] = int(bits_hash(parameter))
    return hashes


def spoil_after_the_reduction(trainer, value: float, bad_step: int) -> None:
    """On the last rank, multiply one element of an otherwise right gradient, as a flipped bit does.

    Multiplied is an element of a norm's weight, which tensor parallelism replicates as well.
    """
    if trainer.world.rank != trainer.world.size - 1:
        return
    parameter = next(p for name, p in trainer.optimizer.named if "norm" in name)

    def spoil(p: torch.Tensor) -> None:
        if trainer.progress.step + 1 == bad_step:
            local(p.grad).view(-1)[0] *= value

    if not trainer.optimizer.is_atomic:
        parameter.register_post_accumulate_grad_hook(spoil)
        hooks = parameter._post_accumulate_grad_hooks
        update, spoiling = hooks.items()
        hooks.clear()
        hooks.update([spoiling, update])  # autograd calls them in the order of insertion
        return
    clip = trainer.optimizer.clip_gradients

    def spoil_and_clip(max_norm: float) -> torch.Tensor:
        spoil(parameter)
        return clip(max_norm)

    trainer.optimizer.clip_gradients = spoil_and_clip


def train_with_a_bad_rank(argv, value=float("nan"), bad_step=BAD_STEP):
    """Exit code, last step, skipped steps, hashes before the bad step, hashes at the end."""
    trainer = build(argv)
    spoil_after_the_reduction(trainer, value, bad_step)
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


def hashes_at_the_start(argv):
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


def joined(of_ranks: list[dict[tuple, int]]) -> dict[tuple, int]:
    """One hash per shard; fails where copies of a shard differ."""
    whole: dict[tuple, int] = {}
    for hashes in of_ranks:
        for key, value in hashes.items():
            assert whole.setdefault(key, value) == value, f"copies of {key} differ"
    return whole


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_all_ranks_stop_and_save_the_weights_from_before(tmp_path, layout):
    num_ranks, argv = arguments(tmp_path, layout, **{"training.steps": 8})
    endings = run_ranks(train_with_a_bad_rank, num_ranks, argv)
    assert {ending[:2] for ending in endings} == {(ExitCode.BAD_NUMBERS, BAD_STEP - 1)}
    assert [skipped for _, _, skipped, _, _ in endings] == [[3, 4, 5]] * num_ranks
    before = joined([ending[3] for ending in endings])
    after = joined([ending[4] for ending in endings])
    assert before == after
    assert [step.step for step in published_steps(tmp_path / "run/checkpoint")] == [BAD_STEP - 1]
    starts = run_ranks(hashes_at_the_start, num_ranks, argv)
    assert {step for step, _ in starts} == {BAD_STEP - 1}
    assert joined([hashes for _, hashes in starts]) == before


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_all_ranks_skip_the_same_step_and_replicas_stay_equal(tmp_path, layout):
    num_ranks, argv = arguments(tmp_path, layout, **{"resilience.on_nonfinite": "skip"})
    endings = run_ranks(train_with_a_bad_rank, num_ranks, argv)
    assert [ending[:3] for ending in endings] == [(ExitCode.DONE, 5, [BAD_STEP])] * num_ranks
    before = joined([ending[3] for ending in endings])
    after = joined([ending[4] for ending in endings])
    assert before.keys() == after.keys() and before != after


@pytest.mark.parametrize("layout", ["ddp", "ddp x tp"])
def test_a_finite_flip_on_one_replica_is_the_same_spike_on_all(tmp_path, layout):
    spikes = {"resilience.on_spike": "skip", "resilience.spike_window": 8, "training.steps": 11}
    num_ranks, argv = arguments(tmp_path, layout, **spikes)
    endings = run_ranks(train_with_a_bad_rank, num_ranks, argv, 1e7, 10)
    assert [ending[:3] for ending in endings] == [(ExitCode.DONE, 11, [10])] * num_ranks
    joined([ending[4] for ending in endings])


@pytest.mark.parametrize("layout", ["ddp", "tp"])
def test_in_backward_all_ranks_stop_and_save_nothing(tmp_path, layout):
    """Some weights are updated before the norm is known, so replicas may differ."""
    early = {"optimizer.early_step_in_backward": "true", "training.steps": 8}
    num_ranks, argv = arguments(tmp_path, layout, **early)
    endings = run_ranks(train_with_a_bad_rank, num_ranks, argv)
    expected = (ExitCode.BAD_NUMBERS, BAD_STEP - 1, [3, 4, 5])
    assert [ending[:3] for ending in endings] == [expected] * num_ranks
    assert published_steps(tmp_path / "run/checkpoint") == []
