"""Print suggested layouts as a table and as the lines of a config."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchtitan_like.plan.layouts import Cluster, Model, Plan
from torchtitan_like.plan.memory import BYTES_KEPT, host_memory
from torchtitan_like.plan.search import Suggestion
from torchtitan_like.util.units import GIB

NUM_ROWS = 8
NUM_CONFIGS = 3
KEPT_NAMES = {"none": "all", "selective": "every 2nd", "full": "inputs"}


def toml(plan: Plan, batch: int, seq_len: int) -> str:
    """Return the lines of a config for a layout. batch: samples of a step."""
    lines = [
        "[parallelism]",
        f"data_parallel_replicate_degree = {plan.replicate}",
        f"data_parallel_shard_degree = {plan.shard}",
    ]
    if plan.tp > 1:
        lines.append(f"tensor_parallel_degree = {plan.tp}")
    if plan.cp > 1:
        lines.append(f"context_parallel_degree = {plan.cp}")
    if plan.pp > 1:
        lines.append(f"pipeline_parallel_degree = {plan.pp}")
        lines.append(f"pipeline_parallel_microbatch_size = {plan.micro}")
    lines += [
        "[training]",
        f"seq_len = {seq_len}",
        f"local_batch_size = {plan.micro}",
        f"global_batch_size = {batch}",
    ]
    if plan.offload:
        lines.append("enable_cpu_offload = true")
    return "\n".join([*lines, "[activation_checkpoint]", f'mode = "{plan.recompute}"'])


def report(
    model: Model, cluster: Cluster, batch: int, seq_len: int, suggestions: list[Suggestion]
) -> Iterator[str]:
    """Yield the lines that `titan plan` prints."""
    least_gpus = max(1, math.ceil(model.params * 18 * 1.25 / GIB / cluster.gpu_gib))
    yield (
        f"{model.name}: {model.params / 1e9:.2f} B parameters, {model.layers} layers of "
        f"{model.dim}; {cluster.gpus} GPUs of {cluster.gpu_gib:g} GiB on {cluster.nodes} "
        f"machine{'s' * (cluster.nodes > 1)}"
    )
    tokens = batch * seq_len
    yield f"Steps of {batch} samples x {seq_len} tokens = {tokens / 1e6:.2f} M tokens"
    yield (
        f"Rule of thumb: parameters x 18 bytes x 1.25 / {cluster.gpu_gib:g} GiB = {least_gpus} "
        "GPUs at least"
    )
    if not suggestions:
        yield "Nothing fits. More GPUs, shorter sequences or a smaller model are needed."
        return
    yield (
        f"\n{'':4}{'layout':26} {'kept':>11} {'samples':>9} {'GiB =':>6} {'states':>7} "
        f"{'gathered':>9} {'activat.':>9} {'rest':>5} {'s/step':>7} {'tokens/s/GPU':>13}"
    )
    for number, suggestion in enumerate(suggestions[:NUM_ROWS], start=1):
        yield _row(number, suggestion, tokens / suggestion.seconds / cluster.gpus)
    best = suggestions[0].plan
    if best.offload:
        yield (
            f"Weights, gradients and optimizer of the first: "
            f"{host_memory(best, model, cluster):,.0f} GiB of each machine's own memory"
        )
    yield (
        f"states = parameters x {BYTES_KEPT} bytes / (shards x TP x PP); gathered = bfloat16 "
        "weights and gradients on their way; activat. = activations kept for backward;\n"
        "rest = CUDA and NCCL; samples = micro-batches x samples of each"
    )
    for number, suggestion in enumerate(suggestions[:NUM_CONFIGS], start=1):
        yield f"\n# {number}. {suggestion.plan.name}\n{toml(suggestion.plan, batch, seq_len)}"


def _row(number: int, suggestion: Suggestion, tokens_per_second: float) -> str:
    plan = suggestion.plan
    parts = suggestion.memory
    samples = f"{suggestion.num_micro} x {plan.micro}"
    return (
        f"{number:>2}. {plan.name:26} {KEPT_NAMES[plan.recompute]:>11} {samples:>9} "
        f"{parts.total:6.1f} {parts.states:7.1f} {parts.gathered:9.1f} {parts.activations:9.1f} "
        f"{parts.overhead:5.1f} {suggestion.seconds:7.2f} {tokens_per_second:13,.0f}"
    )
