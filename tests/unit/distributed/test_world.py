"""Ranks from the launcher's environment, and the device of a rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from torchtitan_like.distributed import world
from torchtitan_like.distributed.world import LaunchedAs, _wait_for_ranks, launched_as, pick_device


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, LaunchedAs(0, 0, 1)),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, LaunchedAs(5, 1, 8)),
    ],
)
def test_launched_as_reads_the_environment(environ, expected):
    assert launched_as(environ) == expected


@pytest.mark.parametrize(
    ("num_visible", "local_rank", "expected"),
    [
        (0, 3, "cpu"),
        (8, 3, "cuda:3"),
        (1, 0, "cuda:0"),
        (1, 3, "cuda:0"),
        (2, 3, "at most 2 ranks"),
    ],
)
def test_pick_device(monkeypatch, num_visible, local_rank, expected):
    """LOCAL_RANK counts processes, not visible devices."""
    selected = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: selected.append(f"cuda:{index}"))
    if " " in expected:
        with pytest.raises(ValueError, match=expected):
            pick_device(local_rank)
        return
    assert str(pick_device(local_rank)) == expected
    assert selected == ([] if expected == "cpu" else [expected])


def test_missing_ranks_are_reported():
    """torch would only report a connection timeout."""
    store = dist.HashStore()
    store.set("here/2", "")
    store.add("here", 1)
    with pytest.raises(
        TimeoutError, match=r"ranks \[1, 3\] did not join within 0 s \(comm.init_timeout_seconds\)"
    ):
        _wait_for_ranks(store, LaunchedAs(0, 0, 4), 0.1)


def test_set_timeout_prefers_the_public_function(monkeypatch) -> None:
    """torch 2.14 made it public. The private one is deprecated and logs a warning."""
    called = []
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda *_: called.append("old"))
    monkeypatch.setattr(dist, "set_timeout", lambda *_: called.append("new"), raising=False)
    world.set_timeout(timedelta(seconds=1), None)
    monkeypatch.delattr(dist, "set_timeout")
    world.set_timeout(timedelta(seconds=1), None)
    assert called == ["new", "old"]
