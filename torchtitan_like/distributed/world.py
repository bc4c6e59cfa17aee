"""Process groups, backends, timeouts, and the step's one agreement.

Every thread that communicates owns a gloo group of its own: two threads on one gloo group give wrong sums without an
error. Groups are fields of `World`, handed to those who need them and never looked up from globals.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.store import ROUND, host_store, stay_on_loopback

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger()

T = TypeVar("T")


@dataclass(frozen=True)
class LaunchedAs:
    """What the launcher told this process; one process without a launcher is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int


def launched_as(environ: dict[str, str] | None = None) -> LaunchedAs:
    """Read torchrun's environment variables."""
    env = os.environ if environ is None else environ
    return LaunchedAs(int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1)))


class HostGroup:
    """A gloo group for small host-side exchanges, owned by one thread: the one that made it, until another adopts it.

    With one rank there is no group at all and every call returns its input.
    """

    def __init__(self, ranks: list[int], timeout: timedelta) -> None:
        self.size = len(ranks)
        self.group = dist.new_group(ranks, timeout=timeout, backend="gloo") if self.size > 1 else None
        self._thread = threading.get_ident()

    @property
    def rank(self) -> int:
        """This process's place in the group; 0 when it is alone."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def adopt(self) -> None:
        """Make the calling thread the owner, for good; the former one has no exchange under way."""
        self._thread = threading.get_ident()

    def destroy(self) -> None:
        """End the group and its threads, now: the process must not end before them.

        A gloo thread that lets go of its last tensors while Python shuts down brings the process down with it.
        """
        group, self.group = self.group, None
        if group is not None:
            dist.destroy_process_group(group)

    @classmethod
    def alone(cls) -> HostGroup:
        """The group of one process that has no peers."""
        return cls([0], timedelta(0))

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a HostGroup was used from a thread that does not own it; make one per thread")

    def sum_async(self, values: list[int]) -> PendingSum:
        """Start an int64 all-reduce (SUM) of `values`; every rank of the group calls it with as many values."""
        self._check_thread()
        vector = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(vector, group=self.group, async_op=True) if self.size > 1 else None
        return PendingSum(vector, work)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Copies of every rank's CPU tensor, stacked in rank order: (ranks, *rows.shape)."""
        self._check_thread()
        if self.size == 1:
            return rows.unsqueeze(0)
        copies = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(copies, rows, group=self.group)
        return torch.stack(copies)

    def barrier(self) -> None:
        """Wait for every rank of the group; the caller says what for."""
        self.gather(torch.zeros(1))

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value` in rank order. Not for the hot path."""
        self._check_thread()
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """The value of the group's first rank. Not for the hot path."""
        self._check_thread()
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def everyone_does(self, action: Callable[[], T]) -> T:
        """Call `action` on every rank; the error of the first rank that failed is everyone's.

        A collective. If `action` has collectives of its own, they fail on all ranks or on none.
        """
        outcome: list[T] = []
        error: Exception | None = None
        try:
            outcome.append(action())
        except Exception as problem:
            error = problem
        (num_failed,) = self.sum_async([error is not None]).wait()
        if num_failed:
            raise next(error for error in self.gather_objects(error) if error is not None)
        return outcome[0]

    def leader_does(self, action: Callable[[], T]) -> T:
        """Call `action` on the first rank alone; what it returns, or the error that it raises, is everyone's."""
        outcome: Any = None
        try:
            outcome = (action(), None) if self.rank == 0 else None
        except Exception as problem:
            outcome = None, problem
        result, error = self.broadcast_object(outcome)
        if error is not None:
            raise error
        answer: T = result
        return answer


@dataclass
class PendingSum:
    """An all-reduce under way."""

    vector: torch.Tensor
    work: Any

    def wait(self) -> list[int]:
        """Block until every rank has contributed; the sums, equal on every rank."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.vector.tolist()


@dataclass
class World:
    """All that a rank knows of its peers."""

    rank: int
    local_rank: int
    dims: ParallelDims
    device: torch.device
    mesh: DeviceMesh | None  # the weights'
    step_group: HostGroup
    checkpoint_group: HostGroup
    owns_default_group: bool
    all_ranks: Any = None  # the group of all ranks on their devices, for the training thread; None for one rank
    groups: dict[str, Any] = field(default_factory=dict)  # this rank's, by dimension of the weights' mesh, and `cp`
    neighbor_groups: dict[int, Any] = field(default_factory=dict)  # of two pipeline ranks, by the other one's number
    _training_groups: list[Any] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.dims.world_size

    def group(self, name: str) -> Any:
        """This rank's process group along a mesh dimension; None where it is alone."""
        return self.groups.get(name)

    def coordinate(self, name: str) -> int:
        """Where this rank stands along a mesh dimension."""
        return self.dims.coordinate(name, self.rank)

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of a CPU tensor on this rank's device, without waiting for it (the CPU: itself).

        A copy from pageable memory would first wait for all work queued on the stream.
        """
        if self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def gather_losses(self, rows: torch.Tensor) -> torch.Tensor:
        """Copies of the CPU tensor of every rank whose loss counts (`ParallelDims.counts_loss`): (ranks, *rows.shape)."""
        copies = self.step_group.gather(rows)
        return copies[[rank for rank in range(self.size) if self.dims.counts_loss(rank)]]

    def tighten_timeouts(self, timeout: timedelta) -> None:
        """Shorten every training group's timeout once the slow first step is over.

        The checkpoint group keeps its own: a save may take longer than any step.
        """
        if self.size == 1:
            return
        logger.info(f"Synchronizing and adjusting timeout for all ProcessGroups to {timeout}")
        # Barrier: no rank may shorten its clock while a peer is still compiling its first step.
        self.step_group.barrier()
        for group in self._training_groups:
            set_timeout(timeout, group)

    def leave(self) -> None:
        """Destroy the groups this process made.

        NOTE: inside a larger world the mesh's groups stay: DTensor's caches outlive the run and reach a group through
        any equal mesh, so a destroyed one would fail the next run.
        """
        self._training_groups.clear()
        for host_group in (self.step_group, self.checkpoint_group):
            host_group.destroy()
        if self.owns_default_group:
            dist.destroy_process_group()


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Set the timeout of a process group's future collectives.

    torch 2.14 made the function public and deprecated the private one.
    """
    public: Any = getattr(dist, "set_timeout", None)
    (public or dist.distributed_c10d._set_pg_timeout)(timeout, group)


def pick_device(local_rank: int) -> torch.device:
    """The GPU of this local rank, or the CPU. A process that sees one device uses it whatever its local rank.

    Raises ValueError when several are seen, but none for this rank.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if 1 < count <= local_rank:
        raise ValueError(
            f"local rank {local_rank} has no device: {count} are visible (CUDA_VISIBLE_DEVICES). Start at most {count} "
            "ranks on this machine (NGPU), or let each process see one device"
        )
    index = local_rank if count > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _meeting_place(launch: LaunchedAs, timeout: timedelta) -> dist.Store:
    """Return the store in which the ranks find each other's addresses; a restarted run has its own part of it.

    NOTE: plain torchrun (2.13) keeps one store for all its restarts. A rank would read the addresses of dead peers in it.
    Several such launchers count restarts independently, so their count does not tell them apart (docs/guides/operations.md).
    """
    if launch.world_size == 1:
        return dist.HashStore()
    store = _open_store(launch, timeout)
    store.set_timeout(timeout)
    has_one_launcher = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if has_one_launcher else "any"
    place = dist.PrefixStore(os.environ.get(ROUND, f"restart_{restarts}"), store)
    _meet(place, launch, timeout.total_seconds())
    return place


def _open_store(launch: LaunchedAs, timeout: timedelta) -> dist.Store:
    """Connect to the launcher's store. A launcher without a store leaves it to rank 0 to host one."""
    is_host = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if is_host and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return host_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout)
    store: dist.Store = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))[0]
    return store


def _meet(place: dist.Store, launch: LaunchedAs, timeout: float) -> None:
    """Wait for all ranks here, where a signal ends the wait: where torch waits none is heard. Raises TimeoutError."""
    place.set(f"here/{launch.rank}", "")
    place.add("here", 1)
    deadline = time.monotonic() + timeout
    while place.add("here", 0) < launch.world_size:
        if time.monotonic() > deadline:
            missing = [rank for rank in range(launch.world_size) if not place.check([f"here/{rank}"])]
            raise TimeoutError(f"ranks {missing} have not come within {timeout:.0f} s (comm.init_timeout_seconds)")
        time.sleep(max(0.05, launch.world_size / 20_000))  # one store answers all


def join_world(
    launch: LaunchedAs,
    dims: ParallelDims,
    timeout: timedelta,
    checkpoint_timeout: timedelta,
    *,
    needs_mesh: bool,
    agree: Callable[[Callable[[Any], list[Any]]], None],
) -> World:
    """Join the default group (made here unless the embedding program made it) and build meshes and host groups.

    timeout: of a collective in training; checkpoint_timeout: in a save or a load, where ranks wait for the slowest disk.
    A single rank joins nothing unless `needs_mesh`: imports and start-up stay as light as a plain script's.
    agree: is given `HostGroup.gather_objects` of all ranks before there is any group that settings decide about; what it
    raises ends the default group made here.
    """
    device = pick_device(launch.local_rank)
    needs_group = dims.world_size > 1 or needs_mesh
    owns = needs_group and not dist.is_initialized()
    ranks = list(range(dims.world_size))
    with ExitStack() as undo:
        if owns:
            stay_on_loopback(os.environ)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend,
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timeout,
                store=_meeting_place(launch, timeout),
                device_id=device if device.type == "cuda" else None,
            )
            undo.callback(dist.destroy_process_group)
        step_group = HostGroup(ranks, timeout)
        undo.callback(step_group.destroy)
        agree(step_group.gather_objects)
        undo.pop_all()
    shape = dims.mesh_shape()
    logger.info(f"Building {len(shape)}-D device mesh with {list(shape)}, {list(shape.values())}")
    mesh = dims.build_mesh(device.type) if needs_group else None
    groups = {} if mesh is None else {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
    if dims.cp > 1:
        groups["cp"], _ = dist.new_subgroups_by_enumeration(dims.peers("cp"), timeout=timeout)
    all_ranks = _group_of_all(ranks, timeout)
    neighbors = neighbor_groups(groups["pp"]) if dims.pp > 1 else {}
    checkpoint_group = HostGroup(ranks, checkpoint_timeout)
    default = dist.group.WORLD if owns else None
    training = {step_group.group, *groups.values(), *neighbors.values(), default} - {None}
    if all_ranks not in (None, dist.group.WORLD):
        training.add(all_ranks)
    for group in training - {dist.group.WORLD}:  # a mesh's own groups have torch's time-out, half an hour
        set_timeout(timeout, group)
    return World(
        launch.rank,
        launch.local_rank,
        dims,
        device,
        mesh,
        step_group,
        checkpoint_group,
        owns,
        all_ranks,
        groups,
        neighbors,
        list(training),
    )


def _group_of_all(ranks: list[int], timeout: timedelta) -> Any:
    """The default group where it is the whole of the run, as in every run of its own; None for one
    rank."""
    if len(ranks) == 1:
        return None
    if dist.get_world_size() == len(ranks):
        return dist.group.WORLD
    return dist.new_group(ranks, timeout=timeout)


def neighbor_groups(group: dist.ProcessGroup) -> dict[int, dist.ProcessGroup]:
    """Groups of this rank and each of its two neighbors on the ring of `group`, by the neighbor's
    rank in `group`.

    With a device bound to the default group, NCCL runs all single messages of a group on one
    stream, in the order in which they were started: a stage's output would wait for messages
    between other ranks. Without one (gloo, or a default group that another program made) torch
    keeps pairs of ranks apart by itself, and the result is empty. So it is for two ranks, whose
    group is such a pair. Collective over the ranks of `group`.
    """
    size, rank = group.size(), group.rank()
    if size == 2 or dist.group.WORLD is None or dist.group.WORLD.bound_device_id is None:
        return {}
    edges = [(first, (first + 1) % size) for first in range(size)]
    last = [edges.pop()] if size % 2 else []  # an odd ring needs a third round: no rank is in two pairs of a round
    found: dict[int, dist.ProcessGroup] = {}
    for pairs in (edges[::2], edges[1::2], last):
        pair_group = dist.split_group(parent_pg=group, split_ranks=[list(pair) for pair in pairs]) if pairs else None
        mine = [pair for pair in pairs if rank in pair]
        if pair_group is not None and mine:
            (pair,) = mine
            found[pair[0] if pair[1] == rank else pair[1]] = pair_group
    return found
