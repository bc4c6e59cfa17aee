"""Memory of a layout: states, gathered weights and activations."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_like.plan.layouts import Cluster, Model, Plan
from torchtitan_like.util.units import GIB

# Float32 weight, gradient and the two averages of Adam. A bfloat16 copy of the weight is gathered
# for computing (18 bytes in total).
BYTES_KEPT = 16
BYTES_GATHERED = 2
OVERHEAD_GIB = 2.0  # context of CUDA, buffers of NCCL
USABLE = 0.92  # the allocator cannot reuse the rest
# activation_checkpoint.mode: (share of the layers whose activations are all kept, work of
# recomputation as a share of forward and backward)
RECOMPUTATION = {"none": (1.0, 0.0), "selective": (0.5, 1 / 6), "full": (0.0, 1 / 3)}


@dataclass(frozen=True)
class Memory:
    """GiB on the fullest GPU."""

    states: float
    gathered: float
    activations: float
    overhead: float = OVERHEAD_GIB

    @property
    def total(self) -> float:
        """Sum of all parts, GiB."""
        return self.states + self.gathered + self.activations + self.overhead


def bytes_per_token(model: Model, tp: int = 1, cp: int = 1) -> float:
    """Return the bytes that one layer keeps for its backward per token of a rank, in bfloat16.

    Assumes fused norms and attention. Tensor parallelism shards: the residual stream (twice),
    queries and the output of attention, keys and values, four times the feed-forward width, and a
    float32 for each head (log-sum-exp of attention) and each norm. It does not shard the outputs of
    the two norms, which are gathered. Context parallelism adds the gathered keys and values of all
    ranks. A test measures these bytes.
    """
    sharded = 2 * (4 * model.dim + 2 * model.kv_dim * cp + 4 * model.ffn_dim) + 4 * model.heads + 8
    return sharded / tp + 2 * 2 * model.dim


def memory(plan: Plan, model: Model, seq_len: int, num_micro: int) -> Memory:
    """Return the memory of the fullest GPU. num_micro: micro-batches of a step."""
    ranks = plan.shard * plan.cp
    stage_params = model.params / plan.tp
    if plan.pp > 1:
        stage_params = (model.block * model.layers / plan.pp + model.embedding) / plan.tp
    states = 0.0 if plan.offload else BYTES_KEPT * stage_params / ranks
    largest = max(model.block, model.embedding) / plan.tp
    if ranks == 1 and not plan.offload:
        gathered = BYTES_GATHERED * stage_params
    elif plan.pp > 1:  # all weights stay gathered, and whole gradients until the last micro-batch
        gathered = (BYTES_GATHERED + 4) * stage_params
    else:  # two groups of weights, and the whole gradient of one group in bfloat16 and float32
        gathered = (2 * BYTES_GATHERED + 2 + 4) * largest
    share_kept, _ = RECOMPUTATION[plan.recompute]
    tokens = plan.micro * seq_len / plan.cp
    layers = model.layers / plan.pp
    per_layer = bytes_per_token(model, plan.tp, plan.cp)
    inputs = 2 * model.dim / plan.tp
    in_flight = min(num_micro, plan.pp)
    per_token = share_kept * per_layer + (1 - share_kept) * inputs
    activations = tokens * in_flight * layers * per_token
    activations += tokens * per_layer * (share_kept < 1) + tokens * 6 * model.dim
    return Memory(states / GIB, gathered / GIB, activations / GIB)


def host_memory(plan: Plan, model: Model, cluster: Cluster) -> float:
    """Return the main memory that offloaded states take on each node, GiB."""
    if not plan.offload:
        return 0.0
    return BYTES_KEPT * model.params * plan.replicate / cluster.nodes / GIB
