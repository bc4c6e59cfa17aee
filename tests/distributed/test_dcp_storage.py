"""Native steps through DCP's planners: every kind of value, every layout, every kind of damage."""

from __future__ import annotations

import functools
import math
import os
import pickle
import re
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint import dcp_storage
from torchtitan_like.checkpoint.dcp_storage import (
    BOUNCE,
    ExtentReader,
    ExtentWriter,
    _Bounce,
    _Box,
    _read_boxes,
    unwrap,
    verify_rest,
)
from torchtitan_like.checkpoint.errors import DamagedError
from torchtitan_like.checkpoint.extents import EXTENT, ExtentSource, FileRecord, all_extents
from torchtitan_like.distributed.world import HostGroup

# name: (shape, dtype); all are cut over the ranks where they have dimensions enough.
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((8, 6), torch.float32),
    "uneven": ((5, 3), torch.float32),
    "fewer rows than ranks": ((1, 7), torch.float64),
    "no rows": ((0, 5), torch.float32),
    "several extents": ((2100, 1503), torch.float32),
    "three dimensions": ((7, 900, 301), torch.bfloat16),
    "counts": ((33,), torch.int64),
    "mask": ((9, 2), torch.bool),
    "bytes": ((130,), torch.uint8),
    "half": ((3, 3), torch.float16),
    "complex": ((4, 5), torch.complex64),
    "scalar": ((), torch.float32),
    "step": ((), torch.int32),
}
OBJECTS = {"json": '{"position": 12}', "numbers": [1, 2.5], "large": "x" * (EXTENT + 5)}


@functools.cache
def whole(name: str) -> torch.Tensor:
    """The tensor's elements, the same on every rank."""
    shape, dtype = TENSORS[name]
    numbers = torch.arange(1, math.prod(shape) + 1).reshape(shape)
    return (numbers % 7 < 3) if dtype == torch.bool else (numbers % 251).to(dtype)


def state_of(dim: int | None, fill: bool = True) -> dict[str, Any]:
    """Every tensor as a DTensor cut along `dim` (None: replicated), a plain one, and objects."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {"plain": torch.arange(5.0)} | OBJECTS
    for name, (shape, _) in TENSORS.items():
        placement = Shard(min(dim, len(shape) - 1)) if dim is not None and shape else Replicate()
        state[name] = distribute_tensor(whole(name), mesh, [placement], src_data_rank=None)
    if not fill:
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                (value.to_local() if isinstance(value, DTensor) else value).zero_()
            else:
                state[name] = ""
    return state


def save(folder: str, state: dict[str, Any]) -> dict[str, FileRecord]:
    """Save on all ranks; the records of all."""
    writer = ExtentWriter(folder, dist.get_rank())
    dcp.save(state, storage_writer=writer)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, writer.records)
    return {name: record for records in gathered for name, record in records.items()}


def save_state(folder: str, dim: int | None) -> dict[str, FileRecord]:
    return save(folder, state_of(dim))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, FileRecord]]:
    """A step saved by 2 ranks, cut by rows."""
    folder = tmp_path_factory.mktemp("step")
    return folder, run_ranks(save_state, 2, str(folder), 0)[0]


def load_state(folder: str, records: dict[str, FileRecord], dim: int | None) -> list[str]:
    """Load everything; the names of what is not as it was saved."""
    state = state_of(dim, fill=False)
    dcp.load(state, storage_reader=ExtentReader(folder, records))
    expected = state_of(dim)
    return [name for name in expected if not same(state[name], expected[name])]


def same(value: Any, expected: Any) -> bool:
    if isinstance(expected, DTensor):
        return same(value.to_local(), expected.to_local())
    return torch.equal(value, expected) if isinstance(expected, torch.Tensor) else bool(value == expected)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_checkpoint_loads_on_every_layout(step: Any, ranks: int, dim: int | None) -> None:
    folder, records = step
    assert run_ranks(load_state, ranks, str(folder), records, dim) == [[]] * ranks


@pytest.mark.parametrize("dim", [0, 1, None])
def test_a_checkpoint_of_any_layout_loads(tmp_path: Path, dim: int | None) -> None:
    records = run_ranks(save_state, 2, str(tmp_path), dim)[0]
    assert run_ranks(load_state, 1, str(tmp_path), records, 0) == [[]]


def test_every_element_is_stored_once_and_nothing_else(step: Any) -> None:
    folder, records = step
    assert sorted(os.listdir(folder)) == [".metadata", "shard-00000.bin", "shard-00001.bin"]
    stored = ExtentReader(folder, records).read_metadata().storage_data
    spans = sorted((name, offset, offset + length) for name, offset, length in stored.values())
    for (name, _, end), (following, begin, _) in zip(spans, spans[1:], strict=False):
        assert begin % 64 == 0 and (begin >= end if name == following else begin == 0)
    tensors = [length for index, (_, _, length) in stored.items() if index.fqn in TENSORS]
    assert sum(tensors) == sum(whole(name).nbytes for name in TENSORS)


def live_and_staged(live: str, staged: str) -> None:
    """The same values from tensors that differ in all but that: gradients wanted, strides, storage."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    part = torch.randn(40, 30) + rank
    views = {"a": part[3:7].requires_grad_(), "b": part.t(), "c": part[:, ::2], "d": torch.ones(3).expand(5, 3)}
    copies = {name: view.detach().clone(memory_format=torch.contiguous_format) for name, view in views.items()}
    for folder, tensors in ((live, views), (staged, copies)):
        state = {n: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for n, t in tensors.items()}
        save(folder, state | OBJECTS)


def test_a_live_state_and_its_staged_copy_give_the_same_bytes(tmp_path: Path) -> None:
    live, staged = tmp_path / "live", tmp_path / "staged"
    for folder in (live, staged):
        folder.mkdir()
    run_ranks(live_and_staged, 2, str(live), str(staged))
    assert len(os.listdir(live)) == 3
    for name in os.listdir(live):
        assert (live / name).read_bytes() == (staged / name).read_bytes(), name


def save_slice(folder: str) -> tuple[int, dict[str, FileRecord]]:
    writer = ExtentWriter(folder, dist.get_rank())
    dcp.save({"row": torch.zeros(1000, 1000)[5]}, storage_writer=writer)
    return dist.get_rank(), writer.records


def test_a_slice_stores_its_own_bytes_and_a_rank_without_items_writes_no_file(tmp_path: Path) -> None:
    (_, first), (_, second) = run_ranks(save_slice, 2, str(tmp_path))
    assert first["shard-00000.bin"].size == 4000
    assert second == {}
    assert sorted(os.listdir(tmp_path)) == [".metadata", "shard-00000.bin"]


def test_a_large_strided_tensor_is_copied_in_pieces() -> None:
    tensor = torch.arange(3 * 4_000_000, dtype=torch.int32).view(2, -1, 2).permute(2, 0, 1)
    lengths, begin = [], 0
    for piece in _Bounce().pieces(tensor):
        assert torch.equal(
            torch.frombuffer(piece, dtype=torch.int32), tensor.flatten()[begin : begin + len(piece) // 4]
        )
        lengths.append(len(piece))
        begin += len(piece) // 4
    assert sum(lengths) == tensor.nbytes and max(lengths) <= BOUNCE


def load_damaged(folder: str, records: dict[str, FileRecord]) -> tuple[type[Exception], str, bool]:
    """(the error's class, its text, has anything been read?)."""
    state = state_of(0, fill=False)
    reader = ExtentReader(folder, records)
    error: Exception
    try:
        reader.read_metadata()
        dcp.load(state, storage_reader=reader)
    except (CheckpointException, DamagedError) as problem:
        error = unwrap(problem) if isinstance(problem, CheckpointException) else problem
        untouched = all(not value.to_local().any() for value in state.values() if isinstance(value, DTensor))
        return type(error), str(error), not untouched
    raise AssertionError("nothing was noticed")


@pytest.fixture
def damaged(step: Any, tmp_path: Path) -> Path:
    """A copy of the step, to be damaged."""
    for name in os.listdir(step[0]):
        (tmp_path / name).write_bytes((step[0] / name).read_bytes())
    return tmp_path


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "position", "text"),
    [
        ("shard-00000.bin", 0, r"shard-00000.bin is damaged: extent 0 \(bytes 0 to 4194304\)"),
        ("shard-00001.bin", EXTENT + 5, r"shard-00001.bin is damaged: extent 1 \(bytes 4194304 to \d+\)"),
        (".metadata", 100, r"\.metadata is damaged: extent 0"),
    ],
)
def test_a_flipped_bit_is_an_error_on_every_rank(step: Any, damaged: Path, name: str, position: int, text: str) -> None:
    flip(damaged / name, position)
    for kind, message, _ in run_ranks(load_damaged, 2, str(damaged), step[1]):
        assert kind is DamagedError
        assert re.search(text, message), message


@pytest.mark.parametrize("name", ["shard-00000.bin", "shard-00001.bin", ".metadata"])
@pytest.mark.parametrize("change", ["missing", "truncated", "longer"])
def test_a_file_of_a_wrong_length_is_found_before_anything_is_read(
    step: Any, damaged: Path, name: str, change: str
) -> None:
    path = damaged / name
    if change == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + (1 if change == "longer" else -1))
    for kind, message, was_read in run_ranks(load_damaged, 2, str(damaged), step[1]):
        assert (kind, was_read) == (DamagedError, False)
        size = path.stat().st_size if path.exists() else None
        expected = f"{path} is missing, expected " if size is None else f"{path} has {size} bytes, expected "
        assert expected in message


class Intruder:
    """Pickled, a command that is run when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_changed_metadata_is_never_unpickled(step: Any, damaged: Path) -> None:
    intruder = pickle.dumps(Intruder(damaged / "harm"))
    size = step[1][".metadata"].size
    (damaged / ".metadata").write_bytes(intruder + bytes(size - len(intruder)))
    assert run_ranks(load_damaged, 1, str(damaged), step[1])[0][0] is DamagedError
    assert not (damaged / "harm").exists()
    pickle.loads((damaged / ".metadata").read_bytes())
    assert (damaged / "harm").exists(), "the test's own command does nothing"


def load_part(folder: str, records: dict[str, FileRecord]) -> tuple[dict[str, set[int]], str]:
    """Load one tensor, then verify the rest: (extents read by this rank, the error of the rest)."""
    reader = ExtentReader(folder, records)
    tensor = distribute_tensor(torch.zeros(5, 3), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    dcp.load({"uneven": tensor}, storage_reader=reader)
    group = HostGroup.alone()
    group.group, group.size = dist.group.WORLD, 2
    with mock.patch.object(dcp_storage, "find_damage", wraps=dcp_storage.find_damage) as found:
        try:
            verify_rest(Path(folder), records, reader.verified, group)
        except DamagedError as error:
            return reader.verified, str(error)
    *_, wanted = found.call_args.args
    return reader.verified, f"read {sum(end - begin for name, k in wanted for begin, end in [records[name].span(k)])}"


def test_only_needed_bytes_are_read_and_the_rest_on_request(step: Any, damaged: Path) -> None:
    folder, records = step
    results = run_ranks(load_part, 2, str(folder), records)
    seen = {(name, index) for read, _ in results for name in read for index in read[name]}
    assert len(seen) == 3 < len(list(all_extents(records))), "one extent of each shard, and .metadata"
    verified = sum(end - begin for name, index in seen for begin, end in [records[name].span(index)])
    rest = sum(int(text.removeprefix("read ")) for _, text in results)
    assert verified + rest == sum(record.size for record in records.values())

    flip(damaged / "shard-00001.bin", records["shard-00001.bin"].size - 1)  # not where "uneven" is
    texts = [text for _, text in run_ranks(load_part, 2, str(damaged), records)]
    assert sum("shard-00001.bin is damaged" in text for text in texts) == 1


def save_with_a_full_disk(folder: str) -> str:
    """Rank 1 may write no file of more than 3 MB."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, limit[1]))
    try:
        save(folder, state_of(0))
    except CheckpointException as problem:
        return f"{type(unwrap(problem)).__name__}: {unwrap(problem)}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return "nothing was noticed"


def test_a_write_that_fails_on_one_rank_is_an_error_on_all_and_publishes_nothing(tmp_path: Path) -> None:
    expected = f"CheckpointError: rank 1: OSError: [Errno 27] File too large: '{tmp_path / 'shard-00001.bin'}'"
    assert run_ranks(save_with_a_full_disk, 2, str(tmp_path)) == [expected] * 2
    assert not (tmp_path / ".metadata").exists()


def load_missing(folder: str, records: dict[str, FileRecord]) -> str:
    try:
        dcp.load({"no such tensor": torch.zeros(3)}, storage_reader=ExtentReader(folder, records))
    except CheckpointException as problem:
        return f"{type(unwrap(problem)).__name__}: {unwrap(problem)}"
    return "nothing was noticed"


def test_missing_keys_are_not_damage(step: Any) -> None:
    for text in run_ranks(load_missing, 2, str(step[0]), step[1]):
        assert text.startswith("CheckpointError: rank 0: RuntimeError: Missing key")


def test_bytes_that_two_tensors_want_reach_both(tmp_path):
    """An extent is read where it shall be only where its boxes do not overlap."""
    state = {"a": torch.randn(3, 1000)}
    writer = ExtentWriter(tmp_path, 0)
    dcp.save(state, storage_writer=writer, no_dist=True)
    first, second = torch.zeros(3, 1000), torch.zeros(3, 1000)
    boxes = [_Box(0, torch.float32, (3, 1000), (0, 0), (3, 1000), target) for target in (first, second)]
    with ExtentSource(tmp_path / "shard-00000.bin", writer.records["shard-00000.bin"]) as source:
        _read_boxes(source, boxes)
    assert torch.equal(first, state["a"]) and torch.equal(second, state["a"])
