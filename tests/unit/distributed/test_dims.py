"""Parallel degrees: defaults, layouts that do not fit, and the coordinates of ranks."""

import math
from types import SimpleNamespace

import pytest

from torchtitan_like.distributed.dims import ParallelDims, resolve_degrees


def parallelism(
    schedule="1F1B", enable_sequence_parallel=True, data_parallel_impl="fsdp2", **changes
):
    defaults = {"data_parallel_replicate": 1, "data_parallel_shard": -1, "context_parallel": 1, "tensor_parallel": 1,
                "pipeline_parallel": 1, "expert_parallel": 1, "expert_tensor_parallel": 1}  # fmt: skip
    degrees = {f"{k}_degree": v for k, v in {**defaults, **changes}.items()}
    return SimpleNamespace(
        pipeline_parallel_schedule=schedule,
        enable_sequence_parallel=enable_sequence_parallel,
        data_parallel_impl=data_parallel_impl,
        **degrees,
    )


def resolve(parallelism, world_size, has_experts=False):
    return resolve_degrees(parallelism, world_size, has_experts=has_experts)


@pytest.mark.parametrize(
    ("degrees", "world_size", "shape"),
    [
        ({}, 1, {"dp_shard": 1}),
        ({}, 8, {"dp_shard": 8}),
        ({"data_parallel_replicate": 2}, 8, {"dp_replicate": 2, "dp_shard": 4}),
        ({"data_parallel_replicate": 4, "data_parallel_shard": 1}, 4, {"dp_replicate": 4}),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, 8, {"pp": 2, "dp_shard": 2, "tp": 2}),
        ({"tensor_parallel": 8}, 8, {"tp": 8}),
    ],
)
def test_mesh_shape(degrees, world_size, shape):
    dims, errors = resolve(parallelism(**degrees), world_size)
    assert errors == []
    assert dims.mesh_shape() == shape
    assert list(dims.mesh_shape()) == list(shape)


@pytest.mark.parametrize(
    ("dims", "ranks_per_node", "text"),
    [
        (ParallelDims(8, pp=2, dp_shard=2, tp=2), 8, "8 ranks = pp 2 x dp_shard 2 x tp 2"),
        (ParallelDims(8, dp_shard=4, cp=2), 4, "8 ranks = dp_shard 4 x cp 2, on 2 nodes of 4"),
        (ParallelDims(9, dp_replicate=9), 4, "9 ranks = dp_replicate 9, on 3 nodes of 4"),
    ],
)
def test_the_mesh_in_the_log(dims, ranks_per_node, text):
    assert dims.describe(ranks_per_node) == text


@pytest.mark.parametrize(
    ("degrees", "world_size", "message"),
    [
        ({"data_parallel_shard": 3}, 4, "dp_shard 3 .*= 3, but the world has 4 ranks"),
        ({"tensor_parallel": 3}, 4, "tp 3 .*= 3, but the world has 4 ranks"),
        ({"tensor_parallel": 8}, 4, "= 8, but the world has 4 ranks"),
    ],
)
def test_degrees_that_do_not_fit_are_reported(degrees, world_size, message):
    import re

    dims, errors = resolve(parallelism(**degrees), world_size)
    assert dims.dp_shard == 1
    assert re.search(message, errors[0])


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(8, dp_replicate=2, dp_shard=4),
        ParallelDims(8, pp=2, dp_shard=2, tp=2),
        ParallelDims(16, pp=2, dp_replicate=2, dp_shard=2, cp=1, tp=2),
        ParallelDims(8, cp=2, tp=2, dp_shard=2),
    ],
)
def test_every_data_shard_is_counted_once(dims):
    counting = [r for r in range(dims.world_size) if dims.counts_tokens(r)]
    assert sorted(dims.dp_coordinate(r) for r in counting) == list(range(dims.dp))


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        (ParallelDims(1), {"dp_shard": 1}),
        (ParallelDims(8, dp_shard=2, cp=4), {"dp_shard": 8}),
        (ParallelDims(8, dp_replicate=2, cp=4), {"dp_replicate": 2, "dp_shard": 4}),
        (ParallelDims(4, dp_replicate=2, tp=2), {"dp_replicate": 2, "tp": 2}),
        (ParallelDims(8, pp=2, cp=2, tp=2), {"pp": 2, "dp_shard": 2, "tp": 2}),
    ],
)
def test_weights_are_sharded_over_context_parallel_ranks_too(dims, shape):
    assert list(dims.weights_shape().items()) == list(shape.items())


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        (ParallelDims(8, dp_shard=8, ep=4), {"efsdp": 2, "ep": 4}),
        (ParallelDims(8, dp_shard=2, cp=2, tp=2, ep=8), {"efsdp": 1, "ep": 8}),
        (
            ParallelDims(8, dp_replicate=2, dp_shard=4, ep=2),
            {"dp_replicate": 2, "efsdp": 2, "ep": 2},
        ),
        (
            ParallelDims(8, dp_shard=4, tp=2, ep=2, expert_tp=2),
            {"efsdp": 2, "ep": 2, "expert_tp": 2},
        ),
        (ParallelDims(8, pp=2, tp=4, ep=2), {"pp": 2, "efsdp": 2, "ep": 2}),
    ],
)
def test_experts_use_the_ranks_of_the_other_dimensions(dims, shape):
    assert list(dims.experts_shape().items()) == list(shape.items())
    assert math.prod(shape.values()) == dims.world_size
    borrowed = {name: shape[name] for name in ("ep", "expert_tp") if name in shape}
    assert dims.layout() == dims.mesh_shape() | borrowed


@pytest.mark.parametrize(
    ("changes", "is_own", "shape"),
    [
        ({}, False, None),
        ({"expert_parallel": 2}, True, {"efsdp": 2, "ep": 2}),
        ({"tensor_parallel": 2}, True, {"efsdp": 4, "ep": 1}),
        (
            {"tensor_parallel": 2, "expert_tensor_parallel": 2},
            True,
            {"efsdp": 2, "ep": 1, "expert_tp": 2},
        ),
        ({"tensor_parallel": 2, "data_parallel_replicate": 2}, False, None),  # DDP
        ({"tensor_parallel": 2, "enable_sequence_parallel": False}, False, None),
        ({"tensor_parallel": 2, "data_parallel_impl": "simple_fsdp"}, False, None),
    ],
)
def test_experts_are_sharded_over_tensor_parallel_ranks_that_route_different_tokens(
    changes, is_own, shape
):
    section = parallelism(**changes)
    dims, errors = resolve(section, 4, has_experts=True)
    assert errors == [] and dims.has_experts_mesh == is_own
    assert shape is None or dims.experts_shape() == shape
    dense, _ = resolve(section, 4)
    assert not dense.has_experts_mesh and (dense.ep, dense.expert_tp) == (1, 1)


@pytest.mark.parametrize(
    ("schedule", "stage"), [("1F1B", 3), ("Interleaved1F1B", 3), ("ZBVZeroBubble", 0)]
)
def test_every_token_has_its_loss_on_one_counted_rank(schedule, stage):
    dims, _ = resolve(
        parallelism(schedule, pipeline_parallel=4, context_parallel=2, tensor_parallel=2), 32
    )
    counting = [rank for rank in range(32) if dims.counts_loss(rank)]
    assert {(dims.dp_coordinate(r), dims.coordinate("cp", r)) for r in counting} == {
        (d, c) for d in (0, 1) for c in (0, 1)
    }
    assert len(counting) == 4 and {dims.coordinate("pp", rank) for rank in counting} == {stage}


def test_peers_differ_along_one_dimension():
    dims = ParallelDims(8, dp_shard=2, cp=2, tp=2)
    assert dims.peers("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dims.peers("dp_shard") == [[0, 4], [1, 5], [2, 6], [3, 7]]
