"""Multi-token prediction on every supported layout equals one rank."""

import functools
import json
import shutil

import numpy as np
import pytest

from tests.distributed.cells import CELL_OPTIONS
from tests.distributed.parity import compare, run_cell
from tests.distributed.test_deepseek_v3 import settings
from tests.distributed.test_matrix import IMPL, REPLICATE, TP, VALIDATE
from tests.distributed.test_moe import EP, ETP
from tests.harness.rank_pool import run_ranks

MTP = {"model.args.num_mtp_layers": 1}
TWO_DEPTHS = {"model.args.num_mtp_layers": 2, "model.args.attn_mask_type": "block_causal"}
LAYOUTS = {
    "fsdp": (2, {}),
    "ddp": (2, {REPLICATE: 2, IMPL: "ddp"}),
    "hsdp": (4, {REPLICATE: 2}),
    "tp": (2, {TP: 2}),
    "tp-no-sp": (2, {TP: 2, "parallelism.enable_sequence_parallel": "false"}),
    "ep": (2, {EP: 2}),
    "ep-etp": (4, {EP: 2, TP: 2, ETP: 2}),
}
OFFLOAD = {"activation_checkpoint.mode": "offload"}
OPTIONS = CELL_OPTIONS | {"full": {"activation_checkpoint.mode": "full"}, "offload": OFFLOAD}
EVERY_RUN = [("fsdp", "together"), ("tp", "op"), ("ep", "together")]
NIGHTLY = [
    (layout, option)
    for layout in LAYOUTS
    for option in ("together", "compile", "op")
    if (layout, option) not in EVERY_RUN
] + [("fsdp", "full"), ("fsdp", "offload")]


@functools.cache
def reference(folder, validates, **changes):
    argv = settings(folder, **changes, **(VALIDATE if validates else {}))
    return run_ranks(run_cell, 1, argv)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mtp")


def losses(folder):
    """Return the loss of multi-token prediction of each step."""
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["mtp_loss"] for row in rows]


@pytest.mark.parametrize(
    ("layout", "option"),
    [*EVERY_RUN, *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in NIGHTLY)],
)
@pytest.mark.parametrize("depths", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_every_layout_equals_one_rank(folder, layout, option, depths):
    """With two depths, attention ends at document borders."""
    changes = MTP if depths == 1 else TWO_DEPTHS
    validates = option == "together"
    one_rank = folder / f"one-rank-{depths}-{validates}"
    expected = reference(str(one_rank), validates, **changes)
    assert validates == bool(expected.validation)
    ranks, cell = LAYOUTS[layout]
    data_ranks = ranks // cell.get(TP, 1)
    local = min(2, 4 // data_ranks) if validates else 8 // data_ranks
    overrides = {**cell, **changes, "training.local_batch_size": local, **OPTIONS[option]}
    path = folder / f"{layout}-{option}-{depths}"
    argv = settings(path, **overrides)
    compare(expected, run_ranks(run_cell, ranks, argv, timeout=120)[0], "float64")
    np.testing.assert_allclose(losses(path), losses(one_rank), rtol=1e-10)


@pytest.mark.nightly
def test_a_resumed_run_equals_one_that_never_stopped(folder):
    """All values are bit-equal, including the loss of multi-token prediction."""
    run_folder = folder / "resumed"
    saving = {"training.steps": 4, "checkpoint.enable": "true", "checkpoint.interval": 2}
    argv = settings(run_folder, **MTP, **saving, **{"training.local_batch_size": 4})
    whole = run_ranks(run_cell, 2, argv)[0]
    expected = losses(run_folder)
    shutil.rmtree(run_folder / "checkpoint" / "step-4")
    resumed = run_ranks(run_cell, 2, argv)[0]
    assert resumed.loss == whole.loss[2:] and resumed.grad_norm == whole.grad_norm[2:]
    assert losses(run_folder) == expected and len(expected) == 4
    for name, parameter in whole.parameters.items():
        assert np.array_equal(resumed.parameters[name], parameter), name


@pytest.mark.nightly
def test_optimizer_steps_in_backward(folder):
    early = {**MTP, "optimizer.early_step_in_backward": "true"}
    one = run_ranks(run_cell, 1, settings(folder / "early", **early))[0]
    argv = settings(folder / "early-fsdp", **early, **{"training.local_batch_size": 4})
    compare(one, run_ranks(run_cell, 2, argv)[0], "float64")
