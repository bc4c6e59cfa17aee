"""Replica groups: quorum and exchange over torchft's protocol, and the positions of groups.

Each group of a test is a thread with a group of one rank.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.harness.ports import listening_addresses
from torchtitan_like.distributed.quorum import (
    Quorum,
    ReplicaGroupError,
    SharedState,
    address_towards,
)
from torchtitan_like.distributed.replica_groups import (
    GROUPS,
    GroupLostError,
    GroupMismatch,
    GroupPosition,
    GroupProgress,
    GroupStep,
    Losses,
    ReplicaGroups,
    SemiSyncGroups,
    common_position,
)
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.optim.semi_sync import LocalSGD

SECONDS = timedelta(seconds=20)


class Group:
    """One replica group: weights, progress, and its connection to the others."""

    def __init__(self, lighthouse: str, index: int, size: int = 2, **options: Any) -> None:
        self.index = index
        self.weights = torch.full((3,), float(index))
        self.trained = GroupProgress(0, 0, GroupPosition())
        self.numbers: dict[str, int] = {}
        layout = options.pop("shape", (3,))
        self.moments = torch.zeros(layout)
        self.ranks = HostGroup.alone()
        self.quorum = Quorum(
            lighthouse,
            f"group_{index}",
            self.ranks,
            min_size=options.pop("min_size", 1),
            timeout=options.pop("timeout", SECONDS),
            patience=options.pop("patience", SECONDS),
        )
        state = SharedState(
            lambda: {"weights": self.weights, "moments": self.moments}, self.text, self.restore
        )
        arguments = (index, size, self.quorum, state, options.pop("identity", 1))
        sync_steps = options.pop("sync_steps", 0)
        if sync_steps:
            self.groups: ReplicaGroups = SemiSyncGroups(
                *arguments, LocalSGD([self.weights], sync_steps)
            )
        else:
            self.groups = ReplicaGroups(*arguments)

    def text(self) -> str:
        return json.dumps(
            {
                "step": self.trained.step,
                "tokens": self.trained.n_tokens_seen,
                **self.groups.state_dict(self.trained.position),
            }
        )

    def restore(self, text: str) -> None:
        state = json.loads(text)
        position = self.groups.load_state_dict(state)
        assert position is not None
        self.trained = GroupProgress(state["step"], state["tokens"], position)

    def join(self) -> None:
        self.ranks.adopt()  # the thread of the group, not the one that made it
        self.groups.join(self.trained)

    def step(self, gradient: float, num_groups: int = 1) -> bool:
        """Train one step on 10 samples with at least `num_groups` groups.

        Returns False if it was not committed.
        """
        self.join()
        while self.quorum.size < num_groups:
            self.join()
        step, tokens, position = self.trained
        after = GroupPosition(position.position + 10, position.digest_chain * 3 + 2**63)
        after = after._replace(digest_chain=after.digest_chain % 2**64)
        totals = self.groups.exchange(GroupStep(8, 10, after))
        grad = torch.full((3,), gradient)
        losses = Losses(torch.tensor(1.0), torch.tensor([0.5]), 8, [8])
        try:
            summed = self.groups.reduce(lambda: [grad], losses)
        except GroupLostError:
            return False
        num_groups = totals.num_valid_tokens // 8
        assert (summed.loss_share.item(), summed.num_labels) == (num_groups, 8 * num_groups)
        assert summed.loss_by_source.tolist() == [0.5 * num_groups]
        assert summed.labels_by_source == [8 * num_groups]
        self.weights -= grad / totals.num_valid_tokens
        self.trained = GroupProgress(step + 1, tokens + totals.num_tokens, after)
        seen = self.groups.finish_step(self.trained)
        if seen is not None:
            self.trained = self.trained._replace(n_tokens_seen=seen)
        return True


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    os.environ.setdefault("RUST_LOG", "warn")  # read when the library is loaded
    pytest.importorskip("torchft", reason="needs the extra ft")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=500
    )
    yield f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    lighthouse.shutdown()


Start = Callable[..., list[Any]]


@pytest.fixture
def together() -> Iterator[Start]:
    """Return a function that calls functions at the same time, each always in the same thread."""
    threads = [ThreadPoolExecutor(1) for _ in range(3)]

    def call(*functions: Callable[[], Any]) -> list[Any]:
        futures: list[Future[Any]] = [
            thread.submit(function) for thread, function in zip(threads, functions, strict=False)
        ]
        return [future.result(timeout=60) for future in futures]

    yield call
    for thread in threads:
        thread.shutdown()


def run_steps(group: Group, num_steps: int, gradient: float = 1.0) -> list[bool]:
    return [group.step(gradient) for _ in range(num_steps)]


def test_groups_take_the_step_of_one(server: str, together: Start) -> None:
    """The sum of both gradients over the labels of both groups."""
    one, two = Group(server, 0, min_size=2), Group(server, 1, min_size=2)
    two.weights.zero_()
    together(lambda: run_steps(one, 2, 3.0), lambda: run_steps(two, 2, 5.0))
    expected = torch.full((3,), -2 * 8.0 / 16)
    assert torch.equal(one.weights, expected) and torch.equal(two.weights, expected)
    assert one.trained == two.trained and one.trained.n_tokens_seen == 40
    assert one.groups.positions == two.groups.positions == [one.trained.position] * 2
    together(one.groups.close, two.groups.close)


def test_a_lost_group_costs_one_step_and_receives_the_state_when_it_returns(
    server: str, together: Start
) -> None:
    """Its batch is not trained, and it reads it again: nobody has committed it."""
    one, two = Group(server, 0), Group(server, 1)
    two.weights.zero_()

    def lose_it() -> None:
        """End like a killed process: after the exchange, without a word."""
        two.join()
        two.groups.exchange(GroupStep(8, 10, GroupPosition(99, 99)))
        two.quorum.close()

    together(lambda: one.step(1.0, 2), lambda: two.step(1.0, 2))
    assert one.trained == two.trained
    committed, _ = together(lambda: run_steps(one, 3), lose_it)
    assert committed == [False, True, True]
    assert one.trained.step == 3 and two.trained.step == 1
    assert one.groups.positions[1] == two.trained.position  # the lost batch is not in the weights

    returned = Group(server, 1)
    together(lambda: one.step(1.0, 2), lambda: returned.step(1.0, 2))
    assert returned.trained.step == one.trained.step == 4
    assert torch.equal(returned.weights, one.weights)
    assert returned.groups.positions == one.groups.positions
    assert [position.position for position in one.groups.positions] == [40, 20]
    together(one.groups.close, returned.groups.close)


def test_everything_listens_on_loopback(server: str, together: Start) -> None:
    one, two = Group(server, 0, min_size=2), Group(server, 1, min_size=2)
    two.weights.zero_()
    together(lambda: run_steps(one, 1), lambda: run_steps(two, 1))
    assert "127.0.0.1" in (addresses := listening_addresses([os.getpid()]))
    assert not [address for address in addresses if address not in ("127.0.0.1", "::1")]
    together(one.groups.close, two.groups.close)


def test_local_sgd_averages_weights_and_counts_samples_then(server: str, together: Start) -> None:
    one, two = (Group(server, index, min_size=2, sync_steps=3) for index in range(2))
    two.weights.zero_()
    together(lambda: run_steps(one, 2, 8.0), lambda: run_steps(two, 2, 16.0))
    assert torch.equal(one.weights, torch.full((3,), -2.0))
    assert torch.equal(two.weights, torch.full((3,), -4.0))
    assert one.groups.positions == [GroupPosition()] * 2  # the other's samples are not in them
    together(lambda: run_steps(one, 1, 8.0), lambda: run_steps(two, 1, 16.0))
    expected = torch.full((3,), -4.5)
    assert torch.equal(one.weights, expected) and torch.equal(two.weights, expected)
    assert [position.position for position in one.groups.positions] == [30, 30]
    assert one.trained.n_tokens_seen == two.trained.n_tokens_seen == 60
    together(one.groups.close, two.groups.close)


def test_a_group_joins_at_a_synchronization_and_contributes_nothing(
    server: str, together: Start
) -> None:
    one = Group(server, 0, sync_steps=3)
    together(lambda: run_steps(one, 4, 8.0))
    late = Group(server, 1, sync_steps=3, min_size=2)
    one.quorum._min_size = 2  # the synchronization after step 6 waits for the late group
    together(lambda: run_steps(one, 5, 8.0), lambda: run_steps(late, 3, 16.0))
    assert late.trained.step == one.trained.step == 9
    # From step 6 on: three steps of -1 and three of -2 are averaged.
    expected = torch.full((3,), -6 - 4.5)
    assert torch.equal(one.weights, expected) and torch.equal(late.weights, expected)
    assert [position.position for position in late.groups.positions] == [90, 30]
    assert late.trained.n_tokens_seen == one.trained.n_tokens_seen == 120
    together(one.groups.close, late.groups.close)


REFUSALS = {
    "Replica group 1 is alive already": {"index": 1},
    "Replica group 0 has other settings than group 1": {"identity": 2},
    "another layout: moments [3] torch.float32 instead of moments [4] torch.float32": {"shape": 4},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_groups_that_do_not_fit_are_refused(server: str, together: Start, message: str) -> None:
    options: dict[str, Any] = {"index": 0, **REFUSALS[message]}
    one = Group(server, 1)
    other = Group(server, options.pop("index"), min_size=2, **options)
    one.trained = one.trained._replace(step=3)

    refused = threading.Event()

    def join_other() -> str:
        try:
            other.join()
        except ReplicaGroupError as error:
            return str(error)
        finally:
            other.quorum.close()
            refused.set()
        return ""

    def train() -> None:
        """The other group does not stop this one."""
        while not refused.is_set():
            one.step(1.0)
        one.step(1.0)

    _, refusal = together(train, join_other)
    one.quorum.close()
    assert message in refusal and "Expected" in refusal
    assert one.trained.step > 3


def test_too_few_groups_end_the_wait(server: str) -> None:
    group = Group(server, 0, min_size=2, patience=timedelta(seconds=1))
    with pytest.raises(
        ReplicaGroupError, match=r"1 replica groups are alive .*min_replica_size = 2"
    ):
        group.step(1.0)
    group.quorum.close()


def test_without_a_lighthouse_the_group_does_not_start() -> None:
    pytest.importorskip("torchft", reason="needs the extra ft")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    group = Group(f"http://127.0.0.1:{port}", 0)
    with pytest.raises(
        ReplicaGroupError,
        match="Cannot reach the lighthouse .* `python -m torchtitan_like.distributed.lighthouse`",
    ):
        group.step(1.0)


@pytest.mark.parametrize("url", ["127.0.0.1:29510", "http://127.0.0.1", "http://no.such.host:1"])
def test_wrong_addresses_are_explained(url: str) -> None:
    with pytest.raises(ReplicaGroupError, match="Expected http://HOST:PORT"):
        address_towards(url)


def test_the_address_reaches_the_lighthouse() -> None:
    assert address_towards("http://127.0.0.1:29510") == "127.0.0.1"
    assert address_towards("http://localhost:29510") in ("127.0.0.1", "::1")


def groups_of(size: int) -> ReplicaGroups:
    state = SharedState(dict, lambda: "", lambda _: None)
    quorum = Quorum("http://127.0.0.1:1", "", HostGroup.alone(), min_size=1, timeout=SECONDS,
                    patience=SECONDS)  # fmt: skip
    return ReplicaGroups(1, size, quorum, state, 0)


def test_a_checkpoint_has_the_positions_of_all_groups() -> None:
    groups = groups_of(2)
    groups.positions[0] = GroupPosition(80, 2**64 - 1)
    state = {"position": 40, **groups.state_dict(GroupPosition(40, 7))}
    assert state[GROUPS] == [
        {"position": 80, "digest_chain": 2**64 - 1},
        {"position": 40, "digest_chain": 7},
    ]
    restored = groups_of(2)
    assert restored.load_state_dict(json.loads(json.dumps(state))) == GroupPosition(40, 7)
    assert restored.positions == [GroupPosition(80, 2**64 - 1), GroupPosition(40, 7)]


@pytest.mark.parametrize(
    "restore",
    [lambda state: common_position(state, 1), lambda state: groups_of(3).load_state_dict(state)],
)
def test_other_numbers_of_groups_continue_only_from_equal_positions(
    restore: Callable[[dict[str, Any]], object],
) -> None:
    restore({"position": 0, **groups_of(2).state_dict(GroupPosition())})
    unequal = groups_of(2).state_dict(GroupPosition(40))
    with pytest.raises(GroupMismatch, match=r"up to 0, 40.*group_size = 2"):
        restore({"position": 40, **unequal})


def test_a_run_without_groups_starts_all_groups_at_its_position() -> None:
    groups = groups_of(3)
    assert groups.load_state_dict({"position": 120}) is None
    assert [position.position for position in groups.positions] == [120] * 3
