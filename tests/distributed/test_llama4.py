"""Llama 4 on every layout equals one rank: chunks, layers without rotation, weighted expert inputs."""

import functools

import pytest

from tests.distributed.parity import compare, options, run_cell
from tests.distributed.test_matrix import CP, LAYERS, METHOD, OPTIONS, PP, TP, VALIDATE
from tests.distributed.test_moe import EP, ETP
from tests.distributed.test_moe import LAYOUTS as MOE_LAYOUTS
from tests.harness.rank_pool import run_ranks

EXPERTS, MASK = "model.args.num_experts", "model.args.attn_mask_type"
# Layer 0 rotates within chunks that no shard ends with, layer 1 has experts and no rotation.
MODEL = {
    "model.name": "llama4",
    "model.flavor": "debugmodel",
    "model.args.every_n_layers_nope": 2,
    "model.args.fixed_attn_block_size": 12,
    "model.args.use_qk_norm": "true",
    "model.args.attn_scale": 0.5,
    "model.args.floor_scale": 8,
    "model.args.rope_original_max_seq_len": 8,
    "model.args.top_k": 2,
    EXPERTS: 8,
    MASK: "causal",
}
AC_OP = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}  # fmt: skip
CELL_OPTIONS = OPTIONS | {"op": AC_OP}
DOCUMENTS = {MASK: "block_causal"}
LAYOUTS = {name: (ranks, {**cell, EXPERTS: 8}) for name, (ranks, cell) in MOE_LAYOUTS.items()} | {
    "documents-cp-allgather": (2, {CP: 2, **DOCUMENTS}),
    "documents-cp-ulysses": (2, {CP: 2, METHOD: "ulysses", **DOCUMENTS}),
    "documents-ep-etp": (4, {EP: 2, TP: 2, ETP: 2, **DOCUMENTS}),
}
EVERY_RUN = [
    ("ep-fsdp-tp", "together"),
    ("ep-etp", "compile"),
    ("documents-cp-allgather", "together"),
]
NIGHTLY = [
    (layout, option)
    for layout in LAYOUTS
    for option in ("together", "compile", "op")
    if (layout, option) not in EVERY_RUN and not ("zbv" in layout and option != "together")
]


def settings(folder, layers, **overrides):
    return options(folder, "float64", **{**MODEL, LAYERS: layers, **overrides})


@functools.cache
def reference(folder, layers, mask, validates):
    argv = settings(folder, layers, **{MASK: mask, **(VALIDATE if validates else {})})
    return run_ranks(run_cell, 1, argv)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama4")


@pytest.mark.parametrize(
    ("layout", "option"),
    [*EVERY_RUN, *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in NIGHTLY)],
)
def test_every_layout_equals_one_rank(folder, layout, option):
    ranks, cell = LAYOUTS[layout]
    layers, mask = cell.get(LAYERS, 2), cell.get(MASK, "causal")
    one_rank = str(folder / f"one-rank-{layers}-{mask}")
    expected = reference(one_rank, layers, mask, option == "together")
    data_ranks = ranks // (cell.get(TP, 1) * cell.get(PP, 1) * cell.get(CP, 1))
    local = min(2, 4 // data_ranks) if option == "together" else 8 // data_ranks
    overrides = {**cell, "training.local_batch_size": local, **CELL_OPTIONS[option]}
    argv = settings(str(folder / layout), overrides.pop(LAYERS, 2), **overrides)
    compare(expected, run_ranks(run_cell, ranks, argv, timeout=120)[0], "float64")
