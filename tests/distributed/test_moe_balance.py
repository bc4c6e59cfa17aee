"""Loads of experts, their biases and the router's losses are the same on every layout."""

import functools
import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.distributed.parity import (
    BALANCE_MUTATIONS,
    build,
    compare,
    compare_experts,
    release,
    run_cell,
)
from tests.distributed.test_matrix import CP, OPTIONS, TP, VALIDATE
from tests.distributed.test_moe import LAYOUTS, MODEL, settings
from tests.harness.rank_pool import run_ranks
from torchtitan_like.resilience.corruption import ReplicaError

METHODS = {
    "bias": {"model.args.load_balance": "bias", "model.args.load_balance_coeff": 0.01},
    "sequence": {
        "model.args.load_balance": "sequence",
        "model.args.load_balance_coeff": 0.5,
        "model.args.router_z_coeff": 0.1,
    },
    "global": {
        "model.args.load_balance": "global",
        "model.args.load_balance_coeff": 0.5,
        "model.args.router_z_coeff": 0.1,
    },
    "in turn": {"debug.moe_force_load_balance": "true"},
}
LOAD_BALANCE = "model.args.load_balance"
# Micro-batches of a pipeline save what the backward of others changes.
BOTH = "compile and recompute"
OPTIONS = OPTIONS | {BOTH: {**OPTIONS["compile"], "activation_checkpoint.mode": "full"}}
LOCAL_4 = {"training.local_batch_size": 4}
EVERY_RUN = [
    ("fsdp", "together", "bias"),
    ("tp", "together", "sequence"),
    ("cp-allgather", "together", "sequence"),
    ("fsdp", "together", "global"),
    ("ep-etp", "together", "sequence"),
    ("fsdp", "compile", "global"),
    ("pp-1f1b", BOTH, "sequence"),
]
# Every pair of layout, option and method: the options take turns. ZBV schedules do not compile.
NIGHTLY = [
    (layout, "together" if "zbv" in layout or turn % 2 else "compile", method)
    for start, layout in enumerate(LAYOUTS)
    for turn, method in enumerate(METHODS, start)
]
NIGHTLY = [cell for cell in NIGHTLY if cell not in EVERY_RUN]


@functools.cache
def reference(folder, layers, experts, method, validates):
    sizes = {"model.args.num_experts": experts}
    overrides = sizes | METHODS[method] | (VALIDATE if validates else {})
    return run_ranks(run_cell, 1, settings(folder, layers, **overrides))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("balance")


def run(folder, layout, option, method, mutation=""):
    ranks, cell = LAYOUTS[layout]
    layers = cell.get("model.args.n_layers", 2)
    experts = cell.get("model.args.num_experts", MODEL["model.args.num_experts"])
    one_rank = str(folder / f"one-rank-{layers}-{experts}-{method}")
    expected = reference(one_rank, layers, experts, method, option == "together")
    pp = cell.get("parallelism.pipeline_parallel_degree", 1)
    data_ranks = ranks // (cell.get(TP, 1) * pp * cell.get(CP, 1))
    local = min(2, 4 // data_ranks) if option == "together" else 8 // data_ranks
    overrides = {**cell, "training.local_batch_size": local, **OPTIONS[option], **METHODS[method]}
    argv = settings(str(folder / layout), overrides.pop("model.args.n_layers", 2), **overrides)
    return expected, run_ranks(run_cell, ranks, argv, mutation, timeout=120)[0]


@pytest.mark.parametrize(
    ("layout", "option", "method"),
    [*EVERY_RUN, *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in NIGHTLY)],
)
def test_every_layout_equals_one_rank(folder, layout, option, method):
    expected, cell = run(folder, layout, option, method)
    compare(expected, cell, "float64")
    assert len(expected.loads) == 3


@pytest.mark.parametrize(
    ("mutation", "layout", "method"),
    [
        ("counts of one rank", "fsdp", "bias"),
        ("bias update skipped on one rank", "fsdp", "bias"),
        pytest.param("signs flipped", "fsdp", "bias", marks=pytest.mark.nightly),
        pytest.param("bias in the weights", "fsdp", "bias", marks=pytest.mark.nightly),
        ("losses per rank", "fsdp", "global"),
        ("losses over parts of sequences", "cp-allgather", "sequence"),
    ],
)
def test_an_injected_fault_fails_the_comparison(folder, mutation, layout, method):
    assert mutation in BALANCE_MUTATIONS
    expected, cell = run(folder, layout, "together", method, mutation)
    with pytest.raises(AssertionError):
        compare(expected, cell, "float64")


def test_the_experts_of_each_token_are_compared(folder):
    """Equal loads do not hide that two tokens have exchanged their experts."""
    expected, cell = run(folder, "fsdp", "together", "bias", "choices of two tokens swapped")
    assert cell.loads[0].choices[0] == expected.loads[0].choices[0]
    with pytest.raises(AssertionError, match="experts of each token"):
        compare_experts(expected, cell, 1e-10)


# ---- what must not change the balance


@pytest.mark.parametrize("method", [pytest.param("bias", marks=pytest.mark.nightly), "global"])
def test_a_skipped_step_keeps_the_state(folder, method):
    """On both layouts, the second step updates nothing, and the third step ignores its loads."""
    argv = settings(str(folder / f"skipped-{method}"), 2, **METHODS[method])
    one = run_ranks(run_cell, 1, argv, "second update skipped")[0]
    argv = settings(str(folder / f"skipped-fsdp-{method}"), 2, **METHODS[method], **LOCAL_4)
    two = run_ranks(run_cell, 2, argv, "second update skipped")[0]
    compare(one, two, "float64")
    first, second, third = one.expert_state
    assert first.keys() == second.keys() and len(first) == 2
    for name in first:
        assert (first[name] == second[name]).all() and (second[name] != third[name]).any()


@pytest.mark.parametrize("method", ["bias", pytest.param("global", marks=pytest.mark.nightly)])
def test_validation_does_not_change_the_counts(folder, method):
    validated = reference(str(folder / f"validated-{method}"), 2, 6, method, True)
    plain = reference(str(folder / f"plain-{method}"), 2, 6, method, False)
    assert validated.validation and not plain.validation
    compare_experts(plain, validated, 0.0)


def test_biases_work_with_optimizer_steps_in_backward(folder):
    """Biases follow the whole step, although weights are updated block by block."""
    early = {"optimizer.early_step_in_backward": "true", **METHODS["bias"]}
    one = run_ranks(run_cell, 1, settings(str(folder / "early"), 2, **early))[0]
    for layout in ("fsdp", "ep"):
        overrides = {**early, **LAYOUTS[layout][1], **LOCAL_4}
        argv = settings(str(folder / f"early-{layout}"), 2, **overrides)
        compare(one, run_ranks(run_cell, 2, argv)[0], "float64")
    late = reference(str(folder / "late"), 2, 6, "bias", False)
    assert one.loads[0].choices == late.loads[0].choices
    for name, bias in late.expert_state[0].items():
        assert (one.expert_state[0][name] == bias).all()


@pytest.mark.parametrize("method", ["bias", pytest.param("global", marks=pytest.mark.nightly)])
def test_a_resumed_run_equals_one_that_never_stopped(folder, method):
    """The runs are bit-equal on two ranks, and equal within tolerances on one rank."""
    run_folder = folder / f"resumed-{method}"
    saving = {"training.steps": 6, "checkpoint.enable": "true", "checkpoint.interval": 3}
    argv = settings(str(run_folder), 2, **METHODS[method], **saving, **LOCAL_4)
    whole = run_ranks(run_cell, 2, argv)[0]
    shutil.rmtree(run_folder / "checkpoint" / "step-6")
    shutil.copytree(run_folder, folder / f"one-rank-resumes-{method}")
    resumed = run_ranks(run_cell, 2, argv)[0]
    assert len(whole.loads) == 6 and resumed.loads == whole.loads[3:]
    assert resumed.loss == whole.loss[3:] and resumed.grad_norm == whole.grad_norm[3:]
    for name, parameter in whole.parameters.items():
        assert np.array_equal(resumed.parameters[name], parameter), name
    one_rank_folder = str(folder / f"one-rank-resumes-{method}")
    argv = settings(one_rank_folder, 2, **METHODS[method], **saving)
    on_one_rank = run_ranks(run_cell, 1, argv)[0]
    rest = replace(
        whole,
        loads=whole.loads[3:],
        choices=whole.choices[3:],
        expert_state=whole.expert_state[3:],
    )
    for trace in (resumed, on_one_rank):
        compare_experts(rest, trace, 1e-10)


def message_of_replicas(argv, name):
    """Return the error of the replica check after the last rank has changed one number."""
    trainer = build(argv)
    trainer.guard.replicas.check(1)
    if trainer.world.rank == trainer.world.size - 1:
        state = {**trainer.optim.balancer.named_state(), **dict(trainer.optim.optimizer.named)}
        tensor = state[f"layers.1.moe.{name}"].detach()
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local.view(-1)[1] += 1e-3
    try:
        trainer.guard.replicas.check(2)
    except ReplicaError as error:
        return str(error)
    finally:
        release(trainer)


@pytest.mark.parametrize(
    ("layout", "name", "suspects"),
    [
        ("ddp", "expert_bias", "0, 1"),
        # Ranks 1 and 3 have the other half of the experts, ranks 0 and 2 the first one.
        ("ep-hsdp", "experts.w1", "1, 3"),
    ],
)
def test_the_replica_check_covers_experts_and_biases(folder, layout, name, suspects):
    ranks, cell = LAYOUTS[layout]
    changes = {"resilience.replica_check_freq": 1, "training.local_batch_size": 8 // ranks}
    argv = settings(str(folder / f"replicas-{layout}"), 2, **cell, **METHODS["bias"], **changes)
    messages = run_ranks(message_of_replicas, ranks, argv, name)
    assert all(f"layers.1.moe.{name} on ranks {suspects} " in message for message in messages)


OFFLOAD = {"activation_checkpoint.mode": "offload"}
SELECTIVE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "recomputation"),
    [
        ("ep", OFFLOAD),
        pytest.param("fsdp", OFFLOAD, marks=pytest.mark.nightly),
        pytest.param("fsdp", SELECTIVE, marks=pytest.mark.nightly),
        pytest.param("ep", SELECTIVE, marks=pytest.mark.nightly),
    ],
)
def test_recomputed_and_offloaded_tokens_count_once(folder, layout, recomputation):
    name = f"{layout}-{recomputation['activation_checkpoint.mode']}"
    overrides = {**LAYOUTS[layout][1], **METHODS["sequence"], **recomputation, **LOCAL_4}
    expected = reference(str(folder / "plain-sequence"), 2, 6, "sequence", False)
    argv = settings(str(folder / name), 2, **overrides)
    compare(expected, run_ranks(run_cell, 2, argv)[0], "float64")


# ---- learning


def violations(argv):
    """Train. Return the largest load violation of all layers for each step."""
    trainer = build(argv)
    rows = []
    trainer.metrics.observers.append(rows.extend)
    trainer.train()
    release(trainer)
    return [row["moe"]["max_violation"] for row in rows]


@pytest.mark.nightly
def test_biases_even_out_the_loads_in_200_steps(folder):
    """The loads of the debug model on the shipped text diverge without balancing."""
    sizes = {
        "model.args.dim": 128,
        "model.args.num_experts": 8,
        "model.args.moe_inter_dim": 32,
        "model.args.load_balance_coeff": 0.001,
        "training.steps": 200,
        "training.seq_len": 128,
        "training.local_batch_size": 32,
        "training.global_batch_size": 32,
        "training.dtype": "float32",
        "training.mixed_precision_param": "float32",
        "training.mixed_precision_reduce": "float32",
    }
    last = {}
    for method in ("none", "bias"):
        argv = settings(str(folder / f"long-{method}"), 2, **sizes, **{LOAD_BALANCE: method})
        source = argv.index("--training.dataset_path")  # of short documents
        argv[source : source + 2] = ["--training.dataset", "shakespeare"]
        steps = run_ranks(violations, 1, argv, timeout=1200)[0]
        last[method] = sum(steps[-20:]) / 20
    assert last["bias"] < 0.2
    assert last["none"] > 0.4
