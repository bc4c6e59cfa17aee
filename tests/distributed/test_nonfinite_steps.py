"""If one rank has a non-finite loss or gradient, no rank updates and all stop at the same step."""

from dataclasses import replace

import pytest
import torch

from tests.distributed.parity import build, full, options, release
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.train import Trainer
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows
from torchtitan_like.util.labels import IGNORED_LABEL

NONFINITE_STEP = 3


def corrupt_loss(hidden, loss):
    """Corrupt only the loss; its gradients stay finite."""
    return loss + torch.inf


def corrupt_gradient(hidden, loss):
    """Corrupt only the gradient of the head's input; loss and head's gradient stay finite."""
    hidden.register_hook(lambda grad: grad * torch.nan)
    return loss


def train_with_a_fault(argv, corrupt, corrupted_steps=(NONFINITE_STEP,)):
    """Train while the last rank corrupts the micro-batches of some steps.

    Return exit code, last step, skipped steps, and whether the weights equal those before step 3.
    """
    trainer = build(argv)
    head, weights = trainer.parts[0].output, {}
    plain_loss, plain_step = head.loss, trainer.train_step

    def loss(hidden, weight, labels):
        value = plain_loss(hidden, weight, labels)
        is_hit = (
            trainer.progress.step + 1 in corrupted_steps
            and trainer.world.rank == trainer.world.size - 1
        )
        return corrupt(hidden, value) if is_hit and torch.is_grad_enabled() else value

    def train_step(step, *args):
        if step == NONFINITE_STEP:
            weights.update(all_weights(trainer))
        return plain_step(step, *args)

    head.loss, trainer.train_step = loss, train_step
    rows = []
    trainer.metrics.observers.append(rows.extend)
    code = trainer.train()
    after = all_weights(trainer)
    skipped = [row["step"] for row in rows if row["skipped"]]
    release(trainer)
    return (
        code,
        trainer.progress.step,
        skipped,
        all((after[name] == value).all() for name, value in weights.items()),
    )


def all_weights(trainer: Trainer):
    return {name: full(p) for name, p in trainer.optim.optimizer.named}


LAYOUTS = {
    "fsdp": {"training.local_batch_size": 4},
    "ddp": {"training.local_batch_size": 4, "parallelism.data_parallel_replicate_degree": 2},
    "accumulation": {"training.local_batch_size": 2},
}


def run(tmp_path, corrupt, layout, implementation, **overrides):
    """Train until the run stops.

    Return whether the weights equal those before NONFINITE_STEP, and the checkpoints.
    """
    overrides |= {
        "training.steps": 10,
        "checkpoint.enable": "true",
        "checkpoint.interval": NONFINITE_STEP,
        "optimizer.implementation": implementation,
    }
    argv = options(str(tmp_path / "run"), "float32", **LAYOUTS[layout], **overrides)
    endings = run_ranks(train_with_a_fault, 2, argv, corrupt)
    assert [ending[:2] for ending in endings] == [(ExitCode.BAD_NUMBERS, NONFINITE_STEP - 1)] * 2
    # The host detects it two steps later. All updates until then are skipped.
    assert endings[0][2] == endings[1][2] == [3, 4, 5]
    return all(is_unchanged for *_, is_unchanged in endings), published_steps(
        tmp_path / "run" / "checkpoint"
    )


@pytest.mark.parametrize("corrupt", [corrupt_loss, corrupt_gradient])
@pytest.mark.parametrize(
    ("layout", "implementation"),
    [
        pytest.param("fsdp", "fused", marks=pytest.mark.nightly),
        pytest.param("ddp", "fused", marks=pytest.mark.nightly),
        ("accumulation", "fused"),
        ("fsdp", "foreach"),
        ("ddp", "for-loop"),
    ],
)
def test_weights_are_unchanged_and_the_last_finite_step_is_saved(
    tmp_path, corrupt, layout, implementation
):
    is_unchanged, saved = run(tmp_path, corrupt, layout, implementation)
    assert is_unchanged
    assert [(s.step, s.is_full) for s in saved] == [(NONFINITE_STEP - 1, True)]


@pytest.mark.parametrize(
    ("layout", "implementation"),
    [
        ("fsdp", "fused"),
        pytest.param("ddp", "foreach", marks=pytest.mark.nightly),
        pytest.param("fsdp", "for-loop", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(("corrupt", "is_whole"), [(corrupt_loss, True), (corrupt_gradient, False)])
def test_partially_updated_state_is_never_saved(
    tmp_path, corrupt, is_whole, layout, implementation
):
    """With a non-finite gradient, the head is updated before the gradients of the blocks exist.

    A partially updated state must not be saved as step 2. A non-finite loss changes no weight.
    """
    in_backward = {"optimizer.early_step_in_backward": "true"}
    is_unchanged, saved = run(tmp_path, corrupt, layout, implementation, **in_backward)
    assert is_unchanged == is_whole
    assert saved == []


SKIP = {
    "resilience.on_nonfinite": "skip",
    "resilience.max_nonfinite_in_a_row": 2,
    "training.steps": 8,
    "checkpoint.enable": "true",
    "checkpoint.last_save_model_only": "false",
}


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_nonfinite_steps_are_skipped_and_training_continues(tmp_path, layout):
    """The run skips the allowed number of steps in a row twice. Only finite steps update."""
    argv = options(str(tmp_path / "run"), "float32", **LAYOUTS[layout], **SKIP)
    endings = run_ranks(train_with_a_fault, 2, argv, corrupt_gradient, (3, 4, 6, 7))
    assert [ending[:3] for ending in endings] == [(ExitCode.DONE, 8, [3, 4, 6, 7])] * 2
    assert not endings[0][3], "step 5 must change the weights"


def test_too_many_nonfinite_steps_in_a_row_stop_the_run(tmp_path):
    """Skipped steps before the checkpoint count after a restart."""
    argv = options(str(tmp_path / "run"), "float32", **LAYOUTS["fsdp"], **SKIP)
    endings = run_ranks(train_with_a_fault, 2, argv, corrupt_gradient, (3, 4, 5, 6, 7))
    assert endings == [(ExitCode.BAD_NUMBERS, 4, [3, 4, 5, 6, 7], True)] * 2
    assert [s.step for s in published_steps(tmp_path / "run/checkpoint")] == [4]
    endings = run_ranks(train_with_a_fault, 2, argv, corrupt_gradient, (5,))
    assert [ending[:3] for ending in endings] == [(ExitCode.BAD_NUMBERS, 4, [5, 6, 7])] * 2


def inflate_loss(hidden, loss):
    """Multiply the loss: it is finite but far above all earlier losses."""
    return loss * 1000


@pytest.mark.parametrize(
    ("on_spike", "step", "pinned"), [("log", 13, ["step-12"]), ("skip", 11, [])]
)
def test_spike_writes_an_event_and_pins_the_previous_checkpoint(tmp_path, on_spike, step, pinned):
    """A skipped spike ends at the next step, which removes the pin."""
    spikes = {
        "resilience.on_spike": on_spike,
        "resilience.spike_window": 8,
        "training.steps": 13,
        "checkpoint.enable": "true",
        "checkpoint.interval": 4,
        "checkpoint.last_save_model_only": "false",
    }
    argv = options(str(tmp_path / "run"), "float32", **LAYOUTS["fsdp"], **spikes)
    endings = run_ranks(train_with_a_fault, 2, argv, inflate_loss, (step,))
    assert [ending[:3] for ending in endings] == [
        (ExitCode.DONE, 13, [step] * (on_spike == "skip"))
    ] * 2
    events = [
        row for row in read_rows(tmp_path / "run/events.jsonl") if row["event"].startswith("spike")
    ]
    started = {row["quantity"]: row["step"] for row in events if row["event"] == "spike"}
    ended = {row["quantity"]: row["how"] for row in events if row["event"] == "spike_end"}
    assert started == {"loss": step, "grad_norm": step}
    assert ended == ({"loss": "fast", "grad_norm": "fast"} if on_spike == "skip" else {})
    assert [path.parent.name for path in (tmp_path / "run/checkpoint").glob("*/PIN")] == pinned


def train_without_labels(argv):
    """Train while step 3 has no label. Return its row, weights before and after, and the last step."""
    trainer = build(argv)
    plain_read, plain_step, weights, rows = trainer.read_batch, trainer.train_step, {}, []
    steps = iter(range(1, 100))

    def read_batch():
        batch = plain_read()
        if batch is not None and next(steps) == NONFINITE_STEP:
            labels = torch.full_like(batch.labels, IGNORED_LABEL)
            batch = replace(batch, labels=labels, num_valid_tokens=0)
        return batch

    def train_step(step, *args):
        weights[step - 1] = all_weights(trainer)
        return plain_step(step, *args)

    trainer.read_batch, trainer.train_step = read_batch, train_step
    trainer.metrics.observers.append(rows.extend)
    trainer.train()
    release(trainer)
    row = next((row for row in rows if row["step"] == NONFINITE_STEP), None)
    return row, weights, trainer.progress


WITHOUT_LABELS = {
    "fsdp": (2, {}),
    "accumulation": (1, {"training.local_batch_size": 2}),
    "in backward": (2, {"optimizer.early_step_in_backward": "true"}),
    "tp": (2, {"parallelism.tensor_parallel_degree": 2}),
    "cp": (2, {"parallelism.context_parallel_degree": 2}),
    "pp": (
        2,
        {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 8},
    ),
}


@pytest.mark.parametrize("layout", WITHOUT_LABELS)
def test_a_step_without_labels_updates_nothing_and_has_no_loss(tmp_path, layout):
    """Momentum and weight decay would move the weights; data, schedule and digests advance."""
    ranks, overrides = WITHOUT_LABELS[layout]
    argv = options(str(tmp_path), "float32", **{"training.local_batch_size": 4, **overrides})
    (row, weights, progress), *_ = run_ranks(train_without_labels, ranks, argv)
    assert row["loss"] is None and row["max_loss"] is None
    assert row["skipped"] == 1 and row["num_valid_tokens"] == 0
    for name, value in weights[NONFINITE_STEP].items():
        assert (value == weights[NONFINITE_STEP - 1][name]).all(), name
    assert any((v != weights[NONFINITE_STEP + 1][n]).any() for n, v in weights[3].items())
    assert progress.step == 5
