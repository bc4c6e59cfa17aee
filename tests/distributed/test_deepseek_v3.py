"""DeepSeek-V3 on every layout equals one rank: latent attention, dense and MoE layers, grouped routing."""

import functools
import pickle

import pytest
import torch

from tests.distributed.parity import compare, options, run_cell
from tests.distributed.test_matrix import CP, LAYERS, METHOD, OPTIONS, PP, TP, VALIDATE, pipeline
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
AC_OP = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}  # fmt: skip
CELL_OPTIONS = OPTIONS | {"op": AC_OP}
EVERY_RUN = [
    ("fsdp", "compile"),
    ("hsdp", "together"),
    ("tp", "op"),
    ("tp-cp", "together"),
    ("cp-ulysses", "together"),
    ("pp-uneven", "together"),
    ("ep-etp", "op"),
]
NIGHTLY = [
    (layout, option)
    for layout in LAYOUTS
    for option in ("together", "compile", "op")
    if (layout, option) not in (*EVERY_RUN, ("cp-ring", "compile"))
    and not ("zbv" in layout and option != "together")
]


def settings(folder, layers, **overrides):
    argv = options(folder, "float64", **{**MODEL, LAYERS: layers, **overrides})
    for name in ("multiple_of", "n_kv_heads"):  # of Llama 3
        index = argv.index(f"--model.args.{name}")
        argv = argv[:index] + argv[index + 2 :]
    return argv


@functools.cache
def reference(folder, layers, validates):
    argv = settings(folder, layers, **(VALIDATE if validates else {}))
    return run_ranks(run_cell, 1, argv)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("deepseek")


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
    ranks, cell = LAYOUTS[layout]
    layers = cell.get(LAYERS, 2)
    one_rank = settings(str(folder / f"recipe-{layers}"), layers, **recipe)
    expected = run_ranks(run_cell, 1, one_rank)[0]
    local = min(2, 4 * cell.get(TP, 1) * cell.get(PP, 1) * cell.get(CP, 1) // ranks)
    overrides = {**cell, **recipe, "training.local_batch_size": local}
    argv = settings(str(folder / f"recipe-{layout}"), overrides.pop(LAYERS, 2), **overrides)
    compare(expected, run_ranks(run_cell, ranks, argv, timeout=120)[0], "float64")
    loads = expected.loads[0]
    assert min(loads.aux_loss) > 1 and min(loads.bias_range) > 0
    plain = reference(str(folder / f"one-rank-{layers}"), layers, False)
    name = f"layers.{layers - 1}.moe.router.gate.weight"
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
    argv = settings(str(tmp_path / "run"), 2, **changes)
    assert run_ranks(train, 2, argv) == [ExitCode.DONE] * 2
    step = tmp_path / "run/checkpoint/step-2"
    metadata = pickle.loads((step / ".metadata").read_bytes()).state_dict_metadata
    dtypes = {name: entry.properties.dtype for name, entry in metadata.items()}
    assert dtypes.pop("model.layers.1.moe.expert_bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    warm = {**changes, "checkpoint.initial_load_path": step}
    assert run_ranks(train, 2, settings(str(tmp_path / "warm"), 2, **warm)) == [ExitCode.DONE] * 2
