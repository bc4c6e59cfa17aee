"""Groups wait long for the first step of a process, and short from then on; the checkpoint group always waits long."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import GROUP_TIMEOUT, run_ranks
from torchtitan_like.distributed.world import CHECKPOINT_TIMEOUT

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
        dist.distributed_c10d._set_pg_timeout(GROUP_TIMEOUT, group)
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
            assert checkpoint == CHECKPOINT_TIMEOUT.total_seconds()
