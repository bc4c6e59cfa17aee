"""Rules of [parallelism]: layouts that cannot work, and combinations that are not offered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torchtitan_like.check.context import RunContext
from torchtitan_like.check.rules.keys import (
    AC_MODE,
    BALANCER,
    COMPILE,
    CP,
    DEGREES,
    EP,
    ETP,
    IMPL,
    MODEL_KEYS,
    PIPELINE_KEYS,
    PP,
    REPLICATE,
    ROTATE,
    SCHEDULE,
    SEQUENCE_PARALLEL,
    TP,
)
from torchtitan_like.config.problems import Problem, Rule
from torchtitan_like.distributed.float8 import FLOAT8
from torchtitan_like.distributed.stages import micro_batch_problems
from torchtitan_like.models.spec import num_mtp_layers

ASYNC_TP = "parallelism.enable_async_tensor_parallel"

DATA_PARALLEL_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "sharded-ddp",
        IMPL,
        lambda run: run.parallelism.data_parallel_impl == "ddp" and run.dims.dp_shard > 1,
        lambda run: (
            f"replicated weights, but data_parallel_shard_degree is {run.dims.dp_shard} in this run"
        ),
        lambda run: (
            "set data_parallel_shard_degree = 1 and "
            f'data_parallel_replicate_degree = {run.dims.dp}, or data_parallel_impl = "fsdp2"'
        ),
        DEGREES,
    ),
    Rule(
        "cp-ddp",
        IMPL,
        lambda run: run.parallelism.data_parallel_impl == "ddp" and run.dims.cp > 1,
        '"fsdp2" or "simple_fsdp" with context parallelism: its ranks shard the weights',
        'set it to "fsdp2"',
        (CP,),
    ),
    Rule(
        "offloaded-simple-fsdp",
        IMPL,
        lambda run: (
            run.parallelism.data_parallel_impl == "simple_fsdp"
            and run.config.training.enable_cpu_offload
        ),
        '"fsdp2" with training.enable_cpu_offload: '
        "the traced graph reads weights from the device that computes",
        'set it to "fsdp2", or enable_cpu_offload = false',
        ("training.enable_cpu_offload",),
    ),
    Rule(
        "offloaded-activations-simple-fsdp",
        IMPL,
        lambda run: (
            run.parallelism.data_parallel_impl == "simple_fsdp" and run.offloads_activations
        ),
        '"fsdp2" with activation_checkpoint.mode = "offload": '
        "SimpleFSDP gathers weights inside the blocks, and offloading would copy them too",
        'set it to "fsdp2", or activation_checkpoint.mode = "full"',
        (AC_MODE,),
    ),
)


def _splits_recomputation(run: RunContext) -> bool:
    """Return True for activation checkpointing by operation with split backward passes."""
    section = run.config.activation_checkpoint
    is_per_op = section.mode == "selective" and section.selective_ac_option == "op"
    return run.splits_backward and is_per_op


def _splits_recorded_blocks(run: RunContext) -> bool:
    section = run.config.activation_checkpoint
    return run.splits_backward and section.debug and section.mode in ("selective", "full")


UNSPLIT = "a schedule that computes each backward pass as a whole"
PIPELINE_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "few-micro-batches",
        PP,
        lambda run: run.is_resolved and 0 < run.num_micro_batches < run.dims.pp,
        lambda run: (
            f"leaves ranks idle: a step has {run.num_micro_batches} micro-batches "
            f"for {run.dims.pp} pipeline ranks"
        ),
        "lower pipeline_parallel_microbatch_size, or raise training.local_batch_size",
        PIPELINE_KEYS,
        "warning",
    ),
    Rule(
        "compiled-zero-bubble",
        SCHEDULE,
        lambda run: run.splits_backward and run.compiles_model,
        f"{UNSPLIT} with a compiled model: "
        "torch cannot split the backward pass of compiled modules",
        'set it to "Interleaved1F1B", or remove "model" from compile.components',
        (PP, *COMPILE),
    ),
    Rule(
        "old-zero-bubble",
        SCHEDULE,
        lambda run: run.splits_backward and run.torch_release < (2, 13),
        f"{UNSPLIT}: "
        "torch before 2.13 cannot split the backward pass of this project's loss and norms",
        'set it to "Interleaved1F1B", or install torch 2.13',
        (PP,),
    ),
    Rule(
        "zero-bubble-per-op",
        SCHEDULE,
        _splits_recomputation,
        f"{UNSPLIT} with the per-op policy, whose saved tensors can be read only once",
        'set it to "Interleaved1F1B", or activation_checkpoint.selective_ac_option = "1"',
        (PP, AC_MODE, "activation_checkpoint.selective_ac_option"),
    ),
    Rule(
        "zero-bubble-debug",
        SCHEDULE,
        _splits_recorded_blocks,
        f"{UNSPLIT} with activation_checkpoint.debug, "
        "which records the operations of a block only once",
        'set it to "Interleaved1F1B", or activation_checkpoint.debug = false',
        (PP, AC_MODE, "activation_checkpoint.debug"),
    ),
)


def _has_mtp(run: RunContext) -> bool:
    """Return True for a model with multi-token prediction."""
    return num_mtp_layers(run.args) > 0


_WITHOUT_MTP = "or model.args.num_mtp_layers = 0"
MTP_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "pipelined-mtp",
        PP,
        lambda run: run.dims.pp > 1 and _has_mtp(run),
        "1 with multi-token prediction: its loss needs the embedding and the head on one rank",
        f"set it to 1, {_WITHOUT_MTP}",
        MODEL_KEYS,
    ),
    Rule(
        "mtp-of-sharded-sequences",
        CP,
        lambda run: run.dims.cp > 1 and _has_mtp(run),
        "1 with multi-token prediction: the tokens and labels that it shifts may be on other ranks",
        f"set it to 1, {_WITHOUT_MTP}",
        MODEL_KEYS,
    ),
    Rule(
        "mtp-of-simple-fsdp",
        IMPL,
        lambda run: run.parallelism.data_parallel_impl == "simple_fsdp" and _has_mtp(run),
        '"fsdp2" with multi-token prediction, which has not been tested with SimpleFSDP',
        f'set it to "fsdp2", {_WITHOUT_MTP}',
        MODEL_KEYS,
    ),
    Rule(
        "mtp-in-float8",
        "model.converters",
        lambda run: FLOAT8 in run.config.model.converters and _has_mtp(run),
        "no float8 with multi-token prediction, which has not been tested with it",
        f"remove it, {_WITHOUT_MTP}",
        MODEL_KEYS,
    ),
)

_WHOLE_EXPERTS = "expert_parallel_degree = 1 and expert_tensor_parallel_degree = 1"
EXPERT_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "unavailable-expert-backend",
        "parallelism.expert_parallel_comm_backend",
        lambda run: (
            run.parallelism.expert_parallel_degree > 1
            and run.parallelism.expert_parallel_comm_backend != "standard"
        ),
        '"standard": other backends are not available yet',
        'set it to "standard"',
        (EP,),
        "training_error",
    ),
    Rule(
        "experts-of-dense-model",
        EP,
        lambda run: run.divides_experts and run.limits is not None and not run.size("n_experts"),
        lambda run: f"1: {run.config.model.name} has no experts",
        "remove it",
        MODEL_KEYS,
    ),
    Rule(
        "uneven-expert-ranks",
        EP,
        lambda run: (
            run.is_resolved and run.num_expert_ranks % run.parallelism.expert_parallel_degree != 0
        ),
        lambda run: (
            f"a divisor of {run.expert_ranks_formula}: experts use the ranks of these degrees"
        ),
        "change a degree",
        (*DEGREES, ETP),
    ),
    Rule(
        "uneven-experts",
        EP,
        lambda run: run.size("n_experts") % run.dims.ep != 0,
        lambda run: f"a divisor of the model's {run.size('n_experts')} experts",
        lambda run: f"set it to one of {_divisors(run.size('n_experts'))}",
        MODEL_KEYS,
    ),
    Rule(
        "uneven-expert-features",
        ETP,
        lambda run: run.size("expert_hidden_dim") % run.dims.expert_tp != 0,
        lambda run: f"a divisor of the {run.size('expert_hidden_dim')} hidden units of each expert",
        "set it to 1",
        MODEL_KEYS,
    ),
    Rule(
        "experts-without-sequence-parallelism",
        SEQUENCE_PARALLEL,
        lambda run: (
            run.divides_experts and run.dims.tp > 1 and not run.parallelism.enable_sequence_parallel
        ),
        "true with expert parallelism: tensor-parallel ranks must send different tokens",
        f"set it to true, or {_WHOLE_EXPERTS}",
        (EP, ETP, TP),
    ),
    Rule(
        "experts-of-simple-fsdp",
        IMPL,
        lambda run: run.divides_experts and run.parallelism.data_parallel_impl == "simple_fsdp",
        '"fsdp2" with expert parallelism: simple_fsdp shards all weights over the same ranks',
        f'set it to "fsdp2", or {_WHOLE_EXPERTS}',
        (EP, ETP),
    ),
    Rule(
        "experts-of-replicas",
        REPLICATE,
        lambda run: (
            run.divides_experts
            and run.is_resolved
            and run.dims.dp_replicate > 1
            and not run.shards_weights
        ),
        "1 with expert parallelism, unless weights are sharded too: the ranks of DDP have all experts",
        f"set data_parallel_shard_degree above 1, or {_WHOLE_EXPERTS}",
        (*DEGREES, EP, ETP),
    ),
    Rule(
        "experts-on-old-torch",
        EP,
        lambda run: run.parallelism.expert_parallel_degree > 1 and run.torch_release < (2, 12),
        "1: torch before 2.12 cannot shard the weights of a layer over two meshes",
        "install torch 2.12 or later",
    ),
    Rule(
        "experts-of-tensor-parallel-ranks-on-old-torch",
        TP,
        lambda run: run.dims.ep == 1 and run.dims.has_experts_mesh and run.torch_release < (2, 12),
        "1 for a model with experts: FSDP2 shards them over tensor-parallel ranks too, which torch "
        "before 2.12 cannot do",
        f"install torch 2.12 or later, or set {SEQUENCE_PARALLEL} = false",
        (ETP, SEQUENCE_PARALLEL, *MODEL_KEYS),
    ),
)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _divided_by_tp(
    name: str, size: str, description: str, unless_uneven: str = ""
) -> Rule[RunContext]:
    """Return the rule that tensor parallelism must divide a size of the model.

    unless_uneven: another size, which has a rule of its own. This rule applies only if that size is
    divisible.
    """
    return Rule(
        name,
        TP,
        lambda run: (
            run.size(size) % run.dims.tp != 0 and run.size(unless_uneven) % run.dims.tp == 0
        ),
        lambda run: f"a divisor of the model's {run.size(size)} {description}",
        lambda run: f"set it to one of {_divisors(run.size(size))}",
        MODEL_KEYS,
    )


def _vocabulary_shard(run: RunContext) -> int:
    """Return the entries of the vocabulary on each tensor-parallel rank but the last."""
    return -(-run.size("vocab_size") // run.dims.tp)


TENSOR_PARALLEL_RULES: tuple[Rule[RunContext], ...] = (
    _divided_by_tp("uneven-heads", "n_heads", "attention heads"),
    _divided_by_tp("uneven-kv-heads", "n_kv_heads", "key-value heads", unless_uneven="n_heads"),
    _divided_by_tp("uneven-features", "ffn_dim", "features of each feed-forward network"),
    _divided_by_tp(
        "uneven-shared-experts", "shared_experts_dim", "features of the shared experts of a layer"
    ),
    Rule(
        "vocabulary-too-small",
        TP,
        lambda run: (run.dims.tp - 1) * _vocabulary_shard(run) >= run.size("vocab_size") > 0,
        lambda run: (
            f"a shard of the vocabulary's {run.size('vocab_size')} entries for every rank: "
            "in shards of "
            f"{_vocabulary_shard(run)} entries, none is left for the last rank"
        ),
        "set it to a smaller degree",
        MODEL_KEYS,
    ),
    Rule(
        "tp-across-nodes",
        TP,
        lambda run: (
            run.is_resolved
            and run.dims.world_size > run.ranks_of_node
            and run.ranks_of_node % run.dims.tp != 0
        ),
        lambda run: (
            f"shards layers across nodes of {run.ranks_of_node} ranks"
            + ("" if run.local_world_size else " (assumed: no launcher reports the number)")
            + ": each layer then waits for the network between nodes"
        ),
        lambda run: f"set it to a divisor of {run.ranks_of_node}",
        severity="warning",
    ),
    Rule(
        "async-tp-eager",
        ASYNC_TP,
        lambda run: (
            run.parallelism.enable_async_tensor_parallel
            and run.dims.tp > 1
            and not (run.compiles_model and run.config.compile.backend == "inductor")
        ),
        'a model compiled by "inductor", which overlaps communication and computation',
        'set compile.enable = true with "model" in compile.components, '
        'and compile.backend = "inductor"',
        (*COMPILE, "compile.backend"),
    ),
    Rule(
        "async-tp-without-sp",
        ASYNC_TP,
        lambda run: (
            run.parallelism.enable_async_tensor_parallel
            and run.dims.tp > 1
            and not run.parallelism.enable_sequence_parallel
        ),
        "enable_sequence_parallel = true: "
        "its all-gathers and reduce-scatters overlap with computation",
        f"set {SEQUENCE_PARALLEL} = true",
        (SEQUENCE_PARALLEL,),
    ),
    Rule(
        "async-tp-on-cpu",
        ASYNC_TP,
        lambda run: (
            run.parallelism.enable_async_tensor_parallel
            and run.dims.tp > 1
            and run.device_type == "cpu"
        ),
        "false without GPUs, which read each other's memory for it",
        "set it to false",
    ),
)


def _heads_per_rank(run: RunContext) -> int:
    return run.size("n_heads") // run.dims.tp


def _has_uneven_ulysses_heads(run: RunContext) -> bool:
    """Return True if context parallelism does not divide the heads of a tensor-parallel rank."""
    is_even_tp = run.size("n_heads") % run.dims.tp == 0
    return run.rotate_method == "ulysses" and is_even_tp and _heads_per_rank(run) % run.dims.cp != 0


CONTEXT_PARALLEL_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "ptrr",
        BALANCER,
        lambda run: (
            run.rotate_method in ("allgather", "alltoall")
            and run.parallelism.context_parallel_load_balancer == "ptrr"
        ),
        '"headtail" or None: "ptrr" balances the block masks of FlexAttention, '
        "which this project does not use",
        'set it to "headtail"',
        (CP, ROTATE),
    ),
    Rule(
        "ulysses-heads",
        CP,
        _has_uneven_ulysses_heads,
        lambda run: (
            f"a divisor of the {_heads_per_rank(run)} attention heads that each tensor-parallel "
            f'rank has of the model\'s {run.size("n_heads")}: "ulysses" distributes them'
        ),
        f'set {ROTATE} = "allgather", which distributes no heads',
        (ROTATE, TP, *MODEL_KEYS),
    ),
    Rule(
        "ring-documents",
        ROTATE,
        lambda run: run.rotate_method == "alltoall" and run.has_document_masks,
        '"allgather" or "ulysses" if attention ends at document borders: '
        "a ring reads one shard of the keys at a time",
        'set it to "allgather"',
        (CP, *MODEL_KEYS),
    ),
    Rule(
        "ring-windows",
        ROTATE,
        lambda run: run.rotate_method == "alltoall" and run.has_windows,
        lambda run: (
            f'"allgather" or "ulysses" with {run.config.model.name}, whose layers have windows: a '
            "ring lets a token attend to all keys, and would count a sink once for each rank"
        ),
        'set it to "allgather"',
        (CP, *MODEL_KEYS),
    ),
    Rule(
        "ring-chunks",
        ROTATE,
        lambda run: run.rotate_method == "alltoall" and run.has_chunks,
        lambda run: (
            f'"allgather" or "ulysses" with {run.config.model.name}, whose layers attend within '
            f"chunks of {run.width('chunk_size')} tokens: a ring lets a token attend to all keys"
        ),
        'set it to "allgather"',
        (CP, *MODEL_KEYS),
    ),
    Rule(
        "sharded-dynamic-rope",
        CP,
        lambda run: run.dims.cp > 1 and run.has_dynamic_rope,
        lambda run: (
            f"1 for sequences of more than {run.width('rope_original_seq_len')} tokens: dynamic "
            "rotary frequencies depend on the length of a sequence, which its shards do not know"
        ),
        f"set {CP} = 1",
        MODEL_KEYS,
    ),
    Rule(
        "compiled-ring",
        ROTATE,
        lambda run: run.rotate_method == "alltoall" and run.compiles_model,
        '"allgather" or "ulysses" with a compiled model: '
        "the exchanges of a ring cannot be part of its graph",
        'set it to "allgather", or compile.enable = false',
        (CP, *COMPILE),
    ),
)

PARALLELISM_RULES: tuple[Rule[RunContext], ...] = (
    *DATA_PARALLEL_RULES,
    *PIPELINE_RULES,
    *EXPERT_RULES,
    *MTP_RULES,
    *TENSOR_PARALLEL_RULES,
    *CONTEXT_PARALLEL_RULES,
)


def check_degrees(run: RunContext) -> Iterator[Problem]:
    """Check that the product of the degrees is the number of ranks."""
    for error in run.degree_errors:
        yield Problem(
            "parallelism",
            None,
            f"degrees whose product is the number of ranks: {error}",
            "change a degree or the number of ranks (NGPU); "
            "data_parallel_shard_degree = -1 uses all remaining ranks",
            involves=DEGREES,
        )


def check_pipeline(run: RunContext) -> Iterator[Problem]:
    """Check layers, schedule and micro-batches against the stages."""
    if run.spec is None or run.stage_plan is None:
        return
    problems = [*run.stage_plan.problems]
    for num_accumulated in run.accumulations:
        problems += micro_batch_problems(
            run.stage_plan,
            run.parallelism.pipeline_parallel_microbatch_size,
            local_batch_size=run.config.training.local_batch_size,
            num_accumulated=num_accumulated,
        )
    for problem in dict.fromkeys(problems):
        yield replace(problem, involves=PIPELINE_KEYS)
