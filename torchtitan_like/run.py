"""The process of a rank: command line -> `Run` -> world -> `Trainer` -> exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from torchtitan_like.build import attach, build_checkpointer
from torchtitan_like.check import DeviceType, check_loaded, load_with_files
from torchtitan_like.check.offload_memory import host_memory_need
from torchtitan_like.checkpoint.changes import check_finished
from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.handover import check_agreement
from torchtitan_like.config.loader import CommandLine
from torchtitan_like.data.batches.batch import describe_core_shortage
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.distributed.determinism import set_determinism
from torchtitan_like.distributed.recorder import set_up_recorder
from torchtitan_like.distributed.world import LaunchedAs, World, join_world, launched_as
from torchtitan_like.monitor.attempt import record_error
from torchtitan_like.monitor.log import init_logger, logger
from torchtitan_like.monitor.memory import is_out_of_memory, oom_advice
from torchtitan_like.monitor.start_clock import StartClock
from torchtitan_like.resilience.agreement import EXIT_CODES, Requests, Stopped, Switches
from torchtitan_like.resilience.end import end_process
from torchtitan_like.resilience.heartbeat import RankPosition, kill_hung_peers
from torchtitan_like.resolved import Run, resolve
from torchtitan_like.train import Trainer
from torchtitan_like.util.exit_codes import ExitCode, RunFailure
from torchtitan_like.util.files import StorageError, WriteFailures
from torchtitan_like.util.host import host_memory, num_cores
from torchtitan_like.util.locks import LockedError
from torchtitan_like.util.modules import load_tool
from torchtitan_like.util.output import show_error
from torchtitan_like.util.run_directory import (
    EXIT,
    RunEnd,
    attempt_folder,
    describe_error,
    read_first_error,
    write_exit,
    write_exit_for_launcher,
)
from torchtitan_like.util.units import GIB

MEMORY_LINES = "torchtitan_like.plan.dry_memory:memory_lines"  # the planner's estimate


def run_rank(command_line: CommandLine) -> NoReturn:
    """Run `main`, and end the process with its exit code."""
    end_process(main(command_line))


def main(
    argv: Sequence[str] | CommandLine,
    job: Callable[[Run, LaunchedAs, Requests, RankPosition], ExitCode] | None = None,
) -> int:
    """Resolve the configuration and call `job`, by default `run_job`; return the exit code.

    It is the code that `job` returns. Under torchrun it is 0 after an agreed end, and exit.json has
    the code. After a crash it is 1. While `job` runs, signals are requests. A signal before the
    first step ends the process with its code, without an agreement of the ranks.
    """
    init_logger()
    launched = launched_as()
    try:
        run = resolve_run(argv, launched.world_size)
    except ConfigError as error:
        _report_refusal(error, launched)
        return int(ExitCode.BAD_CONFIG)
    config = run.config
    if config.job.print_config and launched.rank == 0:
        print(run.config_toml)
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    requests = Requests()
    position = RankPosition()
    with requests.listening():
        try:
            code = (job or run_job)(run, launched, requests, position)
        except Stopped as stopped:
            code = EXIT_CODES[stopped.request]
            logger.info(f"Training stopped: {code.reason}, before the first step")
            if launched.rank == 0:
                write_end(config.job.dump_folder, code, None, WriteFailures())
            return int(code)
        except (LockedError, StorageError) as error:
            # exit.json belongs to the running job, or cannot be written: only return the code.
            logger.error(str(error))
            return int(ExitCode.STORAGE)
        except Exception as error:
            requests.defer_signals = True
            _report_crash(error, Path(config.job.dump_folder), launched, position)
            return 1
    return 0 if is_under_torchrun else int(code)


def resolve_run(argv: Sequence[str] | CommandLine, world_size: int) -> Run:
    """Load, check and resolve the configuration. Raises ConfigError with all problems."""
    loaded = load_with_files(argv, training=True)
    config = loaded.config
    device_type = look_for_device(config)
    context, warnings = check_loaded(loaded, world_size, training=True, device_type=device_type)
    for warning in warnings:
        logger.warning(str(warning))
    run = resolve(context)
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # if unknown, 1 as in the check
    num_shards = world_size // config.parallelism.data_parallel_replicate_degree
    if need := host_memory_need(config, run.spec.num_params(run.args), num_shards, num_ranks):
        free = host_memory().available
        logger.info(f"CPU offload needs {need}; {free / GIB:.2f} GiB are available on this node")
    num_workers = config.training.dataloader.num_workers
    if shortage := describe_core_shortage(num_workers, num_ranks, num_cores()):
        logger.warning(shortage)
    return run


def look_for_device(config: JobConfig) -> DeviceType:
    """Return the type of device to train on. The CUDA driver reads its environment once, now."""
    if config.debug.launch_blocking:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_job(run: Run, launched: LaunchedAs, requests: Requests, position: RankPosition) -> ExitCode:
    """Run one training job from start to end.

    Maps each `RunFailure` to its exit code. Any other exception is a crash.
    """
    config = run.config
    logger.info(f"Starting job: {config.job.description}")
    if config.memory_estimation.enable or config.comm.mode != "default":
        return log_memory_plan(config, launched)
    step, code, world, trainer = 0, ExitCode.DONE, None, None
    with ExitStack() as resources:
        try:
            world = build_world(run, launched)
            checkpointer = resources.enter_context(closing(build_checkpointer(run, world)))
            starts = checkpointer.find_start(config.training.steps, run.config_toml)
            step = starts[0].step
            if step >= config.training.steps:
                check_finished(starts[0].manifest or {}, run.settings, config.job.dump_folder)
                checkpointer.finish_last_step(starts[0])
                logger.info(
                    f"Nothing to do: step {step} of {config.training.steps} is done already"
                )
            elif is_killed(config, world):
                code = ExitCode.INTERRUPTED
            else:
                clock = resources.enter_context(StartClock(launched.rank == 0))
                rank_run = attach(run, world, checkpointer, starts, requests, position, clock)
                trainer = trainer_of(config)(rank_run)
                code = trainer.train()
        except LockedError:
            raise
        except RunFailure as problem:
            code = problem.exit_code
            logger.error(str(problem))
            folder = position.attempt_folder
            if isinstance(problem, DataError) and folder is not None:  # perhaps only on this rank
                record_error(folder, launched.rank, "data", position.current.step, problem)
        except Exception as problem:
            if is_out_of_memory(problem):
                logger.error(oom_advice())
                if trainer is not None and trainer.metrics.experts.fullest_expert:
                    logger.error(trainer.metrics.experts.fullest_expert)
            raise
        finally:  # after the error messages: `close` closes the log file
            if trainer is not None:
                step = trainer.progress.step
                trainer.close()
        # During training, a single rank may read damaged data: it writes the code itself.
        is_alone = trainer is not None and code is ExitCode.BAD_DATA
        # Before old checkpoints are deleted, which may take longer than a scheduler waits.
        if launched.rank == 0 or is_alone:
            failures = None if trainer is None else trainer.attempt.failures
            code = write_end(config.job.dump_folder, code, step, failures or WriteFailures())
    if world is not None:
        world.leave()
        logger.info("Process group destroyed")
    return code


def build_world(run: Run, launched: LaunchedAs, group: dist.ProcessGroup | None = None) -> World:
    """Create process groups and meshes. Raises ConfigError if the settings of ranks differ.

    group: see `join_world`.
    """
    config, dims = run.config, run.dims
    for line in set_determinism(config.debug):  # NCCL reads its environment with the first group
        logger.info(line)
    set_up_recorder(config.comm, Path(config.job.dump_folder))
    seconds = config.comm.init_timeout_seconds, config.comm.checkpoint_timeout_seconds
    world = join_world(
        launched,
        dims,
        *(timedelta(seconds=s) for s in seconds),
        needs_mesh=(
            config.training.enable_cpu_offload or config.activation_checkpoint.mode == "offload"
        ),
        agree=partial(check_agreement, config),
        group=group,
    )
    if world.size > 1:
        logger.info(dims.describe(int(os.environ.get("LOCAL_WORLD_SIZE", world.size))))
    return world


def is_killed(config: JobConfig, world: World) -> bool:
    """Return True if the kill switch exists. Rank 0 checks it for all ranks."""
    switch = Switches(Path(config.job.dump_folder), config.resilience).kill
    exists: bool = world.step_group.broadcast_object(world.rank == 0 and switch.exists())
    if exists:
        logger.warning(
            f"Not starting: the kill switch {switch} exists. Remove it to allow runs again"
        )
    return exists


def trainer_of(config: JobConfig) -> type[Trainer]:
    """Return the class of the run's trainer."""
    if not config.fault_tolerance.enable:
        return Trainer
    from torchtitan_like.group_trainer import GroupTrainer

    return GroupTrainer


def log_memory_plan(config: JobConfig, launched: LaunchedAs) -> ExitCode:
    """Log the memory that the configuration needs, on rank 0. Nothing is trained."""
    if launched.rank != 0:
        return ExitCode.DONE
    for line in load_tool(MEMORY_LINES)(config, launched.world_size):
        logger.info(line)
    return write_end(config.job.dump_folder, ExitCode.DONE, None, WriteFailures())


def write_end(folder: str, code: ExitCode, step: int | None, failures: WriteFailures) -> ExitCode:
    """Write exit.json and return the code in it.

    A finished run that could not write all of its files gets the code STORAGE.
    """
    # The second pass covers a failed write of exit.json.
    for _ in range(2):
        if code is ExitCode.DONE and failures.stop_is_due():
            code = ExitCode.STORAGE
        with failures.recording(Path(folder) / EXIT):
            write_exit(Path(folder), RunEnd(code.reason, int(code), step))
            return code
    write_exit_for_launcher(RunEnd(code.reason, int(code), step))
    return code


def _report_refusal(error: ConfigError, launched: LaunchedAs) -> None:
    """Print the problems of the configuration, and record them.

    Each rank records its own error: a rank may detect GPUs and files that the launcher cannot.
    """
    if launched.rank == 0:
        show_error(str(error))
    if launched.world_size > 1 and error.partial is not None:
        attempt = attempt_folder(Path(error.partial.job.dump_folder), 0)
        record_error(attempt, launched.rank, "config", 0, error.with_traceback(None))


def _report_crash(
    error: Exception, dump_folder: Path, launched: LaunchedAs, position: RankPosition
) -> None:
    """Print and record the error that ends this rank, in attempts/0 if there is no attempt."""
    folder = position.attempt_folder
    current = position.current
    record = record_error(
        folder or attempt_folder(dump_folder, 0), launched.rank, current.phase, current.step, error
    )
    show_error(describe_error(record))
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun prints the message of one failed rank: each rank returns the first error of all.
        first = (read_first_error(folder) if folder is not None else None) or record
        message = {"py_callstack": describe_error(first), "timestamp": str(int(first["time"]))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"extraInfo": message}}), encoding="utf-8")
    if folder is not None:
        kill_hung_peers(folder, position.stall_seconds, launched.rank, launched.world_size)


# ---- runs in a script or notebook


@contextmanager
def open_run(
    config_file: str | Path,
    *settings: str,
    group: dist.ProcessGroup | None = None,
    **values: object,
) -> Iterator[Trainer]:
    """Build the trainer of a run for a notebook, a script or your own loop; close it at the end.

    A collective of the ranks that train. It loads the checkpoint or the weights that the settings
    name. docs/guides/library.md has examples.

    settings: such as "optimizer.lr=1e-3". group: of the ranks that train, if the default group has
    others too. values: by key, `steps=50`: a key of [training], or of only one section. Raises
    ConfigError and the errors of `Trainer`.
    """
    init_logger()
    argv = [f"--job.config_file={config_file}"]
    argv += [text if text.startswith("--") or "=" not in text else f"--{text}" for text in settings]
    argv += [f"--{full_key(name)}={_setting_text(value)}" for name, value in values.items()]
    launched = launched_as()
    if group is not None:
        launched = LaunchedAs(dist.get_rank(group), launched.local_rank, group.size())
    with open_trainer(resolve_run(argv, launched.world_size), launched, group) as trainer:
        yield trainer


@contextmanager
def open_trainer(
    run: Run, launched: LaunchedAs, group: dist.ProcessGroup | None = None
) -> Iterator[Trainer]:
    """Build the world, the checkpointer and the trainer of a run; close them at the end.

    A collective of the ranks that train. group: see `join_world`.
    """
    config = run.config
    with ExitStack() as resources:
        world = build_world(run, launched, group)
        resources.callback(world.leave)
        checkpointer = resources.enter_context(closing(build_checkpointer(run, world)))
        starts = checkpointer.find_start(config.training.steps, run.config_toml)
        trainer = trainer_of(config)(attach(run, world, checkpointer, starts))
        resources.callback(trainer.close)
        yield trainer


def full_key(name: str) -> str:
    """Return "training.steps" for "steps". Raises ValueError if several other sections have it."""
    keys = [setting.key for setting in all_settings() if setting.path[-1] == name]
    if "." in name or f"training.{name}" in keys:
        return name if "." in name else f"training.{name}"
    if len(keys) > 1:
        raise ValueError(
            f'Several sections have the key "{name}": {", ".join(keys)}. Expected a key of one '
            f'section. Write the setting as text: "{keys[0]}=VALUE"'
        )
    return keys[0] if keys else name


def _setting_text(value: object) -> str:
    """Return a value as the command line writes it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
