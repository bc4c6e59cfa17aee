"""Export to Hugging Face files, compared with a lower bound and with torch's own writer.

    python benchmarks/hf_export.py [--rounds 5] [--gigabytes 2] [--ranks 2] [--tp 1] [--folder /tmp] [--cases ...]

The weights have the shapes of a Llama of dim 1536 in float32, sharded by FSDP2, or by FSDP2 and
tensor parallelism. Each round writes them in all ways, each time into a new folder after a `sync`,
so that noise of the disk affects all ways alike. The table gives medians over the rounds of the
seconds, and of the ratio to the lower bound within a round. All ways call fsync, except torch's
consolidation.

The lower bound is each rank writing its own shard with `safetensors.torch.save_file`, one file for
each rank.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from torchtitan_like.checkpoint.hf.export import write_export
from torchtitan_like.checkpoint.hf.plan import natural_key
from torchtitan_like.distributed.world import HostGroup

DIM, KV_DIM, FFN_DIM, VOCAB = 1536, 512, 4096, 32000
LAYER = {
    "input_layernorm": (DIM,), "post_attention_layernorm": (DIM,), "self_attn.q_proj": (DIM, DIM),
    "self_attn.k_proj": (KV_DIM, DIM), "self_attn.v_proj": (KV_DIM, DIM), "self_attn.o_proj": (DIM, DIM),
    "mlp.gate_proj": (FFN_DIM, DIM), "mlp.up_proj": (FFN_DIM, DIM), "mlp.down_proj": (DIM, FFN_DIM),
}  # fmt: skip
Write = Callable[[Path], object]


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """As many layers as fit."""
    ends = {"model.embed_tokens.weight": (VOCAB, DIM), "lm_head.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    size = {key: sum(torch.Size(s).numel() for s in part.values()) * 4 for key, part in (("e", ends), ("l", LAYER))}
    layers = max(1, round((gigabytes * 1e9 - size["e"]) / size["l"]))
    return ends | {f"model.layers.{i}.{k}.weight": s for i in range(layers) for k, s in LAYER.items()}


def ways(tensors: Mapping[str, Tensor], group: HostGroup, rank: int) -> dict[str, Write]:
    """Name -> what writes the export into a new folder."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    names, total = sorted(tensors, key=natural_key), sum(t.numel() * 4 for t in tensors.values())

    def floor(folder: Path) -> None:
        path = folder / f"{rank}.safetensors"
        save_file({name: tensor.to_local() for name, tensor in tensors.items()}, path)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())

    def ours(files: int) -> Write:
        limit = {"rows": tuple((name, name) for name in names), "tied": (), "dtype": None, "group": group}
        size = 10**12 if files == 1 else total // files + 10**8 // files
        return lambda folder: write_export(folder, tensors, shard_bytes=size, **limit)

    def torchs(files: int) -> Write:
        numbers, written = {}, 0
        for name in names:
            numbers[name] = 1 + files * written // total
            written += tensors[name].numel() * 4

        def write(folder: Path) -> None:
            writer = dcp.HuggingFaceStorageWriter(
                str(folder), fqn_to_index_mapping=numbers, save_distributed=True, enable_consolidation=True
            )
            dcp.save(dict(tensors), storage_writer=writer, process_group=group.group)

        return write

    found: dict[str, Write] = {"floor": floor}
    for files in (1, 4):
        found[f"direct, {files}"] = ours(files)
        found[f"torch, {files}"] = torchs(files)
    return found


def sharded(arguments: argparse.Namespace) -> dict[str, Tensor]:
    """Random weights as DTensors over a mesh of (ranks / tp, tp)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    tp, dp = arguments.tp, arguments.ranks // arguments.tp
    mesh = init_device_mesh("cpu", (dp, tp))
    column, row = [_StridedShard(0, split_factor=tp), Shard(0)], [Shard(0), Shard(1)]
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes(arguments.gigabytes).items():
        placements = row if name.endswith(("o_proj.weight", "down_proj.weight")) else column
        cuts = (dp, tp) if placements is row else (dp * tp, 1)
        if len(shape) == 1:
            placements, cuts = [Shard(0), Replicate()], (dp,)
        local = torch.randn([size // cut for size, cut in zip(shape, cuts, strict=True)])
        stride = torch.empty(shape, device="meta").stride()
        tensors[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
    return tensors


def measure(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """One rank: every way once a round; rank 0 prints."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    group = HostGroup(list(range(arguments.ranks)), timedelta(minutes=5))
    tensors = sharded(arguments)
    chosen = {n: w for n, w in ways(tensors, group, rank).items() if n == "floor" or n in arguments.cases.split(";")}
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    cpu: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(arguments.rounds + 1):
        for name, write in chosen.items():
            target = Path(folder) / "export"
            if rank == 0:
                target.mkdir()
                os.sync()
            group.barrier()  # no rank starts before the disk is quiet
            begin, cpu_begin = time.perf_counter(), time.process_time()
            write(target)
            cpu[name].append(sum(group.gather_objects(time.process_time() - cpu_begin)))  # the slowest rank ends it
            seconds[name].append(time.perf_counter() - begin)
            if rank == 0:
                shutil.rmtree(target)
    if rank == 0:
        print(f"{sum(t.numel() * 4 for t in tensors.values()) / 1e9:.2f} GB in {len(tensors)} tensors\n")
        report(seconds, cpu)
    group.destroy()
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]], cpu: dict[str, list[float]]) -> None:
    """The table; the first round is a warm-up."""
    print("| way, files | s (min-max) | x floor (min-max) | CPU s of all ranks |\n|---|---|---|---|")
    for name, values in seconds.items():
        ratios = [value / floor for value, floor in zip(values[1:], seconds["floor"][1:], strict=True)]
        print(f"| {name} | {spread(values[1:])} | {spread(ratios)} | {statistics.median(cpu[name][1:]):.2f} |")


def spread(values: list[float]) -> str:
    """Median (min-max)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one that is not counted")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of float32 weights")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks among them")
    parser.add_argument("--folder", help="on the disk to measure; default: the system's temporary folder")
    every = ";".join(f"{way}, {files}" for files in (1, 4) for way in ("direct", "torch"))
    parser.add_argument("--cases", default=every, help=f"separated by semicolons: {every}")
    arguments = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, Python "
          f"{platform.python_version()}, {arguments.ranks} ranks (tp {arguments.tp}), {arguments.rounds} rounds")  # fmt: skip
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        mp.spawn(measure, (arguments, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
