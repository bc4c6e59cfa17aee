"""Host memory that checkpoints and exports need in addition to the shards does not grow with the model."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from tests.harness.rank_pool import run_in_process_of_its_own
from torchtitan_like.checkpoint.dcp_storage import ExtentReader, ExtentWriter, load_planned
from torchtitan_like.checkpoint.extents import EXTENT
from torchtitan_like.checkpoint.hf import export as export_module
from torchtitan_like.checkpoint.hf.export import write_export
from torchtitan_like.checkpoint.hf.load import load_hf
from torchtitan_like.checkpoint.hf.reads import MAX_ELEMENTS
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.distributed.initialize import materialize
from torchtitan_like.distributed.world import HostGroup

MIB = 2**20
RANKS, NUM_TENSORS = 4, 4
LARGE = (2048, 1024)  # rows of one rank and columns
LOCAL = LARGE[0] * LARGE[1] * 4  # bytes of one tensor on one rank, as float32
SHARD = NUM_TENSORS * LOCAL
OTHER_SHARDS = (RANKS - 1) * SHARD
# Python objects, gloo's sockets and free pages of the C heap: up to 4.1 MiB was seen. Tensors are not
# part of it, see `map_large_blocks`. One shard held twice would add 32 MiB.
SLACK = 8 * MIB
BOUNDS = {
    "save": EXTENT + SLACK,  # host tensors are written from where they are
    "load": EXTENT + SLACK,  # and read to where they are
    # The extent being written; messages of two rounds of one extent a rank, sent and received.
    "export": EXTENT + 4 * EXTENT + SLACK,
    # The shard; the piece being read and the one before it.
    "build and load the export": SHARD + 2 * min(4 * MAX_ELEMENTS, LOCAL) + SLACK,
}


def status(key: str) -> int:
    """VmRSS (resident memory) or VmHWM (its peak) of this process in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def map_large_blocks() -> None:
    """Let the C library return every freed block of 128 KiB and more to the system at once.

    By default glibc raises that limit to the size of each freed block, up to 32 MiB. Freed tensors then
    stay resident, and how many of them depends on the timing of the threads.
    """
    M_MMAP_THRESHOLD = -3  # from malloc.h; setting it also turns the adaptation off
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024) == 1


def growth(action: Callable[[], object]) -> int:
    """Peak of resident memory during `action`, less what was resident before, in bytes."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def sharded(shape: tuple[int, int]) -> dict[str, DTensor]:
    """Tensors whose local rows have that shape; every page of them is resident."""
    mesh = init_device_mesh("cpu", (RANKS,))
    return {
        f"layers.{i}.w": DTensor.from_local(torch.full(shape, float(dist.get_rank())), mesh, [Shard(0)])
        for i in range(NUM_TENSORS)
    }


class Layers(nn.Sequential):
    """A model without buffers."""

    def init_buffers(self, device: torch.device) -> None:
        pass


def build_and_load(export: Path, shape: tuple[int, int], votes: Votes) -> None:
    """As a run does: on meta, sharded, then given memory, then filled."""
    with torch.device("meta"):
        layers = [nn.Linear(shape[1], RANKS * shape[0], bias=False) for _ in range(NUM_TENSORS)]
        model = Layers(*layers)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    materialize(model, torch.device("cpu"))
    state = model.state_dict()
    rows = tuple((f"{i}.weight", f"layers.{i}.w") for i in range(NUM_TENSORS))
    load_hf(export, state, rows=rows, tied=(), quantized=False, votes=votes)
    assert all((tensor.to_local() == dist.get_rank()).all() for tensor in state.values())


def measure(folder: Path, shape: tuple[int, int], group: HostGroup) -> dict[str, int]:
    """Extra memory of each action on this rank, in bytes."""
    state, found = sharded(shape), {}
    native, export = folder / "native", folder / "hf"
    writer = ExtentWriter(native, dist.get_rank())
    if dist.get_rank() == 0:
        native.mkdir(parents=True)
    dist.barrier()
    found["save"] = growth(lambda: dcp.save(dict(state), storage_writer=writer))
    records = {k: v for part in group.gather_objects(writer.records) for k, v in part.items()}
    reader, planner = ExtentReader(native, records), dcp.DefaultLoadPlanner()
    found["load"] = growth(lambda: load_planned(dict(state), reader, planner))
    rows = tuple((name, name) for name in state)
    found["export"] = growth(lambda: write_export(export, state, rows=rows, tied=(), dtype=None, group=group))
    state.clear()
    votes = Votes(group)
    found["build and load the export"] = growth(lambda: build_and_load(export, shape, votes))
    return found


def growths(folder: str) -> dict[str, int]:
    """What `measure` finds for large tensors; tiny ones come first, so that imports do not count."""
    map_large_blocks()
    export_module.EXTENTS_PER_ROUND = 1  # in a process of its own
    group = HostGroup(list(range(RANKS)), timedelta(seconds=25))
    measure(Path(folder) / "tiny", (1, 2), group)
    return measure(Path(folder) / "large", LARGE, group)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_rank_needs_memory_for_the_shards_of_others(tmp_path: Path) -> None:
    assert max(BOUNDS.values()) < OTHER_SHARDS
    ranks = run_in_process_of_its_own(growths, RANKS, str(tmp_path))
    print([{name: round(size / MIB, 1) for name, size in found.items()} for found in ranks])
    for found in ranks:
        assert {name: size for name, size in found.items() if size > BOUNDS[name]} == {}
