"""Run the trainer's own steps of one rank on a device that does not exist, and record them."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from torchtitan_like.build import (
    build_optimization,
    build_sharded_model,
    build_update_gate,
    model_sections,
)
from torchtitan_like.config import JobConfig
from torchtitan_like.data.batches.batch import Batch
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.world import World
from torchtitan_like.models.spec import has_experts, needs_positions
from torchtitan_like.optim.balancing import describe_layers
from torchtitan_like.optim.optimizer import Optimizer
from torchtitan_like.plan.fake import (
    DEVICE_TYPE,
    MirrorGroup,
    faking,
    join_fake_world,
    register_device,
)
from torchtitan_like.plan.gpus import Gpu
from torchtitan_like.plan.record import Progress, Recorder, Recording
from torchtitan_like.resolved import Run, resolve_layout
from torchtitan_like.step import StepRunner
from torchtitan_like.util.host import num_cores
from torchtitan_like.util.plan_file import ModuleBytes
from torchtitan_like.util.units import MIB


@dataclass(frozen=True)
class DryRun:
    """The recording of one rank. modules: bytes that stay in memory between its steps."""

    rank: int
    dims: ParallelDims
    recording: Recording
    modules: ModuleBytes


def ranks_of_stages(dims: ParallelDims) -> list[int]:
    """Return one rank of each pipeline rank. The first shards and chunks are the largest."""
    return [stage * (dims.world_size // dims.pp) for stage in range(dims.pp)]


def record_rank(
    config: JobConfig,
    world_size: int,
    rank: int,
    *,
    device_type: str = DEVICE_TYPE,
    matmul_workspace: int = 0,
    num_steps: int = 2,
) -> DryRun:
    """Build the model of one rank and train `num_steps` steps under fake tensors.

    Call it in a process of its own: the process groups and the device remain.

    device_type: "dryrun" takes the code paths of a GPU, "cpu" those of a CPU rank.
    matmul_workspace: see `Recorder`.
    """
    run = resolve_layout(_as_dry_run(config), world_size)
    dims = run.dims
    recorder = Recorder(device_type, matmul_workspace)
    device = torch.device("cpu") if device_type == "cpu" else register_device(recorder)
    sections = model_sections(run)
    # What a compiled block fuses, `plan.fusion` finds.
    fuses = device_type != "cpu" and not config.compile.compiles_model
    with faking(recorder, fuses=fuses) as fake:
        world = join_fake_world(dims, rank, device, fake, needs_mesh=sections.needs_fsdp2)
        recorder.name_dimensions(world.groups)
        modules = _record_steps(run, world, recorder, num_steps)
    return DryRun(rank, dims, recorder.recording, modules)


def _as_dry_run(config: JobConfig) -> JobConfig:
    """Return the configuration without what has no meaning on fake tensors.

    No random numbers are drawn, so no state of a generator is kept. Nothing is compiled.
    """
    updates: dict[str, dict[str, object]] = {
        "activation_checkpoint": {"preserve_rng_state": False},
        "compile": {"enable": False},
        "parallelism": {"enable_async_tensor_parallel": False},
    }
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=changes)
            for name, changes in updates.items()
        }
    )


def _record_steps(run: Run, world: World, recorder: Recorder, num_steps: int) -> ModuleBytes:
    """Record the steps. Returns the bytes that stay in memory between them."""
    config, spec, args = run.config, run.spec, run.args
    num_sources = len(config.data.sources) if len(config.data.sources) > 1 else 0
    with recorder.allocating("parameters"):
        with_tokens = num_sources > 0 or config.validation.enable
        model = build_sharded_model(run, world, with_tokens=with_tokens)
    recorder.row_padding = model.exchange.padding(world.dims.ep)
    if model.offload is not None:
        model.offload.checks_memory = False  # of the host of the run, not of this one
    for part in model.parts:
        for buffer in part.buffers():
            recorder.assign(buffer, "other")
    recorder.recording.mark("model")
    step_group, layers_of_others = world.step_group, None
    assert isinstance(step_group, MirrorGroup)
    if world.dims.pp > 1 and has_experts(spec, args):
        with torch.device("meta"):  # pipeline ranks gather the experts' layers of all stages
            layers_of_others = describe_layers([spec.build(args)])
    with world.allocating(), recorder.allocating("optimizer"):
        with step_group.gathering_from_others(layers_of_others):
            optim = build_optimization(run, model.parts, world, seed=0)
        gate = build_update_gate(config.resilience, optim, 0, {})
        gate.start_holding()
        model.exchange.start_bounding()
    recorder.recording.mark("optimizer")
    recording = recorder.recording
    runner = StepRunner(
        world,
        0,
        model,
        optim,
        gate.gate,
        config.training.max_norm,
        num_sources=num_sources,
        on_micro_batch=lambda micro: recording.micro_batches.append(len(recording.work)),
        order_updates=lambda: None,
        updating=partial(_updating, optim.optimizer, recorder),
    )
    with world.allocating(), recorder.following(model.parts, spec.last_modules[-1:]):
        for step in range(1, num_steps + 1):
            recorder.num_muted += 1  # the data loader's memory is the host's
            batch = _batch(run, with_positions=needs_positions(args))
            recorder.num_muted -= 1
            num_tokens = run.geometry.global_batch_size * config.training.seq_len
            runner.compute_gradients(step, batch, num_tokens, num_tokens=num_tokens)
            runner.update(num_tokens, is_logged=True)
            gate.record(step)
            gc.collect()  # what only reference cycles hold is not part of a step
            recorder.recording.mark(f"step {step}")
    return optim.kept_bytes()


@contextmanager
def _updating(optimizer: Optimizer, recorder: Recorder) -> Iterator[None]:
    """Let the recorder know the gradients, and when the update begins and ends."""
    for parameter in optimizer.parameters:
        if parameter.grad is not None:
            recorder.assign(parameter.grad, "gradients")
    with recorder.updating():
        yield


def _batch(run: Run, *, with_positions: bool) -> Batch:
    """Return a batch without values, in the shape of a step's."""
    geometry = run.geometry
    rows = geometry.num_accumulated, geometry.local_batch_size
    tokens = torch.zeros(*rows, run.config.training.seq_len, dtype=torch.int64)
    return Batch(
        tokens=tokens,
        labels=torch.zeros_like(tokens),
        sources=torch.zeros(rows, dtype=torch.int64),
        num_valid_tokens=tokens.numel(),
        digest=0,
        first_samples=[micro * rows[1] for micro in range(rows[0])],
        position=0,
        num_samples=geometry.global_batch_size,
        positions=torch.zeros_like(tokens) if with_positions else None,
    )


# Device of a description -> device of its dry run.
DRY_RUN_DEVICES = {"cuda": DEVICE_TYPE, "cpu": "cpu"}


def options_of(gpu: Gpu) -> dict[str, Any]:
    """Return the options of `record_rank` for a device."""
    return {
        "device_type": DRY_RUN_DEVICES[gpu.device_type],
        "matmul_workspace": round(gpu.cublas_workspace_mib * MIB),
    }


class Job(NamedTuple):
    """One rank to dry-run. options: of `record_rank`."""

    config: JobConfig
    world_size: int
    rank: int
    options: dict[str, Any]


def record_jobs(jobs: Sequence[Job]) -> Iterator[tuple[int, DryRun | RuntimeError]]:
    """Yield the index and the recording of each job, as they end.

    Each runs in a child process, as many at a time as cores. A job that fails has an error with its
    traceback instead of a recording. The children end with the iteration.
    """
    _import_before_fork()
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(jobs))
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_cores():
                index, job = waiting.pop(0)
                receiving, sending = context.Pipe(duplex=False)
                child = context.Process(target=_send_recording, args=(receiving, sending, job))
                child.start()
                sending.close()
                running[receiving] = index, child
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                index, child = running.pop(connection)
                yield index, _receive(jobs[index].rank, child, connection)
    finally:
        for _, child in running.values():
            child.terminate()
            child.join()


def record_ranks(
    config: JobConfig,
    world_size: int,
    ranks: Iterable[int],
    *,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> dict[int, DryRun]:
    """Return `record_rank` of several ranks, in their order; see `record_jobs`.

    Raises RuntimeError if one fails.
    """
    jobs = [Job(config, world_size, rank, options) for rank in ranks]
    runs: dict[int, DryRun] = {}
    started = time.monotonic()
    progress("plan", 0, len(jobs), 0.0)
    for _, run in record_jobs(jobs):  # in the order in which they end
        if isinstance(run, RuntimeError):
            raise run
        runs[run.rank] = run
        progress("plan", len(runs), len(jobs), time.monotonic() - started)
    return {job.rank: runs[job.rank] for job in jobs}


def _import_before_fork() -> None:
    """Import what every dry run needs, so that the children share it."""
    import torch._dynamo.external_utils
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    gc.freeze()


def _send_recording(receiving: Connection, sending: Connection, job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, without a traceback
    receiving.close()  # the copy of this process, so that sending fails if the parent was killed
    outcome: DryRun | str
    try:
        outcome = record_rank(job.config, job.world_size, job.rank, **job.options)
    except Exception:
        outcome = traceback.format_exc()
    with suppress(BrokenPipeError):
        sending.send(outcome)


def _receive(rank: int, child: Any, receiving: Connection) -> DryRun | RuntimeError:
    try:
        outcome = receiving.recv()
    except EOFError:
        child.join()
        return RuntimeError(
            f"the dry run of rank {rank} died with exit code {child.exitcode}. Expected a "
            "recording: free memory of this machine, or plan fewer layers"
        )
    child.join()
    if not isinstance(outcome, DryRun):
        return RuntimeError(f"the dry run of rank {rank} failed:\n{outcome}")
    return outcome
