"""Layouts that cannot work, and combinations that are not offered: all of them, in one table.

The same table answers a user before a run starts and tells the matrix of layouts under test which cells there are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from torchtitan_like.config.availability import is_used, value_of
from torchtitan_like.config.layout import Layout
from torchtitan_like.config.problems import NO_EFFECT

Text = str | Callable[[Layout], str]


class LayoutRule(NamedTuple):
    """When it is broken; the key to blame, what was expected of it, what to do; the other keys it looks at."""

    name: str
    is_broken: Callable[[Layout], bool]
    key: str
    expected: Text
    remedy: Text
    involves: tuple[str, ...] = ()
    severity: Literal["error", "warning"] = "error"


def text_of(text: Text, layout: Layout) -> str:
    """The words of a rule for one layout."""
    return text if isinstance(text, str) else text(layout)


def broken_rules(layout: Layout) -> list[LayoutRule]:
    """The rules that a layout breaks, in the table's order."""
    return [rule for rule in LAYOUT_RULES if rule.is_broken(layout)]


def _of(*names: str) -> tuple[str, ...]:
    return tuple(f"parallelism.{name}" for name in names)


MODEL_KEYS = ("model.name", "model.flavor", "model.args")
DEGREES = _of(
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
)
TP, CP, PP, EP = _of(
    "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree", "expert_parallel_degree"
)
IMPL, BUCKETING, RESHARD, SP, ASYNC_TP, ROTATE, BALANCER = _of(
    "data_parallel_impl",
    "simple_fsdp_bucketing",
    "fsdp_reshard_after_forward",
    "enable_sequence_parallel",
    "enable_async_tensor_parallel",
    "context_parallel_rotate_method",
    "context_parallel_load_balancer",
)
PREFETCH = "parallelism.fsdp_prefetch_depth"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
COMPILE = ("compile.enable", "compile.components")
BATCH = ("training.global_batch_size", "training.local_batch_size")
EARLY = "optimizer.early_step_in_backward"
# What decides the stages and micro-batches of a pipeline; see distributed/stages.py.
PIPELINE_KEYS = (
    PP,
    *_of(
        "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_csv",
        "pipeline_parallel_layers_per_stage",
        "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_microbatch_size",
    ),
    *BATCH,
    *COMPILE,
    *MODEL_KEYS,
)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _nearest_batches(at: Layout) -> str:
    below = at.config.training.global_batch_size // at.unit * at.unit
    sizes = f"{below} or {below + at.unit}" if below else f"{at.unit}"
    return f"set it to {sizes}, or change training.local_batch_size"


def _head_rule(name: str, size: str, what: str, first: str = "") -> LayoutRule:
    """Heads of one kind, which tensor parallelism deals out whole. Where those of `first` are already not divided, nothing
    is said of these: one reason is enough.
    """
    return LayoutRule(
        name,
        lambda at: at.size(size) % at.tp != 0 and at.size(first) % at.tp == 0,
        TP,
        lambda at: f"a divisor of the model's {at.size(size)} {what}",
        lambda at: f"set it to one of {_divisors(at.size(size))}",
        MODEL_KEYS,
    )


def _sequence_rules(section: str) -> tuple[LayoutRule, ...]:
    """The sequence lengths of training or validation."""
    key = f"{section}.seq_len"

    def seq_len(at: Layout) -> int:
        return int(value_of(at.config, key)) if is_used(at.config, section) else 0

    return (
        LayoutRule(
            f"uneven-{section}-sequence",
            lambda at: seq_len(at) % at.pieces != 0,
            key,
            lambda at: f"a multiple of {at.pieces_text}",
            lambda at: f"set it to {max(seq_len(at) // at.pieces, 1) * at.pieces}",
            (TP, CP, SP, ROTATE, BALANCER),
        ),
        LayoutRule(
            f"{section}-beyond-rotary-table",
            lambda at: seq_len(at) > at.size("max_seq_len") > 0,
            key,
            lambda at: f"at most the model's max_seq_len = {at.size('max_seq_len')}",
            lambda at: f"set model.args.max_seq_len = {seq_len(at)}",
            MODEL_KEYS,
        ),
    )


BATCH_RULES = (
    LayoutRule(
        "uneven-batch",
        lambda at: at.config.training.global_batch_size > 0 and at.config.training.global_batch_size % at.unit != 0,
        "training.global_batch_size",
        lambda at: (
            "a multiple of local_batch_size x data-parallel ranks = "
            f"{at.config.training.local_batch_size} x {at.dp} = {at.unit} "
            "(global_batch_size = local_batch_size x data-parallel ranks x gradient accumulation)"
        ),
        _nearest_batches,
        ("training.local_batch_size", *DEGREES),
    ),
    LayoutRule(
        "uneven-ramp",
        lambda at: any(size % at.unit for size in at.config.training.batch_ramp[:2]),
        "training.batch_ramp",
        lambda at: f"start and increment in multiples of local_batch_size x data-parallel ranks = {at.unit}",
        lambda at: f"set both to multiples of {at.unit}, or change training.local_batch_size",
        ("training.local_batch_size", *DEGREES),
    ),
    LayoutRule(
        "accumulated-early-step",
        lambda at: at.config.optimizer.early_step_in_backward and at.num_accumulated > 1,
        EARLY,
        lambda at: (
            f"no gradient accumulation (it is {at.num_accumulated} here): each backward pass updates the weights"
        ),
        lambda at: f"set training.global_batch_size to {at.unit} or -1",
        (*BATCH, *DEGREES),
    ),
)

DATA_RULES = (
    LayoutRule(
        "sharded-ddp",
        lambda at: at.parallelism.data_parallel_impl == "ddp" and at.dp_shard > 1,
        IMPL,
        lambda at: f"whole copies of the weights, but data_parallel_shard_degree is {at.dp_shard} here",
        lambda at: (
            f"set data_parallel_shard_degree = 1 and data_parallel_replicate_degree = {at.dp}, or "
            'data_parallel_impl = "fsdp2"'
        ),
        DEGREES,
    ),
    LayoutRule(
        "cp-ddp",
        lambda at: at.parallelism.data_parallel_impl == "ddp" and at.cp > 1,
        IMPL,
        "another one with context parallelism, whose ranks shard the weights",
        'set it to "fsdp2"',
        (CP,),
    ),
    LayoutRule(
        "reshard-of-whole-weights",
        lambda at: (
            at.is_resolved and at.dp_shard * at.cp == 1 and at.parallelism.fsdp_reshard_after_forward != "default"
        ),
        RESHARD,
        f"{NO_EFFECT}: weights are not sharded",
        "",
        DEGREES,
        "warning",
    ),
    LayoutRule(
        "prefetch-without-shards",
        lambda at: (
            at.is_resolved
            and at.parallelism.fsdp_prefetch_depth > 1
            and (at.parallelism.data_parallel_impl != "fsdp2" or at.dp_shard * at.cp == 1)
        ),
        PREFETCH,
        f'{NO_EFFECT}; it needs data_parallel_impl = "fsdp2" and sharded weights',
        "",
        (IMPL, *DEGREES),
        "warning",
    ),
    LayoutRule(
        "narrow-reduction",
        lambda at: at.sharers > 1 and at.config.training.mixed_precision_reduce == "bfloat16",
        "training.mixed_precision_reduce",
        "adds the gradients of all ranks in 8 bits of precision (copies of the weights: those of micro-batches too): "
        "small ones are lost, and the numbers depend on the layout",
        'set it to "float32", unless the network is what a step waits for',
        DEGREES,
        "warning",
    ),
    LayoutRule(
        "offloaded-simple-fsdp",
        lambda at: at.parallelism.data_parallel_impl == "simple_fsdp" and at.config.training.enable_cpu_offload,
        IMPL,
        '"fsdp2" with training.enable_cpu_offload: the traced graph reads its weights where they are computed with',
        'set it to "fsdp2", or enable_cpu_offload = false',
        ("training.enable_cpu_offload",),
    ),
    LayoutRule(
        "offloaded-activations-simple-fsdp",
        lambda at: at.parallelism.data_parallel_impl == "simple_fsdp" and at.offloads_activations,
        IMPL,
        '"fsdp2" with activation_checkpoint.mode = "offload": SimpleFSDP gathers weights inside the '
        "blocks, so they would be copied to host memory as well",
        'set it to "fsdp2", or activation_checkpoint.mode = "full"',
        ("activation_checkpoint.mode",),
    ),
    LayoutRule(
        "offloaded-activations-compiled",
        lambda at: at.offloads_activations and at.compiles_model,
        "activation_checkpoint.mode",
        'another mode than "offload" with a compiled model: the copies to host memory cannot be '
        "part of a compiled block",
        'set it to "selective" or "full", or take "model" out of compile.components',
        COMPILE,
    ),
    LayoutRule(
        "offloaded-activations-on-cpu",
        lambda at: at.offloads_activations and at.device_type == "cpu",
        "activation_checkpoint.mode",
        'saves no memory as "offload" without a GPU: activations are copied within host memory',
        'set it to "none"',
        severity="warning",
    ),
    LayoutRule(
        "bucketing-without-graph",
        lambda at: at.parallelism.simple_fsdp_bucketing and not at.has_own_graph,
        BUCKETING,
        f'{NO_EFFECT}; it needs data_parallel_impl = "simple_fsdp" and a model compiled by '
        '"inductor" or "aot_eager", whose graph holds the collectives',
        "",
        (IMPL, *COMPILE, "compile.backend"),
        "warning",
    ),
    LayoutRule(
        "bucketing-alone",
        lambda at: at.parallelism.simple_fsdp_bucketing and at.has_own_graph and at.sharers == 1,
        BUCKETING,
        f"{NO_EFFECT}; it needs at least two data-parallel or context-parallel ranks",
        "",
        (IMPL, *DEGREES),
        "warning",
    ),
    LayoutRule(
        "replicas-without-replicas",
        lambda at: (
            at.config.is_set("resilience.replica_check_freq")
            and at.config.resilience.replica_check_freq > 0
            and at.dp_replicate == 1
        ),
        "resilience.replica_check_freq",
        f"{NO_EFFECT}; it needs parallelism.data_parallel_replicate_degree > 1",
        "",
        _of("data_parallel_replicate_degree"),
        "warning",
    ),
    LayoutRule(
        "pipelined-early-step",
        lambda at: at.pp > 1 and at.config.optimizer.early_step_in_backward,
        EARLY,
        "false with pipelines: each of a step's backward passes would update the weights",
        "set it to false",
        (PP,),
    ),
    LayoutRule(
        "few-micro-batches",
        lambda at: at.is_resolved and 0 < at.num_micro_batches < at.pp,
        PP,
        lambda at: (
            f"leaves ranks idle most of the time: a step has {at.num_micro_batches} micro-batches for {at.pp} of them"
        ),
        "lower pipeline_parallel_microbatch_size, or raise training.local_batch_size",
        PIPELINE_KEYS,
        "warning",
    ),
    LayoutRule(
        "compiled-zero-bubble",
        lambda at: at.splits_backward and at.compiles_model,
        SCHEDULE,
        "a schedule that computes each backward pass as a whole: under the others, which compute the gradients of inputs "
        "first and those of weights later, torch does not support compiled modules",
        'set it to "Interleaved1F1B", or take "model" out of compile.components',
        (PP, *COMPILE),
    ),
    LayoutRule(
        "old-zero-bubble",
        lambda at: at.splits_backward and at.torch_release < (2, 13),
        SCHEDULE,
        "a schedule that computes each backward pass as a whole: in two parts, torch before 2.13 cannot compute those of our "
        "loss and norms",
        'set it to "Interleaved1F1B", or install torch 2.13',
        (PP,),
    ),
    LayoutRule(
        "zero-bubble-per-op",
        lambda at: (
            at.splits_backward
            and at.config.activation_checkpoint.selective_ac_option == "op"
            and at.config.activation_checkpoint.mode == "selective"
        ),
        SCHEDULE,
        "a schedule that computes each backward pass as a whole with the per-op policy: what that has kept is read once",
        'set it to "Interleaved1F1B", or activation_checkpoint.selective_ac_option = "1"',
        (PP, "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"),
    ),
    LayoutRule(
        "zero-bubble-debug",
        lambda at: (
            at.splits_backward
            and at.config.activation_checkpoint.debug
            and at.config.activation_checkpoint.mode in ("selective", "full")
        ),
        SCHEDULE,
        "a schedule that computes each backward pass as a whole with activation_checkpoint.debug: a block's operations are "
        "recorded once",
        'set it to "Interleaved1F1B", or activation_checkpoint.debug = false',
        (PP, "activation_checkpoint.mode", "activation_checkpoint.debug"),
    ),
    LayoutRule(
        "experts-of-dense-model",
        lambda at: at.ep > 1 and at.limits is not None and not at.size("n_experts"),
        EP,
        lambda at: f"1: {at.config.model.name} has no experts",
        "remove it",
        MODEL_KEYS,
    ),
    LayoutRule(
        "balance-without-experts",
        lambda at: (
            at.config.debug.moe_force_load_balance
            and at.limits is not None
            and not at.size("n_experts")
        ),
        "debug.moe_force_load_balance",
        lambda at: f"{NO_EFFECT}: {at.config.model.name} has no experts",
        "",
        MODEL_KEYS,
        "warning",
    ),
    LayoutRule(
        "uneven-experts",
        lambda at: at.ep > 1 and at.is_resolved and (at.dp_shard * at.cp * at.tp) % at.ep != 0,
        EP,
        lambda at: f"a divisor of dp_shard x cp x tp = {at.dp_shard} x {at.cp} x {at.tp}",
        "change a degree",
        DEGREES,
    ),
)

TENSOR_RULES = (
    _head_rule("uneven-heads", "n_heads", "attention heads"),
    _head_rule("uneven-kv-heads", "n_kv_heads", "key-value heads", first="n_heads"),
    LayoutRule(
        "vocabulary-too-small",
        lambda at: (at.tp - 1) * -(-at.size("vocab_size") // at.tp) >= at.size("vocab_size") > 0,
        TP,
        lambda at: (
            f"a part of the vocabulary's {at.size('vocab_size')} entries for every rank: cut in pieces of "
            f"{-(-at.size('vocab_size') // at.tp)} they do not reach the last one"
        ),
        "set it to a smaller degree",
        MODEL_KEYS,
    ),
    LayoutRule(
        "uneven-features",
        lambda at: at.size("ffn_dim") % at.tp != 0,
        TP,
        lambda at: f"a divisor of the feed-forward layer's {at.size('ffn_dim')} features",
        "set model.args.multiple_of to a multiple of it, or to a smaller degree",
        MODEL_KEYS,
    ),
    LayoutRule(
        "tp-across-nodes",
        lambda at: at.is_resolved and (at.world_size or 1) > at.ranks_of_a_node and at.ranks_of_a_node % at.tp != 0,
        TP,
        lambda at: (
            f"cuts layers across machines of {at.ranks_of_a_node} ranks"
            + ("" if at.local_world_size else " (assumed: no launcher has said how many)")
            + ": each layer then waits for the network between them"
        ),
        lambda at: f"set it to a divisor of {at.ranks_of_a_node}",
        (),
        "warning",
    ),
    LayoutRule(
        "async-without-tp",
        lambda at: at.parallelism.enable_async_tensor_parallel and at.tp == 1,
        ASYNC_TP,
        f"{NO_EFFECT}; it needs {TP} > 1",
        "",
        (TP,),
        "warning",
    ),
    LayoutRule(
        "async-tp-eager",
        lambda at: (
            at.parallelism.enable_async_tensor_parallel
            and at.tp > 1
            and not (at.compiles_model and at.config.compile.backend == "inductor")
        ),
        ASYNC_TP,
        'a model compiled by "inductor", which overlaps communication and computation',
        'set compile.enable = true with "model" among compile.components, and compile.backend = "inductor"',
        (*COMPILE, "compile.backend"),
    ),
    LayoutRule(
        "async-tp-without-sp",
        lambda at: (
            at.parallelism.enable_async_tensor_parallel and at.tp > 1 and not at.parallelism.enable_sequence_parallel
        ),
        ASYNC_TP,
        "enable_sequence_parallel = true: what is overlapped are its all-gathers and reduce-scatters",
        f"set {SP} = true",
        (SP,),
    ),
    LayoutRule(
        "async-tp-on-cpu",
        lambda at: at.parallelism.enable_async_tensor_parallel and at.tp > 1 and at.device_type == "cpu",
        ASYNC_TP,
        "false without GPUs: they read each other's memory for it",
        "set it to false",
    ),
)

# Matrix products on tensor cores: a dimension of a weight should be a multiple of 64 elements (the
# tile of an A100 or later, in 16-bit types), its part on each rank of 8 (16 bytes), below which
# torch falls back to slower kernels.
TILE, UNIT = 64, 8


def is_aligned(size: int, shards: int = 1) -> bool:
    """True for a dimension that tensor cores take well, sharded over ``shards`` ranks."""
    return size % TILE == 0 and (size % shards != 0 or size // shards % UNIT == 0)


def padded(size: int, shards: int = 1) -> int:
    """The next larger size that is aligned on every rank."""
    step = math.lcm(TILE, UNIT * shards)
    return -(-size // step) * step


def _width_rule(name: str, what: str, get: Callable[[Layout], int], key: str, is_sharded: bool) -> LayoutRule:
    """One dimension of the weights against the tiles of tensor cores."""

    def shards(at: Layout) -> int:
        return at.tp if is_sharded else 1

    return LayoutRule(
        name,
        lambda at: at.uses_tensor_cores and not is_aligned(get(at), shards(at)),
        "model.args",
        lambda at: (
            f"{what} of {get(at)}"
            + (f" on {shards(at)} tensor-parallel ranks" if shards(at) > 1 else "")
            + f" is slow on tensor cores: multiples of {TILE}, and of {UNIT} on each rank, are fast"
        ),
        lambda at: f"{key} = {padded(get(at), shards(at))} would be",
        (*MODEL_KEYS, TP),
        "warning",
    )


ALIGNMENT_RULES = (
    _width_rule(
        "unaligned-vocabulary",
        "a vocabulary",
        lambda at: at.size("vocab_size"),
        "model.args.vocab_size",
        True,
    ),
    _width_rule("unaligned-width", "a width (dim)", lambda at: at.width("dim"), "dim", False),
    _width_rule(
        "unaligned-features",
        "a feed-forward width",
        lambda at: at.width("ffn_dim", "hidden_dim"),
        "a feed-forward width",
        True,
    ),
    LayoutRule(
        "unaligned-heads",
        lambda at: at.uses_tensor_cores and at.width("head_dim") % UNIT != 0,
        "model.args",
        lambda at: (
            f"heads of {at.width('head_dim')} dimensions are slow: the flash kernel and tensor "
            f"cores take multiples of {UNIT}"
        ),
        "change dim or n_heads",
        MODEL_KEYS,
        "warning",
    ),
    LayoutRule(
        "unaligned-tokens",
        lambda at: (
            at.uses_tensor_cores
            and at.config.training.seq_len % at.pieces == 0
            and at.tokens_of_a_product % UNIT != 0
        ),
        "training.seq_len",
        lambda at: (
            f"{at.tokens_of_a_product} tokens a rank and forward pass are slow on tensor cores: "
            f"multiples of {UNIT} are fast"
        ),
        "change training.seq_len or training.local_batch_size",
        (TP, CP, *BATCH),
        "warning",
    ),
)

CONTEXT_RULES = (
    LayoutRule(
        "ptrr",
        lambda at: (
            at.method in ("allgather", "alltoall")
            and at.parallelism.context_parallel_load_balancer == "ptrr"
        ),
        BALANCER,
        '"headtail" or None: "ptrr" balances the block masks of FlexAttention, which is not used here',
        'set it to "headtail"',
        (CP, ROTATE),
    ),
    LayoutRule(
        "ulysses-heads",
        lambda at: at.method == "ulysses" and at.size("n_heads") % at.tp == 0 < at.size("n_heads") // at.tp % at.cp,
        CP,
        lambda at: (
            f"a divisor of the {at.size('n_heads') // at.tp} attention heads that each tensor-parallel rank has of "
            f'the model\'s {at.size("n_heads")}: "ulysses" deals them out'
        ),
        f'set {ROTATE} = "allgather", which deals out none',
        (ROTATE, TP, *MODEL_KEYS),
    ),
    LayoutRule(
        "ring-documents",
        lambda at: at.method == "alltoall" and at.has_documents,
        ROTATE,
        '"allgather" or "ulysses" when attention ends at document borders: a ring sees one piece of the keys at a time',
        'set it to "allgather"',
        (CP, *MODEL_KEYS),
    ),
    LayoutRule(
        "compiled-ring",
        lambda at: at.method == "alltoall" and at.compiles_model,
        ROTATE,
        '"allgather" or "ulysses" with a compiled model: a ring\'s exchanges are no part of its graph',
        'set it to "allgather", or compile.enable = false',
        (CP, *COMPILE),
    ),
)

LAYOUT_RULES: tuple[LayoutRule, ...] = (
    *BATCH_RULES,
    *DATA_RULES,
    *TENSOR_RULES,
    *ALIGNMENT_RULES,
    *CONTEXT_RULES,
    *_sequence_rules("training"),
    *_sequence_rules("validation"),
)
