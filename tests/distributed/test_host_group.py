"""An action of one rank for all."""

import pytest
import torch.distributed as dist

from tests.harness.rank_pool import run_ranks
from torchtitan_like.data.errors import DataError
from torchtitan_like.distributed.world import HostGroup


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
