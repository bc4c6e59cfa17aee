"""What the groups of the host take of each rank, and an action of one rank for all."""

import os

import pytest
import torch.distributed as dist

from tests.distributed.parity import options
from tests.harness.rank_pool import run_in_process_of_its_own, run_ranks
from torchtitan_like.data.errors import DataError
from torchtitan_like.distributed.world import HostGroup, LaunchedAs
from torchtitan_like.launch import join, read_config


def acted(fails):
    group, calls = HostGroup([0, 1], dist.default_pg_timeout), []

    def action():
        calls.append(dist.get_rank())
        if fails:
            raise DataError("no data")
        return {"found": 7}

    try:
        return calls, group.leader_does(action)
    except DataError as error:
        return calls, str(error)


@pytest.mark.parametrize(("fails", "result"), [(False, {"found": 7}), (True, "no data")])
def test_what_the_leader_does_or_its_error_is_everyones(fails, result):
    assert run_ranks(acted, 2, fails) == [([0], result), ([], result)]


def test_a_leader_alone_needs_no_group():
    assert HostGroup.alone().leader_does(lambda: 7) == 7


def sockets():
    names = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum("socket" in os.readlink(name) for name in names if os.path.islink(name))


def sockets_of_groups(argv):
    before, rank = sockets(), dist.get_rank()
    world = join(read_config(argv, dist.get_world_size()), LaunchedAs(rank, rank, dist.get_world_size()))
    world.step_group.sum_async([1]).wait()
    world.checkpoint_group.sum_async([1]).wait()
    made = sockets() - before
    world.leave()
    return made


def test_a_group_opens_no_socket_to_each_rank(tmp_path):
    """On 16,384 ranks each of them would have 16,384 for each group, and may have 1,024 files open."""
    num_ranks = 8
    argv = options(str(tmp_path / "run"), "float32", **{"training.local_batch_size": 1})
    most = max(run_in_process_of_its_own(sockets_of_groups, num_ranks, argv))
    assert most <= 2 * 4, "of each group a socket that listens, and those to its neighbours in a ring"
