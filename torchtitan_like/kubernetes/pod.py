"""Run one pod of an Indexed Job, and return a code that the job's podFailurePolicy acts on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.config import ConfigError, JobConfig, load_config
from torchtitan_like.config.loader import import_extensions
from torchtitan_like.launcher.run import launch
from torchtitan_like.process_start import exit_on_signals
from torchtitan_like.util.exit_codes import CRASH, WORTH_A_RETRY, ExitCode
from torchtitan_like.util.output import show, show_error
from torchtitan_like.util.run_directory import read_exit

INDEX = "JOB_COMPLETION_INDEX"  # the job sets it in each pod
POD_IP = "POD_IP"  # job.yaml sets it


def run_pod(settings: Sequence[str], words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Train on this node. Returns the exit code of the pod: see `code_of_pod`.

    A pod that was replaced after the last step ends at once: the other pods, which have completed,
    will not meet it again. settings, words: as for `launch`.
    """
    exit_on_signals()  # until the launcher handles them
    try:
        options = launch_options(environ)
    except ValueError as error:
        show_error(str(error))
        return int(ExitCode.BAD_CONFIG)
    import_extensions(list(settings))  # the launcher reports an import that fails
    try:
        config = load_config(list(settings))
    except ConfigError:  # the launcher reports all problems
        return launch(options, settings, words)
    first = newest_step(config)
    if first >= config.training.steps and config.checkpoint.load_step < 0:
        show(f"Nothing to do: step {first} of {config.training.steps} is done already")
        return int(ExitCode.DONE)
    code = launch(options, settings, words)
    if code == ExitCode.DONE and not _is_recorded_as_done(config):
        code = ExitCode.REQUEUE
    has_progressed = newest_step(config) > first
    if code == ExitCode.REQUEUE and not has_progressed:
        show_error(
            f"The run ended with code {code} and no checkpoint after step {first}. "
            f"The pod returns {CRASH}, so that this start counts"
        )
    return code_of_pod(code, has_progressed)


def launch_options(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the options of `launch` that follow from the pod's index. Raises ValueError.

    Pod 0 hosts the rendezvous at its own address: its name in the DNS may still be that of the pod
    that it replaces.
    """
    index = environ.get(INDEX, "")
    if not index.isdecimal():
        raise ValueError(
            f"{INDEX} is {index!r}. Expected the index of a pod in an Indexed Job. Use `titan train` "
            "outside such a job."
        )
    address = environ.get(POD_IP) if int(index) == 0 else None
    return {"node_rank": index, "master_addr": address}


def newest_step(config: JobConfig) -> int:
    """Return the newest published step of the run; 0 if there is none."""
    if not config.checkpoint.enable:
        return 0
    steps = published_steps(Path(config.job.dump_folder) / config.checkpoint.folder)
    return steps[-1].step if steps else 0


def code_of_pod(code: int, has_progressed: bool) -> int:
    """Return the exit code of a pod whose run ended with `code`.

    has_progressed: this start has saved a new checkpoint. Then every end after which the same
    command may succeed becomes REQUEUE, which job.yaml does not count as a failure. Without a new
    checkpoint, REQUEUE becomes CRASH, which counts: such a job would start forever.
    """
    if code not in WORTH_A_RETRY:
        return int(code)
    if has_progressed:
        return int(ExitCode.REQUEUE)
    return CRASH if code == ExitCode.REQUEUE else int(code)


def _is_recorded_as_done(config: JobConfig) -> bool:
    """Return True if exit.json has the code DONE.

    Without the file, the launcher of several machines returns 0 because it may be written
    elsewhere. Here all pods share the folder: the replacement of another pod has removed the file.
    """
    try:
        return read_exit(Path(config.job.dump_folder)).code == ExitCode.DONE
    except (OSError, ValueError):
        return False
