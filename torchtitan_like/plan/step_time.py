"""Time of a step: computing, pipeline bubble and traffic that does not overlap with computing."""

from __future__ import annotations

from torchtitan_like.plan.layouts import GB, Cluster, Model, Plan
from torchtitan_like.plan.memory import RECOMPUTATION

# CPU offload: each GPU reaches 80 % of the 32 GB/s of PCIe 4 (bytes/s), and has eight cores. One
# core updates 33.5 M parameters with AdamW in 23 ms (measured); seconds per parameter.
PCIE = 0.8 * 32 * GB
HOST_UPDATE = 23e-3 / 33.5e6 / 8
EXPOSED = 0.1  # share of the data-parallel traffic that never overlaps with computing


def traffic(
    plan: Plan, model: Model, seq_len: int, num_micro: int, cluster: Cluster
) -> dict[str, float]:
    """Return the seconds of each kind of traffic in a step, on one rank."""

    def ring(nbytes: float, members: int, stride: int) -> float:
        """Return the seconds of an all-gather or reduce-scatter: a rank sends (n - 1)/n of it."""
        if members == 1:
            return 0.0
        return nbytes * (members - 1) / members / cluster.bandwidth(members, stride)

    shards = plan.shard * plan.cp
    stage_params = model.params / plan.pp / plan.tp
    # Weights are gathered in bfloat16 (twice if they are freed after forward), and gradients
    # scattered in float32 in each backward.
    passes = 1 if plan.pp > 1 else num_micro
    gathers = 1 if plan.pp > 1 else 2
    seconds_by_kind = {"shard": passes * ring((gathers * 2 + 4) * stage_params, shards, plan.tp)}
    # Once in a step.
    seconds_by_kind["replicate"] = 2 * ring(
        4 * stage_params / shards, plan.replicate, shards * plan.tp
    )
    activation = 2 * plan.micro * seq_len / plan.cp * model.dim
    layers = model.layers / plan.pp
    # Two gathers and two scatters of the residual stream in forward, and as many in backward.
    seconds_by_kind["tp"] = num_micro * layers * 8 * ring(activation, plan.tp, 1)
    keys = 2 * plan.micro * seq_len * 2 * model.kv_dim / plan.tp
    seconds_by_kind["cp"] = num_micro * layers * 2 * ring(keys, plan.cp, plan.tp)
    if plan.pp > 1:
        stride = cluster.gpus // plan.pp
        sent = num_micro * 2 * activation / plan.tp
        seconds_by_kind["pp"] = sent / cluster.bandwidth(2, stride)
    if plan.offload:
        own = stage_params / shards  # read for forward and backward, gradients written; float32
        seconds_by_kind["offload"] = num_micro * 3 * 4 * own / PCIE + own * HOST_UPDATE
    return seconds_by_kind


def seconds(plan: Plan, model: Model, seq_len: int, num_micro: int, cluster: Cluster) -> float:
    """Return the seconds of a step.

    Computing takes 6 FLOPs per parameter and token, and the FLOPs of attention. The bubble of a
    pipeline and the traffic that does not overlap with computing are added.
    """
    tokens = num_micro * plan.micro * seq_len * plan.dp
    _, recomputed = RECOMPUTATION[plan.recompute]
    flops = (
        (
            6 * (model.layers * model.block + model.embedding)
            + 12 * model.layers * model.dim * seq_len
        )
        * tokens
        * (1 + recomputed)
    )
    computing = flops / cluster.flops / cluster.gpus
    seconds_by_kind = traffic(plan, model, seq_len, num_micro, cluster)
    hideable = seconds_by_kind["shard"] + seconds_by_kind["replicate"]
    exposed = EXPOSED * hideable + max(0.0, (1 - EXPOSED) * hideable - computing)
    exposed += sum(
        value for kind, value in seconds_by_kind.items() if kind not in ("shard", "replicate")
    )
    bubble = (plan.pp - 1) / num_micro  # (p - 1)/(m + p - 1) of the total is (p - 1)/m of the rest
    return computing * (1 + bubble) + exposed
