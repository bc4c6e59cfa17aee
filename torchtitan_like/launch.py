"""From a command line to a run: the config, checked as a whole; the world; the words and the code at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_like.checkpoint.checkpointer import Checkpointer
from torchtitan_like.checkpoint.errors import ChangedError, CheckpointError
from torchtitan_like.checkpoint.loading import Identity
from torchtitan_like.checkpoint.lock import LockedError
from torchtitan_like.config import ConfigError, JobConfig, dump_toml
from torchtitan_like.config.agreement import check_agreement
from torchtitan_like.data.batches.workers import few_cores
from torchtitan_like.data.errors import CacheWriteError, DataError, WorkerKilled
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.data.tokens.encoding import num_cores
from torchtitan_like.distributed.determinism import set_determinism
from torchtitan_like.distributed.dims import resolve_degrees
from torchtitan_like.distributed.mesh_picture import picture
from torchtitan_like.distributed.parallelize import Built, Sections, build_parts
from torchtitan_like.distributed.recorder import set_up_recorder
from torchtitan_like.distributed.world import LaunchedAs, World, join_world, launched_as
from torchtitan_like.models.spec import fit_positions, get_spec, resolve_args
from torchtitan_like.monitor.attempt import Attempt
from torchtitan_like.monitor.errors import record_error
from torchtitan_like.monitor.log import init_logger, logger
from torchtitan_like.monitor.memory import build_memory_monitor, is_out_of_memory, oom_advice
from torchtitan_like.monitor.metrics import Metrics, announce_hardware
from torchtitan_like.optim.loss import VocabShards, chunked_cross_entropy
from torchtitan_like.preflight import DeviceType, load_checked
from torchtitan_like.preflight.host_memory import host_memory_need
from torchtitan_like.resilience.heartbeat import Heartbeat
from torchtitan_like.resilience.numbers import NonFiniteStateError
from torchtitan_like.resilience.replicas import ReplicaError
from torchtitan_like.resilience.requests import EXIT_CODES, Requests, Stopped
from torchtitan_like.resilience.switches import Switches
from torchtitan_like.util.credentials import mask_values
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.files import StorageError, WriteFailures
from torchtitan_like.util.host_memory import GIB, host_memory
from torchtitan_like.util.run_directory import (
    EXIT,
    RunEnd,
    attempt_folder,
    describe_error,
    read_first_error,
    write_exit,
    write_exit_for_launcher,
)

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.hf.folder import SpecialToken
    from torchtitan_like.config.sections_training import Model
    from torchtitan_like.models.spec import ModelSpec


def read_config(argv: list[str], world_size: int) -> JobConfig:
    """Load and check the config as a whole, before anything is built. Raises ConfigError with every problem."""
    config, warnings = load_checked(argv, world_size, training=True, device_type=look_for_device)
    for warning in warnings:
        logger.warning(str(warning))
    spec = get_spec(config.model.name)
    args = resolve_args(spec, config.model.flavor, config.model.args)
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    num_shards = world_size // config.parallelism.data_parallel_replicate_degree
    if need := host_memory_need(config.training, spec.num_params(args), num_shards, num_ranks):
        free = host_memory().available
        logger.info(f"CPU offload needs {need}; {free / GIB:.2f} GiB are available on this node")
    if crowded := few_cores(config.training.dataloader.num_workers, num_ranks, num_cores()):
        logger.warning(crowded)
    return config


def look_for_device(config: JobConfig) -> DeviceType:
    """What there is to train on; the CUDA driver reads its environment when it is asked."""
    if config.debug.launch_blocking:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    return "cuda" if torch.cuda.is_available() else "cpu"


def join(config: JobConfig, launched: LaunchedAs) -> World:
    """Groups and meshes: everything a rank needs to know of the others. Raises ConfigError where ranks' settings differ."""
    for line in set_determinism(config.debug):  # before any group: NCCL reads its environment when one is made
        logger.info(line)
    set_up_recorder(config.comm, Path(config.job.dump_folder))
    dims, errors = resolve_degrees(config.parallelism, launched.world_size)
    assert dims is not None, errors  # preflight has reported these
    seconds = config.comm.init_timeout_seconds, config.comm.checkpoint_timeout_seconds
    world = join_world(
        launched,
        dims,
        *(timedelta(seconds=s) for s in seconds),
        needs_mesh=(
            config.training.enable_cpu_offload or config.activation_checkpoint.mode == "offload"
        ),
        agree=partial(check_agreement, config),
    )
    if world.size > 1:
        for line in picture(dims, int(os.environ.get("LOCAL_WORLD_SIZE", world.size))):
            logger.info(line)
    return world


def build_checkpointer(config: JobConfig, world: World) -> Checkpointer:
    """The checkpointer of a run."""
    return Checkpointer(
        config.checkpoint,
        dump_folder=config.job.dump_folder,
        group=world.checkpoint_group,
        device=world.device,
        identity=identify(config.model),
    )


def build_model(
    config: JobConfig, world: World, spec: ModelSpec, args: Any, num_samples: int, with_tokens: bool
) -> Built:
    """This rank's parts of the model, cut over the mesh, without values. num_samples: see `build_parts`; with_tokens:
    see `chunked_cross_entropy`.
    """
    sections = Sections(
        config.training,
        config.parallelism,
        config.activation_checkpoint,
        config.compile,
        config.model.converters,
        config.quantize.linear.float8,
        config.model.print_after_conversion,
    )
    longest = max(config.training.seq_len, config.validation.seq_len if config.validation.enable else 0)
    shards = VocabShards(world.group("tp"), spec.constraints(args)["vocab_size"]) if world.dims.tp > 1 else None
    loss = chunked_cross_entropy(
        config.loss.chunk_mib,
        compile_backend=sections.loss_backend,
        shards=shards,
        gathers_logits=config.parallelism.disable_loss_parallel,
        with_tokens=with_tokens,
    )
    return build_parts(spec, fit_positions(args, longest), world, sections, loss=loss, num_samples=num_samples)


def build_metrics(
    config: JobConfig,
    world: World,
    attempt: Attempt,
    flops_per_token: float,
    sources: Sequence[str],
    failures: WriteFailures,
) -> Metrics:
    """The metrics of a run; says what the hardware can do."""
    memory = build_memory_monitor(world.device)
    peak = announce_hardware(memory, world.device.type, config.metrics.peak_flops, flops_per_token)
    return Metrics(
        config.metrics,
        folder=attempt.run,
        attempt=attempt.number,
        writer=world.rank == 0,
        rank=world.rank,
        world_size=world.size,
        gather=world.gather_losses,
        flops_per_token=flops_per_token,
        peak_flops=peak,
        memory_monitor=memory,
        total_steps=config.training.steps,
        sources=sources,
        num_passes=4 if config.activation_checkpoint.mode == "full" else 3,
        run_config=mask_values(config.model_dump()) if config.metrics.enable_wandb else None,
        failures=failures,
    )


def identify(model: Model) -> Identity:
    """The model by name and sizes, for checkpoints in formats other than our own."""
    spec = get_spec(model.name)

    def special_tokens() -> tuple[SpecialToken | None, SpecialToken | None]:
        from torchtitan_like.checkpoint.hf.folder import SpecialToken

        tokenizer = load_tokenizer(model.tokenizer_folder)
        ids = (tokenizer.bos_id, tokenizer.eos_id)
        bos, eos = (None if i is None else SpecialToken(tokenizer.decode([i]), i) for i in ids)
        return bos, eos

    args = resolve_args(spec, model.flavor, model.args)
    return Identity(spec, args, Path(model.hf_assets_path), Path(model.tokenizer_folder), special_tokens)


# What all ranks agree cannot work; the first that matches counts.
CODES: dict[type[Exception], ExitCode] = {
    ChangedError: ExitCode.BAD_CONFIG,
    ConfigError: ExitCode.BAD_CONFIG,
    CheckpointError: ExitCode.STORAGE,
    CacheWriteError: ExitCode.STORAGE,
    WorkerKilled: ExitCode.REQUEUE,
    DataError: ExitCode.BAD_DATA,
    NonFiniteStateError: ExitCode.BAD_NUMBERS,
    ReplicaError: ExitCode.BAD_NUMBERS,
    StorageError: ExitCode.STORAGE,
}


def run_as(trainer_class: Callable[..., Any], config: JobConfig, launched: LaunchedAs, requests: Requests) -> ExitCode:
    """One run from start to end. What all ranks agree cannot work becomes an exit code; any other error is a fault."""
    logger.info(f"Starting job: {config.job.description}")
    step, code, world, trainer = 0, ExitCode.DONE, None, None
    with ExitStack() as resources:
        try:
            world = join(config, launched)
            checkpointer = resources.enter_context(closing(build_checkpointer(config, world)))
            starts = checkpointer.find_start(config.training.steps, dump_toml(config))
            step = starts[0].step
            if step >= config.training.steps:
                checkpointer.finish_last_step(starts[0])
                logger.info(f"Nothing to do: step {step} of {config.training.steps} is done already")
            elif is_killed(config, world):
                code = ExitCode.INTERRUPTED
            else:
                trainer = trainer_class(config, world, checkpointer, starts, requests)
                code = trainer.train()
        except LockedError:
            raise
        except tuple(CODES) as problem:
            code = next(code for kind, code in CODES.items() if isinstance(problem, kind))
            logger.error(str(problem))
            if isinstance(problem, DataError) and (here := Heartbeat.newest):  # of this rank alone, it may be
                record_error(here.folder, launched.rank, "data", here.at.step, problem)
        except Exception as problem:
            if is_out_of_memory(problem):
                logger.error(oom_advice())
            raise
        finally:  # behind the words above, which its log files are to hold
            if trainer is not None:
                step = trainer.progress.step
                trainer.close()
        # In training one rank alone may read damaged data: no other can say so.
        is_alone = trainer is not None and code is ExitCode.BAD_DATA
        if launched.rank == 0 or is_alone:  # before old steps are deleted, which may take longer than a scheduler waits
            failures = None if trainer is None else trainer.failures
            code = leave_exit(config.job.dump_folder, code, step, failures or WriteFailures())
    if world is not None:
        world.leave()
        logger.info("Process group destroyed")
    return code


def leave_exit(folder: str, code: ExitCode, step: int | None, failures: WriteFailures) -> ExitCode:
    """Write exit.json and return the code in it. A finished run that could not write its files has the code STORAGE."""
    for _ in range(2):  # the second time, the first attempt to write the file is one of the failures
        if code is ExitCode.DONE and failures.stop_is_due():
            code = ExitCode.STORAGE
        with failures.noted(Path(folder) / EXIT):
            write_exit(Path(folder), RunEnd(code.reason, int(code), step))
            return code
    write_exit_for_launcher(RunEnd(code.reason, int(code), step))
    return code


def is_killed(config: JobConfig, world: World) -> bool:
    """Is the kill switch there? Rank 0 looks for all."""
    switch = Switches(Path(config.job.dump_folder), config.resilience).kill
    found: bool = world.step_group.broadcast_object(world.rank == 0 and switch.exists())
    if found:
        logger.warning(f"Nothing is started: {switch} is there. Runs start again when you have removed it")
    return found


def launch(argv: list[str], run: Callable[[JobConfig, LaunchedAs, Requests], ExitCode]) -> int:
    """Call `run`: 0 for an agreed end under torchrun (its reason is in exit.json), else the reason's code; 1 after an error.

    In `run` signals are heard: a stop before the first step, to which nobody has to agree, ends the process with its code.
    """
    init_logger()
    launched = launched_as()
    try:
        config = read_config(argv, launched.world_size)
    except ConfigError as error:
        _refuse(error, launched)
        return int(ExitCode.BAD_CONFIG)
    if config.job.print_config and launched.rank == 0:
        print(dump_toml(config))
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    requests = Requests()
    with requests.listening():
        try:
            code = run(config, launched, requests)
        except Stopped as stopped:
            code = EXIT_CODES[stopped.request]
            logger.info(f"Training stopped: {code.reason}, before the first step")
            if launched.rank == 0:
                leave_exit(config.job.dump_folder, code, None, WriteFailures())
            return int(code)
        except (LockedError, StorageError) as error:
            # exit.json belongs to the living run, or cannot be written: the code is returned instead.
            logger.error(str(error))
            return int(ExitCode.STORAGE)
        except Exception as error:
            requests.only_note = True
            _tell(error, Path(config.job.dump_folder), launched.rank)
            return 1
    return 0 if is_under_torchrun else int(code)


def _refuse(error: ConfigError, launched: LaunchedAs) -> None:
    """Print what is wrong with the config. Ranks may see what no launcher has (their GPUs), and each another: all record it."""
    if launched.rank == 0:
        print(error, file=sys.stderr)
    if launched.world_size > 1 and error.partial is not None:
        attempt = attempt_folder(Path(error.partial.job.dump_folder), 0)
        record_error(attempt, launched.rank, "config", 0, error.with_traceback(None))


def _tell(error: Exception, dump_folder: Path, rank: int) -> None:
    """Print what ends this rank, and record it: in attempts/0 if there is no attempt yet, to which it could belong."""
    here = Heartbeat.newest
    folder, (phase, step, *_) = (here.folder, here.at) if here else (attempt_folder(dump_folder, 0), ("start", 0))
    mine = record_error(folder, rank, phase, step, error)
    with suppress(OSError):  # stderr may be a file on a full disk
        print(describe_error(mine), file=sys.stderr)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun's last words are one failed rank's: whichever it takes, they tell of the first error of all.
        first = (read_first_error(folder) if here else None) or mine
        message = {"extraInfo": {"py_callstack": describe_error(first), "timestamp": str(int(first["time"]))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    if here:
        here.kill_stuck_peers()
