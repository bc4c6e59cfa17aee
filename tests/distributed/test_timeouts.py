"""Groups wait long for the first step of a process, and short from then on; the checkpoint group always waits long."""

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


def timeouts(argv):
    """Seconds of every group this run made: before the first step, after it, and at the end; and the checkpoints'."""
    known = set(dist.distributed_c10d._world.pg_map)
    trainer = build(argv)
    mesh = trainer.world.mesh
    groups = {group for group in dist.distributed_c10d._world.pg_map if group not in known}
    groups |= {mesh.get_group(name) for name in mesh.mesh_dim_names}
    checkpoint = trainer.world.checkpoint_group.group
    groups.remove(checkpoint)
    own = {seconds(group) for group in groups - {dist.group.WORLD}}
    assert own == {LONG}, "also those that a mesh makes, to which torch gives 1,800 seconds"

    def read():
        return sorted({seconds(group) for group in groups})

    seen, record = [read()], trainer.metrics.record

    def traced(step):
        seen.append(read())
        record(step)

    trainer.metrics.record = traced
    trainer.train()
    seen.append(read())
    at_end = seconds(checkpoint)
    for group in groups:  # those of the mesh serve later tests
        set_timeout(GROUP_TIMEOUT, group)
    release(trainer)
    return seen, at_end


def seconds(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


@pytest.mark.parametrize(("world_size", "overrides"), [
    (2, {}), (2, {"parallelism.data_parallel_replicate_degree": 2}),
    (4, {"parallelism.data_parallel_replicate_degree": 2}),
], ids=["fsdp", "ddp", "hsdp"])  # fmt: skip
def test_all_groups_are_tightened_after_the_first_step_of_each_process(tmp_path, world_size, overrides):
    for steps, num_steps in ((2, 2), (4, 2)):  # the second run resumes at step 3
        argv = options(
            str(tmp_path / "run"),
            "float32",
            **{"comm.init_timeout_seconds": LONG, "comm.train_timeout_seconds": SHORT, "training.steps": steps},
            **{"checkpoint.enable": "true", "checkpoint.last_save_model_only": "false"},
            **{"training.local_batch_size": 8 // world_size, **overrides},
        )
        for seen, checkpoint in run_ranks(timeouts, world_size, argv):
            assert len(seen) == num_steps + 2
            assert seen[-2:] == [[SHORT], [SHORT]], "every group, from the second step on"
            assert LONG in seen[0] and seen[1] == seen[0], "none before the first step is over"
            assert checkpoint == 1800, "the default of comm.checkpoint_timeout_seconds"


def stand_still(argv, folder):
    """Rank 1 stays in its third step until both ranks have left their stacks; these, on rank 1."""
    left = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(heartbeat, "INTERVAL", 0.05)
        trainer = build(argv)
        trainer.world.tighten_timeouts = lambda timeout: None  # the groups outlive the test
        step_of = trainer.train_step

        def a_step_that_hangs(step, *rest):
            if step == 3 and trainer.world.rank == 1:
                give_up, wanted = time.monotonic() + 20, ("in train", "a_step_that_hangs")
                while len(left) < 2 or not all(map(str.__contains__, left, wanted)):
                    assert time.monotonic() < give_up, left
                    time.sleep(0.1)
                    left[:] = [path.read_text() for path in sorted(folder.glob("stacks-rank-*.txt"))]
            return step_of(step, *rest)

        trainer.train_step = a_step_that_hangs
        trainer.train()
        release(trainer)
        return left


def test_a_hung_rank_leaves_the_stacks_of_all(tmp_path):
    settings = {"comm.train_timeout_seconds": 1, "training.steps": 4, "training.local_batch_size": 4}
    folder = tmp_path / "run/attempts/1/heartbeat"
    stacks = run_ranks(stand_still, 2, options(str(tmp_path / "run"), "float32", **settings), folder)[1]
    places = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [(place["phase"], place["step"]) for place in places] == [("end", 4)] * 2
    assert "a_step_that_hangs" in stacks[1] and "in train" in stacks[0]
