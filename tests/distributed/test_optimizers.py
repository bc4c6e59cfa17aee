"""Optimizers other than AdamW equal one rank on every layout."""

import functools

import pytest

from tests.distributed import test_matrix as dense
from tests.distributed import test_moe as experts
from tests.distributed.parity import LR, compare, options, run_cell
from tests.harness.rank_pool import run_ranks

# Name of a cell's optimizer -> settings that one rank has too.
OPTIMIZERS = {
    "muon": {
        "optimizer.name": "Muon",
        "optimizer.muon_adjust_lr_fn": "match_rms_adamw",
        "optimizer.no_weight_decay": "*norm*",
    },
    "lion": {"optimizer.name": "Lion", "optimizer.lr": LR / 8},
    "adamw": {},
}
# Optimizer -> settings by dtype. Parity needs a computation in the dtype of the weights. With
# `state_dtype`, AdamW is this package's own.
OF_DTYPE = {
    "muon": lambda dtype: {"optimizer.muon_dtype": dtype},
    "lion": lambda dtype: {},
    "adamw": lambda dtype: {"optimizer.state_dtype": dtype},
}
LAYOUTS = {name: (dense, *row) for name, row in dense.LAYOUTS.items()} | {
    f"moe-{name}": (experts, *row) for name, row in experts.LAYOUTS.items()
}
EVERY_RUN = {
    "muon": ["fsdp", "hsdp", "simple-fsdp-tp", "tp", "cp-allgather", "pp-fsdp", "fsdp-tp",
             "moe-fsdp", "moe-ep-fsdp", "moe-ep-one-expert", "moe-ep-etp"],
    "lion": ["fsdp-tp", "pp-fsdp", "moe-ep-fsdp"],
    "adamw": ["hsdp"],
}  # fmt: skip
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
    and (optimizer == "muon" or layout in EVERY_RUN[optimizer])
    and not (dtype == "float32" and layout.startswith("moe"))
]


def arguments(folder, layout, optimizer, dtype, **overrides):
    changes = {**OPTIMIZERS[optimizer], **OF_DTYPE[optimizer](dtype), **overrides}
    if LAYOUTS[layout][0] is dense:
        return options(folder, dtype, **changes)
    return experts.settings(folder, changes.pop(dense.LAYERS, 2), **changes)


@functools.cache
def reference(folder, layout, optimizer, dtype, sizes):
    """Return the trace of one rank with the model of `layout`."""
    return run_ranks(run_cell, 1, arguments(folder, layout, optimizer, dtype, **dict(sizes)))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("optimizers")


def run(folder, layout, optimizer, dtype):
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
    expected, cell = run(folder, layout, optimizer, dtype)
    compare(expected, cell, dtype)
