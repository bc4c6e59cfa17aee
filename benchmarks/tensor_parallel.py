"""Tensor and data parallelism on two ranks, compared with a model sharded with torch's API.

    python benchmarks/tensor_parallel.py [--rounds 9] [--steps 4] [--kinds "tp + sp" tp fsdp]

The reference uses `parallelize_module` with ColwiseParallel, RowwiseParallel, SequenceParallel, and
`loss_parallel`. It calls `fully_shard` on each block, the embedding, and the head, like TorchTitan.
It uses `nn.RMSNorm` and `F.cross_entropy`. A step is forward and backward.

Each round measures both in the same two processes, so that noise affects both equally. The table
has medians of the times, and of the ratio within a round. One thread per rank, gloo, float32.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from torchtitan_like.distributed.data_parallel import apply_data_parallel
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.distributed.parallelize import find_blocks
from torchtitan_like.distributed.tensor_parallel import apply_tensor_parallel
from torchtitan_like.models.layers.norm import RMSNorm
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.optim.loss import VocabShards, chunked_cross_entropy

SEQ, BATCH, VOCAB = 512, 4, 8192
SPEC = get_spec("llama3")
ARGS = resolve_args(SPEC, "debugmodel", {"n_layers": 4, "vocab_size": VOCAB, "max_seq_len": SEQ})
KINDS = ["tp + sp", "tp", "fsdp"]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def build() -> Any:
    with torch.device("meta"):
        return SPEC.build(ARGS)


def with_initial_weights(model: Any) -> Any:
    materialize(model, torch.device("cpu"))
    initialize(model, SPEC.init_table(ARGS), seed=0)
    return model


def trainer_step(kind: str, mesh: Any) -> Step:
    """Return a step of the model sharded by this package."""
    model = build()
    shards = VocabShards(mesh.get_group(), VOCAB) if kind.startswith("tp") else None
    model.output.loss = chunked_cross_entropy(256, None, shards)
    if kind == "fsdp":
        blocks, dims = find_blocks(model, SPEC).values(), ParallelDims(2, dp_shard=2)
        options = {"param_dtype": "float32", "reduce_dtype": "float32", "cpu_offload": False}
        apply_data_parallel(model, SPEC, blocks, mesh, dims, reshard="default", **options)
    else:
        apply_tensor_parallel(model, SPEC, mesh, sequence_parallel=kind == "tp + sp")
    model = with_initial_weights(model)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens, labels)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


def handwritten_step(kind: str, mesh: Any) -> Step:
    """Return a step of the model sharded with torch's API."""
    model = build()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RMSNorm):
                setattr(module, name, nn.RMSNorm(ARGS.dim, ARGS.norm_eps, device="meta"))
    if kind == "fsdp":
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model.tok_embeddings, mesh=mesh)
        fully_shard([model.norm, model.output], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
    else:
        shard_by_hand(model, mesh, sequence_parallel=kind == "tp + sp")
    model = with_initial_weights(model)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if kind == "fsdp":
            loss: torch.Tensor = F.cross_entropy(
                model(tokens).flatten(0, 1), labels.flatten(), reduction="sum"
            )
            loss.backward()
        else:
            with loss_parallel():
                loss = F.cross_entropy(
                    model(tokens).flatten(0, 1), labels.flatten(), reduction="sum"
                )
                loss.backward()
            # The gradients of norms are partial sums over the sharded sequence.
            for parameter in model.parameters():
                if isinstance(parameter.grad, DTensor):
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        model.zero_grad()
        return loss.detach()

    return step


def shard_by_hand(model: Any, mesh: Any, *, sequence_parallel: bool) -> None:
    hidden_layout = Shard(1) if sequence_parallel else Replicate()
    norm = (
        {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        if sequence_parallel
        else {}
    )
    feed_forward_input = PrepareModuleInput(
        input_layouts=(hidden_layout,), desired_input_layouts=(Replicate(),)
    )
    row_parallel = RowwiseParallel(output_layouts=hidden_layout)
    end_modules = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden_layout),
        "output": ColwiseParallel(
            input_layouts=hidden_layout, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(
        model, mesh, end_modules | ({"norm": SequenceParallel()} if sequence_parallel else {})
    )
    for block in model.layers.values():
        attention = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        feed_forward = {"feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel()}
        rows = {"attention.wo": row_parallel, "feed_forward.w2": row_parallel}
        others = [None] * (len(inspect.signature(block.attention.forward).parameters) - 1)
        attention_input = PrepareModuleInput(
            input_layouts=(hidden_layout, *others), desired_input_layouts=(Replicate(), *others)
        )
        parents = {"attention": attention_input, "feed_forward": feed_forward_input}
        parallelize_module(block, mesh, norm | parents | attention | feed_forward | rows)


def measure_times(
    step: Step, batch: tuple[torch.Tensor, torch.Tensor], num_steps: int
) -> tuple[float, float]:
    """Return the (wall, CPU) milliseconds of a step on this rank."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        step(*batch)
    return 1e3 * (time.perf_counter() - wall) / num_steps, 1e3 * (
        time.process_time() - cpu
    ) / num_steps


def work(rank: int, store: str, rounds: int, num_steps: int, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    if rank == 0:
        print(
            "| case | trainer, ms (CPU) | handwritten, ms (CPU) | ratio (CPU) |\n"
            "| --- | --- | --- | --- |"
        )
    for kind in kinds:
        mesh = init_device_mesh(
            "cpu", (2,), mesh_dim_names=("dp_shard" if kind == "fsdp" else "tp",)
        )
        generator = torch.Generator().manual_seed(rank if kind == "fsdp" else 0)
        tokens, labels = torch.randint(VOCAB, (2, BATCH, SEQ), generator=generator)
        steps = [trainer_step(kind, mesh), handwritten_step(kind, mesh)]
        first, second = (side(tokens, labels) for side in steps)
        assert abs(float(first / second) - 1) < 1e-5, (kind, first, second)
        times = [
            [measure_times(side, (tokens, labels), num_steps) for side in steps]
            for _ in range(rounds)
        ]
        if rank == 0:
            print(f"| {kind} | {cells(times, rounds)} |", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads can block a normal exit


def cells(times: list[list[tuple[float, float]]], rounds: int) -> str:
    def median(value: Callable[[list[tuple[float, float]]], float]) -> float:
        return statistics.median(map(value, times))

    medians = [
        f"{median(lambda r, s=s: r[s][0]):.0f} ({median(lambda r, s=s: r[s][1]):.0f})"
        for s in (0, 1)
    ]
    ratios = [median(lambda r, i=i: r[0][i] / r[1][i]) for i in (0, 1)]
    return f"{medians[0]} | {medians[1]} | {ratios[0]:.2f} ({ratios[1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    store = f"/tmp/tensor-parallel-{os.getpid()}"
    mp.start_processes(
        work, (store, options.rounds, options.steps, options.kinds), nprocs=2, start_method="fork"
    )


if __name__ == "__main__":
    main()
