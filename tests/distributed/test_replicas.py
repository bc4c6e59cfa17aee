"""The replica check names a parameter with a flipped bit, and no wrong state is saved."""

import json
import re
from itertools import product

import pytest
import torch

from tests.distributed.parity import options
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.distributed.world import launched_as
from torchtitan_like.resilience.agreement import Request, Requests
from torchtitan_like.resilience.heartbeat import RankPosition
from torchtitan_like.run import resolve_run, run_job
from torchtitan_like.train import Trainer
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

FLIP_STEP, PARAMETER = 3, "layers.0.attention.wk.weight"


def run_with_flipped_bit(argv, flips, stops=False):
    """Run on this rank. The last rank flips the lowest bit of one element after step 3.

    `stops`: that rank also requests a stop.
    """
    launched, plain, requests = launched_as(), Trainer.train_step, Requests()

    def train_step(trainer, step, *args):
        record = plain(trainer, step, *args)
        if flips and step == FLIP_STEP and launched.rank == launched.world_size - 1:
            weight = dict(trainer.optim.optimizer.named)[PARAMETER]
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.detach().view(torch.int32).view(-1)[5] ^= 1
            if stops:
                requests.add(Request.TERMINATE)
        return record

    Trainer.train_step = train_step
    try:
        return run_job(resolve_run(argv, launched.world_size), launched, requests, RankPosition())
    finally:
        Trainer.train_step = plain


LAYOUTS = {
    "two copies": (
        2,
        {"parallelism.data_parallel_replicate_degree": 2},
        r"on ranks 0, 1 \(no majority: one of them\)",
    ),
    "four copies": (4, {"parallelism.data_parallel_replicate_degree": 4}, r"on rank 3\."),
    "two copies of two shards": (
        4,
        {
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.data_parallel_shard_degree": 2,
        },
        r"on ranks 1, 3 \(no majority",
    ),
    "two copies of two tensor-parallel halves": (
        4,
        {"parallelism.data_parallel_replicate_degree": 2, "parallelism.tensor_parallel_degree": 2},
        r"on ranks 1, 3 \(no majority",
    ),
}


EVERY_RUN = [("two copies", True), ("two copies", False), ("four copies", True)]
CELLS = [
    pytest.param(*cell, marks=[] if cell in EVERY_RUN else pytest.mark.nightly)
    for cell in product(LAYOUTS, (True, False))
]


@pytest.mark.parametrize(("name", "flips"), CELLS)
def test_flipped_bit_is_reported_and_not_saved(tmp_path, name, flips):
    ranks, layout, suspects = LAYOUTS[name]
    folder = tmp_path / "run"
    changes = {
        "training.local_batch_size": 2,
        "training.steps": 6,
        "checkpoint.enable": "true",
        "checkpoint.interval": 2,
        "checkpoint.last_save_model_only": "false",
        "resilience.replica_check_freq": 3,
    }
    argv = options(str(folder), "float32", **layout, **changes)
    codes = run_ranks(run_with_flipped_bit, ranks, argv, flips)
    steps = [published_step.step for published_step in published_steps(folder / "checkpoint")]
    if not flips:
        assert (codes, steps) == ([ExitCode.DONE] * ranks, [2, 4, 6])
        return
    assert (codes, steps) == ([ExitCode.BAD_NUMBERS] * ranks, [2])
    log = (folder / "attempts/1/logs/rank0.log").read_text()
    assert re.search(
        rf"Replicas of the weights differ at step {FLIP_STEP}: {re.escape(PARAMETER)} {suspects}",
        log,
    ), log
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((folder / "exit.json").read_text())["code"] == 70


def test_flipped_bit_is_not_saved_by_a_stop_request(tmp_path):
    """Runs usually resume from the checkpoint of a stop request."""
    folder = tmp_path / "run"
    changes = {
        "parallelism.data_parallel_replicate_degree": 2,
        "training.local_batch_size": 2,
        "training.steps": 9,
        "checkpoint.enable": "true",
        "checkpoint.interval": 100,
        "resilience.replica_check_freq": 100,
    }
    codes = run_ranks(
        run_with_flipped_bit, 2, options(str(folder), "float32", **changes), True, True
    )
    assert codes == [ExitCode.BAD_NUMBERS] * 2
    assert published_steps(folder / "checkpoint") == []
    log = (folder / "attempts/1/logs/rank0.log").read_text()
    assert re.search(
        rf"Replicas of the weights differ at step \d+: {re.escape(PARAMETER)} on ranks 0, 1", log
    ), log
