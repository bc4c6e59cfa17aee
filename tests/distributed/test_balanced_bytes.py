"""Eight ranks write equally many bytes of a checkpoint on every layout."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.harness.rank_pool import run_in_new_processes
from torchtitan_like.checkpoint.dcp_storage import BalancedSavePlanner, ExtentWriter
from torchtitan_like.checkpoint.hf.plan import (
    assign_extents,
    describe_shards,
    group_by_size,
    lay_out_files,
    merge_shards,
    plan_copies,
    plan_tensors,
)
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.extents import EXTENT

RANKS = 8
# Layout: the shape of its mesh, the names of its dimensions, and the largest part of the export that
# may pass between ranks. A shard is shorter than an extent where ranks divide a small tensor, so its
# bytes must pass. Balance moves one percent more.
LAYOUTS = {
    "FSDP 8": ((8,), ("fsdp",), 0.42),
    "HSDP 2 x 4": ((2, 4), ("replicate", "fsdp"), 0.24),
    "DDP 8": ((8,), ("replicate",), 0.0),
    "FSDP 4 x TP 2": ((4, 2), ("fsdp", "tp"), 0.43),
    "PP 2 x FSDP 4": ((2, 4), ("pp", "fsdp"), 0.25),
    "EP 4 in FSDP 8": ((2, 4), ("expert_fsdp", "ep"), 0.47),
}


def shapes(dim: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of six blocks with dense and expert layers, and of both ends."""
    block = {
        "wq": (dim, dim), "wk": (dim // 4, dim), "wo": (dim, dim), "norm": (dim,),
        "w1": (2 * dim, dim), "w2": (dim, 2 * dim), "experts.w1": (8, dim // 2, dim), "bias": (8,),
    }  # fmt: skip
    tensors = {f"layers.{i}.{name}": shape for i in range(6) for name, shape in block.items()}
    return {"embed": (vocab, dim)} | tensors | {"norm": (dim,), "output": (vocab, dim)}


def shard(layout: str, dim: int, vocab: int, device: str) -> dict[str, Tensor]:
    """Return this rank's tensors of the layout, without values."""
    sizes, names, _ = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    whole = init_device_mesh("cpu", (RANKS,))
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes(dim, vocab).items():
        is_first_stage = name == "embed" or name.startswith(("layers.0", "layers.1", "layers.2"))
        if "pp" in names and is_first_stage != (mesh["pp"].get_local_rank() == 0):
            continue
        if name.endswith("bias"):  # a buffer, equal on all ranks
            tensors[name] = torch.empty(shape, device=device)
            continue
        is_row_wise = name.endswith(("wo", "w2"))
        on = {
            "fsdp": Shard(0),
            "replicate": Replicate(),
            "tp": Replicate() if len(shape) == 1 else Shard(1 if is_row_wise else 0),
            "expert_fsdp": Shard(1),
            "ep": Shard(0),
        }
        used, placements = mesh, [on[axis] for axis in names if axis != "pp"]
        if "pp" in names:
            used = mesh["fsdp"]
        elif "ep" in names and "experts" not in name:
            used, placements = whole, [Shard(0)]
        local = list(shape)
        for placement, size in zip(placements, used.mesh.shape, strict=True):
            if isinstance(placement, Shard):
                local[placement.dim] //= size
        tensors[name] = DTensor.from_local(
            torch.empty(local, device=device), used, placements, run_check=False,
            shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip
    return tensors


def count_bytes(layout: str, folder: str) -> tuple[list[int], list[int], float]:
    """Return the bytes of each rank, written natively and planned to be exported, and the part sent.

    The planned model has the size of a real one, 571 MB, and no values: an export is divided into
    extents of 4 MiB, and one extent is 10 % of the mean of eight ranks at 320 MiB.
    """
    rank = dist.get_rank()
    writer = ExtentWriter(folder, rank)
    state = {
        f"{name}.{kind}": tensor
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for name, tensor in shard(layout, 256, 4096, "cpu").items()
    }
    dcp.save(state, storage_writer=writer, planner=BalancedSavePlanner())
    native = sum(r.size for name, r in writer.records.items() if name.startswith("shard"))

    group = HostGroup(list(range(RANKS)), timedelta(seconds=20))
    infos, _ = describe_shards(shard(layout, 1280, 16384, "meta"))
    shards = merge_shards(group.gather_objects(infos), [str(r) for r in range(RANKS)])
    outputs = plan_tensors(shards, tuple((name, name) for name in shards), (), None)
    files = lay_out_files(outputs, group_by_size(outputs, 10**9))
    owners = assign_extents(files, outputs, RANKS)
    exported = Counter(dict.fromkeys(range(RANKS), 0))
    for (f, k), owner in owners.items():
        exported[owner] += min(EXTENT, files[f].size - k * EXTENT)
    sent = sum(
        copy.nbytes
        for copy in plan_copies(files, outputs, lambda extent, part: part.holders[0])
        if owners[copy.extent] not in copy.part.holders
    )
    return (
        group.gather_objects(native),
        [exported[r] for r in range(RANKS)],
        sent / sum(exported.values()),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_write_equally_many_bytes(layout: str, tmp_path: Path) -> None:
    native, exported, sent = run_in_new_processes(count_bytes, RANKS, layout, str(tmp_path))[0]
    for way, num_bytes in (("native", native), ("export", exported)):
        mean = sum(num_bytes) / RANKS
        assert max(num_bytes) <= 1.1 * mean and min(num_bytes) >= 0.9 * mean, (way, num_bytes)
    assert sent <= LAYOUTS[layout][2]
