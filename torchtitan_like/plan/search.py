"""Search the layouts that fit into the memory of a cluster, the fastest first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from torchtitan_like.plan.layouts import Cluster, Model, Plan
from torchtitan_like.plan.memory import RECOMPUTATION, USABLE, Memory, host_memory, memory
from torchtitan_like.plan.step_time import seconds

LONG_SEQ_LEN = 32768  # from which context parallelism is tried


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits. num_micro: micro-batches of a step. seconds: of a step."""

    plan: Plan
    memory: Memory
    num_micro: int
    seconds: float


def global_batch(tokens_per_step: float, seq_len: int, gpus: int) -> int:
    """Return the samples of a step: a multiple of the GPUs, which every layout can share out."""
    return max(1, round(tokens_per_step / seq_len / gpus)) * gpus


def suggest(model: Model, cluster: Cluster, batch: int, seq_len: int) -> list[Suggestion]:
    """Return the layouts that fit, fastest first, each with its best batch and recomputation.

    Of layouts with equal times (to two digits), the one with fewer kinds of parallelism is first.
    CPU offload is tried if nothing else fits. batch: samples of a step.
    """
    for offload in (False, True):
        best: dict[str, Suggestion] = {}
        for plan, num_micro in candidates(model, cluster, batch, seq_len, offload):
            required = memory(plan, model, seq_len, num_micro)
            if required.total > cluster.gpu_gib * USABLE:
                continue
            if host_memory(plan, model, cluster) > cluster.host_gib * USABLE:
                continue
            time = seconds(plan, model, seq_len, num_micro, cluster)
            suggestion = Suggestion(plan, required, num_micro, time)
            if plan.name not in best or _rank(suggestion) < _rank(best[plan.name]):
                best[plan.name] = suggestion
        if best:
            return sorted(best.values(), key=_rank)
    return []


def candidates(
    model: Model, cluster: Cluster, batch: int, seq_len: int, offload: bool
) -> Iterator[tuple[Plan, int]]:
    """Yield every layout that may be useful, with its micro-batches per step."""
    max_stages = min(4 * cluster.nodes, model.layers)
    pipelines = [degree for degree in _divisors(cluster.gpus) if degree <= max_stages]
    if offload or model.is_tied:  # a tied weight is on the first stage and on the last one
        pipelines = [1]
    tensors = _divisors(math.gcd(cluster.per_node, model.kv_heads, model.ffn_dim))
    contexts = (1, 2, 4, 8) if seq_len >= LONG_SEQ_LEN else (1,)
    for pp, tp, cp in product(pipelines, tensors, contexts):
        data_ranks, remainder = divmod(cluster.gpus, pp * tp * cp)
        if remainder or not data_ranks:
            continue
        for shard in _divisors(data_ranks):
            plan = Plan(pp, data_ranks // shard, shard, cp, tp, 1, "none", offload)
            yield from _batch_sizes(plan, batch)


def _batch_sizes(plan: Plan, batch: int) -> Iterator[tuple[Plan, int]]:
    """Yield a layout with each recomputation and number of samples in a micro-batch."""
    rows = batch // plan.dp
    micros = [1] if plan.pp > 1 else [size for size in (1, 2, 4, 8) if rows % size == 0]
    for recompute, micro in product(RECOMPUTATION, micros):
        if rows // micro >= plan.pp:
            yield replace(plan, micro=micro, recompute=recompute), rows // micro


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _rank(suggestion: Suggestion) -> tuple[float, int, float]:
    """Return the sort key of a suggestion: the best one is the smallest."""
    plan = suggestion.plan
    num_kinds = sum(degree > 1 for degree in (plan.pp, plan.cp, plan.tp))
    return float(f"{suggestion.seconds:.2g}"), num_kinds, suggestion.seconds
