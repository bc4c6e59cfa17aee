"""Plays of recorded work on streams, and pipelines, agree with timelines drawn by hand."""

from __future__ import annotations

from typing import Any

import pytest

from torchtitan_like.distributed.schedule_view import order_of, schedule, simulate
from torchtitan_like.plan.record import Group, Recording, WorkItem
from torchtitan_like.plan.timeline import Played, Span, in_turn, pipeline_ends, play

FSDP, TP = Group("1", 8, 2, "dp_shard"), Group("2", 2, 1, "tp")
Item = tuple[WorkItem, float]


def compute(seconds: float, **fields: Any) -> Item:
    return WorkItem("matmul", "mm", 0, "layers.0", "forward", **fields), seconds


def gather(seconds: float, group: Group = FSDP, stream: int = 1, **fields: Any) -> Item:
    item = WorkItem("collective", "allgather_base", stream, "", "forward", group=group, **fields)
    return item, seconds


def wait(stream: int, index: int) -> Item:
    return WorkItem("wait", "wait", stream, "", "forward", waits_for=index), 0.0


def recorded(*items: Item) -> tuple[Recording, list[float]]:
    """Return a recording of one step, and the seconds of its items."""
    recording = Recording()
    recording.mark("optimizer")
    recording.streams.append("gather")
    recording.work = [item for item, _ in items]
    recording.mark("step 1")
    return recording, [seconds for _, seconds in items]


def played(*items: Item, host: float = 0.0) -> Played:
    return play(*recorded(*items), host_operator=host)


def test_streams_run_side_by_side_until_one_waits() -> None:
    result = played(gather(5), compute(2), wait(0, 0), compute(1))
    assert result.seconds == 6
    assert result.parts == {"matrix products": 3, "exposed: data parallel": 3}
    assert result.spans == [Span(0, 0, 5), Span(1, 0, 2), Span(3, 5, 6)]


def test_without_the_wait_nothing_is_exposed() -> None:
    result = played(gather(3), compute(2), compute(1))
    assert result.seconds == 3
    assert result.parts == {"matrix products": 3}


def test_a_prefetched_gather_is_hidden_and_a_late_one_is_not() -> None:
    prefetched = played(gather(2), wait(0, 0), gather(2), compute(4), wait(0, 2), compute(4))
    assert (prefetched.seconds, prefetched.parts["exposed: data parallel"]) == (10, 2)
    late = played(gather(2), wait(0, 0), compute(4), wait(1, 2), gather(2), wait(0, 4), compute(4))
    assert (late.seconds, late.parts["exposed: data parallel"]) == (12, 4)


def test_a_collective_on_the_compute_stream_is_exposed() -> None:
    result = played(compute(1), gather(2, TP, stream=0), compute(1))
    assert result.seconds == 4
    assert result.parts["exposed: tensor parallel"] == 2


def test_an_asynchronous_collective_runs_beside_its_stream_until_its_result_is_needed() -> None:
    result = played(gather(3, TP, stream=0, is_async=True), compute(2), wait(0, 0), compute(1))
    assert result.seconds == 4
    assert result.parts["exposed: tensor parallel"] == 1


def test_collectives_of_one_group_run_one_after_another() -> None:
    one = played(gather(3, stream=1), gather(3, stream=2), wait(0, 0), wait(0, 1))
    assert one.seconds == 6
    two = played(gather(3, stream=1), gather(3, TP, stream=2), wait(0, 0), wait(0, 1))
    assert two.seconds == 3


def test_the_end_of_a_step_waits_for_all_streams() -> None:
    result = played(compute(1), gather(4))
    assert result.seconds == 4
    assert sum(result.parts.values()) == 4


def test_short_kernels_wait_for_the_host() -> None:
    result = played(compute(1), compute(1), compute(1), host=2)
    # Issued at 2, 4 and 6 seconds.
    assert result.seconds == 7
    assert result.parts == {"matrix products": 3, "host": 4}


def test_the_host_issues_only_the_update_of_captured_steps() -> None:
    update = WorkItem("matmul", "mm", 0, "", "update"), 1.0
    items = compute(1), compute(1), update
    assert play(*recorded(*items), host_operator=2, is_captured=True).seconds == 3
    assert play(*recorded(*items), host_operator=4, is_captured=True).seconds == 5


@pytest.mark.parametrize(
    ("op", "dimension", "part"),
    [
        ("all_to_all_single", "ep", "expert"),
        ("all_to_all_single", "cp", "context"),
        ("all_gather_into_tensor", "expert_tp", "tensor"),
        ("allgather_base", "efsdp", "data"),
        ("allreduce", "", "data"),
        ("recv_", "cp", "context"),
    ],
)
def test_communication_belongs_to_the_dimension_of_its_group(
    op: str, dimension: str, part: str
) -> None:
    """Groups of several dimensions may have the same size and stride."""
    item, seconds = gather(2, Group("3", 2, 1, dimension), stream=0)
    result = played(compute(1), (item._replace(op=op), seconds), compute(1))
    exposed = 0 if op == "recv_" else 2  # messages take no time here
    assert result.parts[f"exposed: {part} parallel"] == exposed


def test_the_host_waits_for_the_sizes_of_an_exchange() -> None:
    copy = WorkItem("copy", "copy_to_host", 0, "layers.0", "forward")
    items = [compute(6), (copy, 1), compute(1), gather(3), wait(0, 3), compute(1)]
    ahead = [items[0], compute(1), *items[2:]]
    # The first product ends at 7. The gather is issued at 4 and hidden behind it.
    assert played(*ahead, host=1).seconds == 10
    # The copy ends at 8. The gather is issued at 10, and the last product waits for it.
    assert played(*items, host=1).seconds == 14


def test_the_optimizer_is_a_part_of_its_own() -> None:
    item, seconds = compute(1)
    result = played(compute(2), (item._replace(pass_="update"), seconds))
    assert result.parts == {"matrix products": 2, "optimizer": 1}


# ---- pipelines


SECONDS = {"F": 1.0, "B": 2.0}


def ends(schedule_name: str, message: float = 0, slow_stage: int = -1) -> list[float]:
    """Return the ends of two ranks with 4 micro-batches and half a second after the pipeline."""
    return pipeline_ends(
        order_of(schedule_name, 2, 1, 4),
        lambda action: SECONDS[action.kind] * (2 if action.stage == slow_stage else 1),
        [0.5, 0.5],
        message,
    )


@pytest.mark.parametrize("schedule_name", ["1F1B", "GPipe"])
def test_two_stages_have_the_known_bubble(schedule_name: str) -> None:
    # (m + p - 1) (F + B) = 5 x 3. The last backward is rank 0's.
    assert ends(schedule_name) == pytest.approx([15.5, 13.5])


def test_messages_delay_the_first_rank_four_times() -> None:
    # Drawn by hand: four messages of a quarter are on the critical path of 1F1B.
    assert ends("1F1B", message=0.25)[0] == pytest.approx(16.5)


def test_the_slower_stage_determines_the_pace() -> None:
    # Rank 1 is always busy after the first forward; rank 0 ends with the last backward.
    assert ends("1F1B", slow_stage=1) == pytest.approx([1 + 24 + 2 + 0.5, 1 + 24 + 0.5])


def test_schedules_of_unit_durations_are_those_of_the_picture() -> None:
    order = order_of("1F1B", 4, 1, 8)
    picture = simulate(order)
    rows = schedule(order, lambda action: 2.0 * {"F": 1, "B": 2}[action.kind])
    assert [[start / 2 for start, _ in row] for row in rows] == [
        [start for start, _ in row] for row in picture.starts
    ]


def test_a_cpu_rank_does_its_communication_itself() -> None:
    recording, seconds = recorded(
        gather(3, TP, stream=1, is_async=True), compute(2), wait(0, 0), gather(4)
    )
    assert play(recording, seconds, host_operator=0.0).seconds == 4
    result = play(in_turn(recording), seconds, host_operator=0.0)
    assert result.seconds == sum(seconds)
    assert result.parts == {
        "exposed: tensor parallel": 3,
        "matrix products": 2,
        "exposed: data parallel": 4,
    }
