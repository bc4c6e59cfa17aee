"""The whole configuration: one attribute per TOML section."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from pydantic import PrivateAttr, create_model

from torchtitan_like.config import (
    sections_checkpoint,
    sections_run,
    sections_scale,
    sections_training,
)
from torchtitan_like.config.base import Section
from torchtitan_like.config.problems import Problem


class JobConfig(Section):
    """A checked configuration. Names equal TorchTitan v0.2.2 where it has the setting."""

    job: sections_run.Job = sections_run.Job()
    profiling: sections_run.Profiling = sections_run.Profiling()
    metrics: sections_run.Metrics = sections_run.Metrics()
    model: sections_training.Model = sections_training.Model()
    optimizer: sections_training.Optimizer = sections_training.Optimizer()
    ema: sections_training.EMA = sections_training.EMA()
    lr_scheduler: sections_training.LRScheduler = sections_training.LRScheduler()
    training: sections_training.Training = sections_training.Training()
    data: sections_training.Data = sections_training.Data()
    loss: sections_training.Loss = sections_training.Loss()
    parallelism: sections_scale.Parallelism = sections_scale.Parallelism()
    checkpoint: sections_checkpoint.Checkpoint = sections_checkpoint.Checkpoint()
    activation_checkpoint: sections_scale.ActivationCheckpoint = (
        sections_scale.ActivationCheckpoint()
    )
    compile: sections_scale.Compile = sections_scale.Compile()
    quantize: sections_scale.Quantize = sections_scale.Quantize()
    comm: sections_run.Comm = sections_run.Comm()
    resilience: sections_run.Resilience = sections_run.Resilience()
    memory_estimation: sections_run.MemoryEstimation = sections_run.MemoryEstimation()
    fault_tolerance: sections_run.FaultTolerance = sections_run.FaultTolerance()
    experimental: sections_run.Experimental = sections_run.Experimental()
    validation: sections_training.Validation = sections_training.Validation()
    debug: sections_run.Debug = sections_run.Debug()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _layers: tuple[str, ...] = PrivateAttr(default=())
    _notices: tuple[Problem, ...] = PrivateAttr(default=())

    def value_of(self, key: str) -> Any:
        """Return the value of a dotted key."""
        value: Any = self
        for name in key.split("."):
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        return value

    def origin_of(self, key: str) -> str:
        """Return where a dotted key, or the first key below it, was written.

        This is a file, "command line", or "default".
        """
        prefix = f"{key}."
        below = (origin for written, origin in self._origins.items() if written.startswith(prefix))
        return self._origins.get(key) or next(below, "default")

    def layer_of(self, key: str) -> int:
        """Return the layer of a key's origin. 0: defaults; then the extended file, the file, the
        command line.
        """
        origin = self.origin_of(key)
        return 0 if origin == "default" else 1 + self._layers.index(origin)

    def keys_of(self, origin: str) -> list[str]:
        """Return the dotted keys that `origin` has written: a file, or "command line"."""
        return [key for key, written in self._origins.items() if written == origin]

    def is_set(self, key: str) -> bool:
        """Return True if the user wrote the dotted key, or one below it, whatever its value."""
        return self.origin_of(key) != "default"

    def bounds_rows(self, *, is_on_cpu: bool) -> bool:
        """Return True if expert-parallel ranks exchange their rows in bounded buffers."""
        if self.parallelism.expert_parallel_exchange != "auto":
            return self.parallelism.expert_parallel_exchange == "bounded"
        # An optimizer in backward cannot take a step back. The order of sums in a kernel may depend
        # on the size of the buffers, which grow. The detection of overflows would read buffers
        # whose rows have not arrived.
        return not (
            is_on_cpu
            or self.optimizer.early_step_in_backward
            or self.debug.deterministic
            or self.debug.detect_overflow
        )

    def with_sizes(self, flavor: str, args: Mapping[str, Any], origin: str) -> JobConfig:
        """Return the configuration with the flavor and sizes that `origin` gives to the model.

        Written settings of [model.args] override them.
        """
        model = self.model.model_copy(
            update={"flavor": flavor, "args": {**args, **self.model.args}}
        )
        config = self.model_copy(update={"model": model})
        sizes = {f"model.args.{name}": origin for name in args}
        config._origins = {**sizes, **self._origins, "model.flavor": origin}
        config._layers = (origin, *self._layers)
        return config

    def with_defaults(self, sections: Collection[str]) -> JobConfig:
        """Return the configuration with the defaults of these sections."""
        defaults = JobConfig()
        config = self.model_copy(update={name: getattr(defaults, name) for name in sections})
        config._origins = {
            key: origin
            for key, origin in self._origins.items()
            if key.partition(".")[0] not in sections
        }
        return config

    def locate(self, problem: Problem) -> Problem:
        """Add the value of a problem's setting, and the origin of the first written setting."""
        has_value = "." in problem.key and problem.key not in ("model.args", "model.base_args")
        value = self.value_of(problem.key) if has_value else None
        written = [key for key in (problem.key, *problem.involves) if self.is_set(key)]
        origin = self.origin_of(written[0] if written else problem.key)
        return replace(problem, value=value, origin=origin)

    @property
    def extra_sections(self) -> dict[str, Section]:
        """The registered sections of user code, by name."""
        names = type(self).model_fields.keys() - JobConfig.model_fields.keys()
        return {name: getattr(self, name) for name in sorted(names)}

    @property
    def reads_text(self) -> bool:
        """True if this run tokenizes text: at least one dataset is not made of token files."""
        used = [self.data.sources]
        if self.validation.enable:
            used.append(self.validation.sources)
        return any(
            not sources or any(source.format != "tokens" for source in sources.values())
            for sources in used
        )

    @property
    def notices(self) -> tuple[Problem, ...]:
        """Warnings of the loader, e.g. about settings under an older name."""
        return self._notices


# The registered sections of user code by name, each with the file and line of its registration.
_sections: dict[str, tuple[type[Section], str]] = {}


def add_section(name: str, section: type[Section], origin: str) -> None:
    """Register a config section of user code. The same line of a file may register it again.

    origin: file and line. Raises ValueError if another line has registered the name.
    """
    _, first = _sections.setdefault(name, (section, origin))
    if first != origin:
        raise ValueError(
            f"two registrations of the config section {name!r}: {first} and {origin}. Expected "
            "one: give the second another name"
        )
    _sections[name] = section, origin


def job_config() -> type[JobConfig]:
    """Return `JobConfig` with the registered sections of user code."""
    return _extended(tuple((name, section) for name, (section, _) in _sections.items()))


@functools.lru_cache(maxsize=1)
def _extended(sections: tuple[tuple[str, type[Section]], ...]) -> type[JobConfig]:
    if not sections:
        return JobConfig
    fields: dict[str, Any] = {name: (section, section()) for name, section in sections}
    return create_model("JobConfig", __base__=JobConfig, __doc__=JobConfig.__doc__, **fields)
