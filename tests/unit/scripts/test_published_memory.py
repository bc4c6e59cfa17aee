"""Published memory is compared with that of TorchTitan's code of its month, with all layers."""

from __future__ import annotations

import copy
import csv
import functools

import pytest

from benchmarks import plan_published, torchtitan_of_its_time
from benchmarks.deepened import NUM_RECORDED, deepen
from torchtitan_like.check import load_checked
from torchtitan_like.plan.allocator import replay
from torchtitan_like.plan.dry_run import record_ranks
from torchtitan_like.plan.record import Alloc, Mark, Recording
from torchtitan_like.util.units import MIB

ROWS = [
    row
    for row in csv.DictReader(plan_published.ROWS.open())
    if row["mem_reserved_gib"] and not plan_published.out_of_scope(row)
]


PIPELINE = (
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.pipeline_parallel_first_stage_less_layers=0",
    "--parallelism.pipeline_parallel_last_stage_less_layers=0",
    "--training.local_batch_size=4",
)


@functools.cache
def _record(num_layers: int, settings: tuple[str, ...] = ()) -> Recording:
    argv = ["--job.config_file", str(plan_published.ROOT / "train_configs/debug_model.toml")]
    argv += [f"--model.args.n_layers={num_layers}", "--activation_checkpoint.mode=selective"]
    argv += ["--activation_checkpoint.selective_ac_option=op", *settings]
    num_ranks = 4 if settings else 2
    config, _ = load_checked(argv, num_ranks, training=False)
    return record_ranks(config, num_ranks, [0])[0].recording


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "num_stages"), [((), 1), (PIPELINE, 2)], ids=["fsdp", "pipeline"]
)
def test_a_deepened_recording_allocates_like_one_of_all_layers(
    settings: tuple[str, ...], num_stages: int
) -> None:
    deep = deepen(_record(NUM_RECORDED * num_stages, settings), NUM_RECORDED + 2)
    whole = _record((NUM_RECORDED + 2) * num_stages, settings)
    assert replay(deep) == replay(whole)
    assert replay(deep, is_expandable=False) == replay(whole, is_expandable=False)


def test_layers_that_allocate_differently_are_refused() -> None:
    recording = copy.copy(_record(NUM_RECORDED))
    recording.events = [
        event._replace(num_bytes=event.num_bytes + 1)
        if isinstance(event, Alloc) and event.module.startswith("layers.3")
        else event
        for event in recording.events
    ]
    with pytest.raises(ValueError, match="allocate differently in step 1: expected equal ones"):
        deepen(recording, NUM_RECORDED + 1)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_each_row_has_one_loss_and_one_way_to_group_weights(row: dict[str, str]) -> None:
    names = [difference.what for difference in torchtitan_of_its_time.differences_of(row)]
    assert sum("entropy" in name or "logits" in name or "loss" in name for name in names) == 1
    assert sum("FSDP group" in name for name in names) == 1


def _alloc(identity: int, at: int, module: str = "layers.0") -> Alloc:
    return Alloc(identity, 2 * MIB, 0, "activations", "mul", module, "forward", False, at)


def test_states_are_made_after_the_first_step() -> None:
    recording = Recording()
    recording.events = [_alloc(identity, 0) for identity in (1, 2, 3, 4)]
    names = ("model", "optimizer", "step 1", "step 2")
    recording.marks = [Mark(name, count, 0) for count, name in enumerate(names, 1)]
    moved = torchtitan_of_its_time.with_states_in_first_update(recording)
    assert [event.id for event in moved.events] == [1, 3, 2, 4]
    assert [mark.name for mark in moved.marks] == ["model", "step 1", "optimizer", "step 2"]
