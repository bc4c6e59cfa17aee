"""Process groups have a long timeout until the first step and a short one afterwards.

The checkpoint group keeps its long timeout.
"""

import json
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import GROUP_TIMEOUT, run_ranks
from torchtitan_like.distributed.world import set_timeout
from torchtitan_like.resilience import heartbeat

LONG, SHORT = 300, 17


def train_and_read_timeouts(argv):
    """Return the timeouts in seconds of this run's groups, and of its checkpoint group.

    They are read before the first step, after each step and at the end.
    """
    earlier_groups = set(dist.distributed_c10d._world.pg_map)
    trainer = build(argv)
    mesh = trainer.world.mesh
    groups = {group for group in dist.distributed_c10d._world.pg_map if group not in earlier_groups}
    groups |= {mesh.get_group(name) for name in mesh.mesh_dim_names}
    checkpoint = trainer.world.checkpoint_group.group
    groups.remove(checkpoint)
    timeouts_of_groups = {seconds(group) for group in groups - {dist.group.WORLD}}
    assert timeouts_of_groups == {LONG}, "groups of the mesh must not keep torch's 1,800 seconds"

    def read():
        return sorted({seconds(group) for group in groups})

    readings, record = [read()], trainer.metrics.record

    def traced(step):
        readings.append(read())
        record(step)

    trainer.metrics.record = traced
    trainer.train()
    readings.append(read())
    at_end = seconds(checkpoint)
    for group in groups:  # later tests use the groups of the mesh
        set_timeout(GROUP_TIMEOUT, group)
    release(trainer)
    return readings, at_end


def seconds(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


REPLICATE = {"parallelism.data_parallel_replicate_degree": 2}


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        pytest.param(2, {}, id="fsdp"),
        pytest.param(2, REPLICATE, id="ddp", marks=pytest.mark.nightly),
        pytest.param(4, REPLICATE, id="hsdp", marks=pytest.mark.nightly),
    ],
)
def test_group_timeouts_are_shortened_after_the_first_step_of_a_process(
    tmp_path, world_size, overrides
):
    for steps, num_steps in ((2, 2), (4, 2)):  # the second run resumes at step 3
        argv = options(
            str(tmp_path / "run"),
            "float32",
            **{
                "comm.init_timeout_seconds": LONG,
                "comm.train_timeout_seconds": SHORT,
                "training.steps": steps,
            },
            **{"checkpoint.enable": "true", "checkpoint.last_save_model_only": "false"},
            **{"training.local_batch_size": 8 // world_size, **overrides},
        )
        for readings, checkpoint in run_ranks(train_and_read_timeouts, world_size, argv):
            assert len(readings) == num_steps + 2
            assert readings[-2:] == [[SHORT], [SHORT]], "expected the short timeout from step 2 on"
            assert LONG in readings[0] and readings[1] == readings[0], (
                "expected no change before the end of step 1"
            )
            assert checkpoint == 1800, "the default of comm.checkpoint_timeout_seconds"


def hang_in_step_3(argv, folder):
    """Hang in step 3 on rank 1 until both ranks have written their stacks; rank 1 returns them."""
    stacks = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(heartbeat, "INTERVAL", 0.05)
        trainer = build(argv)
        trainer.world.tighten_timeouts = lambda timeout: None  # later tests use these groups
        train_step = trainer.train_step

        def hanging_step(step, *rest):
            if step == 3 and trainer.world.rank == 1:
                deadline, expected = time.monotonic() + 20, ("in train", "hanging_step")
                while len(stacks) < 2 or not all(map(str.__contains__, stacks, expected)):
                    assert time.monotonic() < deadline, stacks
                    time.sleep(0.1)
                    stacks[:] = [
                        path.read_text() for path in sorted(folder.glob("stacks-rank-*.txt"))
                    ]
            return train_step(step, *rest)

        trainer.train_step = hanging_step
        trainer.train()
        release(trainer)
        return stacks


def test_hung_rank_makes_all_ranks_write_their_stacks(tmp_path):
    settings = {
        "comm.train_timeout_seconds": 1,
        "training.steps": 4,
        "training.local_batch_size": 4,
    }
    folder = tmp_path / "run/attempts/1/heartbeat"
    stacks = run_ranks(
        hang_in_step_3, 2, options(str(tmp_path / "run"), "float32", **settings), folder
    )[1]
    heartbeats = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [(beat["phase"], beat["step"]) for beat in heartbeats] == [("end", 4)] * 2
    assert "hanging_step" in stacks[1] and "in train" in stacks[0]
