"""The plan of an export: the file format, the rectangles to copy, and the rank that writes each."""

import json
import math
import struct
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.harness.hf_weights import to_external
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.hf import plan
from torchtitan_like.checkpoint.hf.export import write_export
from torchtitan_like.checkpoint.hf.plan import (
    ShardInfo,
    assign_extents,
    group_by_file,
    group_by_size,
    lay_out_files,
    merge_shards,
    plan_copies,
)
from torchtitan_like.checkpoint.hf.safetensors_file import (
    DTYPES,
    PAGE,
    lay_out,
    read_header,
    render_index,
)
from torchtitan_like.checkpoint.source import check_coverage
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import Row, links
from torchtitan_like.util.boxes import rectangles, slices
from torchtitan_like.util.extents import EXTENT

MIXED = [
    ("flag", "BOOL", (3,)),
    ("weight", "F32", (5, 7)),
    ("count", "I64", ()),
    ("half", "BF16", (4, 0)),
    ("small", "F8_E4M3", (2,)),
    ("more", "F32", (2,)),
]


def write(path: Path, layout) -> None:
    path.write_bytes(layout.header + bytes(range(256))[: layout.size - len(layout.header)])


# ---- the format


def test_a_written_file_is_readable_by_this_package_and_by_safetensors(tmp_path):
    layout = lay_out("model.safetensors", MIXED, {"note": "text"})
    path = tmp_path / layout.name
    write(path, layout)
    entries, metadata = read_header(path)
    assert tuple(entries) == layout.entries and metadata == {"format": "pt", "note": "text"}
    loaded = load_file(path)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in loaded.items()} == {
        n: (DTYPES[d], s) for n, d, s in MIXED
    }
    start = len(layout.header)
    assert start % PAGE == 0 and loaded["count"].item() == int.from_bytes(
        path.read_bytes()[start : start + 8], "little"
    )


def test_entries_are_aligned_and_sorted_by_element_size():
    entries = lay_out("f", MIXED).entries
    assert [entry.name for entry in entries] == ["count", "weight", "more", "half", "flag", "small"]
    assert all(entry.start % DTYPES[entry.dtype].itemsize == 0 for entry in entries)


def test_a_header_of_exactly_one_page_is_not_padded(tmp_path):
    sizes = {len(lay_out("f", [("n" * n, "F32", (1,))]).header) for n in range(1, PAGE)}
    assert sizes == {PAGE, 2 * PAGE}


def test_files_written_by_safetensors_are_readable(tmp_path):
    save_file(
        {"b": torch.ones(2, 3), "a": torch.tensor(True), "z": torch.empty(0, 2)},
        tmp_path / "f.safetensors",
    )
    entries, _ = read_header(tmp_path / "f.safetensors")
    assert sorted((e.name, e.dtype, e.shape) for e in entries) == [
        ("a", "BOOL", ()), ("b", "F32", (2, 3)), ("z", "F32", (0, 2)),
    ]  # fmt: skip


def with_header(header: object, data: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


TWO = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expected a header of"),
        (b"\x01\x02", "Expected a header of"),
        (bytes(4096), "invalid header"),  # an allocated but unfinished file
        (struct.pack("<Q", 2**60) + bytes(100), "Expected a header of"),
        (with_header(b"{not json"), "invalid header"),
        (with_header([1]), "invalid header"),
        (with_header({"a": {**TWO, "dtype": "F4"}}), "invalid header"),
        (with_header({"a": {**TWO, "shape": [-1, -2]}}), "invalid header"),
        (with_header({"a": {**TWO, "shape": [3]}}), "Expected"),
        (with_header({"a": {**TWO, "data_offsets": [4, 12]}}, 12), "Expected"),
        (with_header({"a": TWO, "b": {**TWO, "data_offsets": [4, 12]}}, 12), "Expected"),
        (with_header({"a": TWO}, 7), "as in its header"),
        (with_header({"a": TWO}, 9), "as in its header"),
    ],
)
def test_an_incomplete_file_is_refused(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=message):
        read_header(path)


def test_the_index_counts_the_bytes_of_tensors():
    files = [lay_out("one", MIXED[:2]), lay_out("two", MIXED[2:])]
    index = json.loads(render_index(files))
    assert index["metadata"] == {"total_size": 3 + 140 + 8 + 2 + 8}
    assert index["weight_map"] == {
        name: "one" if i < 2 else "two" for i, (name, _, _) in enumerate(MIXED)
    }


# ---- rectangles


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_range_of_elements_becomes_a_few_rectangles(shape, data):
    total = math.prod(shape)
    low = data.draw(st.integers(0, total))
    high = data.draw(st.integers(low, total))
    numbers = torch.arange(total).view(shape)
    parts = rectangles(tuple(shape), low, high)
    covered = [n for bounds in parts for n in numbers[slices(bounds)].flatten().tolist()]
    assert covered == list(range(low, high))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 4, 1), (0, 6, 1))], None),
        ([((0, 3, 1), (0, 6, 1)), ((3, 1, 1), (0, 6, 1))], None),
        ([((0, 4, 1), (0, 2, 1)), ((0, 1, 1), (2, 4, 1)), ((1, 3, 1), (2, 4, 1))], None),
        ([((0, 3, 1), (0, 6, 1))], r"t\[3:4, 0:6\] is missing"),
        ([], r"t\[0:4, 0:6\] is missing"),
        (
            [((0, 3, 1), (0, 6, 1)), ((2, 2, 1), (0, 6, 1))],
            r"t\[2:3, 0:6\] is stored more than once",
        ),
        # the right number of elements, but one row is missing and another is stored twice
        ([((0, 2, 1), (0, 6, 1)), ((1, 2, 1), (0, 6, 1))], "is stored more than once"),
    ],
)
def test_shards_must_cover_a_tensor_exactly_once(boxes, message):
    if message is None:
        check_coverage("t", (4, 6), boxes)
    else:
        with pytest.raises(CheckpointError, match=message):
            check_coverage("t", (4, 6), boxes)


# ---- the whole plan, executed in memory: any table and any shards yield the expected tensors

ROWS = {
    "plain": (("layers.{}.w", "model.layers.{}.w"),),
    "transposed": (Row("layers.{}.w", "t.{}", transposed=True),),
    "joined": (Row(("layers.{}.w", "layers.{}.v"), "both.{}"),),
    "split": (Row("layers.{}.w", ("q.{}", "k.{}"), sizes=(8, 4)),),
    "interleaved": (Row("layers.{}.w", "meta.{}", interleaved_heads=3),),
    "experts": (Row("layers.{}.w", "e.{}.{e}", transposed=True, axis=1),),
}


def split_shape(shape, ways):
    """Split a shape into `ways[d]` pieces along each dimension d, as torch.chunk does."""
    spans = [[()]]
    for n, k in zip(shape, ways, strict=True):
        size = -(-n // k)
        parts = [(a, min(size, n - a), 1) for a in range(0, n, size)]
        spans = [[box + (part,) for box in spans[0] for part in parts]]
    return spans[0]


def execute(files, targets, shards, holder_of):
    """Return the bytes of the files after copying every rectangle."""
    content = [torch.full((file.size,), 0xFF, dtype=torch.uint8) for file in files]
    for copy in plan_copies(files, targets, holder_of):
        f, k = copy.extent
        extent = content[f][k * plan.EXTENT : (k + 1) * plan.EXTENT]
        copy.write(extent, copy.boxes.view(shards[copy.part.shard]))
    return content


@settings(max_examples=60)
@given(st.sampled_from(sorted(ROWS)), st.data())
def test_any_table_and_any_shards_yield_the_expected_tensors(kind, data):
    shape = (
        data.draw(st.sampled_from([(12, 5, 6)]))
        if kind == "experts"
        else (12, data.draw(st.integers(1, 9)))
    )
    names = [
        f"layers.{i}.{w}" for i in (2, 10) for w in (("w", "v") if kind == "joined" else ("w",))
    ]
    state = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(i))
        for i, name in enumerate(names)
    }
    ranks = data.draw(st.integers(1, 5))
    infos, shards = [[] for _ in range(ranks)], {}
    for name in names:
        boxes = split_shape(shape, [data.draw(st.integers(1, 4)) for _ in shape])
        # One or two ranks hold each box.
        holders = [
            data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=2)) for _ in boxes
        ]
        for rank in range(ranks):
            infos[rank].append(
                ShardInfo(
                    name,
                    "F32",
                    shape,
                    tuple(b for b, held_by in zip(boxes, holders, strict=True) if rank in held_by),
                )
            )
        shards |= {
            (name, box): state[name][tuple(slice(a, a + n) for a, n, _ in box)].clone()
            for box in boxes
        }
    dtype = data.draw(st.sampled_from([None, torch.bfloat16]))
    targets = plan.plan_tensors(
        merge_shards(infos, [str(r) for r in range(ranks)]), ROWS[kind], (), dtype
    )
    files = lay_out_files(targets, group_by_size(targets, data.draw(st.sampled_from([100, 10**9]))))
    with pytest.MonkeyPatch.context() as patch:
        # Small extents, so that many tensors cross a boundary.
        patch.setattr(plan, "EXTENT", data.draw(st.sampled_from([64, 128, 1024, EXTENT])))
        owners = assign_extents(files, targets, ranks)
        assert set(owners) == set(plan.extents_of(files))
        written = Counter(dict.fromkeys(range(ranks), 0))
        for (f, k), owner in owners.items():
            written[owner] += min(plan.EXTENT, files[f].size - k * plan.EXTENT)
        mean = sum(file.size for file in files) / ranks
        assert len(written) == ranks
        assert all(abs(size - mean) <= plan.EXTENT for size in written.values())
        content = execute(files, targets, shards, lambda extent, part: part.holders[-1])
    expected = to_external(links(ROWS[kind], dict.fromkeys(names, shape)), state)
    for file, raw in zip(files, content, strict=True):
        for entry in file.entries:
            values = raw[entry.start : entry.end].view(DTYPES[entry.dtype]).view(entry.shape)
            assert torch.equal(values, expected.pop(entry.name).to(values.dtype))
    assert not expected


def one_tensor(shape, boxes, dtype="F32"):
    """Plan the output of one tensor. boxes: box -> ranks that hold it."""
    ranks = 1 + max(r for holders in boxes.values() for r in holders)
    infos = [
        [ShardInfo("t", dtype, shape, tuple(b for b, h in boxes.items() if r in h))]
        for r in range(ranks)
    ]
    return plan.plan_tensors(
        merge_shards(infos, [str(r) for r in range(ranks)]), (("t", "t"),), (), None
    )


MIB = 2**18  # elements
STRIPES = {
    ((m * MIB, n * MIB, 1),): (rank,)
    for k in range(8)
    for m, n, rank in ((4 * k, 3, 0), (4 * k + 3, 1, 1))
}


@pytest.mark.parametrize(
    ("boxes", "extents_per_rank"),
    [
        # replicated: each rank writes a quarter, no rank sends
        ({((0, 64 * MIB, 1),): (0, 1, 2, 3)}, [4, 4, 4, 5]),
        ({((0, 32 * MIB, 1),): (0,), ((32 * MIB, 32 * MIB, 1),): (1,)}, [9, 8]),
        # sharded and replicated
        ({((0, 32 * MIB, 1),): (0, 2), ((32 * MIB, 32 * MIB, 1),): (1, 3)}, [4, 4, 4, 5]),
        # rank 0 has no data, rank 2 a fifteenth of it, and both write their share
        ({((0, 60 * MIB, 1),): (1,), ((60 * MIB, 4 * MIB, 1),): (2,)}, [6, 5, 6]),
        # rank 1 has a quarter of each extent, and the last bytes of the file
        (STRIPES, [4, 5]),
    ],
)
def test_replicas_share_extents_and_all_ranks_write_equally_many(boxes, extents_per_rank):
    targets = one_tensor((sum(n for ((_, n, _),) in boxes),), boxes)
    num_ranks = len(extents_per_rank)
    counts = Counter(assign_extents(lay_out_files(targets, [["t"]]), targets, num_ranks).values())
    assert [counts[rank] for rank in range(len(extents_per_rank))] == extents_per_rank


def test_ranks_with_equal_shares_of_all_extents_write_equally_many():
    """With column sharding, every rank holds the same number of bytes of each extent."""
    boxes = {((0, 256, 1), (1024 * 64 * rank, 1024 * 64, 1)): (rank,) for rank in range(4)}
    targets = one_tensor((256, 4 * 64 * 1024), boxes)
    counts = Counter(assign_extents(lay_out_files(targets, [["t"]]), targets, 4).values())
    assert sorted(counts.values()) == [16, 16, 16, 17]


def test_names_are_sorted_by_layer_number_and_files_are_split_by_bytes():
    names = ["layers.10.w", "layers.2.w", "norm.w", "layers.1.w"]
    infos = [[ShardInfo(name, "F32", (10,), (((0, 10, 1),),)) for name in names]]
    targets = plan.plan_tensors(
        merge_shards(infos, ["0"]), tuple((name, name) for name in names), (), None
    )
    assert list(targets) == ["layers.1.w", "layers.2.w", "layers.10.w", "norm.w"]
    assert group_by_size(targets, 80) == [["layers.1.w", "layers.2.w"], ["layers.10.w", "norm.w"]]
    assert group_by_size(targets, 79) == group_by_size(targets, 1) == [[name] for name in targets]
    assert group_by_file(targets, {"layers.1.w": 7, "layers.2.w": 3, "layers.10.w": 7, "norm.w": 3, "gone": 1}) == [
        ["layers.2.w", "norm.w"], ["layers.1.w", "layers.10.w"],
    ]  # fmt: skip
    assert [file.name for file in lay_out_files(targets, [list(targets)])] == ["model.safetensors"]
    assert [file.name for file in lay_out_files(targets, group_by_size(targets, 80))][
        1
    ] == "model-00002-of-00002.safetensors"


def test_only_floating_point_numbers_are_converted_and_an_alias_is_skipped():
    infos = [
        [
            ShardInfo("w", "F32", (2,), (((0, 2, 1),),)),
            ShardInfo("n", "I32", (2,), (((0, 2, 1),),)),
            ShardInfo("again", "F32", (2,), (((0, 2, 1),),)),
            ShardInfo("empty", "F32", (0, 3), ()),
            ShardInfo("scalar", "F64", (), ((),)),
        ]
    ]
    rows = tuple((name, name) for name in ("w", "n", "again", "empty", "scalar"))
    targets = plan.plan_tensors(merge_shards(infos, ["0"]), rows, (("again", "w"),), torch.float16)
    assert {name: target.dtype for name, target in targets.items()} == {
        "w": "F16", "n": "I32", "empty": "F16", "scalar": "F16",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([[ShardInfo("w", "F32", (2,), (((0, 1, 1),),))]], r"w\[1:2\] is missing"),
        (
            [[ShardInfo("w", "F32", (2,), ())], [ShardInfo("w", "F32", (3,), ())]],
            "in another one",
        ),
        (
            [[ShardInfo("w", "F32", (2,), ())], [ShardInfo("w", "BF16", (2,), ())]],
            "in another one",
        ),
        ([[ShardInfo("x", "F32", (2,), (((0, 2, 1),),))]], "no row of the table matches"),
        (
            [
                [
                    ShardInfo("w", "F32", (2,), (((0, 2, 1),),)),
                    ShardInfo("v", "BF16", (2,), (((0, 2, 1),),)),
                ]
            ],
            "joins tensors of two dtypes",
        ),
    ],
)
def test_incomplete_or_inconsistent_shards_are_refused(infos, message):
    with pytest.raises(CheckpointError, match=message):
        plan.plan_tensors(
            merge_shards(infos, ["rank 0", "rank 1"]), (Row(("w", "v"), "both"),), (), None
        )


def test_a_dtype_that_safetensors_lacks_is_refused():
    with pytest.raises(CheckpointError, match="cannot store torch.complex128"):
        plan.describe_shards({"w": torch.zeros(1, dtype=torch.complex128)})


def test_an_export_works_without_posix_fadvise(tmp_path, monkeypatch):
    """macOS lacks posix_fadvise."""
    monkeypatch.delattr("os.posix_fadvise")
    write_export(
        tmp_path,
        {"w": torch.ones(3)},
        rows=(("w", "w"),),
        tied=(),
        dtype=None,
        group=HostGroup.alone(),
    )
    assert load_file(tmp_path / "model.safetensors")["w"].tolist() == [1, 1, 1]
