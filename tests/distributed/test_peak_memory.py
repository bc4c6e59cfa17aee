"""Checkpoints and exports need bounded host memory in addition to the shards."""

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

from tests.harness.hf_weights import load_hf
from tests.harness.memory import peak_resident_bytes, reset_peak, resident_bytes
from tests.harness.rank_pool import run_in_new_processes
from torchtitan_like.checkpoint.dcp_source import StepSource
from torchtitan_like.checkpoint.dcp_storage import ExtentWriter
from torchtitan_like.checkpoint.errors import with_checkpoint_errors
from torchtitan_like.checkpoint.hf import export as export_module
from torchtitan_like.checkpoint.hf.export import write_export
from torchtitan_like.checkpoint.hf.load import MAX_ELEMENTS
from torchtitan_like.distributed.initialize import materialize
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.extents import EXTENT

MIB = 2**20
RANKS, NUM_TENSORS = 4, 4
LARGE = (2048, 1024)  # rows of one rank and columns
LOCAL = LARGE[0] * LARGE[1] * 4  # bytes of one tensor on one rank, as float32
SHARD = NUM_TENSORS * LOCAL
OTHER_SHARDS = (RANKS - 1) * SHARD
# Python objects, gloo's sockets and free pages of the C heap: at most 4.1 MiB in measurements.
# Freed tensors do not count, see `return_freed_blocks`. A second copy of a shard would add 32 MiB.
SLACK = 8 * MIB
BOUNDS = {
    "save": EXTENT + SLACK,  # host tensors are written without a copy
    "load": EXTENT + SLACK,  # and read in place
    # The extent being written, and the sent and received messages of two rounds of one extent.
    "export": EXTENT + 4 * EXTENT + SLACK,
    # The shard, the chunk being read and the previous chunk.
    "build and load the export": SHARD + 2 * min(4 * MAX_ELEMENTS, LOCAL) + SLACK,
}


def return_freed_blocks() -> None:
    """Make the C library return every freed block of at least 128 KiB to the system immediately.

    By default glibc raises that limit to the size of each freed block, up to 32 MiB. Freed tensors
    then stay resident, and their number depends on thread timing.
    """
    M_MMAP_THRESHOLD = -3  # from malloc.h; setting it also disables the adaptation
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024) == 1


def growth(action: Callable[[], object]) -> int:
    """Return the growth of resident memory during `action`: peak minus start, in bytes."""
    reset_peak()
    before = resident_bytes()
    action()
    return peak_resident_bytes() - before


def sharded(shape: tuple[int, int]) -> dict[str, DTensor]:
    """Return sharded tensors whose local shards have this shape; all their pages are resident."""
    mesh = init_device_mesh("cpu", (RANKS,))
    return {
        f"layers.{i}.w": DTensor.from_local(
            torch.full(shape, float(dist.get_rank())), mesh, [Shard(0)]
        )
        for i in range(NUM_TENSORS)
    }


class Layers(nn.Sequential):
    """A model without buffers."""

    def init_buffers(self, device: torch.device) -> None:
        pass


def build_and_load(export: Path, shape: tuple[int, int], group: HostGroup) -> None:
    """Build on the meta device, shard, materialize and load, in the order of a run."""
    with torch.device("meta"):
        layers = [nn.Linear(shape[1], RANKS * shape[0], bias=False) for _ in range(NUM_TENSORS)]
        model = Layers(*layers)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    materialize(model, torch.device("cpu"))
    state = model.state_dict()
    rows = tuple((f"{i}.weight", f"layers.{i}.w") for i in range(NUM_TENSORS))
    load_hf(export, state, rows=rows, tied=(), quantized=False, group=group)
    assert all((tensor.to_local() == dist.get_rank()).all() for tensor in state.values())


def measure(folder: Path, shape: tuple[int, int], group: HostGroup) -> dict[str, int]:
    """Return the extra memory of each action on this rank, in bytes."""
    state, growth_by_action = sharded(shape), {}
    native, export = folder / "native", folder / "hf"
    writer = ExtentWriter(native, dist.get_rank())
    if dist.get_rank() == 0:
        native.mkdir(parents=True)
    dist.barrier()
    growth_by_action["save"] = growth(lambda: dcp.save(dict(state), storage_writer=writer))
    records = {k: v for part in group.gather_objects(writer.records) for k, v in part.items()}
    source = StepSource(native, records)
    growth_by_action["load"] = growth(lambda: source.fill_tensors(state))
    rows = tuple((name, name) for name in state)
    growth_by_action["export"] = growth(
        lambda: write_export(export, state, rows=rows, tied=(), dtype=None, group=group)
    )
    state.clear()
    group = with_checkpoint_errors(group)
    growth_by_action["build and load the export"] = growth(
        lambda: build_and_load(export, shape, group)
    )
    return growth_by_action


def measure_large(folder: str) -> dict[str, int]:
    """Measure with large tensors, after a run with tiny ones that excludes imports."""
    return_freed_blocks()
    export_module.EXTENTS_PER_ROUND = 1  # this process runs no other test
    group = HostGroup(list(range(RANKS)), timedelta(seconds=25))
    measure(Path(folder) / "tiny", (1, 2), group)
    return measure(Path(folder) / "large", LARGE, group)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ranks_need_no_memory_for_shards_of_other_ranks(tmp_path: Path) -> None:
    assert max(BOUNDS.values()) < OTHER_SHARDS
    ranks = run_in_new_processes(measure_large, RANKS, str(tmp_path))
    print(
        [
            {name: round(size / MIB, 1) for name, size in growth_by_action.items()}
            for growth_by_action in ranks
        ]
    )
    for growth_by_action in ranks:
        assert {name: size for name, size in growth_by_action.items() if size > BOUNDS[name]} == {}
