"""The rank pool reuses processes, and replaces a pool after a failure. No call hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.harness import rank_pool
from tests.harness.rank_pool import RankError, run_in_new_processes, run_ranks
from tests.harness.runner import ROOT


def identity() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def summed(value: torch.Tensor) -> torch.Tensor:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("a fault of rank 1")
    dist.barrier()


def die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def die_on_rank_0_after_rank_1_raised() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the peer is gone")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(100)


def leave_traces() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(dist.get_rank() + 5)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")


def traces() -> tuple[torch.dtype, float, str | None, str]:
    return (
        torch.get_default_dtype(),
        torch.rand(()).item(),
        os.environ.get("LEFT_BEHIND"),
        os.getcwd(),
    )


def destroy_the_world() -> None:
    dist.destroy_process_group()


def make_groups(count: int) -> int:
    for _ in range(count):
        dist.new_group()
    return os.getpid()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_are_in_rank_order_and_tensors_are_copied() -> None:
    assert [rank for rank, _ in run_ranks(identity, 3)] == [0, 1, 2]
    assert [t.tolist() for t in run_ranks(summed, 2, torch.tensor([1.0, 2.0]))] == [
        [3.0, 6.0],
        [3.0, 6.0],
    ]


def test_processes_are_started_once() -> None:
    assert run_ranks(identity, 2) == run_ranks(identity, 2)


def test_idle_ranks_are_stopped() -> None:
    pids = [pid for _, pid in run_ranks(identity, 2)]
    deadline = time.monotonic() + 30
    while any(psutil.Process(pid).status() != psutil.STATUS_STOPPED for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [pid for _, pid in run_ranks(identity, 2)] == pids


def test_seed_dtype_environment_and_folder_are_reset() -> None:
    before = run_ranks(traces, 2)
    run_ranks(leave_traces, 2)
    assert run_ranks(traces, 2) == before


@pytest.mark.parametrize(
    ("fn", "rank", "text"),
    [
        (raise_on_rank_1, 1, "ValueError: a fault of rank 1"),
        (die_on_rank_0, 0, "exit code -9"),
    ],
)
def test_a_failure_names_its_rank_and_replaces_the_pool(fn, rank, text) -> None:
    old = [pid for _, pid in run_ranks(identity, 2)]
    with pytest.raises(RankError, match=text) as raised:
        run_ranks(fn, 2)
    assert raised.value.rank == rank
    assert not any(map(is_alive, old))
    assert [r for r, pid in run_ranks(identity, 2) if pid not in old] == [0, 1]


def test_a_dead_rank_is_named_before_one_that_raised_earlier(monkeypatch) -> None:
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", 60.0)  # a slow machine reports the death late
    with pytest.raises(RankError, match=r"(?s)^rank 0 of 2:.*rank 1 of 2:.*peer is gone") as raised:
        run_in_new_processes(die_on_rank_0_after_rank_1_raised, 2)
    assert raised.value.rank == 0


def test_the_exception_of_a_rank_is_returned() -> None:
    with pytest.raises(RankError) as raised:
        run_in_new_processes(raise_on_rank_1, 2)
    assert isinstance(raised.value.exception, ValueError)


def test_a_hung_rank_is_killed_and_its_stack_shown() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)no answer from rank 1 within 3 s.*in hang_on_rank_1"):
        run_ranks(hang_on_rank_1, 2, timeout=3)  # rank 0 answers in time
    assert time.monotonic() - started < 60


def test_an_expected_failure_keeps_the_shared_pool() -> None:
    before = run_ranks(identity, 2)
    with pytest.raises(RankError):
        run_in_new_processes(raise_on_rank_1, 2)
    assert run_ranks(identity, 2) == before


@pytest.mark.parametrize(
    ("fn", "args"), [(destroy_the_world, ()), (make_groups, (rank_pool.MAX_GROUPS,))]
)
def test_an_unusable_pool_is_replaced(fn, args) -> None:
    before = run_ranks(identity, 2)
    run_ranks(fn, 2, *args)
    assert {pid for _, pid in run_ranks(identity, 2)}.isdisjoint(pid for _, pid in before)


def test_a_function_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(TypeError, match="top level of its module"):
        run_in_new_processes(lambda: None, 1)


def test_killing_a_pool_ends_its_ranks() -> None:
    pids = [pid for _, pid in run_ranks(identity, 2)]
    rank_pool.kill_all_pools()
    assert not any(map(is_alive, pids))


STARTS_RANKS_AND_DIES = """
import os, signal
from tests.harness.rank_pool import run_ranks
from tests.unit.harness.test_rank_pool import identity
print(*(pid for _, pid in run_ranks(identity, 2)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_idle_ranks_end_with_a_killed_parent() -> None:
    result = subprocess.run(
        [sys.executable, "-c", STARTS_RANKS_AND_DIES], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))
