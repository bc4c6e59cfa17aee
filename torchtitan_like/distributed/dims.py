"""Degrees of parallelism, the ranks' coordinates, and the DeviceMesh that they form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_like.distributed.stages import SCHEDULES

if TYPE_CHECKING:
    from torchtitan_like.config.sections_scale import Parallelism

# Outermost first. The last dimension has the most traffic: its ranks are neighbors on a node.
MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """Size of every mesh dimension; their product, without `ep` and `expert_tp`, is the world size.

    ep: ranks over which the experts are distributed. They are ranks of dp_shard x cp x tp.
    expert_tp: ranks over which each expert's hidden units are sharded: 1 or `tp`.
    has_experts_mesh: experts are sharded over other dimensions than the other weights.
    loss_at_first: the pipeline's first rank has both the first and the last stage (V schedules).
    """

    world_size: int
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    expert_tp: int = 1
    has_experts_mesh: bool = False
    loss_at_first: bool = False

    @property
    def dp(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def mesh_shape(self) -> dict[str, int]:
        """Return the dimensions larger than one, outermost first; {"dp_shard": 1} for one rank."""
        shape = {name: getattr(self, name) for name in MESH_ORDER if getattr(self, name) > 1}
        return shape or {"dp_shard": 1}

    def describe(self, ranks_per_node: int) -> str:
        """Return the number of ranks, the degrees above one, and the number of nodes above one."""
        degrees = " x ".join(f"{name} {size}" for name, size in self.mesh_shape().items())
        num_nodes = -(-self.world_size // ranks_per_node)
        nodes = f", on {num_nodes} nodes of {ranks_per_node}" if num_nodes > 1 else ""
        return f"{self.world_size} ranks = {degrees}{nodes}"

    def layout(self) -> dict[str, int]:
        """Return `mesh_shape` and, if above one, the degrees that use the same ranks."""
        borrowed = {"ep": self.ep, "expert_tp": self.expert_tp}
        return self.mesh_shape() | {name: size for name, size in borrowed.items() if size > 1}

    def weights_shape(self) -> dict[str, int]:
        """Return the mesh on which weights are placed.

        Ranks of one `cp` group have the same weights, which are sharded over `dp_shard` x `cp`
        under the name `dp_shard`. That dimension exists, perhaps with size 1, unless weights are
        replicated.
        """
        sizes = {name: getattr(self, name) for name in MESH_ORDER if name != "cp"}
        sizes["dp_shard"] *= self.cp
        return {
            name: size
            for name, size in sizes.items()
            if size > 1 or (name == "dp_shard" and self.dp_replicate == 1)
        }

    def experts_shape(self) -> dict[str, int]:
        """Return the mesh on which experts are placed if `has_experts_mesh`.

        `ep` neighbors have different experts. These are sharded over the other ranks of
        dp_shard x cp x tp under the name `efsdp`, which has a size of at least 1. With `expert_tp`,
        tensor-parallel ranks are a dimension of their own instead.
        """
        num_ranks = self.dp_shard * self.cp * self.tp // self.expert_tp
        sizes = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "efsdp": num_ranks // self.ep,
            "ep": self.ep,
            "expert_tp": self.expert_tp,
        }
        return {name: size for name, size in sizes.items() if size > 1 or name in ("efsdp", "ep")}

    def coordinate(self, name: str, rank: int) -> int:
        """Return the index of `rank` along one dimension."""
        inner = MESH_ORDER[MESH_ORDER.index(name) + 1 :]
        stride, size = math.prod(getattr(self, other) for other in inner), getattr(self, name)
        return int(rank // stride % size)

    def dp_coordinate(self, rank: int) -> int:
        """Return the index of `rank` among data-parallel ranks, in the order of their samples."""
        return rank // (self.cp * self.tp) % self.dp

    def counts_tokens(self, rank: int) -> bool:
        """Return True on one rank per data shard, which counts the shard's tokens for all of them."""
        return rank == self.dp_coordinate(rank) * self.cp * self.tp

    def counts_loss(self, rank: int) -> bool:
        """Return True if the loss of `rank` is part of the total: last stage, one rank per `tp` group.

        The sum over these ranks covers each token once.
        """
        last = 0 if self.loss_at_first else self.pp - 1
        return self.coordinate("pp", rank) == last and self.coordinate("tp", rank) == 0

    def peers(self, name: str) -> list[list[int]]:
        """Return the world's ranks in groups that differ along one dimension only."""
        sets: dict[int, list[int]] = {}
        inner = MESH_ORDER[MESH_ORDER.index(name) + 1 :]
        stride = math.prod(getattr(self, other) for other in inner)
        for rank in range(self.world_size):
            sets.setdefault(rank - self.coordinate(name, rank) * stride, []).append(rank)
        return list(sets.values())


def resolve_degrees(
    parallelism: Parallelism, world_size: int | None, *, has_experts: bool
) -> tuple[ParallelDims, list[str]]:
    """Resolve `data_parallel_shard_degree = -1` and check the product of all degrees.

    world_size: None if unknown. has_experts: whether the model has experts.
    Returns the dims, and one sentence per problem. In an unknown world, and with problems, the dims
    have dp_shard 1 and no experts mesh.
    """
    degrees = {
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
        "pp": parallelism.pipeline_parallel_degree,
    }
    fixed = math.prod(n for name, n in degrees.items() if name != "dp_shard")
    if degrees["dp_shard"] == -1:
        degrees["dp_shard"] = max(1, (world_size or 1) // fixed)
    formula = " x ".join(f"{name} {n}" for name, n in degrees.items())
    product = fixed * degrees["dp_shard"]
    problems = []
    if world_size not in (None, product):
        problems.append(f"{formula} = {product}, but the world has {world_size} ranks")
    if world_size != product:
        degrees["dp_shard"] = 1
    at_first = degrees["pp"] > 1 and SCHEDULES[parallelism.pipeline_parallel_schedule].is_v_shaped
    dims = ParallelDims(
        world_size=math.prod(degrees.values()),
        loss_at_first=at_first,
        ep=parallelism.expert_parallel_degree if has_experts else 1,
        expert_tp=parallelism.expert_tensor_parallel_degree if has_experts else 1,
        has_experts_mesh=(
            has_experts and world_size == product and needs_experts_mesh(parallelism, degrees)
        ),
        **degrees,
    )
    return dims, problems


def needs_experts_mesh(parallelism: Parallelism, degrees: Mapping[str, int]) -> bool:
    """Return True if experts are sharded over other dimensions than the other weights.

    With sequence parallelism, tensor-parallel ranks route different tokens. For experts they are
    data-parallel ranks, so FSDP2 shards the experts over them too, also without expert parallelism.

    degrees: by the names in `MESH_ORDER`.
    """
    if parallelism.expert_parallel_degree > 1 or parallelism.expert_tensor_parallel_degree > 1:
        return True
    shards_weights = degrees["dp_shard"] * degrees["cp"] > 1 or degrees["dp_replicate"] == 1
    return (
        degrees["tp"] > 1
        and parallelism.enable_sequence_parallel
        and parallelism.data_parallel_impl == "fsdp2"
        and shards_weights
    )
