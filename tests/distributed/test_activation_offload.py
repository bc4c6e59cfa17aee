"""Activation offload computes the same bits as keeping all activations, on every layout."""

import numpy as np
import pytest

from tests.distributed.parity import options, run_cell
from tests.harness.rank_pool import run_ranks
from torchtitan_like.monitor.log import logger

TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "context"))
SCHEDULE = "parallelism.pipeline_parallel_schedule"
FULL_STAGES = {
    f"parallelism.pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")
}
NARROW = {"training.mixed_precision_param": "bfloat16"}
LAYOUTS = {
    # name: (ranks, overrides); the global batch always has 8 samples
    "one-rank": (1, {"training.local_batch_size": 4}),
    "one-rank-bfloat16": (1, NARROW),
    "fsdp-bfloat16": (2, {"training.local_batch_size": 2, **NARROW}),
    "ddp": (2, {"training.local_batch_size": 4, "parallelism.data_parallel_replicate_degree": 2}),
    "fsdp-tp": (4, {TP: 2, "training.local_batch_size": 4}),
    "cp": (2, {CP: 2}),
    "pp": (2, {PP: 2, SCHEDULE: "1F1B", **FULL_STAGES}),
    "zero-bubble": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", "model.args.n_layers": 4, **FULL_STAGES}),
}
NIGHTLY = ("one-rank-bfloat16", "ddp", "fsdp-tp", "cp", "pp")


def run_cell_with_log(argv):
    """Return the trace of a cell and its log lines about offloading."""
    lines = []
    original, logger.info = logger.info, lambda line, **_: lines.append(str(line))
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
def test_offload_gives_the_same_bits_as_no_checkpointing(tmp_path, layout):
    world_size, overrides = LAYOUTS[layout]
    traces = {}
    for mode in ("none", "offload"):
        mode_overrides = {**overrides, "activation_checkpoint.mode": mode, "training.steps": 2}
        argv = options(str(tmp_path / mode), "float32", **mode_overrides)
        traces[mode], lines = run_ranks(run_cell_with_log, world_size, argv)[0]
    baseline, offloaded = traces["none"], traces["offload"]
    assert "GiB of host memory" in lines[-1]
    assert offloaded.loss == baseline.loss
    assert offloaded.grad_norm == baseline.grad_norm
    for actual, expected in zip(offloaded.gradients, baseline.gradients, strict=True):
        assert actual.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
