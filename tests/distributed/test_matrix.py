"""Every layout with every option equals one rank.

A cell runs the trainer's own build and steps, and is compared in float64 or float32
(`parity.compare`). `EXCLUDED` lists the cells that the configuration check rejects, with their
rule.
"""

import functools

import pytest

from tests.distributed.parity import MUTATIONS, compare, options, run_cell
from tests.harness.rank_pool import run_ranks
from torchtitan_like.check import load_checked
from torchtitan_like.config import ConfigError

LAYERS = "model.args.n_layers"
SHARD, REPLICATE = (
    "parallelism.data_parallel_shard_degree",
    "parallelism.data_parallel_replicate_degree",
)
TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "context"))
IMPL, METHOD = "parallelism.data_parallel_impl", "parallelism.context_parallel_rotate_method"
LESS = {f"parallelism.pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}


def pipeline(schedule, layers=2, **others):
    return {
        PP: 2,
        "parallelism.pipeline_parallel_schedule": schedule,
        LAYERS: layers,
        **LESS,
        **others,
    }


LAYOUTS = {
    # name: (ranks, overrides)
    "ddp": (2, {REPLICATE: 2, IMPL: "ddp"}),
    "fsdp": (2, {}),
    "simple-fsdp": (2, {IMPL: "simple_fsdp"}),
    "simple-hsdp": (4, {IMPL: "simple_fsdp", REPLICATE: 2}),
    "hsdp": (4, {REPLICATE: 2}),
    "tp": (2, {TP: 2}),
    "tp-no-sp": (2, {TP: 2, "parallelism.enable_sequence_parallel": "false"}),
    "tp-no-loss-parallel": (2, {TP: 2, "parallelism.disable_loss_parallel": "true"}),
    "pp-gpipe": (2, pipeline("GPipe")),
    "pp-1f1b": (2, pipeline("1F1B")),
    "pp-interleaved": (2, pipeline("Interleaved1F1B", layers=4)),
    "pp-looped-bfs": (2, pipeline("LoopedBFS", layers=4)),
    "pp-izb": (2, pipeline("InterleavedZeroBubble", layers=4)),
    "pp-zbv": (2, pipeline("ZBVZeroBubble", layers=4)),
    "pp-dualpipe": (2, pipeline("DualPipeV", layers=4)),
    "cp-allgather": (2, {CP: 2}),
    "cp-ulysses": (2, {CP: 2, METHOD: "ulysses"}),
    "cp-ring": (2, {CP: 2, METHOD: "alltoall"}),
    "fsdp-tp": (4, {TP: 2}),
    "simple-fsdp-tp": (4, {TP: 2, IMPL: "simple_fsdp"}),
    "ddp-tp": (4, {TP: 2, REPLICATE: 2}),
    "fsdp-cp": (4, {CP: 2}),
    "cp-4": (4, {CP: 4}),
    "ddp-cp": (4, {CP: 2, REPLICATE: 2}),
    "tp-cp": (4, {TP: 2, CP: 2}),
    "pp-fsdp": (4, pipeline("1F1B")),
    "pp-fsdp-zbv": (4, pipeline("ZBVZeroBubble", layers=4)),
    "pp-ddp": (4, pipeline("Interleaved1F1B", layers=4, **{REPLICATE: 2})),
    "pp-tp": (4, pipeline("1F1B", **{TP: 2})),
    "pp-cp": (4, pipeline("1F1B", **{CP: 2})),
    "pp-fsdp-tp": (8, pipeline("1F1B", **{TP: 2})),
}  # fmt: skip
VALIDATE = {
    "validation.enable": "true",
    "validation.dataset": "shakespeare_validation",
    "validation.freq": 2,
    "validation.steps": 2,
    "validation.seq_len": 32,
    "validation.local_batch_size": 2,
}
OPTIONS = {
    "together": {"activation_checkpoint.mode": "full", **VALIDATE},  # also accumulates gradients
    "compile": {"compile.enable": "true", "compile.backend": "aot_eager"},
    "validate": VALIDATE,
}
# (layout, option) -> the rule of check/rules/ that rejects it.
EXCLUDED = {
    ("pp-izb", "compile"): "compiled-zero-bubble",
    ("pp-zbv", "compile"): "compiled-zero-bubble",
    ("pp-dualpipe", "compile"): "compiled-zero-bubble",
    ("pp-fsdp-zbv", "compile"): "compiled-zero-bubble",
    ("cp-ring", "compile"): "compiled-ring",
}
# Float64 shows faults that rounding hides in float32. Users run float32, so "validate" tests it on
# the layouts of two ranks and on HSDP. Nightly, test_parity.py tests FSDP and DDP on four
# ranks. Larger layouts in their default mode are covered by their compiled cells.
DTYPES = {"together": "float64", "compile": "float64", "validate": "float32"}
OPTIONS_ON = {2: ("together", "compile", "validate"), 4: ("together", "compile"), 8: ("together",)}
CELLS = [
    (layout, option, DTYPES[option])
    for layout, (ranks, _) in LAYOUTS.items()
    for option in OPTIONS_ON[ranks]
    if (layout, option) not in EXCLUDED
] + [("hsdp", "validate", "float32")]


def overrides(layout, option):
    """Return the settings of a cell. The global batch always has 8 samples."""
    ranks, cell = LAYOUTS[layout]
    data_ranks = ranks // (cell.get(TP, 1) * cell.get(PP, 1) * cell.get(CP, 1))
    local = (
        8 // data_ranks if option != "together" else min(2, 4 // data_ranks)
    )  # at least two micro-batches
    return {**cell, "training.local_batch_size": local, **OPTIONS[option]}


@functools.cache
def reference(folder, dtype, layers, validates):
    argv = options(folder, dtype, **{LAYERS: layers}, **(VALIDATE if validates else {}))
    return run_ranks(run_cell, 1, argv)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("matrix")


def run(folder, layout, option, dtype, mutation="", timeout=60):
    layers = LAYOUTS[layout][1].get(LAYERS, 2)
    expected = reference(str(folder / f"one-rank-{layers}"), dtype, layers, option != "compile")
    argv = options(str(folder / layout), dtype, **overrides(layout, option))
    return expected, run_ranks(run_cell, LAYOUTS[layout][0], argv, mutation, timeout=timeout)[0]


# Option -> the layouts that run always. The others run nightly.
EVERY_RUN = {
    "together": (
        *(name for name, (ranks, _) in LAYOUTS.items() if ranks == 2),
        *("hsdp", "fsdp-tp", "tp-cp", "pp-fsdp-tp"),
    ),
    "compile": ("fsdp", "tp", "pp-interleaved"),
    "validate": ("fsdp", "hsdp", "tp", "pp-1f1b", "cp-allgather"),
}


def cell_parameter(layout, option, dtype):
    marks = [] if layout in EVERY_RUN[option] else [pytest.mark.nightly]
    return pytest.param(layout, option, dtype, marks=marks)


@pytest.mark.parametrize(("layout", "option", "dtype"), [cell_parameter(*cell) for cell in CELLS])
def test_equals_one_rank(folder, layout, option, dtype):
    expected, cell = run(folder, layout, option, dtype)
    compare(expected, cell, dtype)


# Slow cells: all four kinds of parallelism together, and Inductor's kernels.
LAYOUTS_OF_MANY = {"pp-fsdp-tp-cp": (16, pipeline("1F1B", **{TP: 2, CP: 2}))}
INDUCTOR = {"compile.enable": "true", "compile.backend": "inductor"}
LONG_CELLS = [
    ("pp-fsdp-tp-cp", "together", "float64"),
    ("pp-fsdp-tp-cp", "validate", "float32"),
    ("fsdp", "inductor", "float64"),
    ("fsdp", "inductor", "float32"),
    ("fsdp-tp", "inductor", "float64"),
    ("pp-fsdp", "inductor", "float64"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "option", "dtype"), LONG_CELLS)
def test_long_cells_equal_one_rank(folder, layout, option, dtype, monkeypatch):
    monkeypatch.setitem(OPTIONS, "inductor", {**INDUCTOR, **VALIDATE})
    for name, row in LAYOUTS_OF_MANY.items():
        monkeypatch.setitem(LAYOUTS, name, row)
    expected, cell = run(folder, layout, option, dtype, timeout=500)
    compare(expected, cell, dtype)


@pytest.mark.nightly  # test_simple_fsdp.py merges collectives in every run
def test_bucketed_collectives_give_the_same_results(folder):
    expected = reference(str(folder / "one-rank-2"), "float64", 2, False)
    bucketed = {**overrides("simple-fsdp", "compile"), "parallelism.simple_fsdp_bucketing": "true"}
    cell = run_ranks(
        run_cell, 2, options(str(folder / "bucketed"), "float64", **bucketed), timeout=240
    )[0]
    compare(expected, cell, "float64")


# Half as wide and deep, with smaller heads: all factors differ from 1.
COMPLETEP = {
    "model.parametrization": "completep",
    "model.base_args.dim": 16,
    "model.base_args.n_layers": 1,
    "model.args.enable_weight_tying": "true",
}


def test_a_parametrized_model_equals_one_rank(folder):
    expected = run_ranks(run_cell, 1, options(str(folder / "completep-1"), "float64", **COMPLETEP))[
        0
    ]
    sharded = {**overrides("fsdp-tp", "together"), **COMPLETEP, "validation.enable": "false"}
    cell = run_ranks(run_cell, 4, options(str(folder / "completep"), "float64", **sharded))[0]
    compare(expected, cell, "float64")


def test_there_are_enough_cells():
    assert len({cell[:2] for cell in CELLS}) >= 60


@pytest.mark.parametrize(("layout", "option"), EXCLUDED)
def test_excluded_cells_are_rejected_by_their_rule(folder, layout, option):
    argv = options(str(folder / layout), "float32", **overrides(layout, option))
    with pytest.raises(ConfigError) as refused:
        load_checked(argv, LAYOUTS[layout][0], training=True, device_type="cpu")
    assert [problem.rule for problem in refused.value.problems] == [EXCLUDED[layout, option]]


FAULTS = [
    name for name in MUTATIONS if name != "one micro-batch dropped"
]  # these cells have one micro-batch
# Each fault runs on one of these layouts in every run, and on another one nightly.
RED = ("simple-fsdp", "tp", "pp-1f1b", "cp-allgather")


@pytest.mark.parametrize(
    ("layout", "mutation"),
    [
        *((RED[i % 4], name) for i, name in enumerate(FAULTS)),
        *(
            pytest.param(RED[(i + 2) % 4], name, marks=pytest.mark.nightly)
            for i, name in enumerate(FAULTS)
        ),
    ],
)
def test_injected_fault_fails_the_comparison(folder, layout, mutation):
    expected, cell = run(folder, layout, "validate", "float32", mutation)
    with pytest.raises(AssertionError):
        compare(expected, cell, "float32")
