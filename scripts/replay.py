"""Meet a step with bad numbers again, on one process: `python scripts/replay.py RUN/attempts/1/bad-steps/step-1203.json`.

A run writes such a bundle when the loss or a gradient of a step was not finite (docs/guides/operations.md). This loads the
checkpoint that it names, whatever layout wrote it, trains the steps between the two, if there are any, and runs forward and
backward of the step on the same samples. It shows whether loss, gradient norm and samples are those of the bundle, the first
module that has a number that is not finite, with the modules before it, and the parameters that have one in gradient or value.

Type it where the run was started, as settings may name files relative to that folder; settings can be given as for training
(--data.sources.wiki.path ..., --debug.detect_overflow_frames 50). Nothing is written into the run's folder. Exit codes: 0 the
bad numbers are there again, 1 they are not, 78 for a bundle, settings or a checkpoint that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import reprlib
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

import torch

from torchtitan_like.build import build_checkpointer
from torchtitan_like.checkpoint.errors import ChangedError, CheckpointError
from torchtitan_like.checkpoint.step_folders import read_manifest
from torchtitan_like.config import ConfigError, JobConfig, dump_toml, load_stored_config
from torchtitan_like.data.errors import DataError
from torchtitan_like.distributed.world import LaunchedAs
from torchtitan_like.launch import join, read_config
from torchtitan_like.monitor.log import init_logger, logger
from torchtitan_like.monitor.overflow import NonFiniteError, OverflowDetector
from torchtitan_like.resilience.agreement import StepAgreement
from torchtitan_like.resilience.requests import Requests
from torchtitan_like.stored_config import CUSTOM_IMPORT, custom_import_in
from torchtitan_like.train import StepInput, Trainer
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import decode, encode
from torchtitan_like.util.reading import read_file

# What another layout, or looking on, must not bring along from the run.
DEFAULTS = ("parallelism", "compile", "profiling", "comm", "validation", "fault_tolerance")
SETTINGS = (
    "--training.enable_cpu_offload=false --metrics.enable_tensorboard=false --metrics.enable_wandb=false "
    "--checkpoint.enable=true --checkpoint.load_only=true --checkpoint.load_step=-1 --checkpoint.folder=checkpoint "
    "--checkpoint.create_seed_checkpoint=false --resilience.kill_switch_path=KILL --resilience.save_switch_path=SAVE "
    "--resilience.replica_check_freq=0 --debug.detect_overflow=false"
).split()

# Keys of a bundle that must be there, and the types of their values.
BUNDLE: dict[str, tuple[type, ...]] = {
    "step": (int,), "samples": (list,), "seed": (int,), "global_batch_size": (int,), "config": (str,),
    "checkpoint": (dict,), "loss": (float, int), "grad_norm": (float, int), "data_digest": (str,),
    "rank_losses": (dict,),
}  # fmt: skip
BUNDLE_CHECKPOINT: dict[str, tuple[type, ...]] = {
    "checkpoint.kind": (str,), "checkpoint.path": (str, type(None)), "checkpoint.is_start": (bool,),
    "checkpoint.is_pinned": (bool,),
}  # fmt: skip
PATH_KEY = "checkpoint.initial_load_path"


class UnusableError(Exception):
    """The bundle, or what it names, is not there or not what it should be."""


def read_bundle(path: Path) -> dict[str, Any]:
    """A bundle. Raises UnusableError."""
    try:
        bundle = decode(read_file(path))
    except (OSError, ValueError) as error:
        raise UnusableError(f"{path} cannot be read: {error}") from error
    if missing := BUNDLE.keys() - bundle.keys():
        raise UnusableError(f"{path} is no bundle of a bad step: it has no {', '.join(sorted(missing))}")
    where = bundle["checkpoint"] if isinstance(bundle["checkpoint"], dict) else {}
    values = {**bundle, **{f"checkpoint.{key}": value for key, value in where.items()}}
    for key, kinds in (BUNDLE | BUNDLE_CHECKPOINT).items():
        if type(values.get(key)) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise UnusableError(f"{path}: {key} is {reprlib.repr(values.get(key))}, expected {expected}")
    return bundle


def settings_of(bundle: dict[str, Any], run: Path, folder: Path, settings: list[str]) -> JobConfig:
    """The run's settings for one process that starts from the bundle's checkpoint. Raises UnusableError, ConfigError."""
    file = run / bundle["config"]
    if not _lies_in(run, file):
        raise UnusableError(f"the bundle names {file} as the run's settings: expected a file in {run}")
    if not file.exists():
        raise UnusableError(f"{file}, the run's settings, is missing: a bundle stays in its run's folder")
    config = load_stored_config(file)
    if (module := config.experimental.custom_import) and not custom_import_in(settings):
        raise UnusableError(
            f"The run imports the module {module} ({CUSTOM_IMPORT}); a replay imports what its own command line names. If you "
            f"trust {module}: --{CUSTOM_IMPORT} {module}, with its folder in PYTHONPATH"
        )
    experimental = config.experimental.model_copy(update={"custom_import": ""})
    names = DEFAULTS if bundle["checkpoint"]["is_start"] else (*DEFAULTS, "checkpoint")
    defaults = {name: getattr(JobConfig(), name) for name in names}
    config = config.model_copy(update={**defaults, "experimental": experimental})
    (folder / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    start = _start(bundle["checkpoint"], run, any(PATH_KEY in setting for setting in settings))
    argv = ["--job.config_file", str(folder / "config.toml"), *SETTINGS, *start]
    argv += [f"--job.dump_folder={folder}", f"--debug.seed={bundle['seed']}"]
    argv += [f"--training.global_batch_size={bundle['global_batch_size']}"]
    if config.optimizer.early_step_in_backward:  # gradients are to be there when the backward is over
        allowed = ",".join([*config.checkpoint.allow_change, "optimizer.early_step_in_backward"])
        argv += ["--optimizer.early_step_in_backward=false", f"--checkpoint.allow_change={allowed}"]
    if config.data.cache_folder:
        argv += [f"--data.cache_folder={folder / 'token_cache'}"]
    _link_tokens(Path(config.data.cache_folder or run / "token_cache"), folder / "token_cache")
    return read_config([*argv, *settings], 1)


def _start(checkpoint: dict[str, Any], run: Path, trusts_path: bool) -> list[str]:
    """The settings by which the checkpoint is loaded. trusts_path: the command line names it too."""
    path = checkpoint["path"] and run / checkpoint["path"]
    if path is None:
        return []  # as the run began: from its seed
    if not _lies_in(run, path) and not trusts_path:
        raise UnusableError(
            f"the bundle names {path} as the checkpoint before the bad step: expected one in {run}. If it is the right "
            f"one: --{PATH_KEY} {path}"
        )
    if not path.is_dir():
        raise UnusableError(f"{path}, the checkpoint before the bad step, is missing{_why_missing(checkpoint)}")
    if checkpoint["kind"] == "warm":
        return [f"--checkpoint.initial_load_path={path}", "--checkpoint.start=warm"]
    if read_manifest(path) is None:
        raise UnusableError(f"{path} is not a checkpoint of this program: it has no manifest.json")
    return [
        f"--checkpoint.initial_load_path={path}",
        "--checkpoint.initial_load_model_only=false",
        "--checkpoint.initial_load_in_hf=false",
        "--checkpoint.initial_load_in_hf_quantized=false",
        "--checkpoint.start=auto",
    ]


def _lies_in(run: Path, path: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(run))


def _why_missing(checkpoint: dict[str, Any]) -> str:
    return "" if checkpoint["is_pinned"] else ": it was not pinned, as several steps of that run were bad before"


def _link_tokens(cache: Path, place: Path) -> None:
    """Make the run's token caches seen, and none of them be changed: tokens of a stream are deleted once they are read."""
    place.mkdir()
    for entry in cache.iterdir() if cache.is_dir() else ():
        if not entry.name.startswith((".", "window-")):
            (place / entry.name).symlink_to(entry.absolute())


def replay(config: JobConfig, bundle: dict[str, Any]) -> dict[str, Any]:
    """Load, train the steps before, and meet the step; what was found. The world is left again."""
    world = join(config, LaunchedAs(0, 0, 1))
    try:
        with closing(build_checkpointer(config.checkpoint, config.job, config.model, world)) as checkpointer:
            trainer = Trainer(config, world, checkpointer, checkpointer.find_start(config.training.steps), Requests())
            try:
                return _meet(trainer, bundle)
            finally:
                trainer.close()
    finally:
        world.leave()


def _meet(trainer: Trainer, bundle: dict[str, Any]) -> dict[str, Any]:
    last = bundle["step"]
    logger.info(f"Step {last} is met again behind step {trainer.progress.step}")
    for step in range(trainer.progress.step + 1, last):
        fetched = trainer.fetch(step)
        record = trainer.train_step(step, fetched, fetched.agreement.wait())
        logger.info(f"Step {step}, {last - step} before the bad one: {_told(record.loss_share, record.grad_norm)}")
    fetched = trainer.fetch(last)
    if fetched.batch is None:
        raise DataError(f"the training text ends before step {last}")
    values = _bad_parameters(trainer, lambda parameter: parameter)
    gradients: list[str] = []
    _look_before_clipping(trainer, lambda: gradients.extend(_bad_parameters(trainer, lambda p: p.grad)))
    agreement = fetched.agreement.wait()
    record = trainer.train_step(last, fetched, agreement)
    found = {
        "step": last,
        "loss": record.loss_share.item(),
        "grad_norm": record.grad_norm.item(),
        "data_digest": f"{record.data_digest:016x}",
        "first_module": None,
        "num_parameters": len(trainer.optimizer.named),
        "bad_gradients": gradients,
        "bad_values": values,
    }
    if record.skipped.item():  # else the weights are others now
        found["first_module"] = _first_module(trainer, fetched, agreement)
    return found


def _first_module(trainer: Trainer, fetched: StepInput, agreement: StepAgreement) -> str | None:
    """The first module that has a number that is not finite, as a sentence; None where no forward has one."""
    batch = fetched.batch
    assert batch is not None
    with closing(OverflowDetector(trainer.parts, trainer.config.debug, trainer.heartbeat.place)) as detector:
        try:
            trainer.train_step(trainer.progress.step, fetched, agreement)
            detector.judge()
        except NonFiniteError as error:
            micro = trainer.heartbeat.place()[1]
            return f"{error} (samples from {batch.first_samples[micro]} on)"
    return None


def _look_before_clipping(trainer: Trainer, look: Callable[[], None]) -> None:
    """Gradients as the backward has made them: clipping by a norm that is not finite spoils them all."""
    clip = trainer.optimizer.clip_gradients

    def looked(max_norm: float) -> torch.Tensor:
        trainer.optimizer.clip_gradients = clip  # type: ignore[method-assign]
        look()
        return clip(max_norm)

    trainer.optimizer.clip_gradients = looked  # type: ignore[method-assign]


def _bad_parameters(trainer: Trainer, tensor_of: Callable[[torch.Tensor], torch.Tensor | None]) -> list[str]:
    """Names of the parameters whose `tensor_of` has a number that is not finite."""
    bad = []
    for name, parameter in trainer.optimizer.named:
        tensor: Any = tensor_of(parameter)
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local is not None and not local.isfinite().all():
            bad.append(name)
    return bad


# ---- the command


def report(bundle: dict[str, Any], found: dict[str, Any]) -> tuple[list[str], bool]:
    """What a person is told, and whether the bad numbers are there again."""
    is_same_data = bundle["data_digest"] == found["data_digest"]
    lines = [
        f"step {found['step']}: samples {json.dumps(bundle['samples'])}, digest {found['data_digest']}: "
        + ("the same" if is_same_data else f"ANOTHER than {bundle['data_digest']}"),
        f"in the run: {_told(bundle['loss'], bundle['grad_norm'])}; mean loss of each data rank {bundle['rank_losses']}",
        f"here:       {_told(found['loss'], found['grad_norm'])}",
        f"first: {found['first_module'] or 'no module: every input, output and weight of the forward pass is finite'}",
        f"gradients that are not finite: {_listed(found['bad_gradients'], found['num_parameters'])}",
        f"parameters that are not finite: {_listed(found['bad_values'], found['num_parameters'])}",
    ]
    is_there = is_same_data and _is_as_bad(bundle, found)
    if not is_there:
        lines += [f"why: {reason}" for reason in reasons(bundle, found)]
    lines.append("reproduced" if is_there else "NOT reproduced")
    return lines, is_there


def _is_as_bad(bundle: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether the numbers found are non-finite, or spike, where the run's did."""
    if limits := bundle.get("spike"):
        return all(found[quantity] > limit for quantity, limit in limits.items())
    is_bad = not math.isfinite(bundle["loss"] + bundle["grad_norm"])
    pairs = [(bundle[key], found[key]) for key in ("loss", "grad_norm")]
    return is_bad and all(math.isfinite(one) == math.isfinite(other) for one, other in pairs)


def reasons(bundle: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Why a replay does not show the run's numbers, as far as bundle and replay tell."""
    if bundle["data_digest"] != found["data_digest"]:
        return ["the samples differ: the dataset or its settings have changed since the run"]
    about = bundle["checkpoint"]
    start = "the run's first weights" if about["path"] is None else about["path"]
    limits_of_a_replay = [
        "one process has no other ranks and no reduction, so it cannot show a fault of one rank's "
        "machine, or of code that depends on the rank. Check the machines with "
        "scripts/node_check.py, or continue the run in its own layout from the same checkpoint "
        "with debug.detect_overflow = true",
        f"the replay started from {start}: a weight that went bad in memory later is not in it",
    ]
    if bundle.get("spike"):
        text = "from the stored weights, the same samples give numbers below the spike's limit"
        return [text, *limits_of_a_replay]
    if not math.isfinite(found["loss"] + found["grad_norm"]):
        return ["loss or gradient norm is not finite here either, but not both as in the run"]
    losses = {rank: loss for rank, loss in bundle["rank_losses"].items() if loss is not None}
    bad = ", ".join(rank for rank, loss in losses.items() if not math.isfinite(loss))
    text = (
        f"in the run the loss of data rank {bad} was not finite; from the stored weights, the "
        "same samples give a finite loss"
        if bad
        else "in the run the loss of every data rank was finite and a gradient was not: it went "
        "bad in the backward pass, in the reduction, or in the memory of one rank"
    )
    return [text, *limits_of_a_replay]


def _listed(names: list[str], num_all: int) -> str:
    if len(names) == num_all:
        return "all, as a loss that is not finite reaches every one"
    return "".join(f"\n    {name}" for name in names) or "none"


def _told(loss: Any, grad_norm: Any) -> str:
    return f"loss {float(loss):.6g}, gradient norm {float(grad_norm):.6g}"


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("bundle", type=Path, help="attempts/<n>/bad-steps/step-<k>.json in the folder of a run")
    parser.add_argument("--out", type=Path, help="also write what was found to this file, as JSON")
    options, settings = parser.parse_known_args(argv)
    init_logger()
    run = options.bundle.absolute().parents[3] if len(options.bundle.absolute().parents) > 3 else Path()
    try:
        bundle = read_bundle(options.bundle)
        with tempfile.TemporaryDirectory() as folder:
            config = settings_of(bundle, run, Path(folder), settings)
            found = replay(config, bundle)
    except (UnusableError, ConfigError, CheckpointError, ChangedError, DataError) as error:
        print(error, file=sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    lines, is_there = report(bundle, found)
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_bytes(encode({**found, "reproduced": is_there}))
    return 0 if is_there else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
