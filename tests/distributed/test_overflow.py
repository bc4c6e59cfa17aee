"""`debug.detect_overflow` names the module on each of two ranks and changes no result."""

import pytest
import torch

from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_ranks
from torchtitan_like.monitor.overflow import NonFiniteError
from torchtitan_like.util.jsonl import read_rows

LAYOUTS = {
    "fsdp, full": {"activation_checkpoint.mode": "full"},
    "fsdp, op": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
    },
    "tp": {"parallelism.tensor_parallel_degree": 2},
    "pp": {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_microbatch_size": 4,
    },
}


def train(argv, corrupted=None, value=3e38, ranks=(0, 1)):
    """Corrupt one weight on these ranks and train. Return the detector's error, or None."""
    trainer = build(argv)
    if corrupted is not None and trainer.world.rank in ranks:
        with torch.no_grad():
            dict(trainer.optim.optimizer.named)[corrupted].to_local().fill_(value)
    try:
        trainer.train()
    except NonFiniteError as error:
        trainer.run.heartbeat.close()
        return str(error)
    finally:
        release(trainer)
    return None


def arguments(folder, layout, **overrides):
    local = {"training.local_batch_size": 4} if layout.startswith("fsdp") else {}
    return options(
        str(folder), "float32", **LAYOUTS[layout], **local, **{"training.steps": 2, **overrides}
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_detection_does_not_change_losses(tmp_path, layout):
    losses = []
    for detects in ("false", "true"):
        argv = arguments(tmp_path / detects, layout, **{"debug.detect_overflow": detects})
        assert run_ranks(train, 2, argv) == [None, None]
        losses.append(
            [
                (row["loss"], row["grad_norm"])
                for row in read_rows(tmp_path / detects / "metrics.jsonl")
            ]
        )
    assert losses[0] == losses[1] and len(losses[0]) == 2


@pytest.mark.parametrize("layout", ["fsdp, full", "tp"])
def test_every_rank_names_the_module(tmp_path, layout):
    argv = arguments(tmp_path / "run", layout, **{"debug.detect_overflow": "true"})
    reports = run_ranks(train, 2, argv, "layers.1.ffn_norm.weight")
    assert (
        reports
        == [
            "step 1, micro-batch 0: the first inf or nan is in layers.1.ffn_norm (RMSNorm), output 0"
        ]
        * 2
    )


def test_sharded_weights_are_checked_while_gathered(tmp_path):
    """FSDP shards the head's weight; both ranks detect an inf in the shard of rank 1."""
    argv = arguments(tmp_path / "run", "fsdp, full", **{"debug.detect_overflow": "true"})
    reports = run_ranks(train, 2, argv, "output.weight", torch.inf, (1,))
    assert (
        reports
        == ["step 1, micro-batch 0: the first inf or nan is in output (FSDPOutputHead), weight"] * 2
    )
