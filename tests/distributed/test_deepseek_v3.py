"""DeepSeek-V3 on every layout equals one rank: latent attention, dense and MoE layers, grouped routing."""

import pickle

import pytest
import torch

from tests.distributed.cells import Cells
from tests.distributed.parity import compare
from tests.distributed.test_matrix import CP, LAYERS, METHOD, pipeline
from tests.distributed.test_moe import EP
from tests.distributed.test_moe import LAYOUTS as MOE_LAYOUTS
from tests.distributed.test_saving import SAVING, train
from tests.harness.rank_pool import run_ranks
from torchtitan_like.util.exit_codes import ExitCode

EXPERTS = "model.args.num_experts"
# Layouts for another number of experts do not fit the groups below.
LAYOUTS = {
    name: layout for name, layout in MOE_LAYOUTS.items() if layout[1].get(EXPERTS, 8) == 8
} | {
    "cp-ring": (2, {CP: 2, METHOD: "alltoall"}),
    # The first stage has a dense layer and a MoE layer, the second one two MoE layers.
    "pp-uneven": (2, pipeline("1F1B", layers=4)),
}
MODEL = {
    "model.name": "deepseek_v3",
    "model.flavor": "debugmodel",
    "model.args.inter_dim": 24,
    "model.args.moe_inter_dim": 12,
    EXPERTS: 8,
    "model.args.num_expert_groups": 4,
    "model.args.num_limited_groups": 2,
    "model.args.top_k": 4,
    "model.args.score_func": "sigmoid",
    "model.args.route_norm": "true",
    "model.args.q_lora_rank": 12,
    "model.args.kv_lora_rank": 12,
    "model.args.qk_nope_head_dim": 8,
    "model.args.qk_rope_head_dim": 4,
    "model.args.v_head_dim": 8,
    "model.args.original_seq_len": 8,
}
CELLS = Cells(MODEL, LAYOUTS, absent=("multiple_of", "n_kv_heads"))
settings = CELLS.settings
EVERY_RUN = [
    ("tp", "op"),
    ("cp-ulysses", "together"),
    ("pp-uneven", "together"),
    ("ep-etp", "op"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("deepseek")


@pytest.mark.parametrize(
    ("layout", "option"), CELLS.parameters(EVERY_RUN, excluded=[("cp-ring", "compile")])
)
def test_every_layout_equals_one_rank(folder, layout, option):
    compare(*CELLS.run(folder, layout, option), "float64")


@pytest.mark.parametrize(
    "layout",
    [
        "ep",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("tp", "cp-allgather", "pp-1f1b")
        ),
    ],
)
def test_biases_with_a_loss_over_sequences(folder, layout):
    """DeepSeek-V3's recipe with larger coefficients. All states and metrics equal one rank's."""
    recipe = {
        "model.args.load_balance": "bias",
        "model.args.load_balance_coeff": 0.01,
        "model.args.sequence_loss_coeff": 0.5,
    }
    expected, cell = CELLS.run(folder, layout, "accumulation", recipe)
    compare(expected, cell, "float64")
    loads = expected.loads[0]
    assert min(loads.aux_loss) > 1 and min(loads.bias_range) > 0
    settings_of_layers = {key: value for key, value in LAYOUTS[layout][1].items() if key == LAYERS}
    plain = CELLS.reference(folder, settings_of_layers)
    name = f"layers.{settings_of_layers.get(LAYERS, 2) - 1}.moe.router.gate.weight"
    assert (plain.gradients[0][name] != expected.gradients[0][name]).any()


def test_biases_stay_in_float32_in_checkpoints_of_half_precision(tmp_path):
    """A run can start from such a checkpoint."""
    changes = {
        **SAVING,
        EP: 2,
        "training.steps": 2,
        "checkpoint.last_save_model_only": "true",
        "checkpoint.export_dtype": "bfloat16",
    }
    argv = settings(tmp_path / "run", **changes)
    assert run_ranks(train, 2, argv) == [ExitCode.DONE] * 2
    step = tmp_path / "run/checkpoint/step-2"
    metadata = pickle.loads((step / ".metadata").read_bytes()).state_dict_metadata
    dtypes = {name: entry.properties.dtype for name, entry in metadata.items()}
    assert dtypes.pop("model.layers.1.moe.expert_bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    warm = {**changes, "checkpoint.initial_load_path": step}
    assert run_ranks(train, 2, settings(tmp_path / "warm", **warm)) == [ExitCode.DONE] * 2
