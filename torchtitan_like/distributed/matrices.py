"""Give each matrix of sharded parameters to one rank, and return the shards of what it computes.

An optimizer such as Muon needs whole matrices. Here every matrix has an owner among the ranks that
hold parts of it, chosen so that all ranks compute about equally long. One all-to-all brings the
parts to the owners, and a second one returns the parts of the results. A rank therefore receives
its share of the matrices and never the whole model.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_like.util.shards import shard_positions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Shard(NamedTuple):
    """The rectangle of a parameter that a rank holds.

    bounds: (first, end) for each dimension. replica: which of the parameter's copies it belongs to.
    """

    rank: int
    bounds: tuple[tuple[int, int], ...]
    replica: tuple[int, ...]


class _Part(NamedTuple):
    """A rectangle of one matrix on the rank `holder`, which the rank `owner` computes.

    parameter: index of the parameter. matrix: index in its stack; 0 without a stack.
    is_sent: the holder sends the part to the owner. All other holders have copies of it.
    rows, columns: of the matrix.
    position: index of the matrix in the holder's shard; None without a stack.
    """

    parameter: int
    matrix: int
    owner: int
    holder: int
    is_sent: bool
    rows: slice
    columns: slice
    position: int | None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.rows, self.columns
        return rows.stop - rows.start, columns.stop - columns.start

    def of_shard(self, shard: Tensor) -> Tensor:
        """Return the view of the part in the holder's shard."""
        return shard if self.position is None else shard[self.position]


class MatrixOwners:
    """Distributes the matrices of sharded parameters over the ranks that hold them.

    All ranks compute the same plan from the placements, without communication.

    is_local: for each parameter, True if no matrix is on two ranks, so that `compute` is not
        needed for it.
    """

    def __init__(self, parameters: Sequence[Tensor], group: ProcessGroup | None) -> None:
        """Choose the owners.

        parameters: DTensors or plain tensors of shape (rows, columns) or (matrices, rows, columns),
            in the same order on all ranks of their mesh.
        group: all ranks of the run, each of which calls `compute`; None for one rank.
        Raises ValueError if a shard is not a rectangle.
        """
        self._group = group
        self._ranks = [] if group is None else dist.get_process_group_ranks(group)
        self._rank = 0 if group is None else dist.get_rank()
        self._shapes = [tuple(parameter.shape[-2:]) for parameter in parameters]
        shards = _find_shards(parameters)
        loads: dict[int, float] = defaultdict(float)
        matrices = [
            (_cost(parameter.shape), i, matrix)
            for i, parameter in enumerate(parameters)
            for matrix in range(parameter.shape[0] if parameter.ndim == 3 else 1)
            if shards[i]
        ]
        # The longest computations first, each for the rank with the least to do (LPT rule, Graham
        # 1969).
        matrices.sort(key=lambda each: (-each[0], *each[1:]))
        parts: dict[tuple[int, int], list[_Part]] = {}
        for cost, i, matrix in matrices:
            parts[i, matrix] = _parts_of(i, matrix, self._shapes[i], shards[i], loads)
            loads[parts[i, matrix][0].owner] += cost
        shared = {i for (i, _), each in parts.items() if len(each) > 1}
        self.is_local = [i not in shared for i in range(len(parameters))]
        self._parts = [part for key in sorted(parts) if key[0] in shared for part in parts[key]]

    def compute(
        self, shards: dict[int, Tensor], function: Callable[[Tensor], Tensor], like: Tensor
    ) -> dict[int, Tensor]:
        """Apply `function` to every matrix of the parameters that are not local. A collective.

        shards: this rank's shards, by the index of their parameter.
        function: takes a contiguous matrix (rows, columns), and returns one of the same shape.
        like: has the dtype and device of all shards and results.
        Returns this rank's shards of the results.
        """
        if self._group is None:
            return {}
        owned = [part for part in self._parts if part.owner == self._rank]
        held = [part for part in self._parts if part.holder == self._rank]
        arriving = [part for part in owned if part.is_sent]
        received = self._exchange(
            [(each.owner, each.of_shard(shards[each.parameter])) for each in held if each.is_sent],
            [(each.holder, each.shape) for each in arriving],
            like,
        )
        matrices = {
            (each.parameter, each.matrix): like.new_empty(self._shapes[each.parameter])
            for each in arriving
        }
        for part, values in zip(arriving, received, strict=True):
            matrices[part.parameter, part.matrix][part.rows, part.columns] = values
        del received
        for key in matrices:
            matrices[key] = function(matrices[key])
        returned = self._exchange(
            [
                (each.holder, matrices[each.parameter, each.matrix][each.rows, each.columns])
                for each in owned
            ],
            [(each.owner, each.shape) for each in held],
            like,
        )
        results = {i: torch.empty_like(shard) for i, shard in shards.items()}
        for part, values in zip(held, returned, strict=True):
            part.of_shard(results[part.parameter]).copy_(values)
        return results

    def _exchange(
        self,
        sent: list[tuple[int, Tensor]],
        expected: list[tuple[int, tuple[int, int]]],
        like: Tensor,
    ) -> list[Tensor]:
        """Send each tensor to its rank; return tensors of the expected shapes from their ranks.

        Two ranks list the tensors that they exchange in the same order.
        """
        outgoing: dict[int, list[Tensor]] = {rank: [] for rank in self._ranks}
        for rank, values in sent:
            outgoing[rank].append(values.flatten())
        num_sent = [sum(values.numel() for values in outgoing[rank]) for rank in self._ranks]
        num_received = dict.fromkeys(self._ranks, 0)
        for rank, shape in expected:
            num_received[rank] += math.prod(shape)
        flat = [values for rank in self._ranks for values in outgoing[rank]]
        buffer = torch.cat([like.new_empty(0), *flat])
        sizes = list(num_received.values())
        result = like.new_empty(sum(sizes))
        dist.all_to_all_single(result, buffer, sizes, num_sent, group=self._group)
        rest = dict(zip(self._ranks, result.split(sizes), strict=True))
        arrived = []
        for rank, shape in expected:
            size = math.prod(shape)
            arrived.append(rest[rank][:size].view(shape))
            rest[rank] = rest[rank][size:]
        return arrived


def _cost(shape: Sequence[int]) -> float:
    """Return the FLOPs of a Newton-Schulz step of one matrix, in which (m, n) has m <= n."""
    m, n = sorted(shape[-2:])
    return float(m * m * (4 * n + 2 * m))


def _find_shards(parameters: Sequence[Any]) -> list[list[_Shard]]:
    """Return the shards of each parameter on all ranks of its mesh; none of a plain tensor."""
    known: dict[Any, list[_Shard]] = {}  # layers have equal shapes and placements
    found: list[list[_Shard]] = []
    for parameter in parameters:
        if not hasattr(parameter, "placements"):
            found.append([])
            continue
        key = (parameter.shape, parameter.placements, parameter.device_mesh)
        if key not in known:
            mesh = parameter.device_mesh.mesh
            known[key] = [
                shard
                for coordinate in itertools.product(*map(range, mesh.shape))
                if (shard := _shard_at(parameter, coordinate, int(mesh[coordinate])))
            ]
        found.append(known[key])
    return found


def _shard_at(parameter: Any, coordinate: tuple[int, ...], rank: int) -> _Shard | None:
    """Return the shard of a DTensor on one rank of its mesh; None if it is empty."""
    bounds = []
    for indices in shard_positions(parameter, coordinate):
        if not indices.numel():
            return None
        first, end = int(indices[0]), int(indices[-1]) + 1
        if end - first != indices.numel():
            raise ValueError(
                f"The shard of a parameter {tuple(parameter.shape)} placed as "
                f"{parameter.placements} has gaps. Expected a rectangle: choose sizes of the model "
                "that the degrees of parallelism divide"
            )
        bounds.append((first, end))
    replica = tuple(
        index
        for index, placement in zip(coordinate, parameter.placements, strict=True)
        if placement.is_replicate()
    )
    return _Shard(rank, tuple(bounds), replica)


def _parts_of(
    parameter: int,
    matrix: int,
    shape: Sequence[int],
    shards: list[_Shard],
    loads: dict[int, float],
) -> list[_Part]:
    """Choose the owner of a matrix, and return the parts of all ranks.

    loads: what each rank computes already. A rank that holds the whole matrix is preferred: it
    needs no parts of other ranks.
    """
    holders = [
        shard
        for shard in shards
        if len(shard.bounds) == 2 or shard.bounds[0][0] <= matrix < shard.bounds[0][1]
    ]
    whole = tuple((0, size) for size in shape)
    candidates = [shard for shard in holders if shard.bounds[-2:] == whole] or holders
    owner = min(candidates, key=lambda shard: (loads[shard.rank], shard.rank))
    return [
        _Part(
            parameter,
            matrix,
            owner.rank,
            shard.rank,
            shard.replica == owner.replica,
            slice(*shard.bounds[-2]),
            slice(*shard.bounds[-1]),
            matrix - shard.bounds[0][0] if len(shard.bounds) == 3 else None,
        )
        for shard in holders
    ]
