"""`parallelism.fsdp_prefetch_depth` sets the number of prefetched blocks and changes no result."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.distributed.parity import weights_mesh
from tests.harness.rank_pool import run_ranks
from torchtitan_like.distributed.data_parallel import apply_data_parallel
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.distributed.parallelize import find_blocks
from torchtitan_like.models.spec import get_spec, resolve_args

NUM_BLOCKS = 4
SIZES = {"dim": 32, "n_layers": NUM_BLOCKS, "n_heads": 4, "multiple_of": 16, "vocab_size": 64}


def gathers_and_gradients(depth: int) -> tuple[list[str], list[str], list[torch.Tensor]]:
    """Return the events of forward and backward, and the gradients.

    An event is the number of a block after `g` (gathered) or `c` (computed).
    """
    spec = get_spec("llama3")
    args = resolve_args(spec, "debugmodel", SIZES)
    with torch.device("meta"):
        model = spec.build(args)
    dims = ParallelDims(2, dp_shard=2)
    blocks = list(find_blocks(model, spec).values())
    apply_data_parallel(
        model,
        spec,
        blocks,
        weights_mesh(dims),
        dims,
        param_dtype="float32",
        reduce_dtype="float32",
        reshard="always",
        cpu_offload=False,
        prefetch_depth=depth,
    )
    materialize(model, torch.device("cpu"))
    initialize(model, spec.init_table(args), seed=0)
    events: list[str] = []
    for number, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        group = block._get_fsdp_state()._fsdp_param_group
        group.unshard = functools.partial(record_gather, events, f"g{number}", group.unshard, group)
        block.attention.register_forward_pre_hook(lambda *_, n=number: events.append(f"c{n}"))
        block.attention.register_full_backward_pre_hook(lambda *_, n=number: events.append(f"c{n}"))
    tokens = torch.arange(32).view(2, 16)
    loss = model(tokens).square().mean()
    forward = list(events)
    events.clear()
    loss.backward()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return forward, list(events), gradients


def record_gather(events, name, function, group, *args, **kwargs):
    if not group.is_unsharded and group._all_gather_result is None:  # not gathered yet
        events.append(name)
    return function(*args, **kwargs)


@functools.cache
def events_on_two_ranks(depth: int):
    return run_ranks(gathers_and_gradients, 2, depth)[0]


def gathered_before(events: list[str], number: int) -> set[int]:
    return {int(event[1:]) for event in events[: events.index(f"c{number}")] if event[0] == "g"}


@pytest.mark.parametrize("depth", [2, 3])
def test_prefetch_depth_is_the_number_of_blocks_gathered_ahead(depth: int) -> None:
    forward, backward, _ = events_on_two_ranks(depth)
    for number in range(NUM_BLOCKS):
        assert gathered_before(forward, number) == set(range(min(number + depth + 1, NUM_BLOCKS)))
        ahead = gathered_before(backward, number)
        assert ahead == set(range(max(number - depth, 0), NUM_BLOCKS)), backward


def test_gradients_do_not_depend_on_prefetch_depth() -> None:
    expected = events_on_two_ranks(1)[2]
    for depth in (2, 3):
        for gradient, expected_gradient in zip(
            events_on_two_ranks(depth)[2], expected, strict=True
        ):
            assert torch.equal(gradient, expected_gradient)
