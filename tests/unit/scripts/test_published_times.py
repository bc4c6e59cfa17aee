"""NeMo's rows are timed without the work that NeMo does not have."""

from __future__ import annotations

from benchmarks.nemo_of_its_time import as_nemo
from torchtitan_like.plan.fusion import find_needed
from torchtitan_like.plan.record import Free, Group, Kind, Pass, Recording, WorkItem

WEIGHT, CAST, OTHER_CAST, INPUT, SCALE = 11, 12, 13, 20, 30
LARGE, FEW = 4096, 4
SHARDS, TENSOR = Group("shards", 4, 1, "dp_shard"), Group("tensor", 2, 1, "tp")


def item(
    op: str,
    reads: tuple[int, ...] = (),
    write: int = 0,
    pass_: Pass = "forward",
    kind: Kind = "memory",
    group: Group | None = None,
) -> WorkItem:
    return WorkItem(
        kind,
        op,
        0,
        "layers.0.wq",
        pass_,
        group=group,
        reads=tuple((read, FEW if read == SCALE else LARGE) for read in reads),
        writes=((write, FEW if write == SCALE else LARGE),) if write else (),
    )


def gathered(pass_: Pass = "forward") -> list[WorkItem]:
    return [
        item("allgather_base", (10,), 10, pass_, "collective", SHARDS),
        item("split_with_sizes_copy", (10, WEIGHT), pass_=pass_),
    ]


FORWARD = [
    *gathered(),
    item("rms_norm", (1,), INPUT),
    item("max", (INPUT,), SCALE),
    item("_to_copy", (INPUT, SCALE), 21),
    item("_to_copy", (WEIGHT, SCALE), CAST),
    item("_scaled_mm", (21, CAST), 22, kind="matmul"),
    item("all_reduce", (22,), 22, kind="collective", group=TENSOR),
]
BACKWARD = [
    *gathered("backward"),
    item("_to_copy", (40, SCALE), 41, "backward"),  # of the gradient
    item("_to_copy", (WEIGHT, SCALE), OTHER_CAST, "backward"),
    item("_scaled_mm", (41, OTHER_CAST), 42, "backward", "matmul"),
    item("_to_copy", (INPUT, SCALE), 43, "backward"),
    item("_scaled_mm", (41, 43), 44, "backward", "matmul"),
    item("chunk_cat", (44, 45), pass_="backward"),
    item("reduce_scatter_base", (45,), 46, "backward", "collective", SHARDS),
    item("add_", (47, 46), 47, "backward"),
]
KEPT_FORWARD = ["rms_norm", "_to_copy", "_scaled_mm", "all_reduce"]
KEPT_BACKWARD = ["_to_copy", "_scaled_mm", "_scaled_mm"]


def test_weights_are_gathered_and_cast_once_and_gradients_scattered_once_a_step() -> None:
    recording = Recording()
    recording.work = [*FORWARD, *BACKWARD, *FORWARD, *BACKWARD]
    recording.micro_batches = [0, len(FORWARD) + len(BACKWARD)]
    work = as_nemo(recording).work
    assert len(work) == len(recording.work)
    assert [each.op for each in work if each.op != "nothing"] == [
        *("allgather_base", "rms_norm", "_to_copy", "_to_copy", "_scaled_mm", "all_reduce"),
        *KEPT_BACKWARD,
        *KEPT_FORWARD,
        *KEPT_BACKWARD,
        "reduce_scatter_base",
    ]
    assert all(SCALE not in dict(each.reads) for each in work)


def test_a_pipeline_gathers_and_scatters_as_recorded() -> None:
    recording = Recording()
    recording.work = [*gathered(), *FORWARD[2:], *BACKWARD[2:]]
    recording.actions = [None]  # type: ignore[list-item]
    assert [each.op for each in as_nemo(recording).work if each.op != "nothing"] == [
        "allgather_base",
        *KEPT_FORWARD,
        *KEPT_BACKWARD,
        "reduce_scatter_base",
    ]


def test_gradients_of_weights_stay_needed_where_their_sums_are_dropped() -> None:
    recording = Recording()
    recording.work = [*FORWARD, *BACKWARD]
    recording.events = [Free(identity, len(recording.work)) for identity in (22, 42, 44)]
    recording.micro_batches = [0, len(FORWARD)]
    gradient = len(FORWARD) + [each.writes for each in BACKWARD].index(((44, LARGE),))
    assert find_needed(recording)[gradient]
    assert find_needed(as_nemo(recording))[gradient]
    assert not find_needed(recording)[gradient - 2]  # nothing reads the gradient of the input
