"""Optimizers other than AdamW equal one rank on every layout."""

import functools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed import test_matrix as dense
from tests.distributed import test_moe as experts
from tests.distributed.parity import LR, build, compare, options, run_cell
from tests.distributed.test_saving import metric_rows
from tests.distributed.test_saving import run as save
from tests.harness.rank_pool import run_ranks
from torchtitan_like.config import ConfigError
from torchtitan_like.distributed.matrices import MatrixOwners
from torchtitan_like.optim import eight_bit

# Name of a cell's optimizer -> settings that one rank has too.
OPTIMIZERS = {
    "muon": {
        "optimizer.name": "Muon",
        "optimizer.muon_adjust_lr_fn": "match_rms_adamw",
        "optimizer.no_weight_decay": "*norm*",
    },
    "lion": {"optimizer.name": "Lion", "optimizer.lr": LR / 8},
    "adamw": {},
    "adamw8bit": {"optimizer.name": "AdamW8bit", "optimizer.adamw8bit_block_size": 4},
}
# Optimizer -> settings by dtype. Parity needs a computation in the dtype of the weights. With
# `state_dtype`, AdamW is this package's own.
OF_DTYPE = {
    "muon": lambda dtype: {"optimizer.muon_dtype": dtype},
    "lion": lambda dtype: {},
    "adamw": lambda dtype: {"optimizer.state_dtype": dtype},
    "adamw8bit": lambda dtype: {},
}
LAYOUTS = {name: (dense, *row) for name, row in dense.LAYOUTS.items()} | {
    f"moe-{name}": (experts, *row) for name, row in experts.LAYOUTS.items()
}
EVERY_RUN = {
    "muon": ["fsdp", "fsdp-tp", "moe-ep-etp"],
    "lion": ["fsdp"],
    "adamw": ["hsdp"],
    "adamw8bit": ["fsdp"],
}
# Every layout of Muon that is not in every run is in nightly runs, and these ones.
NIGHTLY = {
    "lion": ["fsdp-tp", "pp-fsdp", "moe-ep-fsdp"],
    "adamw": [],
    "adamw8bit": ["hsdp", "fsdp-tp", "pp-fsdp", "moe-ep-fsdp"],
}
CELLS = [
    pytest.param(
        optimizer,
        layout,
        dtype,
        marks=[] if layout in EVERY_RUN[optimizer] and dtype == "float64" else pytest.mark.nightly,
    )
    for optimizer in OPTIMIZERS
    for layout, (_, num_ranks, _) in LAYOUTS.items()
    for dtype in ("float64", "float32")
    if num_ranks <= 4
    and (optimizer == "muon" or layout in EVERY_RUN[optimizer] + NIGHTLY[optimizer])
    and not (dtype == "float32" and layout.startswith("moe"))
]


def arguments(folder, layout, optimizer, dtype, **overrides):
    """Return arguments with which every step is clipped."""
    changes = {
        "training.max_norm": 0.1,
        **OPTIMIZERS[optimizer],
        **OF_DTYPE[optimizer](dtype),
        **overrides,
    }
    if LAYOUTS[layout][0] is dense:
        return options(folder, dtype, **changes)
    return experts.settings(folder, changes.pop(dense.LAYERS, 2), **changes)


def run_coded_cell(argv):
    """Run a cell in which AdamW8bit has 8-bit states for the small matrices of the model too."""
    with patch.object(eight_bit, "MIN_ELEMENTS", 1):
        return run_cell(argv)


@functools.cache
def reference(folder, layout, optimizer, dtype, sizes):
    """Return the trace of one rank with the model of `layout`."""
    return run_ranks(run_coded_cell, 1, arguments(folder, layout, optimizer, dtype, **dict(sizes)))[
        0
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("optimizers")


def run_faulty_cell(argv):
    """Run a cell in which the last rank loses the results that other ranks have computed."""
    compute = MatrixOwners.compute

    def losing(self, shards, function, like):
        results = compute(self, shards, function, like)
        is_last = dist.get_rank() == dist.get_world_size() - 1
        return {i: torch.zeros_like(r) if is_last else r for i, r in results.items()}

    with patch.object(MatrixOwners, "compute", losing):
        return run_cell(argv)


def run(folder, layout, optimizer, dtype, run_cell=run_coded_cell):
    kind, num_ranks, overrides = LAYOUTS[layout]
    sizes = tuple((key, value) for key, value in overrides.items() if key.startswith("model."))
    model = next(name for name, row in LAYOUTS.items() if row[0] is kind)  # one reference for all
    one_rank = str(folder / f"one-rank-{kind.__name__}")
    expected = reference(one_rank, model, optimizer, dtype, sizes)
    degrees = (dense.TP, dense.PP, dense.CP)
    data_ranks = num_ranks
    for degree in degrees:
        data_ranks //= overrides.get(degree, 1)
    changes = {**overrides, "training.local_batch_size": 8 // data_ranks}
    argv = arguments(str(folder / layout), layout, optimizer, dtype, **changes)
    return expected, run_ranks(run_cell, num_ranks, argv)[0]


@pytest.mark.parametrize(("optimizer", "layout", "dtype"), CELLS)
def test_equals_one_rank(folder, optimizer, layout, dtype):
    if optimizer == "adamw8bit":
        pytest.importorskip("torchao")
    expected, cell = run(folder, layout, optimizer, dtype)
    compare(expected, cell, dtype)


def test_a_fault_turns_a_cell_red(folder):
    expected, cell = run(folder, "fsdp", "muon", "float64", run_faulty_cell)
    with pytest.raises(AssertionError):
        compare(expected, cell, "float64")


def build_error(argv):
    """Return the error of building a trainer."""
    with pytest.raises(ConfigError) as caught:
        build(argv)
    return str(caught.value)


def test_a_shard_with_a_part_of_a_block_is_refused(tmp_path):
    """`wo` has rows of 64 elements; tensor parallelism gives each rank 32 of them."""
    pytest.importorskip("torchao")
    changes = {"optimizer.name": "AdamW8bit", "optimizer.adamw8bit_block_size": 64, dense.TP: 2}
    argv = options(str(tmp_path), "float32", **changes, **{"model.args.dim": 64})
    for error in run_ranks(build_error, 2, argv):
        assert "optimizer.adamw8bit_block_size" in error
        assert "wo.weight has rows of 64 elements in 2 parts of 32" in error


RESUMED = {
    "muon": {"optimizer.name": "Muon"},
    "lion": {"optimizer.name": "Lion"},
    "adamw8bit": OPTIMIZERS["adamw8bit"],
    "stochastic": {"training.dtype": "bfloat16", "optimizer.bf16_rounding": "stochastic",
                   "optimizer.state_dtype": "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "muon",
        pytest.param("lion", marks=pytest.mark.nightly),
        "adamw8bit",
        "stochastic",
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, name):
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    changes = {**RESUMED[name], "lr_scheduler.total_steps": 4}
    save(tmp_path / "straight", **changes, **{"training.steps": 4})
    for steps in (2, 4):
        save(tmp_path / "resumed", **changes, **{"training.steps": steps})
    assert metric_rows(tmp_path / "resumed") == metric_rows(tmp_path / "straight")


MOVES = [(2, {}), (2, {dense.TP: 2}), (4, {dense.REPLICATE: 2}), (1, {})]


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_a_run_moves_between_layouts(tmp_path, optimizer):
    if optimizer == "adamw8bit":
        pytest.importorskip("torchao")
    total = len(MOVES)
    changes = {
        **OPTIMIZERS[optimizer],
        **OF_DTYPE[optimizer]("float32"),
        "lr_scheduler.total_steps": total,
        "training.local_batch_size": 2,
    }
    save(tmp_path / "straight", ranks=1, **changes, **{"training.steps": total})
    for step, (ranks, layout) in enumerate(MOVES, start=1):
        save(tmp_path / "moved", ranks=ranks, **changes, **layout, **{"training.steps": step})
    losses = [
        [float.fromhex(value) for (value,) in metric_rows(tmp_path / name, ("loss",))]
        for name in ("moved", "straight")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
