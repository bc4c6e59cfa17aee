"""torchft's protocol between replica groups: quorum, process group, and transfer of the state.

A *replica group* is a run of its own, with its own launcher and ranks, that trains the same weights
as other groups. Rank r of a group communicates with rank r of the other groups only.

torchft (https://github.com/pytorch/torchft) has two servers, and `torchft.coordination` their
clients. The *lighthouse* tells all groups which of them are alive. Each group's *manager*, on its
rank 0, collects the requests of its ranks and asks the lighthouse. torchft's own `Manager` and
`HTTPTransport` are not used: they listen on all addresses of the machine, and the second one
unpickles what it receives.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from torchtitan_like.config.sections_run import LIGHTHOUSE
from torchtitan_like.distributed.store import host_store
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.exit_codes import ExitCode, RunFailure

logger = logging.getLogger()

HEARTBEAT = timedelta(milliseconds=100)
CONNECT_TIMEOUT = timedelta(seconds=10)
BUCKET_BYTES = 1 << 26  # of one all-reduce between groups


class ReplicaGroupError(RunFailure):
    """This group cannot train with the others. Raised on all ranks of the group."""

    exit_code = ExitCode.LOST_PEER


@dataclass(frozen=True)
class SharedState:
    """The state that is equal in all groups, as this rank holds it.

    tensors: returns this rank's live tensors by name; of DTensors, the local shards.
    text: returns all other state, which is equal on all ranks.
    restore: called with the text of another group after `tensors` have its values.
    """

    tensors: Callable[[], dict[str, torch.Tensor]]
    text: Callable[[], str]
    restore: Callable[[str], None]


class Member(NamedTuple):
    """What a group reports when it joins.

    number: `fault_tolerance.replica_id`. progress: larger if the group is ahead. identity: hash
    (63 bits) of the settings that must be equal in all groups.
    """

    number: int
    progress: int
    identity: int


class Quorum:
    """The connection of this rank to the other groups. One thread uses it.

    After a failed operation the others return at once. `succeeded` then returns False on all ranks
    of the group, and `join` must be called before the next operation.

    lighthouse: URL such as http://127.0.0.1:29510.
    name: prefix of the name that this group has at the lighthouse.
    group: the ranks of this replica group.
    min_size: fewest groups of a quorum.
    timeout: of an exchange between groups. patience: of the wait for a quorum, and of a transfer.
    """

    def __init__(
        self,
        lighthouse: str,
        name: str,
        group: HostGroup,
        *,
        min_size: int,
        timeout: timedelta,
        patience: timedelta,
    ) -> None:
        self.size = 0
        self.rank = 0
        self._lighthouse = lighthouse
        self._name = name
        self._group = group
        self._min_size = min_size
        self._timeout = timeout
        self._patience = patience
        self._address = ""
        self._manager: Any = None
        self._store: dist.Store | None = None
        self._client: Any = None
        self._peers: Any = None  # gloo group of rank r of every replica group; None for one group
        self._quorum_id = -1
        self._is_new = False  # no exchange has completed since the quorum changed
        self._num_failures = 0
        self._failure: str | None = None

    # ---- membership

    def join(self, local: Member, state: SharedState) -> int:
        """Wait for a quorum of groups, and connect to them. A collective of the group.

        The quorum has all live groups that join too. If another group is ahead, this one receives
        its state. Returns the progress of the state afterwards. Raises ReplicaGroupError.
        """
        if self._client is None:
            self._group.run_on_all(self._open)
        deadline = time.monotonic() + self._patience.total_seconds()
        while True:
            answer = self._ask(local.progress)
            self._failure = None
            if answer.quorum_id != self._quorum_id:
                members = self._connect(answer, local)
                if members is None or not self._catch_up(members, state):
                    continue
                local = local._replace(progress=max(member.progress for member in members))
            if self.size >= self._min_size:
                return local.progress
            self._wait_for_groups(deadline)

    def _open(self) -> None:
        """Start this group's manager on its rank 0, and connect to it."""
        # torchft's library logs every request otherwise. It reads the variable when it loads.
        os.environ.setdefault("RUST_LOG", "warn")
        from torchft.coordination import ManagerClient, ManagerServer

        self._address = address_towards(self._lighthouse)
        host = f"[{self._address}]" if ":" in self._address else self._address

        def serve() -> str:
            store = host_store(self._address, 0, self._patience)
            self._store = store
            self._manager = ManagerServer(
                # The lighthouse remembers the former manager of a group that starts again.
                replica_id=f"{self._name}:{uuid.uuid4()}",
                lighthouse_addr=self._lighthouse,
                hostname=host,
                bind=f"{host}:0",
                store_addr=f"{host}:{store.port}",
                world_size=self._group.size,
                heartbeat_interval=HEARTBEAT,
                connect_timeout=CONNECT_TIMEOUT,
                quorum_retries=0,
            )
            address: str = self._manager.address()
            return address

        try:
            address = self._group.run_on_leader(serve)
            self._client = ManagerClient(address, connect_timeout=CONNECT_TIMEOUT)
        except (RuntimeError, TimeoutError) as error:
            raise ReplicaGroupError(
                f"Cannot reach the lighthouse {self._lighthouse}: {error}. Expected a running one. "
                f"Start it with `python -m torchtitan_like.distributed.lighthouse`, and set {LIGHTHOUSE} to its address"
            ) from error
        logger.info(f"{self._name} listens on {self._address} for other replica groups")

    def _ask(self, progress: int) -> Any:
        """Ask the lighthouse for a quorum. All ranks of the group ask, and get the same one."""

        def ask() -> Any:
            return self._client._quorum(
                group_rank=self._group.rank,
                step=progress,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=self._patience,
                init_sync=False,
                commit_failures=self._num_failures,
            )

        try:
            return self._group.run_on_all(ask)
        except (RuntimeError, TimeoutError) as error:
            raise ReplicaGroupError(
                f"No quorum of replica groups within {self._patience}: {error}. Expected a "
                f"lighthouse at {self._lighthouse}, and as many live groups as it waits for. Start "
                "them, and then this group again"
            ) from error

    def _connect(self, answer: Any, local: Member) -> list[Member] | None:
        """Make the process group of a quorum. Returns its members.

        A collective of the group. Returns None if a group does not answer, or does not fit and will
        leave. Raises ReplicaGroupError if this group does not fit.
        """
        self.size = answer.replica_world_size
        self.rank = answer.replica_rank
        self._quorum_id = answer.quorum_id
        self._is_new = True
        self._peers = None
        if self.size > 1:
            self._attempt(lambda: self._make_peers(answer))
        members = [Member(*row) for row in self.gather(local)]
        if not self.succeeded():
            return None
        if not _fit_together(members, self.rank):
            self._quorum_id = -1  # ask again, until the others have left
            return None
        self._is_new = True  # the next exchange waits for groups that receive the state
        names = ", ".join(map(str, sorted(member.number for member in members)))
        logger.info(f"{len(members)} replica groups are alive: {names}")
        return members

    def _catch_up(self, members: Sequence[Member], state: SharedState) -> bool:
        """Send the state of the group that is ahead to all others. Returns False after a failure.

        A collective of the group.
        """
        sender = _ahead(members)
        newest = members[sender].progress
        behind = [rank for rank, member in enumerate(members) if member.progress < newest]
        if self.rank in behind:
            return self._receive(state, sender)
        if self.rank == sender:
            for receiver in behind:
                self._send(state, receiver)
        return self.succeeded()

    def _make_peers(self, answer: Any) -> None:
        host, _, port = answer.store_address.rpartition(":")
        store = dist.TCPStore(
            host.strip("[]"),
            int(port),
            is_master=False,
            wait_for_workers=False,
            timeout=self._timeout,
        )
        prefix = dist.PrefixStore(f"quorum_{answer.quorum_id}/{self._group.rank}", store)
        gloo: Any = dist.ProcessGroupGloo  # without type hints
        options = gloo._Options()
        options._timeout = self._timeout
        options._devices = [gloo.create_device(hostname=self._address)]
        self._peers = gloo(prefix, self.rank, self.size, options)

    def _wait_for_groups(self, deadline: float) -> None:
        """Wait a moment before this group asks for a larger quorum. Raises ReplicaGroupError."""
        if time.monotonic() > deadline:
            raise ReplicaGroupError(
                f"{self.size} replica groups are alive after {self._patience}. Expected at least "
                f"fault_tolerance.min_replica_size = {self._min_size}: start more groups, or lower "
                "it"
            )
        time.sleep(0.5)

    # ---- exchanges

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Return the rows of all groups, in the order of the quorum: int64 numbers.

        Returns this group's row alone after a failure.
        """
        if self.size == 1 or self._failure is not None:
            return [list(row)]
        timeout = self._patience if self._is_new else self._timeout
        table = torch.zeros(self.size, len(row), dtype=torch.int64)
        table[self.rank] = torch.tensor(row, dtype=torch.int64)
        self._attempt(lambda: self._all_reduce(table, timeout).wait())
        self._is_new = False
        return [list(row)] if self._failure is not None else table.tolist()

    def sums(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums over the groups of this rank's tensors, on the CPU. They are copies.

        The sums are bitwise equal in all groups. After a failure they have no meaning.
        """
        buckets = list(_buckets(tensors))
        flats = [
            torch.cat([tensor.detach().flatten() for tensor in each]).cpu() for each in buckets
        ]

        def reduce() -> None:
            works = [self._all_reduce(flat, self._timeout) for flat in flats]
            for work in works:
                work.wait()

        if self.size > 1:
            self._attempt(reduce)
        return [
            piece.view(tensor.shape)
            for flat, bucket in zip(flats, buckets, strict=True)
            for piece, tensor in zip(
                flat.split([tensor.numel() for tensor in bucket]), bucket, strict=True
            )
        ]

    def succeeded(self) -> bool:
        """Return True if no operation since `join` has failed on any rank of this group.

        A collective of the group. Other groups may see a failure that this one does not: they have
        then trained fewer steps, and receive the state in the next quorum.
        """
        (num_failed,) = self._group.sum_async([self._failure is not None]).wait()
        if self._failure is not None:
            logger.warning(f"Lost the connection to a replica group: {self._failure}")
        self._num_failures = self._num_failures + 1 if num_failed else 0
        return not num_failed

    def _all_reduce(self, tensor: torch.Tensor, timeout: timedelta) -> Any:
        options = dist.AllreduceOptions()
        options.timeout = timeout
        return self._peers.allreduce([tensor], options)

    def _attempt(self, operation: Callable[[], object]) -> None:
        """Run an operation with other groups, unless one has failed since `join`."""
        if self._failure is not None:
            return
        try:
            operation()
        except RuntimeError as error:  # torch's DistBackendError and DistNetworkError too
            self._failure = str(error).partition("This is typically caused")[0].strip()
            # Closed connections end the exchanges that other groups wait in.
            self._peers = None

    # ---- transfer of the state

    def _send(self, state: SharedState, receiver: int) -> None:
        def send(tensor: torch.Tensor) -> None:
            self._peers.send([tensor.detach().cpu().contiguous()], receiver, 0).wait(self._patience)

        def transfer() -> None:
            logger.info("Sending the state to a replica group that joins")
            tensors = state.tensors()
            header = {"tensors": _layout(tensors), "text": state.text()}
            encoded = torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8)
            for tensor in (torch.tensor([len(encoded)]), encoded, *tensors.values()):
                send(tensor)

        self._attempt(transfer)

    def _receive(self, state: SharedState, sender: int) -> bool:
        """Receive the state of another group. Returns False, and changes nothing, after a failure.

        A collective of the group. Raises ReplicaGroupError if the states have no common layout.
        """
        tensors = state.tensors()
        received: list[torch.Tensor] = []
        header: dict[str, Any] = {"tensors": _layout(tensors), "text": ""}

        def receive(like: torch.Tensor) -> torch.Tensor:
            tensor = torch.empty(like.shape, dtype=like.dtype)
            self._peers.recv([tensor], sender, 0).wait(self._patience)
            return tensor

        def transfer() -> None:
            size = int(receive(torch.zeros(1, dtype=torch.int64)))
            encoded = receive(torch.empty(size, dtype=torch.uint8))
            header.update(json.loads(bytes(encoded.tolist())))
            if header["tensors"] == _layout(tensors):
                received.extend(map(receive, tensors.values()))

        def check() -> None:
            self._attempt(transfer)
            if header["tensors"] != _layout(tensors):
                raise ReplicaGroupError(
                    "The state of the other replica groups has another layout: "
                    f"{_first_difference(header['tensors'], _layout(tensors))}. Expected the same "
                    "model, optimizer and number of ranks in every group. Start this group with "
                    "their settings"
                )

        self._group.run_on_all(check)
        if not self.succeeded():
            return False
        with torch.no_grad():
            for live, new in zip(tensors.values(), received, strict=True):
                live.copy_(new)
        state.restore(header["text"])
        return True

    def close(self) -> None:
        """Leave. The other groups continue when the lighthouse has missed some heartbeats."""
        self._peers = None
        self._client = None
        if self._manager is not None:
            self._manager.shutdown()
        self._manager = None
        self._store = None


def address_towards(url: str) -> str:
    """Return the IP address of this machine from which it reaches the host of ``url``.

    Sends nothing. Raises ReplicaGroupError if the URL or the host is unusable.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
            raise ValueError("its form is wrong")
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(ipaddress.ip_address(probe.getsockname()[0]))
    except (OSError, ValueError) as error:
        raise ReplicaGroupError(
            f"The lighthouse address {url!r} cannot be used: {error}. Expected http://HOST:PORT "
            f"with a host that this machine reaches. Correct {LIGHTHOUSE}"
        ) from error


def _ahead(members: Sequence[Member]) -> int:
    """Return the rank of the first member that is ahead of all others or equal."""
    return max(range(len(members)), key=lambda rank: (members[rank].progress, -rank))


def _fit_together(members: Sequence[Member], rank: int) -> bool:
    """Return False if other groups do not fit to the one that is ahead.

    They must have its settings, and numbers of their own. Raises ReplicaGroupError if the group
    `rank` does not fit. So a wrong group never stops the others.
    """
    reference = members[_ahead(members)]
    local = members[rank]
    if local.identity != reference.identity:
        raise ReplicaGroupError(
            f"Replica group {local.number} has other settings than group {reference.number}. "
            "Expected the same seed, data, batch size, model, optimizer and [fault_tolerance] in "
            "all groups: compare their config.toml"
        )
    equal = [other for other, member in enumerate(members) if member.number == local.number]
    if rank != max(equal, key=lambda other: (members[other].progress, -other)):
        raise ReplicaGroupError(
            f"Replica group {local.number} is alive already. Expected each number once: start each "
            "group with its own fault_tolerance.replica_id"
        )
    numbers = {member.number for member in members}
    identities = {member.identity for member in members}
    return len(numbers) == len(members) and len(identities) == 1


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive tensors of one dtype, of at most BUCKET_BYTES unless one is larger."""
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        is_full = num_bytes + tensor.nbytes > BUCKET_BYTES
        if bucket and (is_full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def _layout(tensors: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """Return the name, shape and dtype of each tensor, as JSON has them."""
    return [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()]


def _first_difference(theirs: list[list[Any]], own: list[list[Any]]) -> str:
    pairs = zip_longest(theirs, own, fillvalue=["nothing", [], ""])
    their, mine = next((a, b) for a, b in pairs if a != b)
    return " instead of ".join(f"{name} {shape} {dtype}" for name, shape, dtype in (their, mine))
