"""Settings that are accepted, so that files of TorchTitan load, but have no feature yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtitan_like.config.problems import NOT_AVAILABLE_YET
from torchtitan_like.config.rules import Rule

if TYPE_CHECKING:
    from torchtitan_like.config.schema import JobConfig


# Values of TorchTitan's custom_config_module whose settings this schema has: none, and the ones of
# [fault_tolerance].
BUILT_IN_MODULES = ("", "torchtitan.components.ft.config")


def _not_available(
    key: str, is_requested: Callable[[JobConfig], bool], remedy: str
) -> Rule[JobConfig]:
    """Return the rule that a feature is not requested."""
    return Rule(
        f"not-available-{key}",
        key,
        is_requested,
        NOT_AVAILABLE_YET,
        remedy,
        severity="training_error",
    )


UNAVAILABLE_CONVERTERS = {
    "quantize.grouped_mm.float8",
    "quantize.linear.mx",
    "quantize.grouped_mm.mx",
}

NOT_AVAILABLE: tuple[Rule[JobConfig], ...] = (
    _not_available(
        "parallelism.expert_parallel_comm_backend",
        lambda config: (
            config.parallelism.expert_parallel_degree > 1
            and config.parallelism.expert_parallel_comm_backend != "standard"
        ),
        'set it to "standard"',
    ),
    _not_available(
        "model.converters",
        lambda config: not UNAVAILABLE_CONVERTERS.isdisjoint(config.model.converters),
        'remove all converters except "quantize.linear.float8" and registered ones',
    ),
    _not_available(
        "memory_estimation.disable_fake_mode",
        lambda config: (
            config.memory_estimation.enable and config.memory_estimation.disable_fake_mode
        ),
        "set it to false",
    ),
    _not_available(
        "job.custom_config_module",
        lambda config: config.job.custom_config_module not in BUILT_IN_MODULES,
        "leave it out",
    ),
    _not_available(
        "experimental.custom_args_module",
        lambda config: config.experimental.custom_args_module not in BUILT_IN_MODULES,
        "leave it out",
    ),
)
