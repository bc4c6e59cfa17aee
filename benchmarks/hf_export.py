r"""Export to Hugging Face files, compared with a lower bound, a native step, and torch's writer.

    python benchmarks/hf_export.py [--rounds 5] [--gigabytes 2] [--ranks 2 ...] [--tp 1] \
            [--folder /tmp] [--cases ...]

The weights have the shapes of a Llama of dim 1536 in float32, sharded by FSDP2, or by FSDP2 and
tensor parallelism. Each round writes them with every variant to a new folder after a `sync`, so
that noise of the disk affects all variants equally. The table has medians of the seconds, and of
the ratio to the lower bound within a round. All variants call fsync, except torch's consolidation.
The last column has the bytes that a rank wrote to the disk, as the kernel counts them: a folder in
memory (tmpfs) has none. Several numbers of ranks (`--ranks 8 1`) export the same weights in turn, and
the last lines have the times of the first number relative to the others.

The lower bound is `safetensors.torch.save_file` of each rank's shard, one file per rank.
"""

from __future__ import annotations

import argparse
import json
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
    "input_layernorm": (DIM,), "post_attention_layernorm": (DIM,),
    "self_attn.q_proj": (DIM, DIM), "self_attn.k_proj": (KV_DIM, DIM),
    "self_attn.v_proj": (KV_DIM, DIM), "self_attn.o_proj": (DIM, DIM),
    "mlp.gate_proj": (FFN_DIM, DIM), "mlp.up_proj": (FFN_DIM, DIM), "mlp.down_proj": (DIM, FFN_DIM),
}  # fmt: skip
Write = Callable[[Path], object]


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model with as many layers as fit into `gigabytes`."""
    ends = {
        "model.embed_tokens.weight": (VOCAB, DIM),
        "lm_head.weight": (VOCAB, DIM),
        "model.norm.weight": (DIM,),
    }
    size = {
        key: sum(torch.Size(s).numel() for s in part.values()) * 4
        for key, part in (("e", ends), ("l", LAYER))
    }
    layers = max(1, round((gigabytes * 1e9 - size["e"]) / size["l"]))
    return ends | {
        f"model.layers.{i}.{k}.weight": s for i in range(layers) for k, s in LAYER.items()
    }


def build_variants(tensors: Mapping[str, Tensor], group: HostGroup, rank: int) -> dict[str, Write]:
    """Return functions that write the export to a new folder, by name."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    from torchtitan_like.checkpoint.dcp_storage import BalancedSavePlanner, ExtentWriter

    names, total = sorted(tensors, key=natural_key), sum(t.numel() * 4 for t in tensors.values())

    def lower_bound(folder: Path) -> None:
        path = folder / f"{rank}.safetensors"
        save_file({name: tensor.to_local() for name, tensor in tensors.items()}, path)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())

    def native(folder: Path) -> None:
        writer, planner = ExtentWriter(folder, rank), BalancedSavePlanner()
        dcp.save(
            dict(tensors), storage_writer=writer, planner=planner, process_group=group.group,
            no_dist=group.size == 1,
        )  # fmt: skip

    def direct(files: int) -> Write:
        limit = {
            "rows": tuple((name, name) for name in names),
            "tied": (),
            "dtype": None,
            "group": group,
        }
        size = 10**12 if files == 1 else total // files + 10**8 // files
        return lambda folder: write_export(folder, tensors, shard_bytes=size, **limit)

    def torch_writer(files: int) -> Write:
        numbers, written = {}, 0
        for name in names:
            numbers[name] = 1 + files * written // total
            written += tensors[name].numel() * 4

        def write(folder: Path) -> None:
            writer = dcp.HuggingFaceStorageWriter(
                str(folder),
                fqn_to_index_mapping=numbers,
                save_distributed=True,
                enable_consolidation=True,
            )
            dcp.save(dict(tensors), storage_writer=writer, process_group=group.group)

        return write

    variants: dict[str, Write] = {"floor": lower_bound, "native": native}
    for files in (1, 4):
        variants[f"direct, {files}"] = direct(files)
        variants[f"torch, {files}"] = torch_writer(files)
    return variants


def build_sharded(arguments: argparse.Namespace) -> dict[str, Tensor]:
    """Return random weights as DTensors over a mesh of (ranks / tp, tp)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    tp, dp = arguments.tp, arguments.ranks // arguments.tp
    mesh = init_device_mesh("cpu", (dp, tp))
    column, row = [_StridedShard(0, split_factor=tp), Shard(0)], [Shard(0), Shard(1)]
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes(arguments.gigabytes).items():
        placements = row if name.endswith(("o_proj.weight", "down_proj.weight")) else column
        num_shards = (dp, tp) if placements is row else (dp * tp, 1)
        if len(shape) == 1:
            placements, num_shards = [Shard(0), Replicate()], (dp,)
        local = torch.randn([size // num for size, num in zip(shape, num_shards, strict=True)])
        stride = torch.empty(shape, device="meta").stride()
        tensors[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
    return tensors


def measure(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Run every variant once per round on this rank; rank 0 prints the table and writes the times."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    group = HostGroup(list(range(arguments.ranks)), timedelta(minutes=5))
    tensors = build_sharded(arguments)
    variants = {
        n: w
        for n, w in build_variants(tensors, group, rank).items()
        if n == "floor" or n in arguments.cases.split(";")
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    written: dict[str, list[int]] = {}  # bytes of each rank in the last round
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(arguments.rounds + 1):
        for name, write in variants.items():
            target = Path(folder) / "export"
            if rank == 0:
                target.mkdir()
                os.sync()
            group.barrier()  # all ranks start after the sync
            start, cpu_start = time.perf_counter(), time.process_time()
            bytes_before = written_bytes()
            write(target)
            # Wait for the slowest rank.
            cpu[name].append(sum(group.gather_objects(time.process_time() - cpu_start)))
            seconds[name].append(time.perf_counter() - start)
            written[name] = group.gather_objects(written_bytes() - bytes_before)
            if rank == 0:
                shutil.rmtree(target)
    if rank == 0:
        print(
            f"{sum(t.numel() * 4 for t in tensors.values()) / 1e9:.2f} GB "
            f"in {len(tensors)} tensors\n"
        )
        report(seconds, cpu, written)
        medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        (Path(folder) / "medians.json").write_text(json.dumps(medians))
    group.destroy()
    dist.destroy_process_group()


def written_bytes() -> int:
    """Return the bytes that this process has written to disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["write_bytes"])


def report(
    seconds: dict[str, list[float]], cpu: dict[str, list[float]], written: dict[str, list[int]]
) -> None:
    """Print the table without the first round, which is a warm-up."""
    print(
        "| variant, files | s (min-max) | x lower bound (min-max) | CPU s of all ranks "
        "| MB a rank, min to max (max / mean) |\n|---|---|---|---|---|"
    )
    for name, values in seconds.items():
        ratios = [
            value / floor for value, floor in zip(values[1:], seconds["floor"][1:], strict=True)
        ]
        print(
            f"| {name} | {spread(values[1:])} | {spread(ratios)} "
            f"| {statistics.median(cpu[name][1:]):.2f} "
            f"| {min(written[name]) / 1e6:.1f} to {max(written[name]) / 1e6:.1f} "
            f"({max(written[name]) / max(1, statistics.mean(written[name])):.3f}) |"
        )


def spread(values: list[float]) -> str:
    """Format as median (min-max)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="interleaved rounds, after a warm-up round"
    )
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the float32 weights")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel degree")
    parser.add_argument(
        "--folder", help="folder on the measured disk (default: the system's temporary folder)"
    )
    every = ";".join(f"{way}, {files}" for files in (1, 4) for way in ("direct", "torch"))
    every += ";native"
    parser.add_argument("--cases", default=every, help=f"separated by semicolons: {every}")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    medians: dict[int, dict[str, float]] = {}
    for ranks in arguments.ranks:
        print(
            f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, "
            f"torch {torch.__version__}, Python {platform.python_version()}, "
            f"{ranks} ranks (tp {arguments.tp}), {arguments.rounds} rounds",
            flush=True,
        )
        case = argparse.Namespace(**{**vars(arguments), "ranks": ranks})
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            mp.spawn(measure, (case, folder), nprocs=ranks)
            medians[ranks] = json.loads((Path(folder) / "medians.json").read_text())
    first, *others = arguments.ranks
    for ranks in others:
        for name, seconds in medians[first].items():
            print(
                f"{name}: {first} ranks take {seconds / medians[ranks][name]:.2f} x the time of {ranks}"
            )


if __name__ == "__main__":
    main()
