"""Memory and time of a layout by formulas, to choose the layouts that are worth a dry run.

Both only screen: memory with a margin, time to order the layouts. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_like.config import JobConfig
from torchtitan_like.distributed.stages import SCHEDULES
from torchtitan_like.models.spec import ModelSpec, get_spec, resolve_args
from torchtitan_like.plan.gpus import Gpu
from torchtitan_like.plan.layouts import Layout, Recompute, Space
from torchtitan_like.util.units import GIB, MIB

# Float32 weight, gradient and the two averages of Adam. A bfloat16 copy of the weight is gathered
# for computing.
BYTES_KEPT = 16
BYTES_GATHERED = 2
BYTES_REDUCED = 4  # of a whole gradient on its way to the shards, float32
# Of mixed-precision AdamW: weight 4 + 2, gradient 4, states 8; and a quarter more for activations.
QUICK_BYTES, QUICK_FACTOR = 18, 1.25
# Work of recomputation as a share of forward and backward. "op" recomputes every second matrix
# product and what needs no matrix product; "every n" is taken as every second block.
RECOMPUTED: Mapping[Recompute, float] = {
    "none": 0.0,
    "op": 1 / 8,
    "every n": 1 / 6,
    "full": 1 / 3,
    "as given": 1 / 6,
}
# Bytes that kernels read and write for each number of a row, a token's copy for one expert. Rows are
# bfloat16 (`models.layers.moe`): a copy of the token 4, the sum of a token's rows 2. Backward of the
# sum 6, of w1 and w3 together 6, of the copy 2. With expert parallelism, rows are sorted before and
# after the experts, 4 each.
ROW_FORWARD, ROW_BACKWARD = 6, 14
SORTED_FORWARD, SORTED_BACKWARD = 8, 8
# The rows that stay for backward, bfloat16: the experts' input and output. And the gradients of both,
# with expert parallelism before and after sorting.
ROW_KEPT = 4
ROW_TEMPORARY, SORTED_TEMPORARY = 4, 4
# Copies of gathered weights into their tensors, and of gradients into the buffer to reduce.
COPIED_GATHERED, COPIED_REDUCED = 4, 6
# Shares that kernels and collectives reach of the data sheet. They only order layouts.
COMPUTE_REACHED = 0.6
MEMORY_REACHED = 0.75
NETWORK_REACHED = 0.8
NODE_GB_S_PER_GPU = 50.0  # one 400 Gbit/s card for each GPU
EXPOSED = 0.1  # share of the data-parallel traffic that never overlaps with computing
GB = 1e9


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder. Parameters of a block are divided into experts and all others.

    q_dim, kv_dim: width of all queries and of all keys. ffn_dim: hidden units that process a token.
    rows: experts that process a token, on average over the layers. expert_dim: hidden units of each.
    embedding: parameters of the embedding; the head has as many, or is the same tensor if
    `is_tied`. flops_per_token: forward and backward.
    """

    layers: int
    dim: int
    q_dim: int
    kv_dim: int
    heads: int
    ffn_dim: float
    rows: float
    expert_dim: int
    vocab: int
    embedding: int
    is_tied: bool
    block: float
    block_experts: float
    flops_per_token: float

    @property
    def params(self) -> float:
        return self.layers * self.block + self.embedding * (1 if self.is_tied else 2)


def sizes_of(spec: ModelSpec, args: Any, seq_len: int) -> Sizes:
    """Return the sizes of a model. What it does not state is estimated from its parameters."""
    limits = spec.constraints(args)
    layers = limits.get("n_layers", 1)
    cost = spec.cost(args)
    dim = int(getattr(args, "dim", 0)) or max(1, round((cost.num_params / 12 / layers) ** 0.5))
    heads = limits.get("n_heads", max(1, dim // 128))
    head_dim = int(getattr(args, "head_dim", 0)) or dim // heads
    vocab = limits.get("vocab_size", 0)
    outside = cost.embedding * (1 if cost.is_tied else 2)
    block = max(0.0, (cost.num_params - outside) / layers)
    block_active = max(0.0, (cost.num_active_params - outside) / layers)
    experts = sum(each.num_experts * each.expert_params for each in cost.layers) / layers
    q_dim, kv_dim = heads * head_dim, limits.get("n_kv_heads", heads) * head_dim
    attention = dim * (2 * q_dim + 2 * kv_dim)
    return Sizes(
        layers=layers,
        dim=dim,
        q_dim=q_dim,
        kv_dim=kv_dim,
        heads=heads,
        ffn_dim=max(0.0, (block_active - attention) / (3 * dim)),
        rows=sum(each.top_k for each in cost.layers) / layers,
        expert_dim=limits.get("expert_hidden_dim", 0),
        vocab=vocab,
        embedding=cost.embedding,
        is_tied=cost.is_tied,
        block=block,
        block_experts=experts,
        flops_per_token=cost.flops_per_token(seq_len),
    )


# ---- memory


def bytes_per_token(sizes: Sizes, tp: int = 1, cp: int = 1, *, fuses: bool = False) -> float:
    """Return the bytes that one layer keeps for its backward per token of a rank, in bfloat16.

    Assumes fused norms and attention. Tensor parallelism shards: the residual stream (twice),
    queries and the output of attention, keys and values, four times the feed-forward width (three
    times if `fuses`, as compiled code), and a float32 for each head (log-sum-exp of attention) and
    each norm. It does not shard the outputs of the two norms, which are gathered. Context
    parallelism adds the gathered keys and values of all ranks. A mixture of experts keeps input and
    output of the experts for each row, and its tokens in float32 in place of the gathered norm. A
    test measures these bytes.
    """
    # Only a dense layer that is not compiled keeps the result of its activation function.
    activated = 0.0 if fuses else sizes.ffn_dim - sizes.rows * sizes.expert_dim
    widths = 2 * sizes.dim + 2 * sizes.q_dim + 2 * sizes.kv_dim * cp + 3 * sizes.ffn_dim + activated
    sharded = 2 * widths + ROW_KEPT * sizes.rows * sizes.dim + 4 * sizes.heads + 8
    norms = 2 * sizes.dim + (4 * sizes.dim / tp if sizes.rows else 2 * sizes.dim)
    return sharded / tp + norms


def kept_bytes_per_token(sizes: Sizes, layout: Layout, *, fuses: bool = False) -> float:
    """Return the bytes that a layer keeps per token with the layout's recomputation."""
    every = bytes_per_token(sizes, layout.tp, layout.cp, fuses=fuses)
    block_input = 2 * sizes.dim / layout.tp
    routed = sizes.rows * sizes.expert_dim
    products = sizes.q_dim + 2 * sizes.kv_dim + 2 * sizes.dim + 2 * (sizes.ffn_dim - routed)
    # The output of every product of experts, and the rows that ranks exchange.
    of_experts = 2 * routed + (3 if layout.ep > 1 else 1) * sizes.rows * sizes.dim
    kept: dict[Recompute, float] = {
        "none": every,
        # The output of attention, and of every second matrix product.
        "op": block_input + 2 * (sizes.q_dim + products / 2 + of_experts) / layout.tp,
        "full": block_input,
    }
    return kept.get(layout.recompute, (every + block_input) / 2)


def memory_gib(layout: Layout, sizes: Sizes, space: Space) -> float:
    """Return an estimate of the bytes that the allocator of the fullest rank reserves, GiB."""
    sizes = _with_padding(sizes, layout, space)
    shards = layout.shard * layout.cp
    layers = space.num_slots / layout.pp if layout.pp > 1 else sizes.layers
    dense, experts = sizes.block - sizes.block_experts, sizes.block_experts
    block = dense / layout.tp + experts / (layout.ep * layout.expert_tp)
    ends = sizes.params - sizes.layers * sizes.block if layout.pp == 1 else sizes.embedding
    stage = layers * sizes.block / layout.tp + ends / layout.tp
    states = BYTES_KEPT * stage / shards
    whole = layers * block + ends / layout.tp
    if not any(params and ranks > 1 for params, ranks, _ in _sharded_params(layout, sizes)):
        gathered = BYTES_GATHERED * whole
    elif not layout.frees_weights:
        gathered = BYTES_GATHERED * whole + (BYTES_REDUCED * whole if layout.pp > 1 else 0)
    else:  # two groups of weights, and the whole gradient of one in both dtypes
        largest = max(block, sizes.embedding / layout.tp)
        gathered = (3 * BYTES_GATHERED + BYTES_REDUCED) * largest
        gathered += BYTES_REDUCED * whole if layout.pp > 1 else 0
    tokens = layout.micro_batch * space.config.training.seq_len / layout.cp
    fuses = space.config.compile.compiles_model
    kept = kept_bytes_per_token(sizes, layout, fuses=fuses)
    activations = tokens * layers * kept * _in_flight(layout)
    one_layer = tokens * bytes_per_token(sizes, layout.tp, layout.cp, fuses=fuses)
    temporary = ROW_TEMPORARY + (SORTED_TEMPORARY if layout.ep > 1 else 0)
    one_layer += temporary * _rows_of_rank(layout, sizes, space) * sizes.dim
    return (states + gathered + activations + one_layer + _loss_bytes(sizes, layout, space)) / GIB


def _with_padding(sizes: Sizes, layout: Layout, space: Space) -> Sizes:
    """Return the sizes with the rows of padding that expert-parallel ranks exchange."""
    if not space.config.bounds_rows(is_on_cpu=False):
        return sizes
    capacity = min(space.config.parallelism.expert_parallel_capacity, layout.ep)
    rows = (capacity - 1) * sizes.rows
    return replace(sizes, rows=sizes.rows + rows, ffn_dim=sizes.ffn_dim + rows * sizes.expert_dim)


def _rows_of_rank(layout: Layout, sizes: Sizes, space: Space) -> float:
    """Return the rows that a rank's experts have in a layer for one micro-batch, if all are even.

    With expert tensor parallelism, each rank has the rows of its tensor-parallel group.
    """
    tokens = layout.micro_batch * space.config.training.seq_len / layout.cp / layout.tp
    return tokens * layout.expert_tp * sizes.rows


def _in_flight(layout: Layout) -> float:
    """Return how many micro-batches the first rank keeps for all of its layers."""
    if layout.pipeline is None:
        return 1.0
    number = layout.pipeline.stages_per_rank
    if number == 1:
        return min(layout.num_micro, layout.pp)
    if SCHEDULES[layout.pipeline.schedule].is_v_shaped:
        return min(layout.num_micro, layout.pp + 1)
    # Warm-up of Megatron's interleaved schedule (arXiv:2104.04473, section 2.2), in whole layers.
    return min(layout.num_micro, ((number + 1) * layout.pp - 1) / number)


def _loss_bytes(sizes: Sizes, layout: Layout, space: Space) -> float:
    """Return the bytes of logits: bfloat16, float32, and the gradient of these."""
    tokens = layout.micro_batch * space.config.training.seq_len / layout.cp
    logits = tokens * sizes.vocab / layout.tp
    chunk = space.config.loss.chunk_mib * MIB
    return 10 * logits if chunk == 0 else min(10 * logits, 3 * chunk)


# ---- time


@dataclass(frozen=True)
class Network:
    """Bandwidth of a GPU's links, bytes/s per direction. ranks_per_node: GPUs of a node."""

    inside: float
    between: float
    ranks_per_node: int

    def bandwidth(self, members: int, stride: int) -> float:
        """Return the bytes/s at which each rank of a group sends; its ranks are `stride` apart.

        All groups of a node share its network cards: a group with k ranks on a node of n has k/n.
        """
        if members * stride <= self.ranks_per_node:
            return self.inside
        return min(self.inside, self.between * max(1, self.ranks_per_node // stride))

    def exchange_seconds(self, nbytes: float, members: int, stride: int) -> float:
        """Return the seconds of an all-to-all, in which a rank sends 1/n of `nbytes` to each rank.

        It uses its links inside the node, and its own card to other nodes.
        """
        on_node = max(1, min(members, self.ranks_per_node // stride))
        inside = nbytes * (on_node - 1) / members / self.inside
        return max(inside, nbytes * (members - on_node) / members / self.between)


def network_of(gpu: Gpu, ranks_per_node: int, node_gb_s: float = NODE_GB_S_PER_GPU) -> Network:
    """Return the network of nodes with these GPUs."""
    reached = NETWORK_REACHED * GB
    return Network(gpu.link_gb_s * reached, node_gb_s * reached, ranks_per_node)


def seconds(layout: Layout, sizes: Sizes, space: Space, gpu: Gpu, network: Network) -> float:
    """Return the estimated seconds of a step.

    Matrix products, the kernels that move rows and gathered weights, the bubble and the imbalance of
    a pipeline, and the traffic that does not overlap.
    Raises ValueError if the GPU states no peak for the dtype.
    """
    config = space.config
    tokens = space.global_batch * config.training.seq_len
    sizes = _with_padding(sizes, layout, space)
    flops = sizes.flops_per_token * tokens * (1 + RECOMPUTED[layout.recompute])
    peak = _peak_flops(config, gpu)
    computing = flops / (peak * COMPUTE_REACHED) / space.world_size
    computing += _memory_seconds(layout, sizes, space, gpu)
    traffic = _traffic(layout, sizes, space, network)
    hideable = traffic["data"]
    exposed = EXPOSED * hideable + max(0.0, (1 - EXPOSED) * hideable - computing)
    exposed += traffic["layers"] + traffic["experts"] + traffic["stages"]
    return (computing + exposed) * _pipeline_factor(layout, space)


def _memory_seconds(layout: Layout, sizes: Sizes, space: Space, gpu: Gpu) -> float:
    """Return the seconds of kernels that move rows of experts, or weights that FSDP gathers.

    The kernels of the dense layers are a part of `COMPUTE_REACHED`.
    """
    bandwidth = gpu.hbm_tb_s * 1e12 * MEMORY_REACHED
    forward, backward = ROW_FORWARD, ROW_BACKWARD
    if layout.ep > 1:
        forward, backward = forward + SORTED_FORWARD, backward + SORTED_BACKWARD
    per_row = backward + forward * _num_forwards(layout)
    rows = _rows_of_rank(layout, sizes, space) * layout.num_micro * sizes.layers / layout.pp
    moved = per_row * rows * sizes.dim
    gathers, scatters = _num_collectives(layout)
    for params, ranks, _ in _sharded_params(layout, sizes):
        if ranks > 1:
            moved += (gathers * COPIED_GATHERED + scatters * COPIED_REDUCED) * params
    return moved / bandwidth


def _num_forwards(layout: Layout) -> float:
    """Return how often a layer runs its forward, of which recomputation is a part."""
    return 1 + min(1.0, 3 * RECOMPUTED[layout.recompute])


def _peak_flops(config: JobConfig, gpu: Gpu) -> float:
    """Return the peak FLOP/s of matrix products. Raises ValueError if the GPU states none."""
    dtype = config.training.mixed_precision_param
    if dtype not in gpu.peak_tflops:
        raise ValueError(
            f"{gpu.name} has no peak for {dtype}. Expected {dtype} in [peak_tflops]: add it to the "
            "description of the GPU"
        )
    return gpu.peak_tflops[dtype] * 1e12


def _pipeline_factor(layout: Layout, space: Space) -> float:
    """Return the time of a pipeline as a multiple of the time without bubble and imbalance.

    Bubbles: (p - 1)/(v m) of the rest (arXiv:2104.04473, section 2.2). Schedules that split the
    backward fill two thirds of it (arXiv:2401.10241).
    """
    if layout.pipeline is None:
        return 1.0
    bubble = (layout.pp - 1) / layout.pipeline.stages_per_rank / layout.num_micro
    if SCHEDULES[layout.pipeline.schedule].splits_backward:
        bubble /= 3
    slots = layout.num_stages * math.ceil(space.num_slots / layout.num_stages)
    return (1 + bubble) * slots / space.num_slots


def _num_collectives(layout: Layout) -> tuple[int, int]:
    """Return how often a step gathers the weights, and scatters the gradients.

    Weights are gathered for forward, and for backward if they were freed. Gradients are scattered in
    each backward, with a pipeline in the last one.
    """
    gathers = layout.num_micro * (2 if layout.frees_weights else 1)
    if layout.pipeline is not None and not layout.frees_weights:
        gathers = 1
    return gathers, 1 if layout.pipeline is not None else layout.num_micro


def _sharded_params(layout: Layout, sizes: Sizes) -> tuple[tuple[float, int, int], ...]:
    """Return (gathered parameters of a rank, ranks, stride) of the dense weights and of the experts."""
    experts = sizes.layers * sizes.block_experts
    degree = layout.ep * layout.expert_tp
    return (
        ((sizes.params - experts) / layout.tp / layout.pp, layout.shard * layout.cp, layout.tp),
        (experts / degree / layout.pp, layout.num_expert_ranks // layout.ep, degree),
    )


def _traffic(layout: Layout, sizes: Sizes, space: Space, network: Network) -> dict[str, float]:
    """Return the seconds of traffic in a step.

    Of data parallelism, within layers, between the ranks of experts, and between stages.
    """

    def ring(nbytes: float, members: int, stride: int) -> float:
        """Return the seconds of an all-gather or reduce-scatter: a rank sends (n - 1)/n of it."""
        if members == 1:
            return 0.0
        return nbytes * (members - 1) / members / network.bandwidth(members, stride)

    gathers, scatters = _num_collectives(layout)
    replica = layout.shard * layout.cp * layout.tp
    data = 0.0
    for params, ranks, stride in _sharded_params(layout, sizes):
        data += ring((gathers * BYTES_GATHERED + scatters * BYTES_REDUCED) * params, ranks, stride)
        data += 2 * ring(BYTES_REDUCED * params / ranks, layout.replicate, replica)

    activation = 2 * layout.micro_batch * space.config.training.seq_len / layout.cp * sizes.dim
    layers = layout.num_micro * sizes.layers / layout.pp
    # Two gathers and two scatters of the residual stream in forward, as many in backward, and the
    # forward's once more if it is recomputed.
    per_layer = (8 if layout.recompute in ("none", "op") else 12) * ring(activation, layout.tp, 1)
    keys = 2 * layout.micro_batch * space.config.training.seq_len * 2 * sizes.kv_dim / layout.tp
    per_layer += 2 * ring(keys, layout.cp, layout.tp)
    # Rows go to their experts and back in forward and in backward; "op" keeps the exchanged rows.
    exchanges = 4 if layout.recompute in ("none", "op") else 6
    rows = BYTES_GATHERED * _rows_of_rank(layout, sizes, space) * sizes.dim
    experts = exchanges * network.exchange_seconds(rows, layout.ep, layout.expert_tp)
    stages = 0.0
    if layout.pipeline is not None:
        messages = layout.num_micro * 2 * layout.pipeline.stages_per_rank
        stride = space.world_size // layout.pp
        stages = messages * activation / layout.tp / network.bandwidth(2, stride)
    return {
        "data": data,
        "layers": layers * per_layer,
        "experts": layers * experts,
        "stages": stages,
    }


def quick_estimate(config: JobConfig, gpu: Gpu) -> str:
    """Return a line with the fewest GPUs whose memory fits weights, states and some activations."""
    spec = get_spec(config.model.name)
    num = spec.num_params(resolve_args(spec, config.model.flavor, config.model.args))
    gpus = num * QUICK_BYTES * QUICK_FACTOR / (gpu.memory_gib * GIB)
    return (
        f"{num:,} parameters x {QUICK_BYTES} bytes x {QUICK_FACTOR} / {gpu.memory_gib:g} GiB = "
        f"{gpus:.2f}: at least {math.ceil(gpus)} GPUs ({gpu.name})"
    )
