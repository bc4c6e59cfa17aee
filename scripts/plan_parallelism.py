"""Which layout for a model on some GPUs: what fits into their memory, and what should be fastest.

    python scripts/plan_parallelism.py --params 8e9 --gpus 16 --nodes 2 --gpu-mem 80 --net fast

Prints the layouts that fit, the fastest first, with their memory by parts, and for the first ones the lines of a TOML file.
The times come from a model of a few lines (`seconds`): they put layouts in order, and are no forecast. Nothing is built and
no GPU is needed. Exit codes: 0 a layout was found, 1 none fits, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from torchtitan_like.models.llama3.flavors import FLAVORS, num_params

GB, GIB = 1e9, 2**30
# Float32 weight, gradient and Adam's two averages; a bfloat16 copy is gathered for computing (18 bytes in all).
BYTES_KEPT, BYTES_GATHERED = 16, 2
# The context of CUDA and NCCL's buffers; what the allocator cannot hand out again.
OVERHEAD_GIB, USABLE = 2.0, 0.92
# GB/s of one machine with 8 GPUs, per direction, of which collectives reach 80 %. Within it: NVLink 4 of an H100, 450 per
# GPU. Between machines: one 400 Gbit/s card for each GPU, or 100 Gbit/s Ethernet for all.
REACHED, NVLINK = 0.8, 450.0
NETS = {"fast": 8 * 50.0, "slow": 12.5}
# Offloading: 80 % of PCIe 4's 32 GB/s for each GPU; eight cores for each GPU, of which one updates 33.5 M parameters with
# AdamW in 23 ms (measured on the CPU of the machine this was written on).
PCIE, HOST_UPDATE = 0.8 * 32 * GB, 23e-3 / 33.5e6 / 8
# Of the data-parallel traffic that could hide behind computing, this part does not.
EXPOSED = 0.1
# mode, option of activation_checkpoint: layers of which all is kept, further work as a part of forward and backward
RECOMPUTATION = {"none": (1.0, 0.0), "selective": (0.5, 1 / 6), "full": (0.0, 1 / 3)}


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder like Llama 3."""

    params: float
    layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    vocab: int
    is_tied: bool
    name: str

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocab * self.dim

    @property
    def block(self) -> float:
        """Parameters of one layer."""
        return (self.params - (1 if self.is_tied else 2) * self.embedding) / self.layers

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.dim // self.heads


@dataclass(frozen=True)
class Cluster:
    """gpus in all; gpu_gib of memory each; node_gbs: GB/s between machines, of each; flops reached by one GPU; host_gib of
    memory of each machine.
    """

    gpus: int
    nodes: int
    gpu_gib: float
    node_gbs: float
    flops: float
    host_gib: float = 1024

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    def bandwidth(self, members: int, stride: int) -> float:
        """Bytes/s at which each rank of a group sends, `members` ranks that are `stride` apart.

        All groups of a machine share its network: a group with k ranks on a machine of n has k/n of it.
        """
        inside = NVLINK * REACHED * GB
        if members * stride <= self.per_node:
            return inside
        here = max(1, self.per_node // stride)
        return min(inside, self.node_gbs * REACHED * GB * here / self.per_node)


@dataclass(frozen=True)
class Plan:
    """One layout. micro: samples of one forward pass; recompute: activation_checkpoint.mode."""

    pp: int
    replicate: int
    shard: int
    cp: int
    tp: int
    micro: int
    recompute: str
    offload: bool = False

    @property
    def dp(self) -> int:
        return self.replicate * self.shard

    @property
    def name(self) -> str:
        kinds = [f"{word} {n}" for word, n in (("PP", self.pp), ("CP", self.cp), ("TP", self.tp)) if n > 1]
        if self.replicate > 1 and self.shard > 1:
            kinds.append(f"HSDP {self.replicate} x {self.shard}")
        elif self.dp > 1:
            kinds.append(f"FSDP {self.shard}" if self.shard > 1 else f"DDP {self.replicate}")
        return (" x ".join(kinds) or "one GPU") + " + CPU offload" * self.offload


@dataclass(frozen=True)
class Memory:
    """GiB on the fullest GPU."""

    states: float
    gathered: float
    activations: float
    overhead: float = OVERHEAD_GIB

    @property
    def total(self) -> float:
        return self.states + self.gathered + self.activations + self.overhead


# ---- memory


def bytes_per_token(model: Model, tp: int = 1, cp: int = 1) -> float:
    """Bytes that one layer keeps for its backward, per token of a rank, in bfloat16 with fused norms and attention.

    Cut by tensor parallelism: the residual stream twice, queries and attention's output, keys and values, four times the
    feed-forward width, and a float32 for each head (attention's log-sum-exp) and each norm. Not cut: the two norms' outputs,
    which are gathered. With context parallelism the gathered keys and values of all ranks. A test measures it.
    """
    cut = 2 * (4 * model.dim + 2 * model.kv_dim * cp + 4 * model.ffn_dim) + 4 * model.heads + 8
    return cut / tp + 2 * 2 * model.dim


def memory(plan: Plan, model: Model, seq_len: int, num_micro: int) -> Memory:
    """What the fullest GPU holds."""
    ranks = plan.shard * plan.cp
    of_stage = model.params / plan.tp
    if plan.pp > 1:
        of_stage = (model.block * model.layers / plan.pp + model.embedding) / plan.tp
    states = 0.0 if plan.offload else BYTES_KEPT * of_stage / ranks
    largest = max(model.block, model.embedding) / plan.tp
    if ranks == 1 and not plan.offload:
        gathered = BYTES_GATHERED * of_stage
    elif plan.pp > 1:  # all weights stay, and whole gradients until the last micro-batch
        gathered = (BYTES_GATHERED + 4) * of_stage
    else:  # two groups, and the whole gradient of one, in bfloat16 and as float32 on its way
        gathered = (2 * BYTES_GATHERED + 2 + 4) * largest
    kept, _ = RECOMPUTATION[plan.recompute]
    tokens, layers = plan.micro * seq_len / plan.cp, model.layers / plan.pp
    per_layer = bytes_per_token(model, plan.tp, plan.cp)
    inputs = 2 * model.dim / plan.tp
    in_flight = min(num_micro, plan.pp)
    activations = tokens * in_flight * layers * (kept * per_layer + (1 - kept) * inputs)
    activations += tokens * per_layer * (kept < 1) + tokens * 6 * model.dim
    return Memory(states / GIB, gathered / GIB, activations / GIB)


def host_memory(plan: Plan, model: Model, cluster: Cluster) -> float:
    """GiB of each machine that offloaded states take."""
    return BYTES_KEPT * model.params * plan.replicate / cluster.nodes / GIB if plan.offload else 0.0


# ---- time


def traffic(plan: Plan, model: Model, seq_len: int, num_micro: int, cluster: Cluster) -> dict[str, float]:
    """Seconds that each kind of traffic takes in a step, on one rank."""

    def ring(nbytes: float, members: int, stride: int) -> float:
        """A gather or a scatter of `nbytes`: each rank sends (n - 1)/n of them."""
        return nbytes * (members - 1) / members / cluster.bandwidth(members, stride) if members > 1 else 0.0

    inner = plan.tp
    shards, of_stage = plan.shard * plan.cp, model.params / plan.pp / plan.tp
    # Weights gathered in bfloat16 (twice where they are freed in between), gradients scattered in float32, in each backward.
    passes = 1 if plan.pp > 1 else num_micro
    gathers = 1 if plan.pp > 1 else 2
    found = {"shard": passes * ring((gathers * 2 + 4) * of_stage, shards, inner)}
    found["replicate"] = 2 * ring(4 * of_stage / shards, plan.replicate, shards * inner)  # once a step
    activation = 2 * plan.micro * seq_len / plan.cp * model.dim
    layers = model.layers / plan.pp
    # Two gathers and two scatters of the residual stream in forward, and as many in backward.
    found["tp"] = num_micro * layers * 8 * ring(activation, plan.tp, 1)
    keys = 2 * plan.micro * seq_len * 2 * model.kv_dim / plan.tp
    found["cp"] = num_micro * layers * 2 * ring(keys, plan.cp, plan.tp)
    if plan.pp > 1:
        found["pp"] = num_micro * 2 * activation / plan.tp / cluster.bandwidth(2, cluster.gpus // plan.pp)
    if plan.offload:
        own = of_stage / shards  # read for forward and backward, gradients written; float32
        found["offload"] = num_micro * 3 * 4 * own / PCIE + own * HOST_UPDATE
    return found


def seconds(plan: Plan, model: Model, seq_len: int, num_micro: int, cluster: Cluster) -> float:
    """A step: computing (6 FLOPs per parameter and token, and attention's), the pipeline's bubble, traffic not hidden."""
    tokens = num_micro * plan.micro * seq_len * plan.dp
    _, again = RECOMPUTATION[plan.recompute]
    flops = (
        (6 * (model.layers * model.block + model.embedding) + 12 * model.layers * model.dim * seq_len)
        * tokens
        * (1 + again)
    )
    computing = flops / cluster.flops / cluster.gpus
    spent = traffic(plan, model, seq_len, num_micro, cluster)
    hideable = spent["shard"] + spent["replicate"]
    exposed = EXPOSED * hideable + max(0.0, (1 - EXPOSED) * hideable - computing)
    exposed += sum(value for kind, value in spent.items() if kind not in ("shard", "replicate"))
    bubble = (plan.pp - 1) / num_micro  # (p - 1)/(m + p - 1) of all is (p - 1)/m of the rest
    return computing * (1 + bubble) + exposed


# ---- choice


def plans(model: Model, cluster: Cluster, batch: int, seq_len: int, offload: bool) -> Iterator[tuple[Plan, int]]:
    """Every layout of the kinds that are worth a thought, with its number of micro-batches per step."""
    pipelines = [n for n in _divisors(cluster.gpus) if n <= min(4 * cluster.nodes, model.layers)]
    if offload or model.is_tied:  # a tied weight is on the first stage and on the last one
        pipelines = [1]
    tensors = _divisors(math.gcd(cluster.per_node, model.kv_heads, model.ffn_dim))
    contexts = (1, 2, 4, 8) if seq_len >= 32768 else (1,)
    for pp, tp, cp in product(pipelines, tensors, contexts):
        rest, left = divmod(cluster.gpus, pp * tp * cp)
        if rest and not left:
            for shard in _divisors(rest):
                yield from _sizes(Plan(pp, rest // shard, shard, cp, tp, 1, "none", offload), batch)


def _sizes(plan: Plan, batch: int) -> Iterator[tuple[Plan, int]]:
    rows = batch // plan.dp
    for recompute in RECOMPUTATION:
        for micro in [1] if plan.pp > 1 else [n for n in (1, 2, 4, 8) if rows % n == 0]:
            if rows // micro >= plan.pp:
                yield replace(plan, micro=micro, recompute=recompute), rows // micro


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class Suggestion:
    plan: Plan
    memory: Memory
    num_micro: int
    seconds: float


def suggest(model: Model, cluster: Cluster, batch: int, seq_len: int) -> list[Suggestion]:
    """The layouts that fit, fastest first, each with its best batch and recomputation. Of layouts whose times are equal to
    two digits the one that cuts in fewer ways comes first. CPU offload is looked at if nothing else fits."""
    for offload in (False, True):
        found: dict[str, Suggestion] = {}
        for plan, num_micro in plans(model, cluster, batch, seq_len, offload):
            needs = memory(plan, model, seq_len, num_micro)
            if needs.total > cluster.gpu_gib * USABLE or host_memory(plan, model, cluster) > cluster.host_gib * USABLE:
                continue
            one = Suggestion(plan, needs, num_micro, seconds(plan, model, seq_len, num_micro, cluster))
            if plan.name not in found or _order(one) < _order(found[plan.name]):
                found[plan.name] = one
        if found:
            return sorted(found.values(), key=_order)
    return []


def _order(one: Suggestion) -> tuple[float, int, float]:
    plan = one.plan
    return float(f"{one.seconds:.2g}"), sum(n > 1 for n in (plan.pp, plan.cp, plan.tp)), one.seconds


def model_of(params: float) -> Model:
    """The Llama 3 with about as many parameters; or layers of 128 times as many features as there are layers, as in 8B."""
    name, args = min(FLAVORS.items(), key=lambda item: abs(math.log(num_params(item[1]) / params)))
    if abs(num_params(args) / params - 1) < 0.1:
        sizes = (args.n_layers, args.dim, args.ffn_dim, args.n_heads, args.num_kv_heads, args.vocab_size)
        return Model(num_params(args), *sizes, args.enable_weight_tying, f"Llama 3 {name}")
    layers = max(1, round((params / (13 * 128**2)) ** (1 / 3)))
    dim = 128 * layers
    return Model(params, layers, dim, round(3.5 * dim), layers, math.gcd(layers, 8), 128256, False, "estimated sizes")


# ---- command


def toml(plan: Plan, batch: int, seq_len: int) -> str:
    """The lines that a configuration needs for a plan."""
    lines = [
        "[parallelism]",
        f"data_parallel_replicate_degree = {plan.replicate}",
        f"data_parallel_shard_degree = {plan.shard}",
        *(f"{name}_parallel_degree = {n}" for name, n in (("tensor", plan.tp), ("context", plan.cp)) if n > 1),
    ]
    if plan.pp > 1:
        lines += [f"pipeline_parallel_degree = {plan.pp}", f"pipeline_parallel_microbatch_size = {plan.micro}"]
    lines += ["[training]", f"seq_len = {seq_len}", f"local_batch_size = {plan.micro}", f"global_batch_size = {batch}"]
    lines += ["enable_cpu_offload = true"] * plan.offload
    return "\n".join([*lines, "[activation_checkpoint]", f'mode = "{plan.recompute}"'])


def report(model: Model, cluster: Cluster, batch: int, seq_len: int, found: list[Suggestion]) -> Iterator[str]:
    """What is printed."""
    quick = model.params * 18 * 1.25 / GIB / cluster.gpu_gib
    yield (
        f"{model.name}: {model.params / 1e9:.2f} B parameters, {model.layers} layers of {model.dim}; {cluster.gpus} GPUs of "
        f"{cluster.gpu_gib:g} GiB on {cluster.nodes} machine{'s' * (cluster.nodes > 1)}"
    )
    yield f"Steps of {batch} samples x {seq_len} tokens = {batch * seq_len / 1e6:.2f} M tokens"
    yield f"Rule of thumb: parameters x 18 bytes x 1.25 / {cluster.gpu_gib:g} GiB = {max(1, math.ceil(quick))} GPUs at least"
    if not found:
        yield "Nothing fits. More GPUs, shorter sequences or a smaller model are needed."
        return
    yield (
        f"\n{'':4}{'layout':26} {'kept':>11} {'samples':>9} {'GiB =':>6} {'states':>7} {'gathered':>9} {'activat.':>9}"
        f" {'rest':>5} {'s/step':>7} {'tokens/s/GPU':>13}"
    )
    for place, one in enumerate(found[:8], start=1):
        plan, m = one.plan, one.memory
        rate = batch * seq_len / one.seconds / cluster.gpus
        kept = {"none": "all", "selective": "every 2nd", "full": "inputs"}[plan.recompute]
        yield (
            f"{place:>2}. {plan.name:26} {kept:>11} {f'{one.num_micro} x {plan.micro}':>9} {m.total:6.1f} {m.states:7.1f} "
            f"{m.gathered:9.1f} {m.activations:9.1f} {m.overhead:5.1f} {one.seconds:7.2f} {rate:13,.0f}"
        )
    if found[0].plan.offload:
        host = host_memory(found[0].plan, model, cluster)
        yield f"Weights, gradients and optimizer of the first: {host:,.0f} GiB of each machine's own memory"
    yield (
        f"states = parameters x {BYTES_KEPT} bytes / (shards x TP x PP); gathered = bfloat16 weights and gradients on their "
        "way; activat. = activations kept for backward;\nrest = CUDA and NCCL; samples = micro-batches x samples of each"
    )
    for place, one in enumerate(found[:3], start=1):
        yield f"\n# {place}. {one.plan.name}\n{toml(one.plan, batch, seq_len)}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--params", type=float, required=True, help="parameters, e.g. 8e9")
    parser.add_argument("--gpus", type=int, required=True, help="in all")
    parser.add_argument("--nodes", type=int, default=1, help="machines (1)")
    parser.add_argument("--gpu-mem", type=float, default=80, help="GiB of each GPU (80)")
    parser.add_argument("--host-mem", type=float, default=1024, help="GiB of each machine's own memory (1024)")
    parser.add_argument(
        "--net", choices=NETS, default="fast", help="between machines: 8 x 400 or 100 Gbit/s of each (fast)"
    )
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of a sample (8192)")
    parser.add_argument("--tokens-per-step", type=float, default=2**20, help="about (1,048,576)")
    parser.add_argument("--tflops", type=float, default=400, help="reached by one GPU: 40 %% of an H100's 989 (400)")
    options = parser.parse_args(argv)
    if min(options.params, options.gpus, options.nodes, options.gpu_mem, options.seq_len) <= 0:
        parser.error("all sizes must be above 0")
    if options.gpus % options.nodes:
        parser.error(f"{options.gpus} GPUs cannot be shared evenly by {options.nodes} machines")
    return options


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    options = parse(argv)
    model = model_of(options.params)
    cluster = Cluster(
        options.gpus, options.nodes, options.gpu_mem, NETS[options.net], options.tflops * 1e12, options.host_mem
    )
    # A multiple of the GPUs, so that any layout can deal it out.
    batch = max(1, round(options.tokens_per_step / options.seq_len / options.gpus)) * options.gpus
    found = suggest(model, cluster, batch, options.seq_len)
    print("\n".join(report(model, cluster, batch, options.seq_len, found)))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
