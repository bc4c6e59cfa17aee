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

from torchtitan_like.util.boxes import Box, BoxPair, Shape, sizes_of, slices, whole
from torchtitan_like.util.shards import shard_boxes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Holder(NamedTuple):
    """A rank that holds a box of a parameter.

    replica: which of the parameter's copies the box belongs to.
    """

    rank: int
    box: Box
    replica: tuple[int, ...]


class Transfer(NamedTuple):
    """A box of one matrix on the rank `holder`, which the rank `owner` computes.

    parameter: index of the parameter. matrix: index in its stack; 0 without a stack.
    is_sent: the holder sends the box to the owner. All other holders have copies of it.
    boxes: from the holder's shard to the matrix.
    """

    parameter: int
    matrix: int
    owner: int
    holder: int
    is_sent: bool
    boxes: BoxPair


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
        holders = _find_holders(parameters)
        loads: dict[int, float] = defaultdict(float)
        matrices = [
            (_cost(parameter.shape), i, matrix)
            for i, parameter in enumerate(parameters)
            for matrix in range(parameter.shape[0] if parameter.ndim == 3 else 1)
            if holders[i]
        ]
        # The longest computations first, each for the rank with the least to do (LPT rule, Graham
        # 1969).
        matrices.sort(key=lambda each: (-each[0], *each[1:]))
        transfers: dict[tuple[int, int], list[Transfer]] = {}
        for cost, i, matrix in matrices:
            each = _plan_transfers(i, matrix, parameters[i].shape, holders[i], loads)
            transfers[i, matrix] = each
            loads[each[0].owner] += cost
        shared = {i for (i, _), each in transfers.items() if len(each) > 1}
        self.is_local = [i not in shared for i in range(len(parameters))]
        self._transfers = [
            transfer for key in sorted(transfers) if key[0] in shared for transfer in transfers[key]
        ]

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
        owned = [each for each in self._transfers if each.owner == self._rank]
        held = [each for each in self._transfers if each.holder == self._rank]
        arriving = [each for each in owned if each.is_sent]
        received = self._exchange(
            [
                (each.owner, each.boxes.view(shards[each.parameter]))
                for each in held
                if each.is_sent
            ],
            [(each.holder, sizes_of(each.boxes.target)) for each in arriving],
            like,
        )
        matrices = {
            (each.parameter, each.matrix): like.new_empty(self._shapes[each.parameter])
            for each in arriving
        }
        for each, values in zip(arriving, received, strict=True):
            matrices[each.parameter, each.matrix][slices(each.boxes.target)] = values
        del received
        for key in matrices:
            matrices[key] = function(matrices[key])
        returned = self._exchange(
            [
                (each.holder, matrices[each.parameter, each.matrix][slices(each.boxes.target)])
                for each in owned
            ],
            [(each.owner, sizes_of(each.boxes.target)) for each in held],
            like,
        )
        results = {i: torch.empty_like(shard) for i, shard in shards.items()}
        for each, values in zip(held, returned, strict=True):
            each.boxes.view(results[each.parameter]).copy_(values)
        return results

    def _exchange(
        self,
        sent: list[tuple[int, Tensor]],
        expected: list[tuple[int, Shape]],
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


def _find_holders(parameters: Sequence[Any]) -> list[list[Holder]]:
    """Return the holders of each parameter among the ranks of its mesh; none of a plain tensor."""
    known: dict[Any, list[Holder]] = {}  # layers have equal shapes and placements
    found: list[list[Holder]] = []
    for parameter in parameters:
        if not hasattr(parameter, "placements"):
            found.append([])
            continue
        key = (parameter.shape, parameter.placements, parameter.device_mesh)
        if key not in known:
            mesh = parameter.device_mesh.mesh
            known[key] = [
                holder
                for coordinate in itertools.product(*map(range, mesh.shape))
                if (holder := _holder_at(parameter, coordinate, int(mesh[coordinate])))
            ]
        found.append(known[key])
    return found


def _holder_at(parameter: Any, coordinate: tuple[int, ...], rank: int) -> Holder | None:
    """Return the holder at a coordinate of a DTensor's mesh; None if its shard is empty."""
    boxes = shard_boxes(parameter, coordinate)
    if not boxes:
        return None
    if len(boxes) > 1:
        raise ValueError(
            f"The shard of a parameter {tuple(parameter.shape)} placed as "
            f"{parameter.placements} has gaps. Expected a rectangle: choose sizes of the model "
            "that the degrees of parallelism divide"
        )
    replica = tuple(
        index
        for index, placement in zip(coordinate, parameter.placements, strict=True)
        if placement.is_replicate()
    )
    return Holder(rank, boxes[0], replica)


def _plan_transfers(
    parameter: int,
    matrix: int,
    shape: Sequence[int],
    holders: list[Holder],
    loads: dict[int, float],
) -> list[Transfer]:
    """Choose the owner of a matrix, and return the transfers of all its holders.

    shape: of the parameter. loads: what each rank computes already. A rank that holds the whole
    matrix is preferred: it needs no values of other ranks.
    """
    rows_and_columns = whole(shape[-2:])
    stack_index = ((matrix, 1, 1),) if len(shape) == 3 else ()
    pair = BoxPair((*stack_index, *rows_and_columns), rows_and_columns)
    parts = [(each, boxes) for each in holders if (boxes := pair.within_source(each.box))]
    candidates = [each for each, boxes in parts if boxes.target == rows_and_columns]
    candidates = candidates or [each for each, _ in parts]
    owner = min(candidates, key=lambda each: (loads[each.rank], each.rank))
    return [
        Transfer(parameter, matrix, owner.rank, each.rank, each.replica == owner.replica, boxes)
        for each, boxes in parts
    ]
