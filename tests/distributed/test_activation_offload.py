"""Activation offload computes the same bits as keeping all activations, on every layout."""

import numpy as np
import pytest

from tests.distributed.parity import options, run_cell
from tests.harness.rank_pool import run_ranks
from torchtitan_like.monitor.log import logger

TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "context"))
SCHEDULE = "parallelism.pipeline_parallel_schedule"
LESS = {f"parallelism.pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
NARROW = {"training.mixed_precision_param": "bfloat16"}
LAYOUTS = {
    # name: (ranks, overrides); the global batch is 8 samples in all
    "one-rank": (1, {"training.local_batch_size": 4}),
    "one-rank-bfloat16": (1, NARROW),
    "fsdp-bfloat16": (2, {"training.local_batch_size": 2, **NARROW}),
    "ddp": (2, {"training.local_batch_size": 4, "parallelism.data_parallel_replicate_degree": 2}),
    "fsdp-tp": (4, {TP: 2, "training.local_batch_size": 4}),
    "cp": (2, {CP: 2}),
    "pp": (2, {PP: 2, SCHEDULE: "1F1B", **LESS}),
    "zero-bubble": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", "model.args.n_layers": 4, **LESS}),
}
NIGHTLY = ("one-rank-bfloat16", "ddp", "cp", "pp")  # the others in every run


def with_log(argv):
    """The trace of a cell, and what was logged about offloading."""
    lines = []
    original, logger.info = logger.info, lambda line, *rest: lines.append(str(line))
    try:
        return run_cell(argv), [line for line in lines if "offload" in line]
    finally:
        logger.info = original


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else [])
        for name in LAYOUTS
    ],
)
def test_results_equal_those_without_checkpointing(tmp_path, layout):
    world_size, overrides = LAYOUTS[layout]
    traces = {}
    for mode in ("none", "offload"):
        mode_overrides = {**overrides, "activation_checkpoint.mode": mode, "training.steps": 2}
        argv = options(str(tmp_path / mode), "float32", **mode_overrides)
        traces[mode], lines = run_ranks(with_log, world_size, argv)[0]
    kept, offloaded = traces["none"], traces["offload"]
    assert "GiB of host memory" in lines[-1]
    assert offloaded.loss == kept.loss
    assert offloaded.grad_norm == kept.grad_norm
    for ours, theirs in zip(offloaded.gradients, kept.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
