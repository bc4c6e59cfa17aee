"""gpt-oss on every layout equals one rank: sinks, windows, biases of attention and experts."""

import pytest

from tests.distributed.cells import Cells
from tests.distributed.parity import compare
from tests.distributed.test_moe import LAYOUTS

MODEL = {
    "model.name": "gpt_oss",
    "model.flavor": "debugmodel",
    "model.args.head_dim": 8,
    "model.args.vocab_size": 2048,
    "model.args.sliding_window_size": 6,
    "model.args.original_seq_len": 8,
    "model.args.top_k": 2,
    "model.args.moe_inter_dim": 12,
    "model.args.num_experts": 8,
}
EIGHT_EXPERTS = {"model.args.num_experts": 8}
CELLS = Cells(
    MODEL, {name: (ranks, cell | EIGHT_EXPERTS) for name, (ranks, cell) in LAYOUTS.items()}
)
EVERY_RUN = [
    ("tp", "op"),
    ("cp-ulysses", "together"),
    ("ep", "together"),
    ("etp", "together"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpt-oss")


@pytest.mark.parametrize(("layout", "option"), CELLS.parameters(EVERY_RUN))
def test_every_layout_equals_one_rank(folder, layout, option):
    compare(*CELLS.run(folder, layout, option), "float64")


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp", "ep-etp"])
def test_inductor_sends_the_same_on_every_rank(folder, layout):
    """Inductor moves what depends on no gradient into forward: collectives must not differ by rank."""
    compare(*CELLS.run(folder, layout, "inductor"), "float64")
