"""One rank meets a number that is not finite: no weight changes anywhere, and all ranks stop at the same step."""

import pytest
import torch

from tests.distributed.parity import build, full, options, release
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.train import Trainer
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

BAD_STEP = 3


def spoil_loss(hidden, loss):
    """The loss alone: its gradients would be finite."""
    return loss + torch.inf


def spoil_gradient(hidden, loss):
    """The gradient of what enters the head alone: the loss and the head's own gradient are finite."""
    hidden.register_hook(lambda grad: grad * torch.nan)
    return loss


def train_with_a_fault(argv, spoil, bad_steps=(BAD_STEP,)):
    """The last rank spoils one micro-batch of some steps. How it ended, and whether the weights are those before step 3."""
    trainer = build(argv)
    head, weights = trainer.parts[0].output, {}
    plain_loss, plain_step = head.loss, trainer.train_step

    def loss(hidden, weight, labels):
        value = plain_loss(hidden, weight, labels)
        is_hit = trainer.progress.step + 1 in bad_steps and trainer.world.rank == trainer.world.size - 1
        return spoil(hidden, value) if is_hit and torch.is_grad_enabled() else value

    def train_step(step, *args):
        if step == BAD_STEP:
            weights.update(all_weights(trainer))
        return plain_step(step, *args)

    head.loss, trainer.train_step = loss, train_step
    rows = []
    trainer.metrics.observers.append(rows.extend)
    code = trainer.train()
    after = all_weights(trainer)
    skipped = [row["step"] for row in rows if row["skipped"]]
    release(trainer)
    return code, trainer.progress.step, skipped, all((after[name] == value).all() for name, value in weights.items())


def all_weights(trainer: Trainer):
    return {name: full(p) for name, p in trainer.optimizer.named}


LAYOUTS = {
    "fsdp": {"training.local_batch_size": 4},
    "ddp": {"training.local_batch_size": 4, "parallelism.data_parallel_replicate_degree": 2},
    "accumulation": {"training.local_batch_size": 2},
}


def run(tmp_path, spoil, layout, implementation, **overrides):
    """Whether all weights are those before the bad step, and what was saved."""
    overrides |= {"training.steps": 10, "checkpoint.enable": "true", "optimizer.implementation": implementation,
                  "checkpoint.interval": BAD_STEP}  # fmt: skip
    argv = options(str(tmp_path / "run"), "float32", **LAYOUTS[layout], **overrides)
    endings = run_ranks(train_with_a_fault, 2, argv, spoil)
    assert [ending[:2] for ending in endings] == [(ExitCode.BAD_NUMBERS, BAD_STEP - 1)] * 2
    assert endings[0][2] == endings[1][2] == [3, 4, 5], "seen two steps later, and until then no step counts"
    return all(is_unchanged for *_, is_unchanged in endings), published_steps(tmp_path / "run" / "checkpoint")


@pytest.mark.parametrize("spoil", [spoil_loss, spoil_gradient])
@pytest.mark.parametrize(
    ("layout", "implementation"),
    [("fsdp", "fused"), ("ddp", "fused"), ("accumulation", "fused"), ("fsdp", "foreach"), ("ddp", "for-loop")],
)
def test_no_weight_changes_and_the_step_before_is_saved(tmp_path, spoil, layout, implementation):
    is_unchanged, saved = run(tmp_path, spoil, layout, implementation)
    assert is_unchanged
    assert [(s.step, s.is_full) for s in saved] == [(BAD_STEP - 1, True)]


@pytest.mark.parametrize(("layout", "implementation"), [("fsdp", "fused"), ("ddp", "foreach"), ("fsdp", "for-loop")])
@pytest.mark.parametrize(("spoil", "is_whole"), [(spoil_loss, True), (spoil_gradient, False)])
def test_in_backward_half_an_update_is_never_saved(tmp_path, spoil, is_whole, layout, implementation):
    """A bad loss changes nothing. But the head is updated before the blocks' gradients exist: half of step 3 must not
    be called step 2."""
    in_backward = {"optimizer.early_step_in_backward": "true"}
    is_unchanged, saved = run(tmp_path, spoil, layout, implementation, **in_backward)
    assert is_unchanged == is_whole
    assert saved == []


SKIP = {"resilience.on_nonfinite": "skip", "resilience.max_nonfinite_in_a_row": 2, "training.steps": 8,
        "checkpoint.enable": "true", "checkpoint.last_save_model_only": "false"}  # fmt: skip


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_bad_steps_are_skipped_and_the_run_goes_on(tmp_path, layout):
    """As many in a row as are allowed, twice; the update of a skipped step is none at all, and the others are made."""
    argv = options(str(tmp_path / "run"), "float32", **LAYOUTS[layout], **SKIP)
    endings = run_ranks(train_with_a_fault, 2, argv, spoil_gradient, (3, 4, 6, 7))
    assert [ending[:3] for ending in endings] == [(ExitCode.DONE, 8, [3, 4, 6, 7])] * 2
    assert not endings[0][3], "step 5 has changed the weights"


def test_more_bad_steps_in_a_row_than_are_allowed_end_the_run(tmp_path):
    """Also across a restart: what was left out before the save counts."""
    argv = options(str(tmp_path / "run"), "float32", **LAYOUTS["fsdp"], **SKIP)
    endings = run_ranks(train_with_a_fault, 2, argv, spoil_gradient, (3, 4, 5, 6, 7))
    assert endings == [(ExitCode.BAD_NUMBERS, 4, [3, 4, 5, 6, 7], True)] * 2
    assert [s.step for s in published_steps(tmp_path / "run/checkpoint")] == [4]
    endings = run_ranks(train_with_a_fault, 2, argv, spoil_gradient, (5,))
    assert [ending[:3] for ending in endings] == [(ExitCode.BAD_NUMBERS, 4, [5, 6, 7])] * 2


def spoil_size(hidden, loss):
    """Finite, but far above all before it."""
    return loss * 1000


@pytest.mark.parametrize(("on_spike", "step", "pinned"), [("log", 13, ["step-12"]), ("skip", 11, [])])
def test_a_spike_is_told_of_and_pins_what_was_before_it(tmp_path, on_spike, step, pinned):
    """As long as it lasts, or if it lasts: one whose update was left out is over at the next step."""
    spikes = {"resilience.on_spike": on_spike, "resilience.spike_window": 8, "training.steps": 13,
              "checkpoint.enable": "true", "checkpoint.interval": 4, "checkpoint.last_save_model_only": "false"}  # fmt: skip
    argv = options(str(tmp_path / "run"), "float32", **LAYOUTS["fsdp"], **spikes)
    endings = run_ranks(train_with_a_fault, 2, argv, spoil_size, (step,))
    assert [ending[:3] for ending in endings] == [(ExitCode.DONE, 13, [step] * (on_spike == "skip"))] * 2
    events = [row for row in read_rows(tmp_path / "run/events.jsonl") if row["event"].startswith("spike")]
    begun = {row["quantity"]: row["step"] for row in events if row["event"] == "spike"}
    ended = {row["quantity"]: row["how"] for row in events if row["event"] == "spike_end"}
    assert begun == {"loss": step, "grad_norm": step}
    assert ended == ({"loss": "fast", "grad_norm": "fast"} if on_spike == "skip" else {})
    assert [path.parent.name for path in (tmp_path / "run/checkpoint").glob("*/PIN")] == pinned
