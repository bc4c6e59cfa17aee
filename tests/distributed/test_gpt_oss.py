"""gpt-oss on every layout equals one rank: sinks, windows, biases of attention and experts."""

import functools

import pytest

from tests.distributed.parity import compare, options, run_cell
from tests.distributed.test_matrix import CP, LAYERS, OPTIONS, PP, TP, VALIDATE
from tests.distributed.test_moe import LAYOUTS as MOE_LAYOUTS
from tests.harness.rank_pool import run_ranks

SIZES = "model.args.num_experts"
MODEL = {
    "model.name": "gpt_oss",
    "model.flavor": "debugmodel",
    "model.args.head_dim": 8,
    "model.args.vocab_size": 2048,
    "model.args.sliding_window_size": 6,
    "model.args.original_seq_len": 8,
    "model.args.top_k": 2,
    "model.args.moe_inter_dim": 12,
    SIZES: 8,
}
AC_OP = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}  # fmt: skip
CELL_OPTIONS = OPTIONS | {"op": AC_OP}
LAYOUTS = {name: (ranks, {**cell, SIZES: 8}) for name, (ranks, cell) in MOE_LAYOUTS.items()}
EVERY_RUN = [
    ("hsdp", "together"),
    ("tp", "op"),
    ("cp-allgather", "together"),
    ("cp-ulysses", "together"),
    ("ep-fsdp-tp", "together"),
    ("ep-etp", "together"),
    ("pp-1f1b", "together"),
]
NIGHTLY = [
    (layout, option)
    for layout in LAYOUTS
    for option in ("together", "compile", "op")
    if (layout, option) not in EVERY_RUN and not ("zbv" in layout and option != "together")
]


def settings(folder, layers, **overrides):
    argv = options(folder, "float64", **{**MODEL, LAYERS: layers, **overrides})
    multiple_of = argv.index("--model.args.multiple_of")  # of Llama 3
    return argv[:multiple_of] + argv[multiple_of + 2 :]


@functools.cache
def reference(folder, layers, validates):
    argv = settings(folder, layers, **(VALIDATE if validates else {}))
    return run_ranks(run_cell, 1, argv)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpt-oss")


@pytest.mark.parametrize(
    ("layout", "option"),
    [*EVERY_RUN, *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in NIGHTLY)],
)
def test_every_layout_equals_one_rank(folder, layout, option):
    ranks, cell = LAYOUTS[layout]
    layers = cell.get(LAYERS, 2)
    expected = reference(str(folder / f"one-rank-{layers}"), layers, option == "together")
    data_ranks = ranks // (cell.get(TP, 1) * cell.get(PP, 1) * cell.get(CP, 1))
    local = min(2, 4 // data_ranks) if option == "together" else 8 // data_ranks
    overrides = {**cell, "training.local_batch_size": local, **CELL_OPTIONS[option]}
    argv = settings(str(folder / layout), overrides.pop(LAYERS, 2), **overrides)
    compare(expected, run_ranks(run_cell, ranks, argv, timeout=120)[0], "float64")
