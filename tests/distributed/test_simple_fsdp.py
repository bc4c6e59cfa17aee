"""SimpleFSDP has the gradients, placements and collectives of FSDP2, eager and compiled."""

import functools
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.parity import full, weights_mesh
from tests.harness.rank_pool import run_ranks
from torchtitan_like.config.sections_scale import ActivationCheckpoint
from torchtitan_like.distributed import bucketing
from torchtitan_like.distributed.activation import apply_activation_checkpointing
from torchtitan_like.distributed.bucketing import GATHER, REDUCE, SCATTER, merge_collectives
from torchtitan_like.distributed.data_parallel import DTYPES, apply_data_parallel
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.initialize import initialize, materialize, weight_hash
from torchtitan_like.distributed.parallelize import find_blocks
from torchtitan_like.distributed.simple_fsdp import apply_simple_fsdp, cast_weights, compile_model
from torchtitan_like.distributed.tensor_parallel import apply_tensor_parallel
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.optim.loss import VocabShards, chunked_cross_entropy

# Ranks cannot divide this vocabulary equally: 4 ranks get 33, 33, 33 and 32 of 131 rows.
SIZES = {
    "dim": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "multiple_of": 16,
    "vocab_size": 131,
    "max_seq_len": 32,
}
NUM_WEIGHTS = 2 * 9 + 3
BLOCKS = ("layers.0", "layers.1")
LAYOUTS = {
    "one": ParallelDims(1),
    "fsdp-2": ParallelDims(2, dp_shard=2),
    "fsdp-4": ParallelDims(4, dp_shard=4),
    "ddp-2": ParallelDims(2, dp_replicate=2),
    "hsdp-2x2": ParallelDims(4, dp_replicate=2, dp_shard=2),
    "fsdp-2-tp-2": ParallelDims(4, dp_shard=2, tp=2),
    "ddp-2-tp-2": ParallelDims(4, dp_replicate=2, tp=2),
}


@dataclass
class Options:
    """Options of a model. `impl`: none, simple_fsdp, fsdp2, casts (simple_fsdp without a mesh)."""

    impl: str = "simple_fsdp"
    backend: str | None = None
    dtype: str = "float64"
    param_dtype: str = "float64"
    reduce_dtype: str = "float64"
    reshard: str = "default"
    recompute: str = "none"
    num_micro: int = 1
    tied: bool = False
    n_layers: int = 2
    buckets: tuple[str, ...] = ()


@dataclass
class Outcome:
    loss: float
    weight_hash: int
    gradients: dict[str, np.ndarray]
    placements: dict[str, tuple[object, ...]]
    operators: list[Counter]
    name: str


def counting_backend(counts):
    """Return a backend like aot_eager that appends the operator counts of each graph to `counts`.

    The forward graph comes first, then the backward graph.
    """

    def count(graph, inputs):
        counts.append(
            Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        )
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )


class Count(TorchDispatchMode):
    """Counts the collectives of eager functions."""

    def __init__(self):
        super().__init__()
        self.operators = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "_c10d_functional" and "wait" not in str(function):
            self.operators[str(function).split(".")[1], args[0].dtype] += 1
        return function(*args, **(kwargs or {}))


def build(dims, options, graphs):
    """Return (initialized model, name of the parallelism).

    The operator counts of each compiled graph are appended to `graphs`.
    """
    torch._dynamo.reset()
    spec = get_spec("llama3")
    args = resolve_args(
        spec,
        "debugmodel",
        {**SIZES, "n_layers": options.n_layers, "enable_weight_tying": options.tied},
    )
    with torch.device("meta"):
        model = spec.build(args).to(DTYPES[options.dtype])
    mesh, shards = weights_mesh(dims), None
    if dims.tp > 1:
        shards = VocabShards(mesh.get_group("tp"), args.vocab_size)
        apply_tensor_parallel(model, spec, mesh["tp"], sequence_parallel=True)
    model.output.loss = chunked_cross_entropy(1, shards=shards)
    blocks = find_blocks(model, spec)
    section = {"mode": options.recompute}
    if options.recompute == "op":
        section = {"mode": "selective", "selective_ac_option": "op"}
    apply_activation_checkpointing(blocks, ActivationCheckpoint(**section))
    shared = {
        "param_dtype": options.param_dtype,
        "reduce_dtype": options.reduce_dtype,
        "reshard": options.reshard,
    }
    name = ""
    if options.impl in ("simple_fsdp", "casts"):
        compiled = options.backend is not None
        if compiled:
            backend = counting_backend(graphs) if options.backend == "counted" else options.backend
            compile_model(model, backend, mesh, options.buckets)
        shared["compiled"] = compiled
        if options.impl == "casts":
            cast_weights(model, spec, blocks.values(), None, dims, **shared)
        else:
            name = apply_simple_fsdp(model, spec, blocks.values(), mesh, dims, **shared)
    elif options.impl == "fsdp2":
        name = apply_data_parallel(
            model, spec, blocks.values(), mesh, dims, **shared, cpu_offload=False
        )
    materialize(model, torch.device("cpu"))
    initialize(model, spec.init_table(args), seed=0)
    return model, name


def run(dims, options):
    """Run forward and backward on this rank's samples."""
    graphs = []
    model, name = build(dims, options, graphs)
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, weight_hash(model))
    samples = torch.arange(8 * 33).reshape(8, 33).mul(37).remainder(131)
    local_samples = samples.chunk(dims.dp)[dims.dp_coordinate(dist.get_rank())]
    total = torch.zeros((), dtype=torch.float64)
    with Count() if options.backend is None else nullcontext() as count:
        for micro_batch in local_samples.chunk(options.num_micro):
            loss = model(micro_batch[:, :-1], micro_batch[:, 1:]) / (8 * 32)
            loss.backward()
            total += loss.detach()
    dist.all_reduce(total)
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    return Outcome(
        loss=total.item() / dims.tp,
        weight_hash=sum(shares) % 2**64,
        gradients={name: full(p.grad) for name, p in model.named_parameters()},
        placements={
            name: (p.placements, p.device_mesh.mesh_dim_names, p.to_local().shape,
                   p.grad.placements)
            for name, p in model.named_parameters() if hasattr(p, "placements")
        },
        operators=[count.operators] if count is not None else graphs,
        name=name,
    )  # fmt: skip


@functools.cache
def outcomes(layout, **options):
    """Return the outcome of every rank. The timeout covers compilation."""
    dims = LAYOUTS[layout]
    return run_ranks(run, dims.world_size, dims, Options(**options), timeout=240)


def worst_error(actual, expected):
    assert actual.gradients.keys() == expected.gradients.keys()
    return max(
        np.linalg.norm(actual.gradients[name] - gradient) / np.linalg.norm(gradient)
        for name, gradient in expected.gradients.items()
    )


def assert_equal(actual, expected, limit=1e-10):
    assert actual.weight_hash == expected.weight_hash
    assert actual.loss == pytest.approx(expected.loss, rel=limit)
    assert worst_error(actual, expected) <= limit


def one_rank(**options):
    return outcomes("one", impl="none", **options)[0]


# ---- numbers


NIGHTLY = ("fsdp-4", "ddp-2-tp-2")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else [])
        for name in LAYOUTS
    ],
)
def test_gradients_equal_one_rank_and_placements_equal_fsdp2(layout):
    actual, expected = outcomes(layout), outcomes(layout, impl="fsdp2")
    assert_equal(actual[0], one_rank())
    assert_equal(actual[0], expected[0])
    assert [rank.placements for rank in actual] == [rank.placements for rank in expected]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("fsdp-4", marks=pytest.mark.nightly),
        pytest.param("hsdp-2x2", marks=pytest.mark.nightly),
        "fsdp-2-tp-2",
    ],
)
def test_tied_weight_stays_tied(layout):
    actual, expected = outcomes(layout, tied=True)[0], one_rank(tied=True)
    assert_equal(actual, expected)
    assert "output.weight" not in actual.gradients


def test_gradients_accumulate_over_micro_batches():
    assert_equal(outcomes("hsdp-2x2", num_micro=2)[0], one_rank())


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "recompute"), [("ddp-2", "none"), ("fsdp-2-tp-2", "full")])
def test_compiled_graph_gives_the_results_of_one_rank(layout, recompute):
    """Later tests and test_matrix.py compare further compiled graphs."""
    actual = outcomes(layout, backend="aot_eager", recompute=recompute, n_layers=1)[0]
    assert_equal(actual, one_rank(n_layers=1))


@pytest.mark.nightly
def test_inductor_gives_the_results_of_one_rank():
    """The graph has bucketed collectives. Before torch 2.13 Inductor has no float64 attention."""
    types = dict.fromkeys(("dtype", "param_dtype", "reduce_dtype"), "float32")
    actual = outcomes("fsdp-2", backend="inductor", n_layers=1, buckets=BLOCKS[:1], **types)[0]
    assert_equal(actual, one_rank(n_layers=1, **types), limit=1e-5)


MIXED = {"dtype": "float32", "param_dtype": "bfloat16", "reduce_dtype": "float32"}


@pytest.mark.parametrize("reshard", ["default", "always", "never"])
def test_casts_on_one_rank_equal_fsdp2(reshard):
    """Bit-equal in bfloat16, with micro-batches and with recomputation."""
    options = {
        **MIXED,
        "reshard": reshard,
        "num_micro": 2,
        "recompute": "full" if reshard == "always" else "none",
    }
    (actual,), (expected,) = (
        outcomes("one", impl="casts", **options),
        outcomes("one", impl="fsdp2", **options),
    )
    assert (actual.loss, actual.weight_hash) == (expected.loss, expected.weight_hash)
    assert actual.gradients.keys() == expected.gradients.keys()
    assert all(
        (actual.gradients[name] == gradient).all() for name, gradient in expected.gradients.items()
    )
    assert not actual.placements and expected.placements


# ---- collectives

# Backward reads the weights of all linear layers and norms, but not the embedding. The loss reads
# the head's weight only in forward. Weights next to the head are freed only with "always".
GATHERED_AGAIN = {
    "default": lambda layers: 9 * layers,
    "always": lambda layers: 9 * layers + 1,
    "never": lambda layers: 0,
}


@pytest.mark.parametrize("reshard", GATHERED_AGAIN)
def test_number_of_gathers_for_backward(reshard):
    (counts,) = outcomes("fsdp-2", reshard=reshard)[0].operators
    assert counts == {
        ("all_gather_into_tensor", torch.float64): NUM_WEIGHTS + GATHERED_AGAIN[reshard](2),
        ("reduce_scatter_tensor", torch.float64): NUM_WEIGHTS,
    }


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_gradients_are_reduced_in_the_requested_dtype(reduce_dtype):
    (counts,) = outcomes("fsdp-2", **{**MIXED, "reduce_dtype": reduce_dtype}, n_layers=1)[
        0
    ].operators
    assert dict(counts.keys()) == {
        "all_gather_into_tensor": torch.bfloat16,
        "reduce_scatter_tensor": getattr(torch, reduce_dtype),
    }


@pytest.mark.nightly
@pytest.mark.parametrize(("reshard", "recompute", "n_layers"), [
    ("default", "full", 2), ("default", "none", 1), ("default", "op", 1), ("always", "full", 1),
    ("never", "full", 1),
])  # fmt: skip
def test_number_of_gathers_for_backward_in_a_compiled_graph(reshard, recompute, n_layers):
    """Activation checkpointing and compilation do not change the numbers of eager mode."""
    actual = outcomes(
        "fsdp-2", backend="counted", reshard=reshard, recompute=recompute, n_layers=n_layers
    )[0]
    assert_equal(actual, one_rank(n_layers=n_layers))
    gathers_in_backward = GATHERED_AGAIN[reshard](n_layers)
    assert [collectives(graph) for graph in actual.operators] == [
        {"all_gather_into_tensor": 9 * n_layers + 3},
        {"reduce_scatter_tensor": 9 * n_layers + 3}
        | ({"all_gather_into_tensor": gathers_in_backward} if gathers_in_backward else {}),
    ]


def collectives(graph):
    names = {
        name.split(".")[1]: count
        for name, count in graph.items()
        if name.startswith("_c10d_functional")
    }
    names.pop("wait_tensor", None)
    return names


class Merged(NamedTuple):
    """Data-parallel collectives of a graph before and after merging: counts, elements by kind."""

    before: Counter
    after: Counter


def run_counting_merges(dims, options):
    """Call `run`; also return the collectives of each graph before and after merging."""
    graphs = []

    def count_collectives(graph, groups):
        counts = Counter()
        for node in graph.nodes:
            if (
                node.op == "call_function"
                and node.target in (GATHER, SCATTER, REDUCE)
                and node.args[-1] in groups
            ):
                kind = str(node.target).split(".")[1]
                counts[kind] += 1
                counts[f"{kind} elements"] += node.args[0].meta["val"].numel()
        return counts

    def merge(graph, blocks, groups):
        before = count_collectives(graph, groups)
        saved = merge_collectives(graph, blocks, groups)
        graphs.append(Merged(before, count_collectives(graph, groups)))
        assert saved == sum(before[kind] - graphs[-1].after[kind] for kind in KINDS)
        return saved

    with patch.object(bucketing, "merge_collectives", merge):
        return run(dims, options), graphs


KINDS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
IN_BACKWARD = {"fsdp-2": KINDS[:2], "hsdp-2x2": KINDS}


@pytest.mark.parametrize("layout", ["fsdp-2", pytest.param("hsdp-2x2", marks=pytest.mark.nightly)])
def test_weights_of_a_block_share_collectives(layout):
    """Each block has one collective of a kind. The three other weights have their own.

    The total number of elements does not change.
    """
    options = Options(backend="aot_eager", buckets=BLOCKS, recompute="full")
    actual, graphs = run_ranks(
        run_counting_merges, LAYOUTS[layout].world_size, LAYOUTS[layout], options, timeout=240
    )[0]
    assert_equal(actual, one_rank())
    for graph, kinds in zip(graphs, (KINDS[:1], IN_BACKWARD[layout]), strict=True):
        assert {kind for kind in KINDS if graph.before[kind]} == set(kinds)
        for kind in kinds:
            num_other = graph.before[kind] - 2 * 9
            assert num_other in (0, 3) and graph.after[kind] == num_other + 2, kind
            assert graph.after[f"{kind} elements"] == graph.before[f"{kind} elements"]


@pytest.mark.nightly
def test_merged_collectives_work_with_mixed_precision():
    """Weights are gathered in bfloat16 and reduced in float32, as in FSDP2."""
    options = Options(backend="aot_eager", buckets=BLOCKS[:1], n_layers=1, **MIXED)
    actual, graphs = run_ranks(run_counting_merges, 2, LAYOUTS["fsdp-2"], options, timeout=240)[0]
    assert (
        graphs[0].after["all_gather_into_tensor"]
        == graphs[1].after["reduce_scatter_tensor"]
        == 3 + 1
    )
    assert_equal(actual, outcomes("fsdp-2", impl="fsdp2", n_layers=1, **MIXED)[0], limit=1e-6)


def error_of_wrong_bucket():
    try:
        run(LAYOUTS["fsdp-2"], Options(backend="aot_eager", buckets=("blocks.0",), n_layers=1))
    except Exception as error:  # the compiler wraps the original error
        return str(error)


@pytest.mark.nightly
def test_bucket_without_any_merge_is_an_error():
    assert (
        "none of 12 collectives in a compiled graph could be merged"
        in run_ranks(error_of_wrong_bucket, 2, timeout=240)[0]
    )


# ---- memory


class Arrivals(TorchDispatchMode):
    """Records weak references to the memory of gathered or cast weights."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_cast = (
            function is torch.ops.aten._to_copy.default
            and result.dtype is torch.bfloat16
            and result.ndim <= 2
        )
        is_cast = is_cast and args[0].is_floating_point()  # the loss casts a mask
        if is_cast or function is torch.ops._c10d_functional.wait_tensor.default:
            self.storages.append(StorageWeakRef(result.untyped_storage()))
        return result


def num_gathered_and_allocated(layout, options, expected):
    """Return (weights gathered or cast in forward, weights still allocated afterwards).

    Wait until at most `expected` weights are allocated.
    """
    model, _ = build(LAYOUTS[layout], options, [])
    samples = torch.arange(2 * 33).reshape(2, 33).remainder(131)
    with Arrivals() as arrivals:
        loss = model(samples[:, :-1], samples[:, 1:])
    deadline, num_allocated = time.monotonic() + 20, len(arrivals.storages) + 1
    while num_allocated > expected and time.monotonic() < deadline:
        # gloo's threads release the tensors of the last gather with a delay
        time.sleep(0.3)
        num_allocated = sum(not storage.expired() for storage in arrivals.storages)
    loss.backward()
    return len(arrivals.storages), num_allocated


@pytest.mark.parametrize(
    ("reshard", "num_allocated"), [("default", 1), ("always", 0), ("never", 2 * 9 + 1)]
)
def test_number_of_gathered_weights_allocated_after_forward(reshard, num_allocated):
    """Of the head, eager mode keeps only the norm weight: the loss has already freed the other."""
    assert (
        run_ranks(num_gathered_and_allocated, 2, "fsdp-2", Options(reshard=reshard), num_allocated)
        == [(NUM_WEIGHTS, num_allocated)] * 2
    )
    casts = Options("casts", reshard=reshard, **MIXED)
    assert run_ranks(num_gathered_and_allocated, 1, "one", casts, num_allocated) == [
        (NUM_WEIGHTS, num_allocated)
    ]


# ---- validation and log


def training_and_validation_loss(backend):
    """Return both losses of the same model and samples. Both use the compiled forward."""
    model, _ = build(LAYOUTS["fsdp-2"], Options(backend=backend, n_layers=1), [])
    samples = torch.arange(2 * 33).reshape(2, 33).remainder(131)
    training_loss = model(samples[:, :-1], samples[:, 1:]).item()
    with torch.no_grad():
        return training_loss, model.eval()(samples[:, :-1], samples[:, 1:]).item()


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_validation_loss_equals_training_loss(backend):
    training_loss, validation_loss = run_ranks(
        training_and_validation_loss, 2, backend, timeout=240
    )[0]
    assert validation_loss == pytest.approx(training_loss, rel=1e-12)


@pytest.mark.parametrize(("layout", "name"), [
    ("one", "SimpleFSDP"), ("fsdp-2", "SimpleFSDP"), ("ddp-2", "SimpleFSDP (replicated)"),
    ("hsdp-2x2", "SimpleFSDP (hybrid)"),
])  # fmt: skip
def test_name_of_the_parallelism_in_the_log(layout, name):
    assert outcomes(layout)[0].name == name
