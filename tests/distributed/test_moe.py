"""A mixture of experts on every layout equals one rank."""

import functools

import pytest

from tests.distributed.parity import EXPERT_MUTATIONS, build, compare, options, release, run_cell
from tests.distributed.test_matrix import (
    CP,
    IMPL,
    METHOD,
    OPTIONS,
    REPLICATE,
    TP,
    VALIDATE,
    pipeline,
)
from tests.harness.rank_pool import run_ranks

EP = "parallelism.expert_parallel_degree"
ETP = "parallelism.expert_tensor_parallel_degree"
LAYOUTS = {
    # name: (ranks, overrides)
    "ddp": (2, {REPLICATE: 2, IMPL: "ddp"}),
    "fsdp": (2, {}),
    "hsdp": (4, {REPLICATE: 2}),
    "simple-fsdp": (2, {IMPL: "simple_fsdp"}),
    "tp": (2, {TP: 2}),
    "tp-no-sp": (2, {TP: 2, "parallelism.enable_sequence_parallel": "false"}),
    "cp-allgather": (2, {CP: 2}),
    "cp-ulysses": (2, {CP: 2, METHOD: "ulysses"}),
    "pp-1f1b": (2, pipeline("1F1B")),
    "pp-interleaved": (2, pipeline("Interleaved1F1B", layers=4)),
    "pp-zbv": (2, pipeline("ZBVZeroBubble", layers=4)),
    "fsdp-tp": (4, {TP: 2}),
    "pp-fsdp": (4, pipeline("1F1B")),
    "pp-tp": (4, pipeline("1F1B", **{TP: 2})),
    "tp-cp": (4, {TP: 2, CP: 2}),
}
MODEL = {
    "model.name": "qwen3",
    "model.flavor": "debugmodel_moe",
    "model.args.head_dim": 8,
    "model.args.num_experts": 6,
    "model.args.top_k": 2,
    "model.args.moe_inter_dim": 12,
}
# Buffers of all rows: nothing can overflow on two ranks.
BOUNDED = {
    "parallelism.expert_parallel_exchange": "bounded",
    "parallelism.expert_parallel_capacity": 2,
}
# Experts over 2 or 4 ranks of dp_shard x cp x tp; "etp": each expert's hidden units over tp too.
LAYOUTS |= {
    "ep": (2, {EP: 2}),
    "ep-fsdp": (4, {EP: 2}),
    "ep-4": (4, {EP: 4, "model.args.num_experts": 8}),
    "ep-one-expert": (4, {EP: 2, "model.args.num_experts": 2}),  # on a rank; FSDP shards matrices
    "ep-hsdp": (4, {EP: 2, REPLICATE: 2}),
    "ep-tp": (2, {EP: 2, TP: 2}),
    "ep-fsdp-tp": (4, {EP: 4, TP: 2, "model.args.num_experts": 8}),
    "ep-etp": (4, {EP: 2, TP: 2, ETP: 2}),
    "etp": (2, {TP: 2, ETP: 2}),  # FSDP2 shards the experts over no other ranks
    "fsdp-etp": (4, {TP: 2, ETP: 2}),
    "hsdp-tp": (8, {TP: 2, REPLICATE: 2}),
    "ep-cp": (2, {EP: 2, CP: 2}),
    "ep-cp-ulysses": (4, {EP: 2, CP: 2, METHOD: "ulysses"}),
    "ep-pp-1f1b": (4, pipeline("1F1B", **{EP: 2})),
    "ep-pp-interleaved": (4, pipeline("Interleaved1F1B", layers=4, **{EP: 2})),
    "ep-pp-zbv": (4, pipeline("ZBVZeroBubble", layers=4, **{EP: 2})),
    "ep-bounded": (2, {EP: 2, **BOUNDED}),
    "ep-etp-bounded": (4, {EP: 2, TP: 2, ETP: 2, **BOUNDED}),
    "ep-pp-zbv-bounded": (4, pipeline("ZBVZeroBubble", layers=4, **{EP: 2, **BOUNDED})),
}
# The cells of test_moe_balance.py make the same comparison on fsdp, tp, cp and ep-etp.
EVERY_RUN = [
    ("ep", "together"),
    ("ep-bounded", "together"),
    ("etp", "together"),
    ("ep-pp-1f1b", "together"),
]
NIGHTLY = [
    (layout, option)
    for layout in LAYOUTS
    for option in ("together", "compile")
    if (layout, option) not in EVERY_RUN and not ("zbv" in layout and option == "compile")
]


def settings(folder, layers, **overrides):
    argv = options(folder, "float64", **{**MODEL, "model.args.n_layers": layers, **overrides})
    multiple_of = argv.index("--model.args.multiple_of")  # of Llama 3
    return argv[:multiple_of] + argv[multiple_of + 2 :]


@functools.cache
def reference(folder, layers, experts, validates):
    sizes = {"model.args.num_experts": experts}
    argv = settings(folder, layers, **sizes, **(VALIDATE if validates else {}))
    return run_ranks(run_cell, 1, argv)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("moe")


def run(folder, layout, option, mutation=""):
    ranks, cell = LAYOUTS[layout]
    layers = cell.get("model.args.n_layers", 2)
    experts = cell.get("model.args.num_experts", MODEL["model.args.num_experts"])
    one_rank = str(folder / f"one-rank-{layers}-{experts}")
    expected = reference(one_rank, layers, experts, option == "together")
    data_ranks = ranks // (
        cell.get(TP, 1) * cell.get("parallelism.pipeline_parallel_degree", 1) * cell.get(CP, 1)
    )
    local = 8 // data_ranks if option == "compile" else min(2, 4 // data_ranks)
    overrides = {**cell, "training.local_batch_size": local, **OPTIONS[option]}
    argv = settings(str(folder / layout), overrides.pop("model.args.n_layers", 2), **overrides)
    return expected, run_ranks(run_cell, ranks, argv, mutation, timeout=120)[0]


@pytest.mark.parametrize(
    ("layout", "option"),
    [*EVERY_RUN, *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in NIGHTLY)],
)
def test_every_layout_equals_one_rank(folder, layout, option):
    expected, cell = run(folder, layout, option)
    compare(expected, cell, "float64")


FAULTS_IN_EVERY_RUN = ("rows of two tokens swapped", "weights not normalized")
FAULTS = [
    pytest.param(name, marks=[] if name in FAULTS_IN_EVERY_RUN else pytest.mark.nightly)
    for name in EXPERT_MUTATIONS
]


@pytest.mark.parametrize("mutation", FAULTS)
def test_an_injected_fault_fails_the_comparison(folder, mutation):
    expected, cell = run(folder, "ep", "together", mutation)
    with pytest.raises(AssertionError):
        compare(expected, cell, "float64")


def experts_on_rank(argv):
    """Return the number of elements of the first layer's `w1` on this rank, and in the model."""
    trainer = build(argv)
    weight = dict(trainer.parts[0].named_parameters())["layers.0.moe.experts.w1"]
    release(trainer)
    return weight.to_local().numel(), weight.numel()


@pytest.mark.parametrize(
    ("layout", "num_shards"), [("fsdp", 2), ("tp", 2), ("tp-no-sp", 1), ("etp", 2), ("ep-etp", 4)]
)
def test_ranks_that_route_different_tokens_share_the_experts(folder, layout, num_shards):
    ranks, cell = LAYOUTS[layout]
    sizes = {"training.local_batch_size": 1}
    argv = settings(str(folder / f"{layout}-shards"), 2, **sizes, **cell)
    for local, total in run_ranks(experts_on_rank, ranks, argv):
        assert local * num_shards == total
