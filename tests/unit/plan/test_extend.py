"""Few layers and micro-batches, extended to all of them, take what the whole dry run takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_like.check import load_checked
from torchtitan_like.plan.clusters import load_cluster
from torchtitan_like.plan.dry_run import DryRun, Job, ranks_of_stages, record_jobs
from torchtitan_like.plan.extend import (
    Depth,
    all_jobs,
    depths_of,
    estimate,
    extend,
    few_micro_batches,
    full_depth,
    ranks_to_run,
)
from torchtitan_like.plan.gpus import load_gpu
from torchtitan_like.plan.layouts import Layout, Pipeline, Space, apply
from torchtitan_like.plan.ledger import memory_of
from torchtitan_like.plan.plan_report import needed_gib
from torchtitan_like.plan.search import space_of
from torchtitan_like.plan.timeline import step_time
from torchtitan_like.resolved import resolve_layout
from torchtitan_like.util.units import MIB

CONFIGS = Path(__file__).resolve().parents[3] / "train_configs"
GPU, CLUSTER = load_gpu("h100-80g"), load_cluster("default")
FSDP = Layout(1, 1, 2, 1, 1, 1, 1, None, 8, 4, "none", True)
PIPELINE = replace(
    FSDP, pp=2, shard=1, pipeline=Pipeline("1F1B", 1), num_micro=8, frees_weights=False
)


def space(layers: int, global_batch: int = 64) -> Space:
    argv = ["--job.config_file", str(CONFIGS / "debug_model.toml")]
    # Wide enough that kernels take longer than the host needs to launch them.
    sizes = {"n_layers": layers, "dim": 2048, "max_seq_len": 2048, "vocab_size": 8192}
    argv += [f"--model.args.{name}={value}" for name, value in sizes.items()]
    config, _ = load_checked([*argv, "--training.seq_len=2048"], None, training=False)
    return space_of(config, 2, 8, global_batch)


def test_values_are_on_the_line_through_two_depths() -> None:
    values = [(3.0, {"a": 1.0, "b": 2.0}), (5.0, {"a": 2.0, "c": 4.0})]
    assert extend(values, 9) == {"a": 4.0, "b": -4.0, "c": 12.0}
    assert extend(values[:1], 9) == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    ("layout", "layers", "depths", "full"),
    [
        (FSDP, 12, [(3, 3), (5, 5)], (12, 12)),
        (FSDP, 5, [(5, 5)], (5, 5)),
        # Each of two stages has three layers, less one for the embedding and one for the head.
        (PIPELINE, 12, [(3, 4), (5, 8)], (7, 12)),
        (PIPELINE, 7, [(5, 7)], (5, 7)),
        (
            replace(PIPELINE, pipeline=Pipeline("Interleaved1F1B", 2)),
            22,
            [(3, 10), (5, 18)],
            (6, 22),
        ),
    ],
)
def test_depths(
    layout: Layout, layers: int, depths: list[tuple[int, int]], full: tuple[int, int]
) -> None:
    given = space(layers)
    assert [tuple(depth) for depth in depths_of(layout, given)] == depths
    assert tuple(full_depth(layout, given)) == full


@pytest.mark.parametrize(
    ("schedule", "num_micro", "few"),
    [
        (None, 1, 1),
        (None, 9, 2),
        (Pipeline("1F1B", 1), 16, 5),
        (Pipeline("1F1B", 1), 4, 4),
        (Pipeline("Interleaved1F1B", 2), 16, 8),
        (Pipeline("ZBVZeroBubble", 2), 6, 6),
        (Pipeline("DualPipeV", 2), 32, 8),
    ],
)
def test_few_micro_batches(schedule: Pipeline | None, num_micro: int, few: int) -> None:
    layout = replace(PIPELINE, pp=4 if schedule else 1, pipeline=schedule, num_micro=num_micro)
    assert few_micro_batches(layout) == few


def test_ranks_have_the_first_a_middle_and_the_last_stage() -> None:
    given = space(12)
    layout = replace(PIPELINE, pp=4)
    config = apply(layout, replace(given, world_size=8))
    dims = resolve_layout(config, 8).dims
    assert ranks_to_run(dims, layout) == [0, 2, 6]
    interleaved = replace(layout, pipeline=Pipeline("Interleaved1F1B", 2))
    assert ranks_to_run(dims, interleaved) == [0, 6]


def run(jobs: list[Job]) -> list[DryRun]:
    runs: dict[int, DryRun] = {}
    for index, outcome in record_jobs(jobs):
        assert isinstance(outcome, DryRun), outcome
        runs[index] = outcome
    return [runs[index] for index in range(len(jobs))]


def compare(layout: Layout, layers: int) -> None:
    """Compare the extension with a dry run of all layers, micro-batches and stages."""
    given = space(layers, layout.dp * layout.micro_batch * layout.num_micro)
    jobs = list(all_jobs([layout], given, GPU, is_full=False))
    by_depth: dict[Depth, list[DryRun]] = {}
    for (_, depth, _), outcome in zip(jobs, run([job for *_, job in jobs]), strict=True):
        by_depth.setdefault(depth, []).append(outcome)
    assert len(by_depth) == 2
    extended = estimate(layout, given, by_depth, GPU, CLUSTER)

    config = apply(layout, given)
    options = {"matmul_workspace": round(GPU.cublas_workspace_mib * MIB)}
    ranks = ranks_of_stages(resolve_layout(config, 2).dims)
    whole = run([Job(config, 2, rank, options) for rank in ranks])
    time = step_time(whole, config, GPU, CLUSTER)
    assert not extended.is_full
    needed = max(needed_gib(memory_of(one), GPU) for one in whole)
    assert extended.gib == pytest.approx(needed, rel=0.03)
    assert extended.seconds == pytest.approx(time.seconds, rel=0.03)
    if layout.pipeline is None:
        exposed = sum(value for part, value in time.parts.items() if part.startswith("exposed"))
        assert extended.exposed == pytest.approx(exposed, abs=0.02 * time.seconds)
    else:
        assert 0 < extended.bubble < 0.3


def test_two_depths_agree_with_the_full_depth() -> None:
    compare(FSDP, 8)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (PIPELINE, 14),
        (replace(PIPELINE, pipeline=Pipeline("Interleaved1F1B", 2)), 22),
        (replace(PIPELINE, pipeline=Pipeline("ZBVZeroBubble", 2)), 22),
        (replace(FSDP, shard=1, tp=2, num_micro=1), 14),
    ],
    ids=["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "TP 2"],
)
def test_two_depths_agree_with_the_full_depth_of_other_layouts(layout: Layout, layers: int) -> None:
    compare(layout, layers)
