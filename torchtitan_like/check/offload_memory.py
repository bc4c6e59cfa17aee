"""The host memory that CPU offload needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from torchtitan_like.check.rules.keys import DEGREES, MODEL_KEYS
from torchtitan_like.config.problems import Problem
from torchtitan_like.util.host import host_memory
from torchtitan_like.util.units import GIB

if TYPE_CHECKING:
    from torchtitan_like.check.context import RunContext
    from torchtitan_like.config import JobConfig
    from torchtitan_like.config.sections_training import Optimizer

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


class States(NamedTuple):
    """The states that an optimizer keeps for each parameter.

    num_tensors: tensors of the size of the parameter. is_elementwise: `optimizer.state_dtype` and
    `optimizer.bf16_rounding` apply to them.
    """

    num_tensors: int
    is_elementwise: bool


STATES = {
    "Adam": States(2, is_elementwise=True),
    "AdamW": States(2, is_elementwise=True),
    "AdamW8bit": States(2, is_elementwise=True),
    "Lion": States(1, is_elementwise=True),
    "Muon": States(1, is_elementwise=False),
}


class HostMemoryNeed(NamedTuple):
    """Bytes of host memory that `training.enable_cpu_offload` needs on each rank of a node."""

    ranks_of_node: int
    parameters: int
    gradients: int
    optimizer_states: int
    averages: int

    @property
    def of_node(self) -> int:
        of_rank = self.parameters + self.gradients + self.optimizer_states + self.averages
        return self.ranks_of_node * of_rank

    def __str__(self) -> str:
        sizes = (self.parameters, self.gradients, self.optimizer_states)
        parameters, gradients, states = (f"{num_bytes / GIB:.2f}" for num_bytes in sizes)
        average = f" + averages {self.averages / GIB:.2f}" if self.averages else ""
        return (
            f"{self.of_node / GIB:.2f} GiB of host memory on each node: {self.ranks_of_node} ranks"
            f" x (parameters {parameters} + gradients {gradients} + optimizer states {states}"
            f"{average} GiB)"
        )


def state_bytes(section: Optimizer, weight_dtype: str) -> float:
    """Return the bytes of optimizer states of a parameter.

    With several optimizers, this is the smallest number among them, so that no run is refused that
    fits: which parameters are in a group is known only for a built model.
    """
    return min(_state_bytes(name, section, weight_dtype) for name in section.names)


def _state_bytes(name: str, section: Optimizer, weight_dtype: str) -> float:
    if name not in STATES:
        return 0  # of the user's optimizer, whose states are unknown
    states = STATES[name]
    if not states.is_elementwise:
        return states.num_tensors * BYTES[weight_dtype]
    size: float = BYTES[section.state_dtype or weight_dtype]
    if name == "AdamW8bit":  # a code, and a part of a float32 scale
        size = 1 + 4 / section.adamw8bit_block_size
    num_bytes = states.num_tensors * size
    if section.bf16_rounding == "kahan" and weight_dtype == "bfloat16":
        num_bytes += BYTES["bfloat16"]
    return num_bytes


def host_memory_need(
    config: JobConfig, num_params: int, num_shards: int, ranks_of_node: int
) -> HostMemoryNeed | None:
    """Return the host memory that CPU offload needs, or None without CPU offload.

    num_shards: ranks that share one copy of the weights. All ranks count alike. In a pipeline, the
    ranks with the embedding or the head need somewhat more.
    """
    training = config.training
    if not training.enable_cpu_offload:
        return None
    num_of_rank = -(-num_params // num_shards)
    weights = num_of_rank * BYTES[training.dtype]
    states = round(num_of_rank * state_bytes(config.optimizer, training.dtype))
    averages = num_of_rank * max(BYTES[training.dtype], 4) if config.ema.enable else 0
    return HostMemoryNeed(ranks_of_node, weights, weights, states, averages)


def check_host_memory(run: RunContext) -> Iterator[Problem]:
    """Compare the need of CPU offload with the memory of this node, which must be one of the run.

    A need above the total memory is an error. A need above the available memory is a warning: it
    may work later, and a run that restarts by itself must not be refused for good.
    """
    if run.spec is None or not run.is_resolved or run.device_type != "cuda":
        return
    num_params = run.spec.num_params(run.args)
    num_shards = run.dims.world_size // run.dims.dp_replicate
    ranks_of_node = run.local_world_size or 1
    need = host_memory_need(run.config, num_params, num_shards, ranks_of_node)
    if need is None:
        return
    key = "training.enable_cpu_offload"
    memory = host_memory()
    involves = (
        *DEGREES,
        *MODEL_KEYS,
        "training.dtype",
        "optimizer.name",
        "optimizer.state_dtype",
        "optimizer.bf16_rounding",
        "optimizer.groups",
        "ema.enable",
    )
    remedy = "use more nodes, or nodes with more memory, or raise the job's memory limit"
    if need.of_node > memory.total:
        total = f"{memory.total / GIB:.2f} GiB"
        expected = f"nodes with {need}. This node or its control group has {total}"
        yield Problem(key, None, expected, remedy, involves=involves)
    elif need.of_node > memory.available:
        text = f"needs {need}. Only {memory.available / GIB:.2f} GiB are available now"
        yield Problem(key, None, text, remedy, severity="warning", involves=involves)
