"""Further layouts and options equal one rank, in addition to test_matrix.py.

They vary data-parallel sizes, activation checkpointing and compilation.
"""

import functools

import pytest

from tests.distributed.parity import LR, MUTATIONS, PRECISIONS, compare, options, run_cell
from tests.harness.rank_pool import run_ranks

COMPILED = {"compile.enable": "true", "compile.backend": "aot_eager"}
LAYOUTS = {
    # name: (ranks, overrides); the global batch always has 8 samples
    "fsdp-4": (4, {"training.local_batch_size": 2}),
    "ddp-4": (4, {"training.local_batch_size": 2, "parallelism.data_parallel_replicate_degree": 4}),
    "accumulate-2x4": (1, {"training.local_batch_size": 4}),
    "accumulate-8x1": (1, {"training.local_batch_size": 1}),
    "fsdp-2-accumulate": (2, {"training.local_batch_size": 2}),
    "fsdp-2-never-reshard": (2, {
        "training.local_batch_size": 4, "parallelism.fsdp_reshard_after_forward": "never",
    }),
    "fsdp-2-always-reshard": (2, {
        "training.local_batch_size": 4, "parallelism.fsdp_reshard_after_forward": "always",
    }),
    "fsdp-2-tied": (2, {
        "training.local_batch_size": 4, "model.args.enable_weight_tying": "true",
    }),
    "ac-every-2nd": (2, {
        "training.local_batch_size": 4, "activation_checkpoint.mode": "selective",
    }),
    "ac-per-op": (2, {
        "training.local_batch_size": 4, "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
    }),
    "chunked-loss": (2, {
        "training.local_batch_size": 4, "loss.chunk_mib": 1, "training.seq_len": 128,
    }),
    "compile-ac-per-op": (2, {
        "training.local_batch_size": 4, **COMPILED, "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
    }),
    "compile-ac-full": (2, {
        "training.local_batch_size": 4, **COMPILED, "activation_checkpoint.mode": "full",
    }),
    "compile-memory-budget": (2, {
        "training.local_batch_size": 4, **COMPILED, "activation_checkpoint.mode": "memory_budget",
    }),
    "compile-loss": (2, {"training.local_batch_size": 4, **COMPILED, "compile.components": "loss"}),
    "foreach": (2, {"training.local_batch_size": 4, "optimizer.implementation": "foreach"}),
    "groups": (2, {
        "training.local_batch_size": 4,
        "optimizer.groups.head.parameters": "output.*,tok_embeddings.*",
        "optimizer.groups.head.lr": LR / 4,
        "optimizer.groups.norms.parameters": "*norm*",
        "optimizer.groups.norms.weight_decay": 0.0,
        "optimizer.groups.norms.name": "Adam",
    }),
}  # fmt: skip
# Only in float64: other cells test these operations in float32.
FLOAT64_ONLY = {
    "fsdp-2-never-reshard",
    "fsdp-2-always-reshard",
    "ac-every-2nd",
    "compile-ac-per-op",
    "compile-ac-full",
    "compile-memory-budget",
}
# In every run, these are in float32 and the others in float64. Nightly runs add the other dtype.
FLOAT32_IN_EVERY_RUN = ("fsdp-4", "ddp-4", "fsdp-2-accumulate", "chunked-loss", "foreach")
NIGHTLY = ("fsdp-4", "ddp-4", "accumulate-8x1", "compile-ac-per-op", "compile-ac-full")
# Settings that change the model or the samples, so the reference run needs them too.
SHARED = ("model.args.enable_weight_tying", "training.seq_len", "optimizer.groups.")


@functools.cache
def reference(folder, dtype, **overrides):
    (trace,) = run_ranks(run_cell, 1, options(folder, dtype, **overrides))
    return trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parity")


def run(folder, name, dtype, mutation=""):
    world_size, overrides = LAYOUTS[name]
    shared = {key: value for key, value in overrides.items() if key.startswith(SHARED)}
    expected = reference(str(folder / "one-rank"), dtype, **shared)
    cell = run_ranks(
        run_cell, world_size, options(str(folder / name), dtype, **overrides), mutation
    )[0]
    return expected, cell


def is_long(name, dtype):
    return name in NIGHTLY or (dtype == "float32") != (name in FLOAT32_IN_EVERY_RUN)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.nightly] if is_long(name, dtype) else [])
        for name in LAYOUTS
        for dtype in PRECISIONS
        if dtype == "float64" or name not in FLOAT64_ONLY
    ],
)
def test_equals_one_rank(folder, name, dtype):
    expected, cell = run(folder, name, dtype)
    compare(expected, cell, dtype)


def test_numbers_of_valid_tokens_differ_between_steps(folder):
    """With equal numbers a mean of means would equal the mean over tokens."""
    trace = reference(str(folder / "one-rank"), "float32")
    assert len(set(trace.num_valid_tokens)) > 1
    assert all(count < 8 * 32 for count in trace.num_valid_tokens)


# test_matrix.py injects the other faults in every run.
FAULTS = [
    pytest.param(name, marks=[] if name == "one micro-batch dropped" else pytest.mark.nightly)
    for name in MUTATIONS
]


@pytest.mark.parametrize("mutation", FAULTS)
def test_injected_fault_fails_the_comparison(folder, mutation):
    expected, cell = run(folder, "fsdp-2-accumulate", "float32", mutation)
    with pytest.raises(AssertionError):
        compare(expected, cell, "float32")
