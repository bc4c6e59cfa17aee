"""Every pipeline schedule equals one rank, with and without data parallelism.

Further tests cover non-finite losses, memory for messages, and the executed order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness.rank_pool import RankError, run_in_new_processes, run_ranks
from torchtitan_like.config.sections_scale import ActivationCheckpoint, Parallelism
from torchtitan_like.distributed.activation import apply_activation_checkpointing
from torchtitan_like.distributed.data_parallel import apply_data_parallel
from torchtitan_like.distributed.initialize import initialize, materialize, weight_hash
from torchtitan_like.distributed.parallelize import compile_blocks, find_blocks
from torchtitan_like.distributed.pipeline import Pipeline
from torchtitan_like.distributed.schedule_view import order_of
from torchtitan_like.distributed.stages import plan_stages, prune
from torchtitan_like.models.layers.head import cross_entropy_sum
from torchtitan_like.models.spec import get_spec
from torchtitan_like.optim.clipping import gradient_norm

VOCAB, CPU = 40, torch.device("cpu")
SINGLE = ("GPipe", "1F1B")
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def spec_and_args():
    spec = get_spec("llama3")
    sizes = {
        "dim": 16,
        "n_layers": 6,
        "n_heads": 2,
        "n_kv_heads": 1,
        "vocab_size": VOCAB,
        "max_seq_len": 32,
    }
    return spec, dataclasses.replace(spec.flavors["debugmodel"], multiple_of=8, **sizes)


def batch(rows=8, seq=12):
    """Return tokens, partly masked labels, and positions in documents of different lengths."""
    generator = torch.Generator().manual_seed(rows)
    tokens, labels = (torch.randint(VOCAB, (rows, seq), generator=generator) for _ in range(2))
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return tokens, labels, torch.stack([torch.arange(seq) % (row + 3) for row in range(rows)])


def count(labels):
    return int((labels != -100).sum())


# ---- one rank


@functools.cache
def one_rank():
    """Return the results of the unsharded model: a step, and an evaluation of another batch."""
    spec, args = spec_and_args()
    with torch.device("meta"):
        model = spec.build(args).double()
    materialize(model, CPU)
    initialize(model, spec.init_table(args), 7)
    tokens, labels, positions = batch()
    loss = model(tokens, labels, positions) / count(labels)
    loss.backward()
    gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
    norm = gradient_norm(model.parameters()).item()
    with torch.no_grad():
        evaluated = model(*batch(3, 20)).item()
    return SimpleNamespace(
        loss=loss.item(),
        gradients=gradients,
        norm=norm,
        hash=weight_hash(model),
        evaluated=evaluated,
    )


# ---- ranks


def assemble(
    schedule,
    *,
    mesh=None,
    blocks="plain",
    dtype="float64",
    compute_dtype="float64",
    microbatch_size=1,
    reshard="default",
    **section,
):
    """Build this rank's pipeline over the dimension "pp" of `mesh`, or over all ranks."""
    spec, args = spec_and_args()
    group = dist.group.WORLD if mesh is None else mesh.get_group("pp")
    pp = dist.get_world_size(group)
    plan = plan_stages(
        spec,
        args,
        Parallelism(pipeline_parallel_degree=pp, pipeline_parallel_schedule=schedule, **section),
    )
    stage_fqns = [plan.fqns[stage] for stage in plan.ranks[dist.get_rank(group)]]
    with torch.device("meta"):
        parts = [
            prune(spec.build(args).to(getattr(torch, dtype)), spec, fqns) for fqns in stage_fqns
        ]
    for part in parts:
        modules = find_blocks(part, spec)
        BLOCKS[blocks](modules)
        if mesh is not None:
            sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
            dims = SimpleNamespace(**{"dp_replicate": 1, "dp_shard": 1, "cp": 1, **sizes})
            reduce_dtype = "float64" if compute_dtype == "float64" else "float32"
            apply_data_parallel(
                part, spec, modules.values(), mesh, dims,
                param_dtype=compute_dtype, reduce_dtype=reduce_dtype, reshard=reshard,
                cpu_offload=False,
            )  # fmt: skip
        materialize(part, CPU)
        initialize(part, spec.init_table(args), 7)
    return Pipeline(
        parts,
        plan,
        group,
        neighbor_groups={},
        device=CPU,
        microbatch_size=microbatch_size,
        width=args.dim,
        dtype=getattr(torch, compute_dtype),
    )


BLOCKS = {
    "plain": lambda modules: None,
    "recomputed": lambda modules: apply_activation_checkpointing(
        modules, ActivationCheckpoint(mode="full")
    ),
    "recomputed per op": lambda modules: apply_activation_checkpointing(
        modules, ActivationCheckpoint(mode="selective", selective_ac_option="op")
    ),
    "compiled": lambda modules: compile_blocks(modules, "aot_eager"),
    "with other strides": lambda modules: [
        _with_other_strides(block) for block in modules.values()
    ],
}


def _with_other_strides(block):
    """Make the output and the input gradient of a block non-contiguous."""
    forward = block.forward

    def change(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    block.forward = lambda x, *others: change(forward(change(x), *others))


def named_parameters(pipeline):
    return [pair for part in pipeline.parts for pair in part.named_parameters()]


def step(pipeline, data, num_valid):
    for _, parameter in named_parameters(pipeline):
        parameter.grad = None
    loss, token_losses = pipeline.step(*data, num_valid)
    assert token_losses is None  # the head returns only the sum
    return loss.item()


def trace(pipeline, dp_rank=0, dp=1):
    """Return this rank's results of a second step, after an evaluation with another shape."""
    data = tuple(part.tensor_split(dp)[dp_rank] for part in batch())
    num_valid = count(batch()[1])
    weights_hash = sum(weight_hash(part) for part in pipeline.parts)
    step(pipeline, data, num_valid)
    evaluated = pipeline.evaluate(*batch(3, 20)).item()
    loss = step(pipeline, data, num_valid)
    gradients = {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).double().numpy()
        for name, p in named_parameters(pipeline)
    }
    pairs = named_parameters(pipeline)
    norm = gradient_norm([p for _, p in pairs], dist.group.WORLD).item()
    return SimpleNamespace(
        loss=loss, gradients=gradients, norm=norm, hash=weights_hash, evaluated=evaluated / dp
    )


def trace_pipeline(schedule, options):
    return trace(assemble(schedule, **options))


def check(traces, limit=1e-10):
    """Compare with one rank: summed losses, the gradients of all stages, the norm of each rank."""
    expected = one_rank()
    np.testing.assert_allclose(sum(t.loss for t in traces), expected.loss, rtol=limit)
    np.testing.assert_allclose(sum(t.evaluated for t in traces), expected.evaluated, rtol=limit)
    assert {name for t in traces for name in t.gradients} == expected.gradients.keys()
    assert sum(t.hash for t in traces) % 2**64 == expected.hash
    for t in traces:
        np.testing.assert_allclose(t.norm, expected.norm, rtol=limit)
        for name, gradient in t.gradients.items():
            error = np.linalg.norm(gradient - expected.gradients[name]) / np.linalg.norm(
                expected.gradients[name]
            )
            assert error <= limit, f"{name}: {error:.1e}"


# test_matrix.py trains with every schedule on two ranks in every run.
EVERY_RUN = [(4, "1F1B"), (4, "Interleaved1F1B"), (4, "ZBVZeroBubble")]
CELLS = [
    pytest.param(*cell, marks=[] if cell in EVERY_RUN else pytest.mark.nightly)
    for cell in product((2, 4), SINGLE + MULTI)
]


@pytest.mark.parametrize(("world_size", "schedule"), CELLS)
def test_equals_one_rank(world_size, schedule):
    traces = run_ranks(trace_pipeline, world_size, schedule, {})
    check(traces)
    assert sum(len(t.gradients) for t in traces) == len(one_rank().gradients)


LAYERS = [f"layers.{i}" for i in range(6)]
SPLITS = {
    "explicit names": (4, "1F1B", {
        "module_fqns_per_model_part": [
            ["tok_embeddings"], LAYERS[:4], [*LAYERS[4:], "norm"], ["output"]
        ]
    }),
    "last stage without layers": (4, "GPipe", {
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 2,
    }),
    "five stages per rank": (2, "Interleaved1F1B", {"pipeline_parallel_layers_per_stage": 1}),
    "micro-batches of two": (2, "1F1B", {"microbatch_size": 2}),
    "fewer micro-batches than ranks": (4, "GPipe", {"microbatch_size": 8}),
    "one micro-batch in a V": (2, "ZBVZeroBubble", {"microbatch_size": 8}),
    "recomputed": (2, "1F1B", {"blocks": "recomputed"}),
    "recomputed per op": (2, "Interleaved1F1B", {"blocks": "recomputed per op"}),
    "recomputed, backward in two parts": (2, "ZBVZeroBubble", {"blocks": "recomputed"}),
    "compiled": (2, "Interleaved1F1B", {"blocks": "compiled"}),
    "with other strides": (2, "InterleavedZeroBubble", {"blocks": "with other strides"}),
}  # fmt: skip


SPLIT_CELLS = [  # test_matrix.py compiles a pipeline in every run
    pytest.param(name, marks=[pytest.mark.nightly] if name == "compiled" else []) for name in SPLITS
]


@pytest.mark.parametrize("name", SPLIT_CELLS)
def test_splits_and_block_options_equal_one_rank(name):
    world_size, schedule, options = SPLITS[name]
    check(run_ranks(trace_pipeline, world_size, schedule, options))


# ---- schedules from a file


def dump_schedule(path):
    """Write torch's file of a schedule, which includes messages."""
    pipeline = assemble("Interleaved1F1B")
    step(pipeline, batch(), 1)
    if dist.get_rank() == 0:
        next(iter(pipeline._schedules.values())).schedule._dump_csv(path)


@pytest.mark.parametrize(
    ("schedule", "content"), [("Single", "1F1B"), ("Multi", "LoopedBFS"), ("Multi", "messages")]
)
def test_schedule_from_a_file_equals_one_rank(tmp_path, schedule, content):
    path = str(tmp_path / "schedule.csv")
    if content == "messages":
        run_ranks(dump_schedule, 2, path)
    else:
        rows = order_of(content, 2, 1 if schedule == "Single" else 2, 8)
        (tmp_path / "schedule.csv").write_text(
            "".join(",".join(map(str, row)) + "\n" for row in rows)
        )
    check(
        run_ranks(
            trace_pipeline,
            2,
            f"PipelineSchedule{schedule}",
            {"pipeline_parallel_schedule_csv": path},
        )
    )


# ---- with data parallelism


class Wire(TorchDispatchMode):
    """Counts collectives and messages by kind, and records the dtypes of messages."""

    def __init__(self):
        super().__init__()
        self.counts, self.sent = Counter(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            kind = str(function).split(".")[1].strip("_").removeprefix("_")
            self.counts[kind] += 1
            if kind == "send":
                self.sent |= {
                    str(leaf.dtype) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)
                }
        return function(*args, **(kwargs or {}))


def trace_with_data_parallel(schedule, kind, options):
    """Return the trace, collective counts, message dtypes, and this rank's parameter groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", kind))
    pipeline, dp_rank = assemble(schedule, mesh=mesh, **options), mesh[kind].get_local_rank()
    traced = trace(pipeline, dp_rank, 2)
    with Wire() as wire:
        step(pipeline, tuple(part.tensor_split(2)[dp_rank] for part in batch()), 1)
    names = {name for name, _ in named_parameters(pipeline)}
    groups = len({name.split(".")[1] for name in names if name.startswith("layers.")})
    groups += "tok_embeddings.weight" in names
    groups += "norm.weight" in names
    return traced, wire.counts, wire.sent, groups


DATA_PARALLEL_IN_EVERY_RUN = [
    ("Interleaved1F1B", "dp_shard"),
    ("ZBVZeroBubble", "dp_shard"),
    ("1F1B", "dp_replicate"),
]
DATA_PARALLEL = [
    pytest.param(*cell, marks=[] if cell in DATA_PARALLEL_IN_EVERY_RUN else pytest.mark.nightly)
    for cell in (
        *product(SINGLE + MULTI, ["dp_shard"]),
        ("1F1B", "dp_replicate"),
        ("DualPipeV", "dp_replicate"),
    )
]


@pytest.mark.parametrize(("schedule", "kind"), DATA_PARALLEL)
def test_data_parallel_pipeline_equals_one_rank_and_reduces_once(schedule, kind):
    results = run_ranks(trace_with_data_parallel, 4, schedule, kind, {})
    check([traced for traced, *_ in results])
    for _, counts, _, groups in results:
        reductions = [
            number
            for name, number in counts.items()
            if "reduce_scatter" in name or "allreduce" in name
        ]
        gathers = [number for name, number in counts.items() if "allgather" in name]
        assert reductions == [groups]
        assert gathers == ([groups] if kind == "dp_shard" else [])


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("1F1B", marks=pytest.mark.nightly),
        "InterleavedZeroBubble",
        pytest.param("DualPipeV", marks=pytest.mark.nightly),
    ],
)
def test_resharded_weights_get_all_their_gradients(schedule):
    results = run_ranks(trace_with_data_parallel, 4, schedule, "dp_shard", {"reshard": "always"})
    check([traced for traced, *_ in results])
    assert all(
        sum(n for name, n in counts.items() if "allgather" in name) > groups
        for _, counts, _, groups in results
    )


@pytest.mark.parametrize(
    "schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.nightly)]
)
def test_messages_have_the_compute_dtype(schedule):
    options = {"dtype": "float32", "compute_dtype": "bfloat16"}
    results = run_ranks(trace_with_data_parallel, 4, schedule, "dp_shard", options)
    check([traced for traced, *_ in results], limit=0.03)  # rounding of bfloat16 through 6 layers
    assert all(sent == {"torch.bfloat16"} for _, _, sent, _ in results)


# ---- errors and memory


def step_with_infinite_loss(schedule):
    """Return the loss and which gradients are NaN, if one micro-batch has an infinite loss.

    The gradient of that loss would be finite.
    """
    pipeline = assemble(schedule)
    for part in pipeline.parts:
        if part.output is not None:
            part.output.loss = lambda hidden, weight, labels: (
                cross_entropy_sum(hidden, weight, labels)
                + torch.where((labels == 17).any(), torch.inf, 0.0)
            )
    tokens, labels, positions = batch()
    labels[labels == 17], labels[3, 4] = 18, 17
    loss = step(pipeline, (tokens, labels, positions), 1)
    return loss, {name: bool(p.grad.isnan().any()) for name, p in named_parameters(pipeline)}


@pytest.mark.parametrize("schedule", ["GPipe", "ZBVZeroBubble"])
def test_nonfinite_micro_batch_makes_every_gradient_nonfinite(schedule):
    results = run_ranks(step_with_infinite_loss, 2, schedule)
    assert sorted(loss for loss, _ in results) == [0.0, float("inf")]
    assert all(is_nan for _, gradients in results for is_nan in gradients.values())


def message_buffers(schedule, trains):
    """Return the number of message buffers on this rank: the peak, and after the step."""
    pipeline, counts = assemble(schedule), []

    def count_buffers(*_):
        (runner,) = pipeline._schedules.values()
        infos = [
            info
            for stage in runner.stages
            for cache in (stage.args_recv_info, stage.grad_recv_info)
            for received in cache.values()
            for info in received
        ]
        buffers = [getattr(info, "buffer", None) for info in infos]
        counts.append(sum(buffer is not None and not buffer.is_meta for buffer in buffers))

    for part in pipeline.parts:
        part.register_forward_hook(count_buffers)
    pipeline.step(*batch(), 1) if trains else pipeline.evaluate(*batch())
    peak = max(counts)
    count_buffers()
    return peak, counts[-1]


def test_memory_for_messages_does_not_grow_with_accumulation():
    """A rank needs one buffer for each later stage, or a single one in evaluation.

    The step has 8 micro-batches on 4 ranks.
    """
    assert run_ranks(message_buffers, 4, "1F1B", True) == [(0, 0), (3, 0), (2, 0), (1, 0)]
    assert run_ranks(message_buffers, 4, "1F1B", False) == [(0, 0), (1, 0), (1, 0), (1, 0)]
    assert {after for _, after in run_ranks(message_buffers, 2, "ZBVZeroBubble", True)} == {0}


def step_with_wrong_shape():
    pipeline = assemble("1F1B")
    pipeline.sequence_shards = 2
    step(pipeline, batch(), 1)


def test_wrong_output_shape_of_a_stage_is_reported():
    with pytest.raises(
        RankError,
        match=r"stage 0 returned hidden states as \(1, 12, 16\), torch.float64. "
        r"The next stage expects \(1, 6, 16\)",
    ):
        run_in_new_processes(step_with_wrong_shape, 2)


# ---- the timeline


def planned_and_executed(schedule):
    """Return this rank's planned actions, its executed actions, and the first log line."""
    pipeline, executed = assemble(schedule), []
    pipeline.step(*batch(), 1)  # builds the schedule
    (runner,) = pipeline._schedules.values()
    for stage in runner.stages:
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(
                stage,
                name,
                functools.partial(
                    _record_action, executed, stage.stage_index, name, getattr(stage, name)
                ),
            )
    pipeline.step(*batch(), 1)
    return pipeline.plan.order(8)[dist.get_rank()], executed, pipeline.lines(8)[0]


def _record_action(executed, stage, name, function, micro_batch, *args, **kwargs):
    backward = "B" if kwargs.get("full_backward", True) else "I"
    kind = {"forward_one_chunk": "F", "backward_one_chunk": backward}.get(name, "W")
    executed.append((stage, kind, micro_batch))
    return function(micro_batch, *args, **kwargs)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "InterleavedZeroBubble", "DualPipeV"])
def test_planned_order_equals_the_executed_order(schedule):
    for planned, executed, first_line in run_ranks(planned_and_executed, 2, schedule):
        assert executed == planned
        assert first_line.startswith(f"Pipeline {schedule}: ")
