"""Process groups, backends, timeouts, and collectives between hosts.

Each thread that communicates owns a gloo group: two threads on one gloo group give wrong sums
without an error. Groups are fields of `World` and arguments, never globals.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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
    """This process's rank as the launcher set it; without a launcher rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int


def launched_as(environ: dict[str, str] | None = None) -> LaunchedAs:
    """Read torchrun's environment variables."""
    env = os.environ if environ is None else environ
    return LaunchedAs(
        int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1))
    )


def make_group(ranks: Sequence[int], timeout: timedelta, backend: str | None = None) -> Any:
    """Make a group of ranks of the default group.

    All of these ranks call this together, and the others do not take part. backend: None: of the
    default group.
    """
    is_subset = len(ranks) < dist.get_world_size()
    return dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=is_subset
    )


class RankErrors(Protocol):
    """How the errors of some ranks become one error that all ranks of a group raise."""

    def call(self, action: Callable[[], T], rank: int) -> T:
        """Call `action` on one rank. May raise another error than the action."""

    def merge(self, errors: list[Exception]) -> Exception:
        """Return the error that all ranks raise, from those of the failed ranks in rank order."""


class _FirstError:
    """All ranks raise the error of the first failed rank."""

    def call(self, action: Callable[[], T], rank: int) -> T:
        return action()

    def merge(self, errors: list[Exception]) -> Exception:
        return errors[0]


class HostGroup:
    """A gloo group for small exchanges between hosts, owned by one thread.

    The creating thread owns it until another thread calls `adopt`. With one rank there is no group,
    and every call returns its input.

    errors: converts and merges the errors of `run_on_all` and `run_on_leader`.
    """

    errors: RankErrors = _FirstError()

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        self.size = len(ranks)
        self.group = make_group(ranks, timeout, backend="gloo") if self.size > 1 else None
        self._thread = threading.get_ident()

    @property
    def rank(self) -> int:
        """This process's rank in the group; 0 if there is only one."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def adopt(self) -> None:
        """Make the calling thread the owner. The former owner must have no exchange in progress."""
        self._thread = threading.get_ident()

    def destroy(self) -> None:
        """Destroy the group and its threads. Call it before the process ends.

        A gloo thread that releases its last tensors while Python shuts down crashes the process.
        """
        group, self.group = self.group, None
        if group is not None:
            dist.destroy_process_group(group)

    @classmethod
    def alone(cls) -> HostGroup:
        """Return the group of a single process."""
        return cls([0], timedelta(0))

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "a HostGroup was used from a thread that does not own it; make one per thread"
            )

    def sum_async(self, values: list[int]) -> PendingSum:
        """Start an int64 all-reduce (SUM). All ranks must pass the same number of values."""
        self._check_thread()
        vector = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(vector, group=self.group, async_op=True) if self.size > 1 else None
        return PendingSum(vector, work)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return every rank's CPU tensor, stacked in rank order: (ranks, *rows.shape)."""
        self._check_thread()
        if self.size == 1:
            return rows.unsqueeze(0)
        copies = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(copies, rows, group=self.group)
        return torch.stack(copies)

    def barrier(self) -> None:
        """Wait for every rank of the group."""
        self.gather(torch.zeros(1))

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value` in rank order. Too slow for every step."""
        self._check_thread()
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Return the value of the group's first rank. Too slow for every step."""
        self._check_thread()
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Call `action` on every rank; if any fails, raise one error on all.

        Without this exchange, peers would wait for a failed rank in the next collective. If
        `action` has collectives, they must fail on all ranks or on none.
        """
        outcome: list[T] = []
        error: Exception | None = None
        try:
            outcome.append(self.errors.call(action, self.rank))
        except Exception as problem:
            error = problem
        try:
            (num_failed,) = self.sum_async([error is not None]).wait()
            if num_failed:
                raise self.errors.merge(
                    [each for each in self.gather_objects(error) if each is not None]
                )
        finally:
            error = None  # its traceback refers to this frame, and so to what `action` uses
        return outcome[0]

    def run_on_leader(self, action: Callable[[], T]) -> T:
        """Call `action` on the first rank only; return its result, or raise its error, on all."""
        outcome: Any = None
        try:
            outcome = (self.errors.call(action, 0), None) if self.rank == 0 else None
        except Exception as problem:
            outcome = None, problem
        error: Exception | None = None
        try:
            result, error = self.broadcast_object(outcome)
            if error is not None:
                raise error
        finally:
            outcome = error = None  # as in `run_on_all`
        answer: T = result
        return answer


@dataclass
class PendingSum:
    """An all-reduce in progress."""

    vector: torch.Tensor
    work: Any

    def wait(self) -> list[int]:
        """Block until every rank has contributed; return the sums, equal on every rank."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.vector.tolist()


@dataclass
class World:
    """A rank's device, coordinates, meshes, and process groups."""

    rank: int
    local_rank: int
    dims: ParallelDims
    device: torch.device
    mesh: DeviceMesh | None  # of the weights
    experts_mesh: DeviceMesh | None  # of the experts; None if it is the weights' mesh
    step_group: HostGroup
    checkpoint_group: HostGroup
    owns_default_group: bool
    # Group of all ranks on their devices, for the training thread; None for one rank.
    all_ranks: Any = None
    # This rank's groups, by dimension of the weights' mesh and of the experts' mesh, and `cp`. A
    # dimension of both meshes has two groups: the second one is named "... of experts".
    groups: dict[str, Any] = field(default_factory=dict)
    # Groups of two pipeline ranks, by the other one's rank.
    neighbor_groups: dict[int, Any] = field(default_factory=dict)
    _training_groups: list[Any] = field(default_factory=list)
    # Returns the context in which memory of the device is allocated; a plan allocates fake tensors.
    allocating: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def size(self) -> int:
        return self.dims.world_size

    def group(self, name: str) -> Any:
        """Return this rank's process group along a mesh dimension; None if it has no peers there."""
        return self.groups.get(name)

    def coordinate(self, name: str) -> int:
        """Return this rank's index along a mesh dimension."""
        return self.dims.coordinate(name, self.rank)

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to this rank's device without waiting; on CPU return it unchanged.

        A copy from pageable memory would wait for all work queued on the stream.
        """
        if self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def gather_losses(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather a CPU tensor from the ranks for which `counts_loss` is true: (ranks, *rows.shape)."""
        copies = self.step_group.gather(rows)
        return copies[[rank for rank in range(self.size) if self.dims.counts_loss(rank)]]

    def tighten_timeouts(self, timeout: timedelta) -> None:
        """Shorten the timeout of every training group after the slow first step.

        The checkpoint group keeps its timeout: a checkpoint may take longer than any step.
        """
        if self.size == 1:
            return
        logger.info(f"Synchronizing and adjusting timeout for all ProcessGroups to {timeout}")
        # Barrier: no rank may shorten its timeout while a peer still compiles its first step.
        self.step_group.barrier()
        for group in self._training_groups:
            set_timeout(timeout, group)

    def leave(self) -> None:
        """Destroy the groups that this process created.

        NOTE: inside a larger world the mesh's groups remain. DTensor's caches outlive the run and
        use the groups of any equal mesh, so destroying them would break the next run.
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
    """Return the GPU of this local rank, or the CPU. A single visible GPU is used by any local rank.

    Raises ValueError if several GPUs are visible, but fewer than the local ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if 1 < count <= local_rank:
        raise ValueError(
            f"local rank {local_rank} has no device: {count} are visible (CUDA_VISIBLE_DEVICES). Start "
            f"at most {count} ranks on this machine (NGPU), or let each process see one device"
        )
    index = local_rank if count > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _rendezvous_store(launch: LaunchedAs, timeout: timedelta) -> dist.Store:
    """Return the store in which the ranks exchange addresses, with a prefix for each restart.

    NOTE: plain torchrun (2.13) keeps one store for all its restarts, so that without the prefix a
    rank would read the addresses of dead peers. Several such launchers count restarts
    independently, so their count cannot be the prefix (docs/guides/operations.md).
    """
    if launch.world_size == 1:
        return dist.HashStore()
    store = _open_store(launch, timeout)
    store.set_timeout(timeout)
    has_one_launcher = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if has_one_launcher else "any"
    prefixed = dist.PrefixStore(os.environ.get(ROUND, f"restart_{restarts}"), store)
    _wait_for_ranks(prefixed, launch, timeout.total_seconds())
    return prefixed


def _open_store(launch: LaunchedAs, timeout: timedelta) -> dist.Store:
    """Connect to the launcher's store. Without one, rank 0 hosts the store."""
    is_host = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if is_host and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return host_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout)
    rendezvous = dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout)
    store: dist.Store = next(rendezvous)[0]
    return store


def _wait_for_ranks(store: dist.Store, launch: LaunchedAs, timeout: float) -> None:
    """Wait until all ranks have joined. Raises TimeoutError.

    Signals interrupt this wait, but not torch's own waits.
    """
    store.set(f"here/{launch.rank}", "")
    store.add("here", 1)
    deadline = time.monotonic() + timeout
    while store.add("here", 0) < launch.world_size:
        if time.monotonic() > deadline:
            ranks = range(launch.world_size)
            missing = [rank for rank in ranks if not store.check([f"here/{rank}"])]
            raise TimeoutError(
                f"ranks {missing} did not join within {timeout:.0f} s (comm.init_timeout_seconds). "
                f"Expected {launch.world_size} ranks: read their logs, or raise the timeout"
            )
        time.sleep(max(0.05, launch.world_size / 20_000))  # one store serves all ranks


def join_world(
    launch: LaunchedAs,
    dims: ParallelDims,
    timeout: timedelta,
    checkpoint_timeout: timedelta,
    *,
    needs_mesh: bool,
    agree: Callable[[Callable[[Any], list[Any]]], None],
    group: dist.ProcessGroup | None = None,
) -> World:
    """Join or create the default group, and build meshes and host groups.

    launch: the rank among the ranks that train, and their number.

    timeout: of collectives in training.
    checkpoint_timeout: of collectives while saving or loading, where ranks wait for the slowest disk.
    needs_mesh: a single rank creates groups only if this is True, so that it starts as fast as a
        plain script.
    agree: is called with `HostGroup.gather_objects` of all ranks before the config determines any
        group. If it raises, a default group created here is destroyed.
    group: of the ranks that train, in a program whose default group has other ranks too. Only its
        ranks call this. None: the default group.
    """
    device = pick_device(launch.local_rank)
    needs_group = dims.world_size > 1 or needs_mesh
    owns = needs_group and not dist.is_initialized()
    ranks = list(range(dims.world_size))
    if group is not None:
        ranks = dist.get_process_group_ranks(group)
    with ExitStack() as undo:
        if owns:
            stay_on_loopback(os.environ)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend,
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timeout,
                store=_rendezvous_store(launch, timeout),
                device_id=device if device.type == "cuda" else None,
            )
            undo.callback(dist.destroy_process_group)
        step_group = HostGroup(ranks, timeout)
        undo.callback(step_group.destroy)
        agree(step_group.gather_objects)
        undo.pop_all()
    shape = dims.mesh_shape()
    logger.info(f"Building {len(shape)}-D device mesh with {list(shape)}, {list(shape.values())}")
    groups = DeviceGroups()
    if needs_group:
        groups = build_device_groups(
            launch.rank, dims, device.type, ranks=ranks, timeout=timeout, group=group
        )
    checkpoint_group = HostGroup(ranks, checkpoint_timeout)
    default = dist.group.WORLD if owns else None
    own = {*groups.by_name.values(), *groups.neighbors.values()}
    training = {step_group.group, *own, default} - {None}
    if groups.all_ranks not in (None, dist.group.WORLD):
        training.add(groups.all_ranks)
    # Groups of a mesh have torch's timeout of 30 minutes. The caller's group keeps its own.
    for each in training - {dist.group.WORLD, group}:
        set_timeout(timeout, each)
    return World(
        launch.rank,
        launch.local_rank,
        dims,
        device,
        groups.mesh,
        groups.experts_mesh,
        step_group,
        checkpoint_group,
        owns,
        groups.all_ranks,
        groups.by_name,
        groups.neighbors,
        list(training),
    )


@dataclass(frozen=True)
class DeviceGroups:
    """The meshes and process groups of a rank's device; see the fields of `World`."""

    mesh: DeviceMesh | None = None
    experts_mesh: DeviceMesh | None = None
    all_ranks: Any = None
    by_name: dict[str, Any] = field(default_factory=dict)
    neighbors: dict[int, Any] = field(default_factory=dict)


def build_device_groups(
    rank: int,
    dims: ParallelDims,
    device_type: str,
    *,
    ranks: Sequence[int],
    timeout: timedelta,
    group: dist.ProcessGroup | None = None,
) -> DeviceGroups:
    """Build the meshes and process groups of all dimensions. A collective.

    rank: among the ranks that train. ranks: these ranks in the default group.
    group: of these ranks, if the caller has it.
    """
    build = partial(build_mesh, device_type, ranks=ranks, timeout=timeout)
    mesh = build(dims.weights_shape())
    by_name = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
    experts_mesh = build(dims.experts_shape()) if dims.has_experts_mesh else None
    if experts_mesh is not None:
        for name in experts_mesh.mesh_dim_names or ():
            key = f"{name} of experts" if name in by_name else name
            by_name[key] = experts_mesh.get_group(name)
    if dims.cp > 1:
        (peers,) = [peers for peers in dims.peers("cp") if rank in peers]
        by_name["cp"] = make_group([ranks[peer] for peer in peers], timeout)
    all_ranks = group if group is not None else _group_of_all(list(ranks), timeout)
    neighbors = neighbor_groups(by_name["pp"]) if dims.pp > 1 else {}
    return DeviceGroups(mesh, experts_mesh, all_ranks, by_name, neighbors)


def build_mesh(
    device_type: str, shape: Mapping[str, int], *, ranks: Sequence[int], timeout: timedelta
) -> DeviceMesh:
    """Build the mesh of these sizes by dimension over ranks of the default group, in their order."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    names = tuple(shape)
    if len(ranks) == dist.get_world_size():
        return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=names)
    # torch makes the groups of a mesh with all ranks of the default group.
    grid = torch.tensor(ranks).view(*shape.values())
    ((*own,),) = (grid == dist.get_rank()).nonzero().tolist()
    groups = []
    for dim in range(grid.ndim):
        line = grid[tuple(slice(None) if i == dim else index for i, index in enumerate(own))]
        groups.append(make_group(line.tolist(), timeout))
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=names)


def _group_of_all(ranks: list[int], timeout: timedelta) -> Any:
    """Return the default group, or a new one if it has other ranks too; None for one rank."""
    if len(ranks) == 1:
        return None
    if dist.get_world_size() == len(ranks):
        return dist.group.WORLD
    return make_group(ranks, timeout)


def neighbor_groups(group: dist.ProcessGroup) -> dict[int, dist.ProcessGroup]:
    """Create a group for this rank and each of its two neighbors on the ring of `group`.

    The result is keyed by the neighbor's rank in `group`. All ranks of `group` call this together.

    If the default group is bound to a device, NCCL runs all point-to-point messages of a group on
    one stream, in the order of their start: a stage's output would wait for messages between other
    ranks. Otherwise (gloo, or a default group of another program) torch separates pairs of ranks
    itself, and the result is empty. It is also empty for two ranks, which already are a pair.
    """
    size, rank = group.size(), group.rank()
    if size == 2 or dist.group.WORLD is None or dist.group.WORLD.bound_device_id is None:
        return {}
    edges = [(first, (first + 1) % size) for first in range(size)]
    # A rank is in at most one pair of a round, so an odd ring needs a third round.
    last = [edges.pop()] if size % 2 else []
    groups: dict[int, dist.ProcessGroup] = {}
    for pairs in (edges[::2], edges[1::2], last):
        if not pairs:
            continue
        pair_group = dist.split_group(parent_pg=group, split_ranks=[list(pair) for pair in pairs])
        own_pair = next((pair for pair in pairs if rank in pair), None)
        if pair_group is not None and own_pair is not None:
            first, second = own_pair
            groups[first if second == rank else second] = pair_group
    return groups
