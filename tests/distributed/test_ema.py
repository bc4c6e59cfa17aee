"""The averaged weights equal one rank's on every layout, resume, and are validated and exported."""

import functools
import logging
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.distributed import test_matrix as dense
from tests.distributed import test_moe as experts
from tests.distributed.parity import build, compare, full, options, release, run_cell
from tests.distributed.test_nonfinite_steps import SKIP, corrupt_gradient, train_with_a_fault
from tests.distributed.test_saving import metric_rows
from tests.distributed.test_saving import run as save
from tests.harness.rank_pool import run_ranks
from torchtitan_like import validation as validation_module
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.stored_weights import check_average
from torchtitan_like.checkpoint.tools.open_checkpoint import open_checkpoint
from torchtitan_like.cli import main as titan
from torchtitan_like.optim.ema import AveragedWeights
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

DECAY = 0.24  # the warm-up ends after the first update: (1 + n) / (10 + n) = 2 / 11, 3 / 12
EMA = {"ema.enable": "true", "ema.decay": DECAY}
VALIDATED = {**dense.VALIDATE, **EMA, "ema.validation": "true"}
NEVER = {"parallelism.fsdp_reshard_after_forward": "never"}
IN_BACKWARD = {"optimizer.early_step_in_backward": "true"}

# ---- layouts

LAYOUTS = {name: (dense, *row) for name, row in dense.LAYOUTS.items()} | {
    f"moe-{name}": (experts, *row) for name, row in experts.LAYOUTS.items()
}
LAYOUTS["fsdp-never"] = (dense, 2, NEVER)
LAYOUTS["fsdp-in-backward"] = (dense, 2, IN_BACKWARD)
EVERY_RUN = ("fsdp-never", "pp-1f1b", "moe-ep")
CELLS = [
    pytest.param(layout, marks=[] if layout in EVERY_RUN else pytest.mark.nightly)
    for layout, (_, num_ranks, _) in LAYOUTS.items()
    if num_ranks <= 4
]


def arguments(folder, kind, **overrides):
    settings = {**VALIDATED, **overrides}
    if kind is dense:
        return options(folder, "float64", **settings)
    return experts.settings(folder, settings.pop(dense.LAYERS, 2), **settings)


def run_cell_and_loop(argv):
    """Run a cell. Return its trace, and the largest difference of an average from a plain loop."""
    start, update = AveragedWeights.start, AveragedWeights.update
    loop, differences = {}, [0.0]

    def weights(ema):
        return {name: full(weight) for name, weight in ema._weights.items()}

    def traced_start(ema):
        start(ema)
        loop.update(weights(ema))

    def traced_update(ema, skip):
        update(ema, skip)
        n = ema.state_dict()["num_updates"].item()
        d = min(DECAY, (1 + n) / (10 + n))
        for name, weight in weights(ema).items():
            loop[name] = d * loop[name] + (1 - d) * weight
            average = full(ema.state_dict()[f"average.{name}"])
            differences.append(np.abs(average - loop[name]).max())

    with (
        patch.object(AveragedWeights, "start", traced_start),
        patch.object(AveragedWeights, "update", traced_update),
    ):
        trace = run_cell(argv)
    return trace, max(differences)


def run_cell_that_keeps_gathered_weights(argv):
    with patch.object(validation_module, "free_gathered", lambda parts: None):
        return run_cell_and_loop(argv)


@functools.cache
def reference(folder, kind, overrides):
    return run_ranks(run_cell, 1, arguments(folder, kind, **dict(overrides)))[0]


def run(folder, layout, run_cell=run_cell_and_loop):
    """Return the trace of one rank with the same model, and the results of the layout's ranks."""
    kind, num_ranks, overrides = LAYOUTS[layout]
    is_shared = {"optimizer", "model"}
    shared = {key: value for key, value in overrides.items() if key.split(".")[0] in is_shared}
    one_rank = str(folder / f"one-rank-{kind.__name__}-{len(shared)}")
    expected = reference(one_rank, kind, tuple(shared.items()))
    data_ranks = num_ranks
    for degree in (dense.TP, dense.PP, dense.CP):
        data_ranks //= overrides.get(degree, 1)
    batch = {"training.local_batch_size": 8 // data_ranks}
    argv = arguments(str(folder / layout), kind, **overrides, **batch)
    return expected, run_ranks(run_cell, num_ranks, argv)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ema")


@pytest.mark.parametrize("layout", CELLS)
def test_every_layout_equals_one_rank_and_a_loop(folder, layout):
    expected, endings = run(folder, layout)
    assert max(difference for _, difference in endings) < 1e-14
    trace = endings[0][0]
    assert len(trace.validation) == 2 * 3, "the weights and their averages at steps 1, 2 and 3"
    compare(expected, trace, "float64")
    for name, value in trace.parameters.items():
        assert not np.array_equal(value, trace.averages[f"average.{name}"]), name


@pytest.mark.nightly
def test_gathered_weights_of_the_last_validation_turn_a_cell_red(folder):
    expected, endings = run(folder, "fsdp-never", run_cell_that_keeps_gathered_weights)
    with pytest.raises(AssertionError, match="validation loss"):
        compare(expected, endings[0][0], "float64")


# ---- checkpoints


def steps(number, **overrides):
    return {**EMA, "lr_scheduler.total_steps": 4, "training.steps": number, **overrides}


def averages(step):
    """Return the state of the average in a step, as whole tensors by name."""
    contents = open_checkpoint(step)
    return {name: contents.read(name) for name in contents.stored if name.startswith("ema.")}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="foreground"),
        pytest.param({"checkpoint.async_mode": "async"}, id="async", marks=pytest.mark.nightly),
        pytest.param(IN_BACKWARD, id="in backward", marks=pytest.mark.nightly),
        pytest.param({"training.dtype": "bfloat16"}, id="bfloat16", marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, changes):
    """Also in the average, and in the losses of a validation with it."""
    validated = {**dense.VALIDATE, "ema.validation": "true", "validation.local_batch_size": 1}
    save(tmp_path / "straight", **steps(4, **changes, **validated))
    for number in (3, 4):
        save(tmp_path / "resumed", **steps(number, **changes, **validated))
    assert metric_rows(tmp_path / "resumed") == metric_rows(tmp_path / "straight")
    states = [averages(tmp_path / name / "checkpoint/step-4") for name in ("resumed", "straight")]
    assert states[0].keys() == states[1].keys() and len(states[0]) > 10
    assert states[0]["ema.num_updates"] == 4
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    losses = [
        [(row["step"], row["loss"].hex()) for row in rows if row.get("set") == "ema"][-1]
        for rows in (
            read_rows(tmp_path / name / "validation.jsonl") for name in ("resumed", "straight")
        )
    ]
    assert losses[0] == losses[1]


@pytest.mark.nightly
def test_validation_with_averaged_weights_leaves_the_run_unchanged(tmp_path):
    for validation in ("false", "true"):
        changes = {**dense.VALIDATE, "validation.freq": 1, "ema.validation": validation, **NEVER}
        changes["validation.local_batch_size"] = 1
        save(tmp_path / validation, **steps(4, **changes))
    assert metric_rows(tmp_path / "true") == metric_rows(tmp_path / "false")


MOVES = [
    (2, {}),
    (2, {dense.TP: 2}),
    (2, dense.pipeline("1F1B")),
    (4, {dense.REPLICATE: 2}),
    (1, {}),
]


@pytest.mark.nightly
def test_an_average_moves_between_layouts(tmp_path):
    total = len(MOVES)
    changes = {**EMA, "lr_scheduler.total_steps": total, "training.local_batch_size": 2}
    save(tmp_path / "straight", ranks=1, **changes, **{"training.steps": total})
    for step, (ranks, layout) in enumerate(MOVES, start=1):
        save(tmp_path / "moved", ranks=ranks, **{**changes, **layout, "training.steps": step})
    last = f"checkpoint/step-{total}"
    moved, straight = (averages(tmp_path / name / last) for name in ("moved", "straight"))
    assert moved["ema.num_updates"] == total
    for name, value in straight.items():
        error = (moved[name].double() - value).abs()
        assert (error <= 1e-5).double().mean() >= 0.9999, name


def train_and_log(argv):
    lines, root = [], logging.getLogger()
    handler, level = logging.Handler(logging.INFO), root.level
    handler.emit = lambda record: lines.append(record.getMessage())
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    trainer = build(argv)
    try:
        assert trainer.train() is ExitCode.DONE
    finally:
        release(trainer)
        root.removeHandler(handler)
        root.setLevel(level)
    return lines


def train_one_rank(folder, number, **overrides):
    settings = {"checkpoint.enable": "true", "checkpoint.last_save_model_only": "false"}
    argv = options(str(folder), "float32", **{**settings, **steps(number), **overrides})
    return "\n".join(run_ranks(train_and_log, 1, argv)[0])


def test_an_average_may_start_and_end_at_a_checkpoint(tmp_path):
    log = train_one_rank(tmp_path, 1, **{"ema.enable": "false"})
    assert "EMA" not in log
    log = train_one_rank(tmp_path, 2)
    assert "EMA: the average starts from the weights of step 1" in log
    assert "(not loaded: ema)" in log
    assert "Changed since the checkpoint: ema.enable false -> true" in log
    state = averages(tmp_path / "checkpoint/step-2")
    assert state["ema.num_updates"] == 1
    first, second = (open_checkpoint(tmp_path / f"checkpoint/step-{n}") for n in (1, 2))
    name = "layers.0.attention.wq.weight"
    before, after = (contents.read(f"model.{name}") for contents in (first, second))
    amount = 1 - 2 / 11  # of the first update with warm-up
    torch.testing.assert_close(
        state[f"ema.average.{name}"], before + amount * (after - before), rtol=0, atol=1e-7
    )
    log = train_one_rank(tmp_path, 3, **{"checkpoint.exclude_from_loading": '["ema"]'})
    assert "EMA: the average starts from the weights of step 2" in log
    log = train_one_rank(tmp_path, 4, **{"ema.enable": "false"})
    assert f"Ignored the averaged weights in {tmp_path}/checkpoint/step-3" in log
    assert averages(tmp_path / "checkpoint/step-4") == {}


def test_the_last_checkpoint_has_averages_that_export(tmp_path):
    """`last_save_model_only` drops the optimizer, not the averages."""
    train_one_rank(tmp_path, 2, **{"checkpoint.last_save_model_only": "true"})
    step = tmp_path / "checkpoint/step-2"
    state = averages(step)
    assert not any(name.startswith("optimizer.") for name in open_checkpoint(step).stored)
    for out, flags in (("plain", []), ("averaged", ["--ema"])):
        assert titan(["ckpt", "export", str(step), str(tmp_path / out), *flags]) == 0
    plain, averaged = (open_checkpoint(tmp_path / out) for out in ("plain", "averaged"))
    assert plain.stored.keys() == averaged.stored.keys()
    name, native = "model.embed_tokens.weight", "tok_embeddings.weight"
    assert torch.equal(averaged.read(name), state[f"ema.average.{native}"])
    assert not torch.equal(averaged.read(name), plain.read(name))


@pytest.mark.parametrize("manifest", [{"kind": "full"}, {"kind": "hf", "ema": {}}])
def test_steps_without_averages_are_refused(manifest):
    """An export has one copy of the weights, even if the step had averages."""
    with pytest.raises(CheckpointError, match="has no averaged weights"):
        check_average(Path("step-1"), manifest)


def count_updates_with_a_fault(argv):
    """Train while steps 3 and 4 of the last rank are not finite. Return the number of updates."""
    counts, update = [], AveragedWeights.update

    def counted(ema, skip):
        update(ema, skip)
        counts.append(ema.state_dict()["num_updates"].item())

    with patch.object(AveragedWeights, "update", counted):
        train_with_a_fault(argv, corrupt_gradient, (3, 4))
    return counts


@pytest.mark.nightly
@pytest.mark.parametrize("implementation", ["fused", "for-loop"])
def test_skipped_steps_do_not_enter(tmp_path, implementation):
    changes = {"optimizer.implementation": implementation, "training.local_batch_size": 4}
    argv = options(str(tmp_path), "float32", **{**SKIP, **EMA, **changes, "training.steps": 5})
    assert run_ranks(count_updates_with_a_fault, 2, argv) == [[1, 2, 2, 2, 3]] * 2
