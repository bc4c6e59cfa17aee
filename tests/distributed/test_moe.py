"""A mixture of experts on every layout equals one rank."""

import functools

import pytest

from tests.distributed.parity import EXPERT_MUTATIONS, compare, options, run_cell
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
EVERY_RUN = [
    ("fsdp", "together"),
    ("fsdp", "compile"),
    ("tp", "together"),
    ("cp-allgather", "together"),
    ("pp-1f1b", "together"),
    ("pp-zbv", "together"),
]
NIGHTLY = [
    (layout, option)
    for layout in LAYOUTS
    for option in ("together", "compile")
    if (layout, option) not in (*EVERY_RUN, ("pp-zbv", "compile"))
]


def settings(folder, layers, **overrides):
    argv = options(folder, "float64", **MODEL, **{"model.args.n_layers": layers, **overrides})
    multiple_of = argv.index("--model.args.multiple_of")  # of Llama 3
    return argv[:multiple_of] + argv[multiple_of + 2 :]


@functools.cache
def reference(folder, layers, validates):
    argv = settings(folder, layers, **(VALIDATE if validates else {}))
    return run_ranks(run_cell, 1, argv)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("moe")


def run(folder, layout, option, mutation=""):
    ranks, cell = LAYOUTS[layout]
    layers = cell.get("model.args.n_layers", 2)
    expected = reference(str(folder / f"one-rank-{layers}"), layers, option == "together")
    data_ranks = ranks // (cell.get(TP, 1) * cell.get("parallelism.pipeline_parallel_degree", 1) * cell.get(CP, 1))
    local = 8 // data_ranks if option == "compile" else min(2, 4 // data_ranks)
    overrides = {**cell, "training.local_batch_size": local, **OPTIONS[option]}
    argv = settings(str(folder / layout), overrides.pop("model.args.n_layers", 2), **overrides)
    return expected, run_ranks(run_cell, ranks, argv, mutation, timeout=120)[0]


@pytest.mark.parametrize(
    ("layout", "option"),
    [*EVERY_RUN, *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in NIGHTLY)],
)
def test_equals_one_rank(folder, layout, option):
    expected, cell = run(folder, layout, option)
    compare(expected, cell, "float64")


@pytest.mark.parametrize("mutation", EXPERT_MUTATIONS)
def test_a_fault_turns_a_cell_red(folder, mutation):
    expected, cell = run(folder, "fsdp", "together", mutation)
    with pytest.raises(AssertionError):
        compare(expected, cell, "float64")
