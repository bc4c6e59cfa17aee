"""Asynchronous tensor parallelism: the collectives that Inductor's pass fuses, and their results.

The pass silently skips every pattern that it does not recognize. These tests need no GPU: they run
the graphs after the pass on CPU ranks, with torch's fallbacks for the overlapping operators.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V
from torch.distributed import _symmetric_memory as symmetric_memory

from tests.harness.ports import free_ports
from tests.harness.rank_pool import run_ranks
from torchtitan_like.config.sections_scale import (
    ActivationCheckpoint,
    Compile,
    Float8Linear,
    Parallelism,
)
from torchtitan_like.config.sections_training import Training
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.initialize import initialize
from torchtitan_like.distributed.parallelize import Sections, build_parts
from torchtitan_like.distributed.row_exchange import RowExchange
from torchtitan_like.distributed.tensor_parallel import overlap_tensor_parallel
from torchtitan_like.distributed.world import World, join_world, launched_as
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.optim.loss import VocabShards, chunked_cross_entropy

SEQ, VOCAB, LAYERS = 16, 72, 2
SIZES = {
    "dim": 32,
    "n_layers": LAYERS,
    "n_heads": 4,
    "n_kv_heads": 4,
    "vocab_size": VOCAB,
    "max_seq_len": SEQ,
}
FLAVORS = {
    "llama3": ("debugmodel", {"multiple_of": 16}),
    "qwen3": ("0.6B", {"head_dim": 8, "hidden_dim": 48}),
}
GATHER_MM, MM_SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
OPERATORS = (GATHER_MM, MM_SCATTER, GATHER, SCATTER)


@dataclass(frozen=True)
class Run:
    model: str = "llama3"
    batch: int = 2
    recompute: str = "none"
    simple: bool = False
    dtype: str = "float64"


def build(run: Run, world: World, *, asynchronous: bool, compiled: bool = True) -> Any:
    """Build this rank's shard of the model with initial weights, like the trainer."""
    torch._dynamo.reset()
    flavor, others = FLAVORS[run.model]
    spec = get_spec(run.model)
    args = resolve_args(spec, flavor, SIZES | others)
    modes = {"op": {"mode": "selective", "selective_ac_option": "op"}}
    sections = Sections(
        Training(
            dtype=run.dtype, mixed_precision_param=run.dtype, mixed_precision_reduce=run.dtype
        ),
        Parallelism(
            tensor_parallel_degree=2,
            enable_async_tensor_parallel=asynchronous,
            data_parallel_impl="simple_fsdp" if run.simple else "fsdp2",
            simple_fsdp_bucketing=run.simple and compiled,
        ),
        ActivationCheckpoint(**modes.get(run.recompute, {"mode": run.recompute})),
        Compile(enable=compiled, components=["model"]),
        (),
        Float8Linear(),
    )
    loss = chunked_cross_entropy(0, None, VocabShards(world.group("tp"), VOCAB))
    exchange = RowExchange(False, 1.0, torch.device("cpu"))
    (model,) = build_parts(
        spec, args, world, sections, exchange, loss=loss, num_samples=run.batch
    ).parts
    initialize(model, spec.init_table(args), seed=7)
    return model


def step(model: Any, run: Run) -> dict[str, torch.Tensor]:
    """Return loss, this rank's gradient shards, and the logits of a forward without gradients."""
    samples = torch.randint(VOCAB, (2, run.batch, SEQ), generator=torch.Generator().manual_seed(3))
    tokens, labels = samples.to(next(model.buffers()).device)
    model.zero_grad()
    loss = model(tokens, labels)
    loss.backward()
    tensors = {name: p.grad.to_local() for name, p in model.named_parameters()} | {
        "loss": loss.detach()
    }
    with torch.no_grad():
        tensors["logits"] = model(tokens)
    return tensors


def largest_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest error over all tensors, relative to each tensor's largest entry."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name] - t).abs().max() / t.abs().max()) for name, t in expected.items()
    )


@contextmanager
def world_of_ranks() -> Iterator[World]:
    timeout = timedelta(seconds=60)
    world = join_world(
        launched_as(),
        ParallelDims(2, tp=2),
        timeout,
        timeout,
        needs_mesh=True,
        agree=lambda gather: None,
    )
    try:
        yield world
    finally:
        world.leave()


@contextmanager
def as_on_gpus(graphs: list[Counter[str]]) -> Iterator[None]:
    """Replace the GPU-only functions, and record the operator counts of each graph in `graphs`.

    Inductor runs all passes, then returns the graph instead of generated code. As on GPUs, the pass
    changes nothing if the option is off or symmetric memory is not enabled for the group.
    """
    enabled: set[str] = set()

    def run_graph(
        module: torch.fx.GraphModule, inputs: Any, is_inference: bool = False, **_: Any
    ) -> Any:
        post_grad.view_to_reshape(module)
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad.post_grad_passes(module, is_inference)
        module.recompile()
        names = [
            node.target.__name__.split(".")[0]
            for node in module.graph.nodes
            if node.op == "call_function"
        ]
        graphs.append(Counter(name for name in names if name in OPERATORS))
        return torch._functorch.aot_autograd.make_boxed_func(module.forward)

    with ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("symm_mem", "FRAGMENT"))
        library.impl(GATHER_MM, symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
        library.impl(MM_SCATTER, symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
        for target, name, stand_in in (
            (dist, "is_nccl_available", lambda: True),
            (symmetric_memory, "enable_symm_mem_for_group", enabled.add),
            (symmetric_memory, "get_symm_mem_workspace", lambda group, min_size: None),
            (symmetric_memory, "is_symm_mem_enabled_for_group", enabled.__contains__),
            (compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=run_graph)),
        ):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        yield


def step_graphs_and_error(run: Run) -> tuple[list[dict[str, int]], float]:
    """Return the operator counts of three graphs, and the error relative to plain TP.

    The graphs are the forward, the backward, and a forward without gradients.
    """
    graphs: list[Counter[str]] = []
    with world_of_ranks() as world:
        plain = step(build(run, world, asynchronous=False, compiled=False), run)
        with as_on_gpus(graphs):
            overlapped = step(build(run, world, asynchronous=True), run)
    return [dict(graph) for graph in graphs], largest_error(overlapped, plain)


# Gathers for (q, k, v) and (gate, up); scatters of the two output projections.
FORWARD = {GATHER_MM: 2, MM_SCATTER: 2}
# Backward gathers each output gradient for one product. It scatters sums of two or three products,
# for which no overlapping operator exists.
BACKWARD = {GATHER_MM: 2, SCATTER: 2}
# Recomputation omits the second output, which only the next block needs.
RECOMPUTED = {GATHER_MM: 4, MM_SCATTER: 1, SCATTER: 2}
# per_op_sac_save_reduce_scatter keeps the scattered outputs of the forward.
SAVED_PER_OP = {GATHER_MM: 4, SCATTER: 2}
# One graph for the whole model. The embedding scatters its output and gathers its gradient. With
# labels the head gathers its input for a product that the loss computes in chunks. Without labels
# it computes one product and gathers the logits.
WHOLE = [
    {GATHER_MM: 2 * LAYERS, MM_SCATTER: 2 * LAYERS, GATHER: 1, SCATTER: 1},
    {GATHER_MM: 2 * LAYERS, SCATTER: 2 * LAYERS + 1, GATHER: 1},
    {GATHER_MM: 2 * LAYERS + 1, MM_SCATTER: 2 * LAYERS, GATHER: 1, SCATTER: 1},
]
RUNS = {
    "block": (Run(), [FORWARD, BACKWARD, FORWARD]),
    "qwen3, one sample": (Run(model="qwen3", batch=1), [FORWARD, BACKWARD, FORWARD]),
    "recomputed": (Run(recompute="full"), [FORWARD, RECOMPUTED, FORWARD]),
    "recomputed per op": (Run(recompute="op"), [FORWARD, SAVED_PER_OP, FORWARD]),
    "whole model": (Run(simple=True), WHOLE),
}
EVERY_RUN = ("recomputed per op",)
RUN_CELLS = [
    pytest.param(name, marks=[] if name in EVERY_RUN else pytest.mark.nightly) for name in RUNS
]


@pytest.mark.parametrize("name", RUN_CELLS)
def test_collectives_overlap_matrix_products(name: str) -> None:
    run, expected = RUNS[name]
    for graphs, error in run_ranks(step_graphs_and_error, 2, run, timeout=120):
        assert graphs == expected
        assert error <= 1e-14


def default_graphs() -> list[dict[str, int]]:
    graphs: list[Counter[str]] = []
    with world_of_ranks() as world, as_on_gpus(graphs):
        step(build(Run(), world, asynchronous=False), Run())
    return [dict(graph) for graph in graphs]


@pytest.mark.nightly
def test_asynchronous_collectives_are_off_by_default() -> None:
    plain = {GATHER: 2, SCATTER: 2}
    assert run_ranks(default_graphs, 2) == [[plain] * 3] * 2


def error_without_peer_access() -> str:
    def fail_without_peer_access(group: str, min_size: int) -> None:
        raise RuntimeError("CUDA driver error: peer access is not supported")

    with (
        mock.patch.object(symmetric_memory, "enable_symm_mem_for_group"),
        mock.patch.object(symmetric_memory, "get_symm_mem_workspace", fail_without_peer_access),
        pytest.raises(RuntimeError) as caught,
    ):
        overlap_tensor_parallel(dist.group.WORLD)
    return str(caught.value)


def test_gpus_without_peer_access_are_rejected() -> None:
    for message in run_ranks(error_without_peer_access, 2):
        assert (
            "expected 2 GPUs that read each other's memory" in message
            and "peer access is not supported" in message
        )
        assert "-> set it to false" in message


# ---- the overlapping operators on GPUs


def compare_on_gpu(rank: int, port: int, run: Run) -> None:
    """Run one of two processes: compare with plain TP and count the operators of all layers."""
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    os.environ["WORLD_SIZE"] = "2"
    with world_of_ranks() as world:
        plain = step(build(run, world, asynchronous=False), run)
        model = build(run, world, asynchronous=True)
        step(model, run)  # compiles, which also runs operators
        with torch.profiler.profile() as profile:
            overlapped = step(model, run)
        counts = Counter(event.name for event in profile.events())
        assert counts[f"symm_mem::{GATHER_MM}"] == LAYERS * sum(
            g[GATHER_MM] for g in (FORWARD, BACKWARD, FORWARD)
        )
        assert counts[f"symm_mem::{MM_SCATTER}"] == LAYERS * sum(
            g[MM_SCATTER] for g in (FORWARD, FORWARD)
        )
        # float32: the two ways add the partial sums of the ranks in a different order.
        assert largest_error(overlapped, plain) <= 1e-5


@pytest.mark.gpu
def test_numbers_on_gpus_equal_plain_tensor_parallelism() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs that read each other's memory")
    [port] = free_ports(1)
    torch.multiprocessing.spawn(compare_on_gpu, (port, Run(dtype="float32")), nprocs=2)
