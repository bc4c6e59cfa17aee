"""DCP storage: save, load and verify all kinds of values on all layouts, and detect damage."""

from __future__ import annotations

import functools
import math
import os
import pickle
import re
import resource
from datetime import timedelta
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
from torchtitan_like.checkpoint import verification
from torchtitan_like.checkpoint.dcp_metadata import read_metadata
from torchtitan_like.checkpoint.dcp_source import StepSource
from torchtitan_like.checkpoint.dcp_storage import BOUNCE, ExtentWriter, _Bounce
from torchtitan_like.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    unwrap,
    with_checkpoint_errors,
)
from torchtitan_like.checkpoint.source import Read
from torchtitan_like.checkpoint.verification import (
    all_extents,
    check_sizes,
    verify_rest,
)
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.boxes import slices, whole
from torchtitan_like.util.extents import EXTENT, FileRecord

# name: (shape, dtype). All tensors except scalars are sharded over the ranks.
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
    "eighth": ((6, 5), torch.float8_e4m3fn),
    "unsigned": ((2, 11), torch.uint16),
    "complex": ((4, 5), torch.complex64),
    "scalar": ((), torch.float32),
    "step": ((), torch.int32),
}
OBJECTS = {"json": '{"position": 12}', "numbers": [1, 2.5], "large": "x" * (EXTENT + 5)}


@functools.cache
def full_tensor(name: str) -> torch.Tensor:
    """Return the full tensor, equal on every rank."""
    shape, dtype = TENSORS[name]
    numbers = torch.arange(1, math.prod(shape) + 1).reshape(shape)
    return (numbers % 7 < 3) if dtype == torch.bool else (numbers % 251).to(dtype)


def build_state(dim: int | None, fill: bool = True) -> dict[str, Any]:
    """Return all tensors as DTensors sharded along `dim`, a plain tensor, and the objects.

    `dim=None` replicates the DTensors. `fill=False` returns zeros and empty objects to load into.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {"plain": torch.arange(5.0)} | OBJECTS
    for name, (shape, _) in TENSORS.items():
        placement = Shard(min(dim, len(shape) - 1)) if dim is not None and shape else Replicate()
        state[name] = distribute_tensor(full_tensor(name), mesh, [placement], src_data_rank=None)
    if not fill:
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                (value.to_local() if isinstance(value, DTensor) else value).zero_()
            else:
                state[name] = ""
    return state


def save(folder: str, state: dict[str, Any]) -> dict[str, FileRecord]:
    """Save on all ranks and return the file records of all ranks."""
    writer = ExtentWriter(folder, dist.get_rank())
    dcp.save(state, storage_writer=writer)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, writer.records)
    return {name: record for records in gathered for name, record in records.items()}


def save_state(folder: str, dim: int | None) -> dict[str, FileRecord]:
    return save(folder, build_state(dim))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, FileRecord]]:
    """A step saved by 2 ranks, sharded by rows."""
    folder = tmp_path_factory.mktemp("step")
    return folder, run_ranks(save_state, 2, str(folder), 0)[0]


def load_state(folder: str, records: dict[str, FileRecord], dim: int | None) -> list[str]:
    """Load all values and return the names of values that differ from the saved values."""
    state = load_into(build_state(dim, fill=False), StepSource(Path(folder), records))
    expected = build_state(dim)
    return [name for name in expected if not is_equal(state[name], expected[name])]


def load_into(state: dict[str, Any], source: StepSource) -> dict[str, Any]:
    """Load all tensors of a state in place. Returns the state with all objects."""
    check_sizes(source.path, source.records)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    source.fill_tensors(tensors)
    return tensors | source.read_objects(name for name in state if name not in tensors)


def is_equal(value: Any, expected: Any) -> bool:
    if isinstance(expected, DTensor):
        return is_equal(value.to_local(), expected.to_local())
    if not isinstance(expected, torch.Tensor):
        return bool(value == expected)
    is_alike = (value.dtype, value.shape) == (expected.dtype, expected.shape)
    return is_alike and torch.equal(*(bits(tensor) for tensor in (value, expected)))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor. Not all dtypes can be compared."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_checkpoint_loads_on_every_layout(step: Any, ranks: int, dim: int | None) -> None:
    folder, records = step
    assert run_ranks(load_state, ranks, str(folder), records, dim) == [[]] * ranks


@pytest.mark.parametrize("dim", [0, 1, None])
def test_checkpoint_saved_on_any_layout_loads_on_one_rank(tmp_path: Path, dim: int | None) -> None:
    records = run_ranks(save_state, 2, str(tmp_path), dim)[0]
    assert run_ranks(load_state, 1, str(tmp_path), records, 0) == [[]]


def test_files_contain_each_element_exactly_once(step: Any) -> None:
    folder, records = step
    assert sorted(os.listdir(folder)) == [".metadata", "shard-00000.bin", "shard-00001.bin"]
    source = StepSource(folder, records)
    chunks = [chunk for name in TENSORS for chunk in source.stored[name].chunks]
    metadata = read_metadata(folder)
    spans = sorted(
        (chunk.file, chunk.start, chunk.start + chunk.length)
        for chunk in (
            *metadata.objects.values(),
            *(chunk for entry in metadata.tensors.values() for chunk in entry.chunks),
        )
    )
    for (name, _, end), (next_name, start, _) in zip(spans, spans[1:], strict=False):
        assert start % 64 == 0 and (start >= end if name == next_name else start == 0)
    lengths = [chunk.length for chunk in chunks]
    num_bytes = sum(full_tensor(name).nbytes for name in TENSORS)
    assert num_bytes < sum(lengths) < num_bytes + 1100 * len(lengths)


def save_live_and_staged(live: str, staged: str) -> None:
    """Save equal values twice, from tensors with different strides, storage and `requires_grad`."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    local = torch.randn(40, 30) + rank
    views = {
        "a": local[3:7].requires_grad_(),
        "b": local.t(),
        "c": local[:, ::2],
        "d": torch.ones(3).expand(5, 3),
    }
    copies = {
        name: view.detach().clone(memory_format=torch.contiguous_format)
        for name, view in views.items()
    }
    for folder, tensors in ((live, views), (staged, copies)):
        state = {
            n: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for n, t in tensors.items()
        }
        save(folder, state | OBJECTS)


def test_live_state_and_staged_copy_give_the_same_bytes(tmp_path: Path) -> None:
    live, staged = tmp_path / "live", tmp_path / "staged"
    for folder in (live, staged):
        folder.mkdir()
    run_ranks(save_live_and_staged, 2, str(live), str(staged))
    assert len(os.listdir(live)) == 3
    for name in os.listdir(live):
        assert (live / name).read_bytes() == (staged / name).read_bytes(), name


def save_slice(folder: str) -> tuple[int, dict[str, FileRecord]]:
    writer = ExtentWriter(folder, dist.get_rank())
    dcp.save({"row": torch.zeros(1000, 1000)[5]}, storage_writer=writer)
    return dist.get_rank(), writer.records


def test_slice_stores_only_its_bytes_and_idle_ranks_write_no_file(
    tmp_path: Path,
) -> None:
    (_, first), (_, second) = run_ranks(save_slice, 2, str(tmp_path))
    assert first["shard-00000.bin"].size < 4000 + 1100
    assert second == {}
    assert sorted(os.listdir(tmp_path)) == [".metadata", "shard-00000.bin"]


def test_large_strided_tensor_is_copied_in_bounded_pieces() -> None:
    tensor = torch.arange(3 * 4_000_000, dtype=torch.int32).view(2, -1, 2).permute(2, 0, 1)
    lengths, start = [], 0
    for piece in _Bounce().pieces(tensor):
        assert torch.equal(
            torch.frombuffer(piece, dtype=torch.int32),
            tensor.flatten()[start : start + len(piece) // 4],
        )
        lengths.append(len(piece))
        start += len(piece) // 4
    assert sum(lengths) == tensor.nbytes and max(lengths) <= BOUNCE


def load_damaged(folder: str, records: dict[str, FileRecord]) -> tuple[type[Exception], str, bool]:
    """Return the error's class, its message, and whether any tensor was changed."""
    state = build_state(0, fill=False)
    ranks = list(range(dist.get_world_size()))
    group = with_checkpoint_errors(HostGroup(ranks, timedelta(seconds=25)))
    try:
        group.run_on_all(lambda: load_into(state, StepSource(Path(folder), records)))
    except CheckpointError as error:
        is_unchanged = all(
            not value.to_local().any() for value in state.values() if isinstance(value, DTensor)
        )
        return type(error), str(error), not is_unchanged
    finally:
        group.destroy()
    raise AssertionError("the damage was not detected")


@pytest.fixture
def damaged(step: Any, tmp_path: Path) -> Path:
    """Return a copy of the step that a test may damage."""
    for name in os.listdir(step[0]):
        (tmp_path / name).write_bytes((step[0] / name).read_bytes())
    return tmp_path


def flip_bit(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "offset", "text"),
    [
        ("shard-00000.bin", 0, r"shard-00000.bin is damaged: extent 0 \(bytes 0 to 4194304\)"),
        (
            "shard-00001.bin",
            EXTENT + 5,
            r"shard-00001.bin is damaged: extent 1 \(bytes 4194304 to \d+\)",
        ),
        (".metadata", 100, r"\.metadata is damaged: extent 0"),
    ],
)
def test_flipped_bit_is_an_error_on_every_rank(
    step: Any, damaged: Path, name: str, offset: int, text: str
) -> None:
    flip_bit(damaged / name, offset)
    for kind, message, _ in run_ranks(load_damaged, 2, str(damaged), step[1]):
        assert kind is DamagedError
        assert re.search(text, message), message


@pytest.mark.parametrize("name", ["shard-00000.bin", "shard-00001.bin", ".metadata"])
@pytest.mark.parametrize("change", ["missing", "truncated", "longer"])
def test_wrong_file_length_is_an_error_before_any_read(
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
        expected = (
            f"{path} is missing. Expected "
            if size is None
            else f"{path} has {size} bytes. Expected "
        )
        assert expected in message


class Intruder:
    """An object whose pickle creates a folder when it is loaded."""

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
    assert (damaged / "harm").exists(), "the test's pickle has no effect"


def load_part(folder: str, records: dict[str, FileRecord]) -> tuple[dict[str, set[int]], str]:
    """Load one tensor, then verify all other extents.

    Return the extents that this rank read, and the error of the verification or its number of
    bytes.
    """
    source = StepSource(Path(folder), records)
    tensor = distribute_tensor(
        torch.zeros(5, 3), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
    )
    source.fill_tensors({"uneven": tensor})
    group = HostGroup.alone()
    group.group, group.size = dist.group.WORLD, 2
    with mock.patch.object(
        verification, "find_damage", wraps=verification.find_damage
    ) as find_damage_mock:
        try:
            verify_rest(Path(folder), records, source.verified, group)
        except DamagedError as error:
            return source.verified, str(error)
    *_, extents = find_damage_mock.call_args.args
    return (
        source.verified,
        f"read {sum(end - start for name, k in extents for start, end in [records[name].span(k)])}",
    )


def test_load_reads_only_needed_extents_and_verify_reads_the_rest(step: Any, damaged: Path) -> None:
    folder, records = step
    results = run_ranks(load_part, 2, str(folder), records)
    extents_read = {(name, index) for read, _ in results for name in read for index in read[name]}
    assert len(extents_read) == 3 < len(list(all_extents(records))), (
        "expected one extent of each shard, and .metadata"
    )
    num_verified = sum(
        end - start for name, index in extents_read for start, end in [records[name].span(index)]
    )
    num_rest = sum(int(text.removeprefix("read ")) for _, text in results)
    assert num_verified + num_rest == sum(record.size for record in records.values())

    # The tensor "uneven" is not in the last byte.
    flip_bit(damaged / "shard-00001.bin", records["shard-00001.bin"].size - 1)
    texts = [text for _, text in run_ranks(load_part, 2, str(damaged), records)]
    assert sum("shard-00001.bin is damaged" in text for text in texts) == 1


def save_with_a_full_disk(folder: str) -> str:
    """Save with a file size limit of 3 MB on rank 1; return the error."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, limit[1]))
    try:
        save(folder, build_state(0))
    except CheckpointException as problem:
        return f"{type(unwrap(problem)).__name__}: {unwrap(problem)}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return "no error"


def test_failed_write_on_one_rank_is_an_error_on_all_ranks(
    tmp_path: Path,
) -> None:
    expected = (
        f"CheckpointError: rank 1: {tmp_path / 'shard-00001.bin'}: File too large. Expected a "
        "smaller file. Choose another path, or raise the limit (ulimit -f)."
    )
    assert run_ranks(save_with_a_full_disk, 2, str(tmp_path)) == [expected] * 2
    assert not (tmp_path / ".metadata").exists()


def test_two_tensors_with_the_same_bytes_are_both_filled(tmp_path):
    """The source uses a copy of the extent if boxes overlap, instead of reading into the tensor."""
    state = {"a": torch.randn(3, 1000)}
    writer = ExtentWriter(tmp_path, 0)
    dcp.save(state, storage_writer=writer, no_dist=True)
    first, second = torch.zeros(3, 1000), torch.zeros(3, 1000)
    source = StepSource(tmp_path, writer.records)
    source.fill(Read("a", whole(target.shape), target) for target in (first, second))
    assert torch.equal(first, state["a"]) and torch.equal(second, state["a"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_box_is_read_into_any_view_and_dtype(tmp_path, dtype):
    """The box crosses an extent, has steps, and its target is transposed."""
    state = {"a": torch.randn(5, 1100, 300)}
    writer = ExtentWriter(tmp_path, 0)
    dcp.save(state, storage_writer=writer, no_dist=True)
    target = torch.zeros(4, 150, 500, dtype=dtype).mT
    box = ((1, 4, 1), (90, 500, 2), (0, 150, 2))
    StepSource(tmp_path, writer.records).fill([Read("a", box, target)])
    assert torch.equal(target, state["a"][slices(box)].to(dtype))
