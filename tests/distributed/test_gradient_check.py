"""Passes over one micro-batch are compared bit for bit on every layout, and leave no trace."""

import pytest
import torch

from tests.distributed import test_moe
from tests.distributed.parity import build, options, release
from tests.distributed.test_replica_decisions import LAYOUTS, shard_hashes
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

CHECKED_STEP, STEPS = 3, 5
SETTINGS = {
    "training.steps": STEPS,
    "metrics.log_freq": 2,
    "checkpoint.enable": "true",
    "checkpoint.last_save_model_only": "false",
    "activation_checkpoint.mode": "none",
    "resilience.verify_gradients_freq": CHECKED_STEP,
}
ACCUMULATION = (2, 2, {"training.local_batch_size": 2})
REGULAR = ("pp", "experts")
EVERY_LAYOUT = [
    pytest.param(name, marks=[] if name in REGULAR else pytest.mark.nightly)
    for name in (*LAYOUTS, "accumulation", "experts")
]


class _Wrong(torch.autograd.Function):
    """The identity, whose backward is wrong in one element while `is_wrong()`."""

    @staticmethod
    def forward(ctx, x, is_wrong):
        ctx.is_wrong = is_wrong
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if ctx.is_wrong():
            grad.view(-1)[0] += 1e-3
        return grad, None


def train(argv, wrong_pass):
    """Train; the last rank's kernel is wrong in pass `wrong_pass` of the checked step (0: never).

    Returns the exit code, the step, rows, the hashes of the weights, and the generator's state.
    """
    trainer = build(argv)
    num_passes, rows = 0, []
    run_micro_batches = trainer.step_runner._run_micro_batches

    def counted(*args):
        nonlocal num_passes
        num_passes += trainer.progress.step + 1 == CHECKED_STEP
        return run_micro_batches(*args)

    trainer.step_runner._run_micro_batches = counted
    if trainer.world.rank == trainer.world.size - 1:
        trainer.parts[-1].norm.register_forward_hook(
            lambda module, inputs, out: _Wrong.apply(out, lambda: num_passes == wrong_pass > 0)
        )
    trainer.metrics.observers.append(rows.extend)
    code = trainer.train()
    hashes = shard_hashes(trainer)
    release(trainer)
    values = [(r["step"], r["loss"], r["grad_norm"], r["skipped"], r.get("moe")) for r in rows]
    return code, trainer.progress.step, values, hashes, torch.get_rng_state().sum().item()


def run(folder, layout, wrong_pass=0, **changes):
    changes = SETTINGS | changes
    if layout == "experts":
        num_ranks, settings = test_moe.LAYOUTS["ep"]
        settings = {**settings, "training.local_batch_size": 4, **changes}
        argv = test_moe.settings(folder, 2, **settings)
    else:
        num_ranks, data_ranks, settings = (LAYOUTS | {"accumulation": ACCUMULATION})[layout]
        settings = {"training.local_batch_size": 8 // data_ranks, **settings, **changes}
        argv = options(str(folder), "float32", **settings)
    endings = run_ranks(train, num_ranks, argv, wrong_pass)
    events = [r for r in read_rows(folder / "events.jsonl") if r["event"] == "wrong_gradients"]
    return endings, events


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_a_check_leaves_no_trace_and_finds_a_wrong_kernel(tmp_path, layout):
    plain, _ = run(tmp_path / "plain", layout, **{"resilience.verify_gradients_freq": 0})
    checked, events = run(tmp_path / "checked", layout)
    assert checked == plain and events == []
    endings, [event] = run(tmp_path / "wrong", layout, wrong_pass=1)
    assert {ending[:2] for ending in endings} == {(ExitCode.BAD_NUMBERS, CHECKED_STEP - 1)}
    assert event["step"] == CHECKED_STEP
    named = event["parameters"].get(str(len(endings) - 1), [])
    assert any("layers" in name for name in named), event
    steps = [step.step for step in published_steps(tmp_path / "wrong/checkpoint")]
    assert steps == [CHECKED_STEP - 1]


def test_a_wrong_step_is_skipped_by_policy(tmp_path):
    skip = {"resilience.on_nonfinite": "skip"}
    endings, [event] = run(tmp_path / "wrong", "fsdp2", 2, **skip)
    for code, step, rows, *_ in endings:
        assert (code, step) == (ExitCode.DONE, STEPS)
        assert [row[3] for row in rows] == [0, 0, 1, 0, 0]
