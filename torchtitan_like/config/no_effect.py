"""Find settings without effect: another setting does not meet their needs."""

from __future__ import annotations

from collections.abc import Iterable

from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.problems import NO_EFFECT, Problem
from torchtitan_like.config.schema import JobConfig, job_config


def without_effect(config: JobConfig, *, every_layer: bool = False) -> Iterable[Problem]:
    """Yield a warning for each setting that differs from its default and has no effect.

    Files often contain the settings of features that they disable. So a setting counts only if it
    was written in a later layer than the unmet need, unless `every_layer` is True.
    """
    defaults = job_config()()
    for setting in all_settings():
        key = setting.key
        if "<name>" in setting.path or config.value_of(key) == defaults.value_of(key):
            continue
        for need in setting.needs:
            is_later = config.layer_of(key) > config.layer_of(need.key)
            if not need.is_met(config.value_of(need.key), config) and (is_later or every_layer):
                yield Problem(
                    key,
                    config.value_of(key),
                    f"{NO_EFFECT}; it needs {need}",
                    origin=config.origin_of(key),
                    severity="warning",
                    involves=(need.key,),
                )
                break


def idle_keys(config: JobConfig) -> set[str]:
    """Return the keys of settings that differ from their default and have no effect."""
    return {problem.key for problem in without_effect(config, every_layer=True)}
