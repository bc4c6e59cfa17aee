"""The whole configuration: one attribute per TOML section."""

from __future__ import annotations

from pydantic import PrivateAttr

from torchtitan_like.config import sections_run, sections_scale, sections_training
from torchtitan_like.config.base import Section
from torchtitan_like.config.problems import Problem


class JobConfig(Section):
    """A checked configuration. Sections and keys carry the names of TorchTitan v0.2.2 where it has the setting."""

    job: sections_run.Job = sections_run.Job()
    profiling: sections_run.Profiling = sections_run.Profiling()
    metrics: sections_run.Metrics = sections_run.Metrics()
    model: sections_training.Model = sections_training.Model()
    optimizer: sections_training.Optimizer = sections_training.Optimizer()
    lr_scheduler: sections_training.LRScheduler = sections_training.LRScheduler()
    training: sections_training.Training = sections_training.Training()
    data: sections_training.Data = sections_training.Data()
    loss: sections_training.Loss = sections_training.Loss()
    parallelism: sections_scale.Parallelism = sections_scale.Parallelism()
    checkpoint: sections_scale.Checkpoint = sections_scale.Checkpoint()
    activation_checkpoint: sections_scale.ActivationCheckpoint = sections_scale.ActivationCheckpoint()
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

    def origin_of(self, key: str) -> str:
        """Where a dotted key, or the first one below it, was written: a file, "command line", or "default"."""
        below = (origin for written, origin in self._origins.items() if written.startswith(f"{key}."))
        return self._origins.get(key) or next(below, "default")

    def layer_of(self, key: str) -> int:
        """How far up the origin of a key lies: 0 for defaults, then the extended file, the file, the command line."""
        origin = self.origin_of(key)
        return 0 if origin == "default" else 1 + self._layers.index(origin)

    def is_set(self, key: str) -> bool:
        """True if the dotted key, or one below it, was written by the user, whatever its value."""
        return self.origin_of(key) != "default"

    @property
    def notices(self) -> tuple[Problem, ...]:
        """What the reader should know although nothing is wrong, e.g. settings under an older name."""
        return self._notices
