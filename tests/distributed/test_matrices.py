"""Each matrix of sharded parameters is computed by one rank, which receives nothing else."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.harness.rank_pool import run_ranks
from torchtitan_like.distributed.matrices import MatrixOwners

# (mesh, placements, shapes of the parameters) on four ranks
LAYOUTS = {
    "FSDP": ((4,), [Shard(0)], [(8, 6)] * 4),
    "FSDP, uneven": ((4,), [Shard(0)], [(5, 6), (2, 3), (7, 4), (3, 9)]),
    "HSDP": ((2, 2), [Replicate(), Shard(0)], [(8, 6)] * 4),
    "DDP": ((4,), [Replicate()], [(8, 6)] * 4),
    "FSDP and TP by columns": ((2, 2), [Shard(0), Shard(1)], [(8, 6)] * 4),
    "FSDP and TP by rows": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], [(8, 6)] * 4),
    "whole experts": ((4,), [Shard(0)], [(8, 6, 4)]),
    "parts of experts": ((2, 2), [Shard(1), Shard(0)], [(4, 6, 4)]),
    "experts on two of four ranks": ((4,), [Shard(0)], [(2, 6, 4)]),
}


def compute(name):
    """Return the results, the matrices that this rank computed, and the elements it received."""
    sizes, placements, shapes = LAYOUTS[name]
    mesh = init_device_mesh("cpu", sizes)
    parameters = []
    for number, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(number)
        full = torch.randn(shape, generator=generator, dtype=torch.float64)
        if isinstance(placements[0], _StridedShard):  # as FSDP2 shards the rows of TP
            tp = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
            shard = tp.to_local().chunk(sizes[0])[mesh.get_local_rank(0)]
            parameters.append(torch.distributed.tensor.DTensor.from_local(
                shard, mesh, placements, shape=full.shape, stride=full.stride()
            ))  # fmt: skip
        else:
            parameters.append(distribute_tensor(full, mesh, placements))
    owners = MatrixOwners(parameters, dist.group.WORLD)
    computed, received = [], []
    exchange = owners._exchange

    def traced(sent, expected, like):
        received.append(sum(rows * columns for _, (rows, columns) in expected))
        return exchange(sent, expected, like)

    def function(matrix):
        computed.append(tuple(matrix.shape))
        return matrix.cumsum(0).cumsum(1) + matrix.sum()

    owners._exchange = traced
    shards = {i: p.to_local() for i, p in enumerate(parameters) if not owners.is_local[i]}
    like = torch.empty(0, dtype=torch.float64)
    results = owners.compute(shards, function, like)
    is_equal = []
    for i, parameter in enumerate(parameters):
        full = parameter.full_tensor()
        matrices = full if full.ndim == 3 else full[None]
        expected = torch.stack([m.cumsum(0).cumsum(1) + m.sum() for m in matrices])
        expected = expected.view(full.shape)
        if owners.is_local[i]:
            continue
        placed = type(parameter).from_local(
            results[i], mesh, placements, shape=full.shape, stride=full.stride()
        )
        is_equal.append(torch.equal(placed.full_tensor(), expected))
    return is_equal, computed, received[0], owners.is_local


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_rank_computes_each_matrix(name):
    shapes = LAYOUTS[name][2]
    of_ranks = run_ranks(compute, 4, name)
    local = of_ranks[0][3]
    assert all(is_local == local for *_, is_local in of_ranks)
    assert all(all(is_equal) for is_equal, *_ in of_ranks)
    shared = [shape for shape, is_local in zip(shapes, local, strict=True) if not is_local]
    expected = sorted(s[-2:] for s in shared for _ in range(s[0] if len(s) == 3 else 1))
    assert sorted(shape for _, computed, *_ in of_ranks for shape in computed) == expected
    # Each element reaches one owner, so no rank receives more than its matrices.
    total = sum(rows * columns for rows, columns in expected)
    assert sum(num_received for *_, num_received, _ in of_ranks) == total
    if len(set(expected)) == 1:
        assert {len(computed) for _, computed, *_ in of_ranks} == {len(expected) // 4}


def test_matrices_on_one_rank_are_not_sent():
    assert all(owner[3] == [True] for owner in run_ranks(compute, 4, "whole experts"))
    assert all(
        owner[3] == [True] for owner in run_ranks(compute, 4, "experts on two of four ranks")
    )
