"""Llama 4 on every layout equals one rank: chunks, layers without rotation, weighted expert inputs."""

import pytest

from tests.distributed.cells import Cells
from tests.distributed.parity import compare
from tests.distributed.test_matrix import CP, METHOD, TP
from tests.distributed.test_moe import EP, ETP, LAYOUTS

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
DOCUMENTS = {MASK: "block_causal"}
EIGHT_EXPERTS = {name: (ranks, cell | {EXPERTS: 8}) for name, (ranks, cell) in LAYOUTS.items()}
CELLS = Cells(
    MODEL,
    EIGHT_EXPERTS
    | {
        "documents-cp-allgather": (2, {CP: 2, **DOCUMENTS}),
        "documents-cp-ulysses": (2, {CP: 2, METHOD: "ulysses", **DOCUMENTS}),
        "documents-ep-etp": (4, {EP: 2, TP: 2, ETP: 2, **DOCUMENTS}),
    },
    absent=(),
)
EVERY_RUN = [
    ("ep", "together"),
    ("etp", "together"),
    ("documents-cp-allgather", "together"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama4")


@pytest.mark.parametrize(("layout", "option"), CELLS.parameters(EVERY_RUN))
def test_every_layout_equals_one_rank(folder, layout, option):
    compare(*CELLS.run(folder, layout, option), "float64")
