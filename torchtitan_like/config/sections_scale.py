"""Sections about scale: parallelism, checkpoints, activation memory, compilation, low precision."""

from __future__ import annotations

from typing import ClassVar, Literal

from torchtitan_like.config.base import (
    Facts,
    HomePath,
    MinusOneOrPositive,
    Need,
    NthOrOp,
    Section,
    above,
    converter,
    enabled,
    field,
    one_of,
)
from torchtitan_like.config.problems import Rule

# This list omits the backends of torch's own tests, "ts" and "aot_ts" (TorchScript), and
# "aot_eager_decomp_partition_with_mode" (needs an argument).
BACKENDS = (
    "inductor",
    "aot_eager",
    "eager",
    "aot_eager_decomp_partition",
    "aot_eager_default_partitioner",
    "cudagraphs",
    "eager_debug",
    "eager_noexcept",
    "invoke_subgraph",
    "openxla",
    "openxla_eval",
    "pre_dispatch_eager",
    "tvm",
)
# Backends outside torch, and the package that torch imports for each at the first step.
PACKAGE_OF_BACKEND = {"openxla": "torch_xla", "openxla_eval": "torch_xla", "tvm": "tvm"}
# With these backends, autograd keeps all activations for the backward pass.
KEEPING_ALL = (
    "eager",
    "aot_eager_default_partitioner",
    "eager_debug",
    "eager_noexcept",
    "pre_dispatch_eager",
)
# Backends whose graphs can be rewritten before they are compiled.
GRAPH_BACKENDS = ("inductor", "aot_eager")


class Parallelism(Section):
    """Degrees of each kind of parallelism. Their product is the number of ranks."""

    facts: ClassVar[Facts] = Facts(affects="nothing")
    TENSOR: ClassVar[Need] = above(1, "tensor_parallel_degree")
    PIPELINE: ClassVar[Need] = above(1, "pipeline_parallel_degree")
    CONTEXT: ClassVar[Need] = above(1, "context_parallel_degree")
    EXPERT: ClassVar[Need] = above(1, "expert_parallel_degree")
    EVEN_STAGES: ClassVar[Need] = Need(
        "module_fqns_per_model_part",
        "{key} to be unset",
        lambda names, _: names is None,
        "it lists the modules of each stage",
    )

    data_parallel_replicate_degree: int = field(
        1, "Replicas of the weights (DDP, or HSDP together with sharding).", gt=0
    )
    data_parallel_shard_degree: MinusOneOrPositive = field(
        -1,
        "Ranks over which weights, gradients and optimizer states are sharded (FSDP2). "
        "-1: all remaining ranks.",
    )
    data_parallel_impl: Literal["fsdp2", "simple_fsdp", "ddp"] = field(
        "fsdp2",
        "fsdp2: torch's fully_shard and replicate. simple_fsdp: weights are gathered inside the "
        "traced graph, and the compiler schedules it. ddp: all data-parallel ranks replicate; "
        "requires data_parallel_shard_degree = 1.",
    )
    simple_fsdp_bucketing: bool = field(
        False,
        "With simple_fsdp and a compiled model: one collective for all weights of a block instead "
        "of one for each weight.",
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = field(
        "default",
        "Free gathered weights after the forward pass. default: always, except with pipelines.",
    )
    fsdp_prefetch_depth: int = field(
        1,
        "FSDP2: number of blocks whose weights are gathered ahead, in forward and backward. A "
        "larger value hides longer collectives, and needs the memory of more gathered blocks.",
        gt=0,
    )
    tensor_parallel_degree: int = field(1, "Ranks over which each layer is sharded.", gt=0)
    enable_sequence_parallel: bool = field(
        True,
        "Also shard the sequence between layers, in norms and the residual stream.",
        needs=TENSOR,
    )
    disable_loss_parallel: bool = field(
        False,
        "Gather the logits before the loss instead of computing it on vocabulary shards.",
        needs=TENSOR,
    )
    enable_async_tensor_parallel: bool = field(
        False,
        "Overlap the communication of activations with matrix products. Requires a compiled model, "
        "sequence parallelism, and GPUs that read each other's memory (NVLink).",
    )
    pipeline_parallel_degree: int = field(
        1, "Ranks over which the layers are distributed in order.", gt=0
    )
    module_fqns_per_model_part: list[list[str]] | None = field(
        None,
        "Names of the modules of each pipeline stage, one list per stage. Unset: split evenly.",
        needs=PIPELINE,
    )
    pipeline_parallel_first_stage_less_layers: int = field(
        1,
        "Number of layers that the first stage has fewer than the others, to balance the embedding.",
        ge=0,
        needs=(PIPELINE, EVEN_STAGES),
    )
    pipeline_parallel_last_stage_less_layers: int = field(
        1,
        "Number of layers that the last stage has fewer than the others, to balance the output layer.",
        ge=0,
        needs=(PIPELINE, EVEN_STAGES),
    )
    pipeline_parallel_layers_per_stage: int | None = field(
        None,
        "Layers per stage. Unset: the fewest stages per rank that the schedule allows.",
        gt=0,
        needs=(PIPELINE, EVEN_STAGES),
    )
    pipeline_parallel_schedule: Literal[
        "1F1B",
        "GPipe",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
        "PipelineScheduleSingle",
        "PipelineScheduleMulti",
    ] = field("1F1B", "Order in which micro-batches pass through the stages.", needs=PIPELINE)
    pipeline_parallel_schedule_csv: HomePath = field(
        "",
        "CSV file of a schedule, for PipelineScheduleSingle and PipelineScheduleMulti.",
        needs=PIPELINE,
    )
    pipeline_parallel_microbatch_size: int = field(
        1,
        "Samples per pipeline micro-batch. It must divide training.local_batch_size.",
        gt=0,
        needs=PIPELINE,
    )
    pipeline_parallel_expert_parallel_overlap: bool = field(
        True, "Overlap expert communication with computation (DualPipeV only).", needs=PIPELINE
    )
    context_parallel_degree: int = field(1, "Ranks over which each sequence is sharded.", gt=0)
    context_parallel_load_balancer: Literal["headtail", "ptrr"] | None = field(
        "headtail",
        "How the positions of a sequence are assigned to ranks, to balance causal attention. "
        "None: in order.",
        needs=(
            CONTEXT,
            one_of(
                "context_parallel_rotate_method",
                "allgather",
                "alltoall",
                reason='with "ulysses" all ranks do the same work',
            ),
        ),
    )
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ulysses"] = field(
        "allgather",
        "How attention reads the whole sequence. allgather: keys and values are gathered at once. "
        "alltoall: they are passed around a ring. ulysses: each rank computes some heads of the "
        "whole sequence.",
        needs=CONTEXT,
    )
    expert_parallel_degree: int = field(1, "Ranks over which the experts are distributed.", gt=0)
    expert_tensor_parallel_degree: int = field(
        1,
        "Ranks over which each expert is sharded: 1, or tensor_parallel_degree.",
        gt=0,
    )
    expert_parallel_exchange: Literal["auto", "bounded", "exact"] = field(
        "auto",
        "Rows that expert-parallel ranks exchange. exact: as many as there are; the host waits for "
        "their numbers. bounded: buffers; a step whose rows do not fit runs again, exactly. auto: "
        "bounded on GPUs, unless deterministic, detect_overflow or early_step_in_backward.",
        needs=EXPERT,
    )
    expert_parallel_capacity: float = field(
        1.5,
        "Rows that a buffer of the bounded exchange holds, as a multiple of an even share. It grows "
        "if a second step within 1,000 does not fit.",
        ge=1,
        needs=(EXPERT, one_of("expert_parallel_exchange", "auto", "bounded")),
    )
    expert_parallel_comm_backend: Literal["standard", "deepep"] = field(
        "standard",
        "How tokens are sent to experts: standard all-to-all. DeepEP is not available yet.",
        needs=EXPERT,
    )

    rules: ClassVar[tuple[Rule[Parallelism], ...]] = (
        Rule(
            "expert-tensor-parallel-degree",
            "expert_tensor_parallel_degree",
            lambda section: (
                section.expert_tensor_parallel_degree not in (1, section.tensor_parallel_degree)
            ),
            lambda section: f"1 or tensor_parallel_degree = {section.tensor_parallel_degree}",
            "set it to 1 to keep experts whole",
            ("tensor_parallel_degree",),
        ),
        Rule(
            "csv-of-named-schedule",
            "pipeline_parallel_schedule_csv",
            lambda section: (
                section.pipeline_parallel_degree > 1
                and bool(section.pipeline_parallel_schedule_csv)
                and not section.pipeline_parallel_schedule.startswith("PipelineSchedule")
            ),
            "empty unless pipeline_parallel_schedule is PipelineScheduleSingle or "
            "PipelineScheduleMulti",
            'set pipeline_parallel_schedule = "PipelineScheduleMulti"',
            ("pipeline_parallel_schedule", "pipeline_parallel_degree"),
        ),
    )


class ActivationCheckpoint(Section):
    """Save activation memory: recompute activations or move them to host memory."""

    facts: ClassVar[Facts] = Facts(affects="nothing")
    SELECTIVE: ClassVar[Need] = one_of("mode", "selective")
    BUDGETING: ClassVar[Need] = one_of("mode", "memory_budget")
    RECOMPUTING: ClassVar[Need] = one_of("mode", "selective", "full")

    mode: Literal["selective", "full", "memory_budget", "offload", "none"] = field(
        "selective",
        "none: keep all activations. full: recompute each block. selective: see "
        "selective_ac_option. memory_budget: the compiler chooses. offload: keep activations in "
        "host memory.",
    )
    selective_ac_option: NthOrOp = field(
        "2",
        'A number n: recompute every n-th block. "op": recompute all but expensive operations.',
        needs=SELECTIVE,
    )
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(
        ["moe.router.gate"],
        "Parts of module names. Matrix products with weights of these modules' shapes are "
        "recomputed.",
        needs=Need(
            "selective_ac_option",
            'activation_checkpoint.mode = "selective" with selective_ac_option = "op"',
            lambda option, config: (
                option == "op" and config.activation_checkpoint.mode == "selective"
            ),
        ),
    )
    per_op_sac_save_reduce_scatter: bool = field(
        True,
        'With "op": keep the outputs of reduce-scatters of tensor and sequence parallelism, to '
        "communicate once. Costs 2 activations (batch x seq x dim / tensor_parallel_degree) per "
        "block.",
    )
    early_stop: bool = field(
        False,
        "Stop recomputing a block as soon as all needed activations exist.",
        needs=RECOMPUTING,
    )
    memory_budget: float = field(
        0.5,
        "Fraction of activation memory to keep. 0 is the same as full, 1 the same as none.",
        ge=0,
        le=1,
        needs=BUDGETING,
    )
    visualize_memory_budget_pareto: bool = field(
        False,
        "Write plots of time against memory, memory_budget_pareto_*.svg, to the current directory. "
        "Requires matplotlib.",
        needs=BUDGETING,
    )
    preserve_rng_state: bool = field(
        True,
        "Restore the random state for recomputation, so that dropout is the same.",
        needs=RECOMPUTING,
    )
    determinism_check: Literal["default", "none"] = field(
        "default",
        "default: compare shapes and types of recomputed tensors with the original ones. none: do "
        "not compare.",
        needs=RECOMPUTING,
    )
    debug: bool = field(
        False,
        "Record the operations of each block, to explain a failed determinism check.",
        needs=RECOMPUTING,
    )


class Compile(Section):
    """torch.compile, and CUDA graphs."""

    facts: ClassVar[Facts] = Facts(affects="nothing")

    enable: bool = field(False, "Compile what components lists.")
    components: list[Literal["model", "loss"]] = field(
        ["model", "loss"],
        "What to compile: the model (block by block), the loss.",
        needs=enabled(),
    )
    backend: str = field(
        "inductor",
        "Backend of torch.compile. The module of experimental.custom_import can register one.",
        needs=enabled(),
        min_length=1,
    )
    cuda_graphs: bool = field(
        False,
        "Launch forward and backward of a micro-batch as one CUDA graph, from the third step on. "
        "For small models on one GPU, whose kernels end before the host has launched the next ones. "
        "Works with and without enable.",
    )

    @property
    def is_on(self) -> bool:
        """True if anything is compiled."""
        return self.enable and bool(self.components)

    @property
    def compiles_model(self) -> bool:
        """True if the blocks of the model are compiled."""
        return self.enable and "model" in self.components


class Float8Linear(Section):
    """float8 matrix products in linear layers (converter quantize.linear.float8)."""

    facts: ClassVar[Facts] = Facts(needs=(converter("quantize.linear.float8"),))

    enable_fsdp_float8_all_gather: bool = field(False, "Gather FSDP weights in float8.")
    precompute_float8_dynamic_scale_for_fsdp: bool = field(
        False,
        "Compute the scales of all weights in one pass after each optimizer step.",
        needs=enabled("enable_fsdp_float8_all_gather"),
    )
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = field(
        None, "Scaling recipe. Unset: tensorwise with the settings of this section."
    )
    filter_fqns: list[str] = field(
        ["auto_filter_small_kn"],
        "Parts of the names of linear layers that are not converted. auto_filter_small_kn also "
        "leaves out all layers that torchao's rule finds too small to gain. [] converts all.",
    )
    emulate: bool = field(False, "Emulate float8 on devices without it. For tests.")


class MXLinear(Section):
    """MXFP8 matrix products in linear layers (converter quantize.linear.mx)."""

    facts: ClassVar[Facts] = Facts(needs=(converter("quantize.linear.mx"),))

    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = field(
        "triton", "Kernel that casts along dimension 1."
    )
    recipe_name: str = field("mxfp8_cublas", "MX recipe of torchao.")
    filter_fqns: list[str] = field(
        ["output"], "Linear layers whose names contain one of these are not converted."
    )


class Float8GroupedMM(Section):
    """float8 in grouped matrix products of experts (converter quantize.grouped_mm.float8)."""

    facts: ClassVar[Facts] = Facts(needs=(converter("quantize.grouped_mm.float8"),))

    fqns: list[str] = field([], "Modules whose names contain one of these are converted.")


class MXGroupedMM(Section):
    """MXFP8 in grouped matrix products of experts (converter quantize.grouped_mm.mx)."""

    facts: ClassVar[Facts] = Facts(needs=(converter("quantize.grouped_mm.mx"),))

    recipe_name: str = field("mxfp8", "MX recipe of torchao.")
    fqns: list[str] = field([], "Modules whose names contain one of these are converted.")


class QuantizeLinear(Section):
    """Low precision in linear layers."""

    float8: Float8Linear = field(Float8Linear(), "float8 in linear layers.")
    mx: MXLinear = field(MXLinear(), "MXFP8 in linear layers.")


class QuantizeGroupedMM(Section):
    """Low precision in grouped matrix products of experts."""

    float8: Float8GroupedMM = field(Float8GroupedMM(), "float8 in grouped products.")
    mx: MXGroupedMM = field(MXGroupedMM(), "MXFP8 in grouped products.")


class Quantize(Section):
    """Settings of the quantizing converters in model.converters."""

    facts: ClassVar[Facts] = Facts(affects="model")

    linear: QuantizeLinear = field(QuantizeLinear(), "Linear layers.")
    grouped_mm: QuantizeGroupedMM = field(QuantizeGroupedMM(), "Grouped matrix products.")
