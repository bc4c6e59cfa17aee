"""Replay a non-finite step or a spike in one process, for any layout of the run.

A run writes a bundle for such a step (see `replay_bundle`). A replay loads the checkpoint that the
bundle names, trains the steps between, and runs forward and backward of the step on the same
samples. It writes nothing into the run directory.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtitan_like.checkpoint.step_folders import read_manifest
from torchtitan_like.config.loader import CUSTOM_IMPORT_KEY, CommandLine
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.distributed.world import LaunchedAs
from torchtitan_like.monitor.log import logger
from torchtitan_like.monitor.overflow import NonFiniteError, OverflowDetector
from torchtitan_like.resilience.agreement import StepAgreement
from torchtitan_like.resolved import Run
from torchtitan_like.run import open_trainer, resolve_run
from torchtitan_like.stored_config import custom_import_in, load_trusted
from torchtitan_like.train import StepInput, Trainer
from torchtitan_like.util.jsonl import decode
from torchtitan_like.util.reading import read_file
from torchtitan_like.util.shards import local_shard

# Settings that override the run's: a replay is one process and writes no results.
DEFAULTS = ("parallelism", "compile", "profiling", "comm", "validation", "fault_tolerance")
SETTINGS = (
    "--training.enable_cpu_offload=false",
    "--metrics.enable_tensorboard=false",
    "--metrics.enable_wandb=false",
    "--checkpoint.enable=true",
    "--checkpoint.load_only=true",
    "--checkpoint.load_step=-1",
    "--checkpoint.folder=checkpoint",
    "--checkpoint.create_seed_checkpoint=false",
    "--resilience.kill_switch_path=KILL",
    "--resilience.save_switch_path=SAVE",
    "--resilience.replica_check_freq=0",
    "--debug.detect_overflow=false",
)
PATH_KEY = "checkpoint.initial_load_path"

# Keys that a bundle must have, and the types of their values.
BUNDLE: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "samples": (list,),
    "seed": (int,),
    "global_batch_size": (int,),
    "config": (str,),
    "checkpoint": (dict,),
    "loss": (float, int),
    "grad_norm": (float, int),
    "data_digest": (str,),
    "rank_losses": (dict,),
}
BUNDLE_CHECKPOINT: dict[str, tuple[type, ...]] = {
    "checkpoint.kind": (str,),
    "checkpoint.path": (str, type(None)),
    "checkpoint.is_start": (bool,),
    "checkpoint.is_pinned": (bool,),
}

Bundle = dict[str, Any]


class BundleError(Exception):
    """A bundle, or a file that it names, is missing or malformed."""


@dataclass(frozen=True)
class Replay:
    """Numbers of a replayed step.

    data_digest       of the samples, 16 hexadecimal digits
    first_module      a sentence with the first module with an inf or nan; None: no module has one
    num_parameters    of the model, as named tensors
    bad_gradients     names of parameters whose gradient has an inf or nan, before clipping
    bad_values        names of parameters that have an inf or nan
    """

    step: int
    loss: float
    grad_norm: float
    data_digest: str
    first_module: str | None
    num_parameters: int
    bad_gradients: list[str]
    bad_values: list[str]


def replay_bundle(path: Path, settings: Sequence[str]) -> tuple[Bundle, Replay]:
    """Replay the step of a bundle. settings: `--section.key value`, overriding the run's settings.

    Raises BundleError, ConfigError, CheckpointError, ChangedError, DataError.
    """
    bundle = read_bundle(path)
    parents = path.absolute().parents
    run = parents[3] if len(parents) > 3 else Path()
    with tempfile.TemporaryDirectory() as folder:
        alone = resolve_replay(bundle, run, Path(folder), settings)
        return bundle, replay_step(alone, bundle)


def read_bundle(path: Path) -> Bundle:
    """Read and check a bundle. Raises BundleError."""
    try:
        bundle = decode(read_file(path))
    except (OSError, ValueError) as error:
        raise BundleError(
            f"{path} cannot be read: {error}. Expected a bundle that a run wrote. "
            "Give attempts/<n>/bad-steps/step-<k>.json of a run."
        ) from error
    if missing := BUNDLE.keys() - bundle.keys():
        raise BundleError(
            f"{path} is not a replay bundle: it has no {', '.join(sorted(missing))}. "
            "Expected the bundle of a non-finite step. Give attempts/<n>/bad-steps/step-<k>.json of a run."
        )
    checkpoint = bundle["checkpoint"] if isinstance(bundle["checkpoint"], dict) else {}
    values = {**bundle, **{f"checkpoint.{key}": value for key, value in checkpoint.items()}}
    for key, types in (BUNDLE | BUNDLE_CHECKPOINT).items():
        if type(values.get(key)) not in types:
            expected = " or ".join(one.__name__ for one in types)
            raise BundleError(
                f"{path}: {key} is {reprlib.repr(values.get(key))}. Expected {expected}. "
                "Give a bundle as the run wrote it."
            )
    return bundle


def resolve_replay(bundle: Bundle, run: Path, folder: Path, settings: Sequence[str]) -> Run:
    """Resolve the run's configuration for one process that starts from the bundle's checkpoint.

    folder: an empty folder, for job.dump_folder. Raises BundleError, ConfigError.
    """
    file = run / bundle["config"]
    if not _is_in(run, file):
        raise BundleError(
            f"the bundle names {file} as the run's settings. Expected a file in {run}. "
            "Move the bundle back into the folder of its run."
        )
    if not file.exists():
        raise BundleError(
            f"{file}, the run's settings, is missing. Expected the bundle in its run's folder. "
            "Move it back, or restore the file."
        )
    config = load_trusted(file, custom_import_in(settings))
    if (module := config.experimental.custom_import) and not custom_import_in(settings):
        raise BundleError(
            f"The run imports the module {module} ({CUSTOM_IMPORT_KEY}). Expected the same option for "
            f"the replay, which imports nothing else. If you trust {module}, add --{CUSTOM_IMPORT_KEY} "
            f"{module}, with its folder in PYTHONPATH"
        )
    experimental = config.experimental.model_copy(update={"custom_import": ""})
    names = DEFAULTS if bundle["checkpoint"]["is_start"] else (*DEFAULTS, "checkpoint")
    config = config.with_defaults(names).model_copy(update={"experimental": experimental})
    is_path_given = any(PATH_KEY in setting for setting in settings)
    start = _start_settings(bundle["checkpoint"], run, is_path_given)
    argv = [*SETTINGS, *start]
    argv += [f"--job.dump_folder={folder}", f"--debug.seed={bundle['seed']}"]
    argv += [f"--training.global_batch_size={bundle['global_batch_size']}"]
    if config.optimizer.early_step_in_backward:  # it frees gradients before they can be inspected
        change = [*config.checkpoint.allow_change, "optimizer.early_step_in_backward"]
        argv += ["--optimizer.early_step_in_backward=false"]
        argv += [f"--checkpoint.allow_change={','.join(change)}"]
    if config.data.cache_folder:
        argv += [f"--data.cache_folder={folder / 'token_cache'}"]
    _link_tokens(Path(config.data.cache_folder or run / "token_cache"), folder / "token_cache")
    # A module that only the command names, for the run's names of code, is no change of the run.
    imported = [] if module else [f"--{CUSTOM_IMPORT_KEY}="]
    return resolve_run(CommandLine([*argv, *settings, *imported], base=config), 1)


def _start_settings(checkpoint: dict[str, Any], run: Path, is_path_given: bool) -> list[str]:
    """Return the settings that load the checkpoint.

    is_path_given: the command line has the checkpoint's path.
    """
    path = checkpoint["path"] and run / checkpoint["path"]
    if path is None:
        return []  # the run started from its seed
    if not _is_in(run, path) and not is_path_given:
        raise BundleError(
            f"the bundle names {path} as the checkpoint before its step. Expected a path in {run}: "
            f"if it is the right checkpoint, give --{PATH_KEY} {path}"
        )
    if not path.is_dir():
        reason = "" if checkpoint["is_pinned"] else " (earlier non-finite steps used all pins)"
        raise BundleError(
            f"{path}, the checkpoint before the step, is missing{reason}. "
            "Expected a folder. Restore it, or replay the bundle of an earlier step."
        )
    if checkpoint["kind"] == "warm":
        return [f"--{PATH_KEY}={path}", "--checkpoint.start=warm"]
    if read_manifest(path) is None:
        raise BundleError(
            f"{path} is not a checkpoint: it has no manifest.json. Expected the checkpoint before "
            "the step. Restore it, or replay the bundle of another step."
        )
    return [
        f"--{PATH_KEY}={path}",
        "--checkpoint.initial_load_model_only=false",
        "--checkpoint.initial_load_in_hf=false",
        "--checkpoint.initial_load_in_hf_quantized=false",
        "--checkpoint.initial_load_upcycle=false",
        "--checkpoint.start=auto",
    ]


def _is_in(run: Path, path: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(run))


def _link_tokens(cache: Path, target: Path) -> None:
    """Link the run's token caches into `target`.

    A stream deletes its windows after reading them, so windows are not linked.
    """
    target.mkdir()
    for entry in cache.iterdir() if cache.is_dir() else ():
        if not entry.name.startswith((".", "window-")):
            (target / entry.name).symlink_to(entry.absolute())


# ---- the step


def replay_step(run: Run, bundle: Bundle) -> Replay:
    """Load the checkpoint, train the steps between, and run the step of the bundle."""
    with open_trainer(run, LaunchedAs(0, 0, 1)) as trainer:
        return _train_to(trainer, bundle["step"])


def _train_to(trainer: Trainer, last: int) -> Replay:
    logger.info(f"Replaying step {last} from step {trainer.progress.step}")
    for step in range(trainer.progress.step + 1, last):
        fetched = trainer.fetch(step)
        record = trainer.train_step(step, fetched, fetched.agreement.wait())
        numbers = _format_numbers(record.loss_share, record.grad_norm)
        logger.info(f"Step {step}, {last - step} before the replayed step: {numbers}")
    fetched = trainer.fetch(last)
    if fetched.batch is None:
        raise DataError(
            f"the training data end before step {last}. Expected the data of the run: restore them"
        )
    bad_values = _bad_parameters(trainer, lambda parameter: parameter)
    bad_gradients: list[str] = []

    @contextmanager
    def inspect_gradients() -> Iterator[None]:
        """Clipping by a non-finite norm spoils all gradients, so inspect them before it."""
        trainer.step_runner.updating = nullcontext
        bad_gradients.extend(_bad_parameters(trainer, lambda p: p.grad))
        yield

    trainer.step_runner.updating = inspect_gradients
    agreement = fetched.agreement.wait()
    record = trainer.train_step(last, fetched, agreement)
    loss = record.loss_share.item()
    grad_norm = record.grad_norm.item()
    first_module = None
    if record.skipped.item():  # otherwise the step has changed the weights
        first_module = _first_module(trainer, fetched, agreement)
    return Replay(
        step=last,
        loss=loss,
        grad_norm=grad_norm,
        data_digest=f"{record.data_digest:016x}",
        first_module=first_module,
        num_parameters=len(trainer.optim.optimizer.named),
        bad_gradients=bad_gradients,
        bad_values=bad_values,
    )


def _first_module(trainer: Trainer, fetched: StepInput, agreement: StepAgreement) -> str | None:
    """Run the step again. Return a sentence about the first module with an inf or nan."""
    batch = fetched.batch
    assert batch is not None
    position = trainer.position.step_and_micro_batch
    with closing(OverflowDetector(trainer.parts, trainer.config.debug, position)) as detector:
        try:
            trainer.train_step(trainer.progress.step, fetched, agreement)
            detector.evaluate()
        except NonFiniteError as error:
            micro_batch = position()[1]
            return f"{error} (samples from {batch.first_samples[micro_batch]} on)"
    return None


def _bad_parameters(
    trainer: Trainer, tensor_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> list[str]:
    """Return the names of parameters whose `tensor_of` has an inf or nan."""
    names = []
    for name, parameter in trainer.optim.optimizer.named:
        tensor = tensor_of(parameter)
        if tensor is not None and not local_shard(tensor).isfinite().all():
            names.append(name)
    return names


# ---- the report


def is_reproduced(bundle: Bundle, replay: Replay) -> bool:
    """Return True if the same samples gave non-finite numbers, or a spike, as in the run."""
    if bundle["data_digest"] != replay.data_digest:
        return False
    replayed = {"loss": replay.loss, "grad_norm": replay.grad_norm}
    if limits := bundle.get("spike"):
        return all(replayed[quantity] > limit for quantity, limit in limits.items())
    is_bad = not math.isfinite(bundle["loss"] + bundle["grad_norm"])
    return is_bad and all(
        math.isfinite(bundle[key]) == math.isfinite(number) for key, number in replayed.items()
    )


def format_replay(bundle: Bundle, replay: Replay) -> list[str]:
    """Return the lines of `titan run replay`."""
    is_same_data = bundle["data_digest"] == replay.data_digest
    data = "the same as in the run" if is_same_data else f"DIFFERENT from {bundle['data_digest']}"
    samples = json.dumps(bundle["samples"])
    run_numbers = _format_numbers(bundle["loss"], bundle["grad_norm"])
    module = replay.first_module or (
        "none: every input, output and weight of the forward pass is finite"
    )
    lines = [
        f"step {replay.step}: samples {samples}, digest {replay.data_digest}: {data}",
        f"run:    {run_numbers}; mean loss of each data rank {bundle['rank_losses']}",
        f"replay: {_format_numbers(replay.loss, replay.grad_norm)}",
        f"first non-finite module: {module}",
        f"non-finite gradients: {_format_names(replay.bad_gradients, replay.num_parameters)}",
        f"non-finite parameters: {_format_names(replay.bad_values, replay.num_parameters)}",
    ]
    if is_reproduced(bundle, replay):
        return [*lines, "reproduced"]
    reasons = [f"why: {reason}" for reason in possible_reasons(bundle, replay)]
    return [*lines, *reasons, "NOT reproduced"]


def possible_reasons(bundle: Bundle, replay: Replay) -> list[str]:
    """Return the possible reasons why the numbers of the replay differ from the run's."""
    if bundle["data_digest"] != replay.data_digest:
        return ["the samples differ: the dataset or its settings have changed since the run"]
    path = bundle["checkpoint"]["path"]
    start = "the run's first weights" if path is None else path
    limits_of_a_replay = [
        "one process has no other ranks and no reduction. So a replay cannot show a fault of one "
        "rank's machine, or of code that depends on the rank. Check the machines with "
        "`titan node check`, or continue the run in its own layout from the same checkpoint "
        "with debug.detect_overflow = true",
        f"the replay started from {start}: it does not contain later changes of weights in memory",
    ]
    if bundle.get("spike"):
        text = "from the stored weights, the same samples give numbers below the spike's limit"
        return [text, *limits_of_a_replay]
    if not math.isfinite(replay.loss + replay.grad_norm):
        return ["the run and the replay differ in which of loss and gradient norm is non-finite"]
    losses = {rank: loss for rank, loss in bundle["rank_losses"].items() if loss is not None}
    ranks = ", ".join(rank for rank, loss in losses.items() if not math.isfinite(loss))
    if ranks:
        text = (
            f"in the run the loss of data rank {ranks} was not finite; from the stored weights, "
            "the same samples give a finite loss"
        )
    else:
        text = (
            "in the run the loss of every data rank was finite and a gradient was not: it became "
            "non-finite in the backward pass, in the reduction, or in the memory of one rank"
        )
    return [text, *limits_of_a_replay]


def _format_names(names: list[str], num_parameters: int) -> str:
    if len(names) == num_parameters:
        return "all, because a non-finite loss reaches every parameter"
    return "".join(f"\n    {name}" for name in names) or "none"


def _format_numbers(loss: Any, grad_norm: Any) -> str:
    return f"loss {float(loss):.6g}, gradient norm {float(grad_norm):.6g}"
