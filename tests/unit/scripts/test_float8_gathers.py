"""TorchTitan's tensor-parallel ranks cast their part of a tensor to float8, then gather it."""

from __future__ import annotations

import pytest

from benchmarks.float8_gathers import has_float8_gathers, with_float8_gathers
from torchtitan_like.plan.record import Group, Kind, Pass, Recording, WorkItem

TENSOR, SHARDS = Group("tensor", 4, 1, "tp"), Group("shards", 4, 4, "dp_shard")
PART, WHOLE, FLOAT8, FEW = 1000, 4000, 2000, 4


def item(
    op: str,
    *reads: tuple[int, int],
    to: tuple[int, int],
    kind: Kind = "memory",
    group: Group | None = None,
    pass_: Pass = "forward",
) -> WorkItem:
    num_bytes = sum(size for _, size in (*reads, to))
    return WorkItem(
        kind,
        op,
        0,
        "layers.0",
        pass_,
        num_bytes=num_bytes,
        group=group,
        reads=reads,
        writes=(to,),
    )


def cast(first: int, pass_: Pass = "forward") -> list[WorkItem]:
    """The gathered tensor 3 to float8, by kernels that write tensors `first` and after it."""
    return [
        item("abs", (3, WHOLE), to=(first, WHOLE), pass_=pass_),
        item("max", (first, WHOLE), to=(first + 1, FEW), pass_=pass_),
        item("mul", (3, WHOLE), (first + 1, FEW), to=(first + 2, WHOLE), pass_=pass_),
        item("_to_copy", (first + 2, WHOLE), to=(first + 3, FLOAT8), pass_=pass_),
    ]


GATHER = item("all_gather_into_tensor", (1, PART), to=(2, WHOLE), kind="collective", group=TENSOR)
ORDER = item("cat", (2, WHOLE), to=(3, WHOLE))
WEIGHT = item("abs", (90, WHOLE), to=(91, WHOLE))


def changed(work: list[WorkItem]) -> list[WorkItem]:
    recording = Recording()
    recording.work = work
    result = with_float8_gathers(recording).work
    assert recording.work is work and len(result) == len(work)
    return result


def test_parts_are_cast_once_and_one_byte_is_gathered_for_each_number() -> None:
    result = changed([GATHER, ORDER, *cast(10), WEIGHT, *cast(20)])
    assert [each.num_bytes for each in result[:2]] == [(PART + WHOLE) // 2, WHOLE]
    assert [each.reads[0][1] for each in result[2:6]] == [PART, PART, PART, PART]
    assert result[5].writes == ((13, FLOAT8 // 4),)
    assert result[6] == WEIGHT
    assert [each.op for each in result[7:]] == ["nothing"] * 4


def test_a_cast_is_transposed_once_in_each_pass() -> None:
    copies = [
        item("clone", (13, FLOAT8), to=(30, FLOAT8), pass_="backward"),
        item("clone", (23, FLOAT8), to=(31, FLOAT8), pass_="backward"),
    ]
    result = changed([GATHER, ORDER, *cast(10, "backward"), *cast(20, "backward"), *copies])
    assert result[-2] == copies[0]
    assert result[-1].op == "nothing"


def test_other_gathers_and_what_reads_them_stay() -> None:
    weights = GATHER._replace(group=SHARDS)
    outside = [each._replace(module="output") for each in (GATHER, ORDER, *cast(10))]
    for work in ([weights, ORDER, *cast(10)], outside):
        assert changed(work) == work


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"precision": "fp8"}, True),
        ({"precision": "fp8 rowwise"}, False),
        ({"precision": "bf16"}, False),
        ({"tp": "1"}, False),
        ({"framework": "NeMo/Megatron"}, False),
    ],
)
def test_only_scales_of_whole_tensors_are_known_before_the_gather(
    changes: dict[str, str], expected: bool
) -> None:
    row = {"framework": "torchtitan", "tp": "8", "precision": "fp8 tensorwise"}
    assert has_float8_gathers(row | changes) is expected
