"""Run an action on one rank or on all ranks, and raise its error on every rank."""

import pytest
import torch.distributed as dist

from tests.harness.rank_pool import run_ranks
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.distributed.world import HostGroup


def run_by_leader(fails):
    group, calls = HostGroup([0, 1], dist.default_pg_timeout), []

    def action():
        calls.append(dist.get_rank())
        if fails:
            raise DataError("no data")
        return {"offset": 7}

    try:
        return calls, group.run_on_leader(action)
    except DataError as error:
        return calls, str(error)


@pytest.mark.parametrize(("fails", "result"), [(False, {"offset": 7}), (True, "no data")])
def test_all_ranks_get_the_result_or_error_of_the_leader(fails, result):
    assert run_ranks(run_by_leader, 2, fails) == [([0], result), ([], result)]


def test_one_rank_needs_no_group():
    assert HostGroup.alone().run_on_leader(lambda: 7) == 7


def run_by_all(failing_ranks):
    group = HostGroup([0, 1], dist.default_pg_timeout)

    def action():
        if dist.get_rank() in failing_ranks:
            raise DataError(f"no data on rank {dist.get_rank()}")
        return dist.get_rank()

    try:
        return group.run_on_all(action)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize(
    ("failing_ranks", "results"),
    [([], [0, 1]), ([1], ["no data on rank 1"] * 2), ([0, 1], ["no data on rank 0"] * 2)],
)
def test_all_ranks_raise_the_first_error(failing_ranks, results):
    assert run_ranks(run_by_all, 2, failing_ranks) == results
