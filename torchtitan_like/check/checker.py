"""Load a configuration and check it as a whole, before anything is built."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_like.check.context import DeviceType, RunContext, build_context
from torchtitan_like.check.datasets import check_datasets
from torchtitan_like.check.environment import (
    check_folders,
    check_initial_checkpoint,
    check_nccl,
    check_torch,
)
from torchtitan_like.check.model_checks import (
    CheckedModel,
    check_attention,
    check_model,
    check_parameter_patterns,
    check_tokenizer,
    read_sizes,
)
from torchtitan_like.check.offload_memory import check_host_memory
from torchtitan_like.check.rules import RULES
from torchtitan_like.check.rules.no_effect_rules import find_idle_settings
from torchtitan_like.check.rules.parallelism_rules import check_degrees, check_pipeline
from torchtitan_like.config import ConfigError, JobConfig, Problem
from torchtitan_like.config.fields import dotted_names
from torchtitan_like.config.loader import CUSTOM_IMPORT_KEY, CommandLine
from torchtitan_like.config.problems import Rule, Severity, broken_rules, merge_no_effect
from torchtitan_like.extensions.user_code import ExtensionError, resolve_name
from torchtitan_like.util.modules import searching_modules_in

if TYPE_CHECKING:
    from torchtitan_like.models.spec import ModelSpec


class Loaded(NamedTuple):
    """A configuration that was read and whose files were checked.

    problems: found so far, without those of the model. faulty: the keys of refused values, which
    have their defaults.
    """

    config: JobConfig
    model: CheckedModel
    problems: list[Problem]
    faulty: frozenset[str]


def load_checked(
    argv: Sequence[str] | CommandLine,
    world_size: int | None,
    *,
    training: bool,
    device_type: DeviceType | None = None,
) -> tuple[JobConfig, list[Problem]]:
    """Import the user's extensions, then load the configuration and check all of it.

    Returns the configuration and warnings. world_size, training, device_type: see `check_config`.

    Raises ConfigError with the problems of loading and of checking. So a misspelled key does not
    hide a missing tokenizer.
    """
    loaded = load_with_files(argv, training=training)
    run, warnings = check_loaded(loaded, world_size, training=training, device_type=device_type)
    return run.config, warnings


def load_with_files(argv: Sequence[str] | CommandLine, *, training: bool) -> Loaded:
    """Import the user's extensions, load the configuration, and check the files that it names.

    The files of a `CheckedCommandLine` are not read again. Raises ConfigError if there is no
    configuration to check.
    """
    command_line = argv if isinstance(argv, CommandLine) else CommandLine(argv)
    problems = list(command_line.import_extensions())
    # Names and sections of a module that cannot be imported are unknown.
    faulty = frozenset(problem.key for problem in problems)
    try:
        config = command_line.load()
        problems += config.notices
    except ConfigError as error:
        problems += _independent(error.problems, faulty)
        if error.partial is None or command_line.is_checked:
            raise ConfigError(problems, partial=error.partial, faulty=faulty) from error
        config = error.partial
        faulty |= error.faulty
    if command_line.is_checked:
        return Loaded(config, check_model(config), problems, faulty)
    try:
        config, warnings = read_sizes(config)
        problems += warnings
    except ConfigError as error:
        problems += error.problems
        faulty |= {"model.flavor"}  # its checks would report the same cause
    model = check_model(config)
    problems += _independent(check_files(config, model, training=training), faulty)
    return Loaded(config, model, problems, faulty)


def check_loaded(
    loaded: Loaded,
    world_size: int | None,
    *,
    training: bool,
    device_type: DeviceType | None = None,
) -> tuple[RunContext, list[Problem]]:
    """Check all that is no file. Returns the facts about the run, and all warnings.

    world_size, training, device_type: see `check_config`. Raises ConfigError with all problems.
    """
    config, model, problems, faulty = loaded
    run = build_context(config, world_size, model, device_type)
    found = check_settings(run, training=training)
    problems = merge_no_effect([*problems, *_independent(found, faulty)])
    if any(problem.severity == "error" for problem in problems):
        raise ConfigError(problems, partial=config, faulty=faulty)
    return run, problems


def load_for_command(
    argv: Sequence[str],
    world_size: int | None,
    *,
    training: bool,
    device_type: DeviceType | None = None,
) -> tuple[JobConfig, list[Problem]]:
    """Load and check as `load_checked` does, in a command that is no rank: see `in_command`."""
    with in_command():
        return load_checked(argv, world_size, training=training, device_type=device_type)


@contextmanager
def in_command() -> Iterator[None]:
    """Search the current folder for the user's modules, as ranks do. Their output goes to stderr."""
    with searching_modules_in(Path.cwd()), redirect_stdout(sys.stderr):
        yield


def _independent(problems: Iterable[Problem], faulty: frozenset[str]) -> list[Problem]:
    """Return the problems that do not depend on a setting whose value was refused.

    The check of the others has read the default of the setting instead.
    """

    def is_faulty(key: str) -> bool:
        return any(key == bad or key.startswith(f"{bad}.") for bad in faulty)

    return [
        problem for problem in problems if not any(map(is_faulty, (problem.key, *problem.involves)))
    ]


def check_config(
    config: JobConfig,
    world_size: int | None,
    *,
    training: bool,
    device_type: DeviceType | None = None,
) -> list[Problem]:
    """Return every problem of a valid configuration.

    world_size: number of ranks. None reports only problems that hold on any number.
    training: missing files, and features that are not available yet, are errors; else warnings.
    device_type: None skips the checks that depend on the hardware.
    """
    model = check_model(config)
    run = build_context(config, world_size, model, device_type)
    return [
        *check_settings(run, training=training),
        *check_files(config, model, training=training),
    ]


def check_settings(run: RunContext, *, training: bool) -> list[Problem]:
    """Return the problems of the settings with the model, the number of ranks and the device."""
    problems = _settle(run.config, _find_problems(run, training), training)
    return [*problems, *find_idle_settings(run.config)]


def check_files(config: JobConfig, model: CheckedModel, *, training: bool) -> list[Problem]:
    """Return the problems of the files and folders that a configuration names on this machine."""
    problems = [
        *check_tokenizer(config, model),
        *check_datasets(config),
        *check_folders(config),
        *check_initial_checkpoint(config),
    ]
    return _settle(config, problems, training)


# Sections whose settings differ between the layouts of one run.
LAYOUT_SECTIONS = ("parallelism", "training", "activation_checkpoint")


def _reads_layout(rule: Rule[RunContext]) -> bool:
    return any(key.split(".")[0] in LAYOUT_SECTIONS for key in (rule.key, *rule.involves))


_LAYOUT_RULES = tuple(rule for rule in RULES if _reads_layout(rule))


def check_layout(config: JobConfig, world_size: int, spec: ModelSpec, args: Any) -> list[Problem]:
    """Return the errors of another layout of a configuration that `check_config` has accepted.

    Only what depends on `LAYOUT_SECTIONS` is checked, for GPUs. So it takes a millisecond, and
    reads no files.
    """
    run = build_context(config, world_size, CheckedModel(spec, args), "cuda")
    problems = list(check_degrees(run))
    problems += [rule.problem(run) for rule in broken_rules(_LAYOUT_RULES, run)]
    pipeline_problems = list(check_pipeline(run))
    problems += pipeline_problems
    problems += check_host_memory(run)
    for name in LAYOUT_SECTIONS:
        section = getattr(config, name)
        problems += [
            replace(rule.problem(section), key=f"{name}.{rule.key}")
            for rule in broken_rules(type(section).rules, section)
        ]
    refused = [problem for problem in problems if problem.severity == "error"]
    # Training refuses too few micro-batches, which a file may leave to the command of the run.
    refused += [each for each in pipeline_problems if each.severity == "training_error"]
    return [config.locate(problem) for problem in refused]


def _find_problems(run: RunContext, training: bool) -> Iterator[Problem]:
    """Yield the problems of the checks that read no files."""
    yield from run.model_problems
    if training:
        yield from check_torch(run)
    yield from check_degrees(run)
    yield from (rule.problem(run) for rule in broken_rules(RULES, run))
    yield from check_pipeline(run)
    yield from check_host_memory(run)
    yield from check_attention(run)
    yield from check_parameter_patterns(run)
    yield from check_nccl(run)
    yield from check_names(run.config)


def check_names(config: JobConfig) -> Iterator[Problem]:
    """Import the functions and classes of user code. A module that fails is reported once.

    A check on a machine without torch accepts modules that import it.
    """
    reported = set()
    for key, kind, name in dotted_names(config):
        try:
            resolve_name(name, kind)
        except ExtensionError as error:
            module = name.partition(":")[0]
            involves = (CUSTOM_IMPORT_KEY,) if module == config.experimental.custom_import else ()
            if error.problem not in reported:
                reported.add(error.problem)
                expected = f"user code that follows its protocol; {error.problem}"
                lacks_torch = getattr(error.__cause__, "name", "") == "torch"
                severity: Severity = "training_error" if lacks_torch else "error"
                yield Problem(key, None, expected, error.remedy, "", severity, involves)


def _settle(config: JobConfig, problems: Iterable[Problem], training: bool) -> list[Problem]:
    """Add the values and origins of the settings, and decide about each "training_error".

    It is an error before training, else a warning: a check may run on another machine.
    """
    settled = []
    for problem in map(config.locate, problems):
        if problem.severity == "training_error" and training:
            problem = replace(problem, severity="error")
        elif problem.severity == "training_error":
            expected = f"expected {problem.expected}"
            problem = replace(problem, severity="warning", expected=expected)
        settled.append(problem)
    return settled
