"""Answer what memory a configuration needs on a GPU, with dry runs of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchtitan_like.config import JobConfig
from torchtitan_like.models.spec import get_spec, has_experts, resolve_args
from torchtitan_like.plan import plan_report
from torchtitan_like.plan.dry_run import (
    DryRun,
    options_of,
    ranks_of_stages,
    record_ranks,
)
from torchtitan_like.plan.gpus import DEFAULT_GPU, Gpu, load_gpu
from torchtitan_like.plan.ledger import RankMemory, memory_of
from torchtitan_like.plan.record import Progress
from torchtitan_like.resolved import resolve_layout


def memory_lines(config: JobConfig, world_size: int) -> Iterator[str]:
    """Yield the lines that a job logs instead of training, for the default GPU.

    `run.log_memory_plan` calls this by name. Raises RuntimeError if it does not train.
    """
    gpu = load_gpu(DEFAULT_GPU)
    memories = plan_memory(config, world_size, gpu)
    notes = [*plan_report.allocator_note(gpu), *assumptions(config)]
    yield from plan_report.memory_lines(memories, gpu, notes)


def plan_memory(config: JobConfig, world_size: int, gpu: Gpu) -> list[RankMemory]:
    """Return the memory of one rank of each pipeline rank.

    Raises RuntimeError if the configuration does not train.
    """
    return memory_of_all(dry_runs(config, world_size, gpu), config, gpu)


def memory_of_all(runs: Sequence[DryRun], config: JobConfig, gpu: Gpu) -> list[RankMemory]:
    """Return the memory of each dry run of a configuration."""
    fuses = config.compile.compiles_model
    return [memory_of(run, device_type=gpu.device_type, fuses=fuses) for run in runs]


def dry_runs(
    config: JobConfig,
    world_size: int,
    gpu: Gpu,
    stages: Sequence[int] | None = None,
    progress: Progress = lambda *_: None,
) -> list[DryRun]:
    """Return the recordings of one rank of each pipeline rank in `stages`; None: of all.

    Raises RuntimeError if the configuration does not train.
    """
    ranks = ranks_of_stages(resolve_layout(config, world_size).dims)
    chosen = ranks if stages is None else [ranks[stage] for stage in stages]
    runs = record_ranks(config, world_size, chosen, progress=progress, **options_of(gpu))
    return list(runs.values())


def assumptions(config: JobConfig) -> list[str]:
    """Return what a dry run of this configuration assumes or leaves out."""
    notes = []
    model = config.model
    spec = get_spec(model.name)
    args: Any = resolve_args(spec, model.flavor, model.args)
    kernel = getattr(args, "attn_type", "sdpa")
    if kernel != "sdpa":
        notes.append(
            f'attn_type = "{kernel}": planned as causal attention over whole sequences. Windows, '
            "chunks and documents need less time"
        )
    if has_experts(spec, args):
        notes.append(
            "even routing assumed: all experts receive the same number of tokens. Uneven routing needs "
            "more memory and time"
        )
    if config.compile.compiles_model:
        notes.append(
            "compile.enable: rules say which results a compiled block keeps. torch.compile does "
            "not run"
        )
    if config.activation_checkpoint.mode == "memory_budget":
        notes.append(
            'activation_checkpoint.mode = "memory_budget": planned as "none", because '
            "torch.compile chooses what is kept. The run needs less memory"
        )
    if config.parallelism.enable_async_tensor_parallel:
        notes.append("enable_async_tensor_parallel: its buffers are not modeled")
    return notes
