"""A checkpoint with an inf or nan is kept for analysis, and no run starts from it."""

import pytest
import torch

from tests.distributed.parity import options
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.distributed.world import launched_as
from torchtitan_like.resilience.agreement import Requests
from torchtitan_like.resilience.heartbeat import RankPosition
from torchtitan_like.run import resolve_run, run_job
from torchtitan_like.train import Trainer
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run_with_nan_state(argv, name, step):
    """Write a NaN into a state tensor of the last rank after `step`; return exit code and start."""
    launched, plain, starts = launched_as(), Trainer.train_step, set()

    def train_step(trainer, number, *args):
        starts.add(str(trainer.origin.start))
        record = plain(trainer, number, *args)
        if number == step and trainer.world.rank == trainer.world.size - 1:
            key, _, tensor = name.partition(".")
            local(trainer.states[key].state_dict()[tensor]).detach().view(-1)[0] = torch.nan
        return record

    Trainer.train_step = train_step
    try:
        code = run_job(resolve_run(argv, launched.world_size), launched, Requests(), RankPosition())
        return code, starts.pop()
    finally:
        Trainer.train_step = plain


WEIGHT = "model.output.weight"
MOMENT = "optimizer.state.output.weight.exp_avg"
EXPORTING = {"checkpoint.async_mode": "async", "checkpoint.hf_interval": 4}
FIRST_STEP = {"checkpoint.enable_first_step_checkpoint": "true"}


@pytest.mark.parametrize(
    ("interval", "step", "name", "published", "settings"),
    [
        # Step 6 has NaN gradients, and the run saves step 5.
        pytest.param(4, 5, WEIGHT, [4], {}, id="halted"),
        # The checkpoint of step 4 detects it.
        pytest.param(2, 4, WEIGHT, [2], {}, id="interval", marks=pytest.mark.nightly),
        pytest.param(2, 4, MOMENT, [2], EXPORTING, id="optimizer"),
        pytest.param(100, 1, WEIGHT, [], FIRST_STEP, id="first step", marks=pytest.mark.nightly),
    ],
)
def test_nonfinite_checkpoint_is_never_published(
    tmp_path, interval, step, name, published, settings
):
    folder = tmp_path / "run"
    changes = {
        "training.local_batch_size": 4,
        "training.steps": 8,
        "checkpoint.enable": "true",
        "checkpoint.interval": interval,
        "checkpoint.last_save_model_only": "false",
        **settings,
    }
    argv = options(str(folder), "float32", **changes)
    endings = run_ranks(run_with_nan_state, 2, argv, name, step)
    assert [code for code, _ in endings] == [ExitCode.BAD_NUMBERS] * 2
    checkpoints = folder / "checkpoint"
    assert [published_step.step for published_step in published_steps(checkpoints)] == published
    names = {path.name for path in checkpoints.glob("*step-*")}
    assert names == {f"step-{step}.nonfinite", *(f"step-{number}" for number in published)}
    assert not (checkpoints / "hf").exists()
    log = (folder / "attempts/1/logs/rank0.log").read_text()
    assert f"After step {step}, 1 tensors of the run's state hold an inf or nan: {name}." in log
    saves = [row for row in read_rows(folder / "events.jsonl") if row["event"] == "save"]
    assert saves[-1]["form"] == "nonfinite"

    endings = run_ranks(run_with_nan_state, 2, argv, name, None)
    assert [code for code, _ in endings] == [ExitCode.DONE] * 2
    assert published_steps(checkpoints)[-1].step == 8
    start = endings[0][1]
    assert f" at step {published[-1] if published else 0}: " in start
    assert f"; skipped because not finite: step-{step}.nonfinite" in start
