"""The host memory that CPU offload takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchtitan_like.config.layout_rules import DEGREES, MODEL_KEYS
from torchtitan_like.util.host_memory import GIB, host_memory

if TYPE_CHECKING:
    from torchtitan_like.config.findings import Findings
    from torchtitan_like.config.layout import Layout
    from torchtitan_like.models.spec import ModelSpec


class HostNeed(NamedTuple):
    """Bytes of host memory that `training.enable_cpu_offload` takes on each rank of a node."""

    num_ranks: int
    parameters: int
    gradients: int
    optimizer_states: int

    @property
    def of_node(self) -> int:
        return self.num_ranks * (self.parameters + self.gradients + self.optimizer_states)

    def __str__(self) -> str:
        parts = (self.parameters, self.gradients, self.optimizer_states)
        each = [f"{num_bytes / GIB:.2f}" for num_bytes in parts]
        return (
            f"{self.of_node / GIB:.2f} GiB of host memory on each node: {self.num_ranks} ranks x "
            f"(parameters {each[0]} + gradients {each[1]} + optimizer states {each[2]} GiB)"
        )


def host_need(layout: Layout, spec: ModelSpec) -> HostNeed | None:
    """What CPU offload takes; None without it, and where the number of ranks is unknown.

    All ranks count alike. In a pipeline those with the embedding or the head need somewhat more.
    """
    if not layout.config.training.enable_cpu_offload or not layout.is_resolved:
        return None
    num_shards = layout.dp_shard * layout.cp * layout.tp * layout.pp
    width = 2 if layout.config.training.dtype == "bfloat16" else int(layout.config.training.dtype[-2:]) // 8
    each = -(-spec.num_params(layout.args) // num_shards) * width
    return HostNeed(layout.local_world_size or 1, each, each, 2 * each)  # Adam keeps two averages


def check_host_memory(findings: Findings, layout: Layout, spec: ModelSpec) -> None:
    """CPU offload against the memory of this node, on the node that the ranks run on.

    More than there is can never work. More than is free may work later, and a run that restarts
    by itself must not be refused for good: a warning.
    """
    need = host_need(layout, spec)
    if need is None or layout.device_type != "cuda":
        return
    memory = host_memory()
    involves = (*DEGREES, *MODEL_KEYS, "training.dtype")
    remedy = "use more nodes, or nodes with more memory, or raise the job's memory limit"
    if need.of_node > memory.total:
        findings.error(
            "training.enable_cpu_offload",
            f"nodes with {need}. This node or its control group has {memory.total / GIB:.2f} GiB",
            remedy,
            involves=involves,
        )
    elif need.of_node > memory.available:
        findings.warning(
            "training.enable_cpu_offload",
            f"needs {need}. Only {memory.available / GIB:.2f} GiB are available now",
            remedy,
            involves=involves,
        )
