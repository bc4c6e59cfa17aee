"""Load a configuration and check it as a whole, without torch and before anything is built."""

from __future__ import annotations

from collections.abc import Callable

from torchtitan_like.config import ConfigError, JobConfig, Problem, load_config
from torchtitan_like.config.availability import is_used, not_available, without_effect
from torchtitan_like.config.findings import Findings
from torchtitan_like.config.problems import merge_no_effect
from torchtitan_like.preflight.datasets import check_text
from torchtitan_like.preflight.folders import check_checkpoint, check_folders
from torchtitan_like.preflight.layout import DeviceType, check_layout
from torchtitan_like.preflight.model import check_exempt, check_model
from torchtitan_like.preflight.settings import (
    check_hardware,
    check_numerics,
    check_packages,
    check_profiling,
    check_schedule,
)
from torchtitan_like.preflight.tokenizer import check_tokenizer
from torchtitan_like.preflight.torch_release import check_torch


def load_checked(
    argv: list[str],
    world_size: int | None,
    *,
    training: bool,
    device_type: DeviceType | Callable[[JobConfig], DeviceType] | None = None,
) -> tuple[JobConfig, list[Problem]]:
    """Load the configuration and check all of it; returns it with the warnings.

    ``device_type``: see `check`; or what looks for the device once the settings are known.

    Raises ConfigError with the problems of both: a misspelt key does not hide a missing tokenizer.
    """
    problems: list[Problem] = []
    faulty: frozenset[str] = frozenset()
    try:
        config = load_config(argv)
        problems += config.notices
    except ConfigError as error:
        if error.partial is None:
            raise
        config, faulty = error.partial, error.faulty
        problems += error.problems
    device = device_type(config) if callable(device_type) else device_type
    found = check(config, world_size, training=training, device_type=device)
    problems += [problem for problem in found if not _is_doubtful(problem, faulty)]
    problems = merge_no_effect(problems)
    if any(problem.severity == "error" for problem in problems):
        raise ConfigError(problems, partial=config, faulty=faulty)
    return config, problems


def _is_doubtful(problem: Problem, faulty: frozenset[str]) -> bool:
    """True if a finding rests on a setting whose written value was refused, so that its default was checked."""
    keys = (problem.key, *problem.involves)
    return any(key == bad or key.startswith(f"{bad}.") for key in keys for bad in faulty)


def check(
    config: JobConfig, world_size: int | None, *, training: bool, device_type: DeviceType | None = None
) -> list[Problem]:
    """Every problem of a valid configuration on ``world_size`` ranks (None: only what does not depend on it).

    ``training``: missing files, and features that are not available yet, are errors; else warnings. ``device_type``
    None leaves out what depends on the hardware.
    """
    findings = Findings(config, training=training)
    if training:
        check_torch(findings)
    spec, args = check_model(findings)
    limits = spec.constraints(args) if spec else {}
    check_layout(findings, world_size, spec, args, device_type)
    if spec:
        check_exempt(findings, spec, args)
    check_schedule(findings)
    check_profiling(findings)
    check_numerics(findings)
    check_hardware(findings, device_type, args)
    check_tokenizer(findings, limits)
    for section in ("training", "validation"):
        if is_used(config, section):
            check_text(findings, section)
    check_folders(findings)
    check_checkpoint(findings, world_size, device_type)
    check_packages(findings)
    spoken_of = {
        problem.key
        for problem in findings.problems
        if problem.severity == "error" or problem.has_no_effect
    }
    missing = [problem for problem in not_available(config, training=training) if problem.key not in spoken_of]
    return [*findings.problems, *missing, *without_effect(config)]
