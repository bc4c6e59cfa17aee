"""Sections about size: parallelism, checkpoints, activation memory, compilation, low precision."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from torchtitan_like.config.base import HomePath, KeepCount, MinusOneOrPositive, NthOrOp, Section
from torchtitan_like.config.checkpoint_rules import CHECKPOINT_RULES
from torchtitan_like.config.rules import Rule


class Parallelism(Section):
    """Degrees of each kind of parallelism; their product is the number of ranks."""

    data_parallel_replicate_degree: int = Field(
        1, gt=0, description="Copies of the weights (DDP; together with sharding: HSDP)."
    )
    data_parallel_shard_degree: MinusOneOrPositive = Field(
        -1,
        description="Ranks over which weights, gradients and optimizer states are cut (FSDP2). -1: left-over ranks.",
    )
    data_parallel_impl: Literal["fsdp2", "simple_fsdp", "ddp"] = Field(
        "fsdp2",
        description="fsdp2: torch's fully_shard and replicate. simple_fsdp: weights gathered inside the traced graph, "
        "for the compiler to place. ddp: all data-parallel ranks replicate; needs data_parallel_shard_degree = 1.",
    )
    simple_fsdp_bucketing: bool = Field(
        False,
        description="With simple_fsdp and a compiled model: one collective for all weights of a block instead of one each.",
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = Field(
        "default",
        description="Free gathered weights after the forward pass. default: always, except with pipelines.",
    )
    fsdp_prefetch_depth: int = Field(
        1,
        gt=0,
        description="FSDP2: blocks whose weights are gathered ahead, in forward and backward. Each further one hides longer "
        "collectives and costs the memory of one more gathered block.",
    )
    tensor_parallel_degree: int = Field(1, gt=0, description="Ranks over which each layer is cut.")
    enable_sequence_parallel: bool = Field(
        True,
        description="With tensor parallelism: also split the sequence between layers, for norms and the residual stream.",
    )
    disable_loss_parallel: bool = Field(
        False, description="Gather the logits before the loss instead of computing it on vocabulary shards."
    )
    enable_async_tensor_parallel: bool = Field(
        False,
        description="Send and fetch activations while they are multiplied. Needs a compiled model, sequence parallelism, and "
        "GPUs that read each other's memory (NVLink).",
    )
    pipeline_parallel_degree: int = Field(1, gt=0, description="Ranks over which the layers are distributed in order.")
    module_fqns_per_model_part: list[list[str]] | None = Field(
        None, description="Names of the modules of each pipeline stage, one list per stage. Unset: split evenly."
    )
    pipeline_parallel_first_stage_less_layers: int = Field(
        1, ge=0, description="Layers the first stage has less than the others, to balance the embedding."
    )
    pipeline_parallel_last_stage_less_layers: int = Field(
        1, ge=0, description="Layers the last stage has less than the others, to balance the output layer."
    )
    pipeline_parallel_layers_per_stage: int | None = Field(
        None, gt=0, description="Layers per stage. Unset: as many stages per rank as the schedule needs at least."
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
    ] = Field("1F1B", description="Order in which micro-batches pass through the stages.")
    pipeline_parallel_schedule_csv: HomePath = Field(
        "", description="CSV file of a schedule, for PipelineScheduleSingle and PipelineScheduleMulti."
    )
    pipeline_parallel_microbatch_size: int = Field(
        1, gt=0, description="Samples per pipeline micro-batch; must divide training.local_batch_size."
    )
    pipeline_parallel_expert_parallel_overlap: bool = Field(
        True, description="Overlap expert communication with computation (DualPipeV only)."
    )
    context_parallel_degree: int = Field(1, gt=0, description="Ranks over which each sequence is cut.")
    context_parallel_load_balancer: Literal["headtail", "ptrr"] | None = Field(
        "headtail", description="How positions are dealt to ranks so that causal attention is balanced. None: in order."
    )
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ulysses"] = Field(
        "allgather",
        description="How attention sees the whole sequence. allgather: keys and values gathered at once. alltoall: passed "
        "on in a ring. ulysses: each rank takes some heads of the whole sequence.",
    )
    expert_parallel_degree: int = Field(1, gt=0, description="Ranks over which the experts are distributed.")
    expert_tensor_parallel_degree: int = Field(
        1, gt=0, description="Ranks over which each expert is cut: 1, or tensor_parallel_degree."
    )
    expert_parallel_comm_backend: Literal["standard", "deepep"] = Field(
        "standard", description="Communication of tokens to experts: standard all-to-all, or DeepEP."
    )

    rules: ClassVar[tuple[Rule[Parallelism], ...]] = (
        Rule(
            "expert-tensor-parallel-degree",
            "expert_tensor_parallel_degree",
            lambda section: (
                section.expert_parallel_degree > 1
                and section.expert_tensor_parallel_degree not in (1, section.tensor_parallel_degree)
            ),
            lambda section: f"1 or tensor_parallel_degree = {section.tensor_parallel_degree}",
            "set it to 1 to keep experts whole",
            ("tensor_parallel_degree", "expert_parallel_degree"),
        ),
        Rule(
            "csv-of-named-schedule",
            "pipeline_parallel_schedule_csv",
            lambda section: (
                section.pipeline_parallel_degree > 1
                and bool(section.pipeline_parallel_schedule_csv)
                and not section.pipeline_parallel_schedule.startswith("PipelineSchedule")
            ),
            "empty unless pipeline_parallel_schedule is PipelineScheduleSingle or PipelineScheduleMulti",
            'set pipeline_parallel_schedule = "PipelineScheduleMulti"',
            ("pipeline_parallel_schedule", "pipeline_parallel_degree"),
        ),
    )


class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = Field(False, description="Save checkpoints and resume from them.")
    enable_ft_dataloader_checkpoints: bool = Field(
        True, description="With fault tolerance: each replica also saves its own data position."
    )
    folder: HomePath = Field(
        "checkpoint", min_length=1, description="Folder of the checkpoints step-N, below job.dump_folder."
    )
    interval: int = Field(500, gt=0, description="Save every this many steps, and at the end.")
    interval_minutes: float = Field(
        0.0, ge=0, description="Also save when this many minutes have passed since the last save; 0 switches this off."
    )
    initial_load_path: HomePath | None = Field(
        None,
        description="Checkpoint to start from when the run has none of its own: a step-N of this program, a folder of "
        "Hugging Face safetensors, of torch.distributed.checkpoint, or of Meta's consolidated.*.pth. The format is "
        "detected.",
    )
    initial_load_model_only: bool = Field(
        True,
        description="Take only the weights from initial_load_path; optimizer, schedule and data start anew. false: "
        "continue the run of that full checkpoint, from its step, in a folder of its own.",
    )
    initial_load_in_hf: bool = Field(
        False,
        description="Refuse initial weights that are not Hugging Face safetensors. Without initial_load_path they are "
        "those of model.hf_assets_path.",
    )
    initial_load_in_hf_quantized: bool = Field(
        False, description="The initial weights are quantised Hugging Face safetensors."
    )
    last_save_model_only: bool = Field(
        True, description="The last save holds the weights alone. Set it to false to extend a finished run later."
    )
    last_save_in_hf: bool = Field(
        False,
        description="Write the last save as Hugging Face safetensors; needs last_save_model_only. Costs no more than a "
        "native save of the weights.",
    )
    hf_interval: int = Field(
        0,
        ge=0,
        description="Also export the weights as Hugging Face safetensors every this many steps, to hf/step-N in "
        "checkpoint.folder, where nothing deletes them; 0 switches this off. Takes no longer than a native save of the "
        "same bytes (docs/guides/checkpoint.md).",
    )
    hf_executor: Literal["direct", "consolidate"] = Field(
        "direct",
        description="Has no effect: all ranks write the final Hugging Face safetensors together. "
        "Accepted so that older TOML files load.",
    )
    hf_shard_gb: float = Field(
        5.0, gt=0, description="Size of each file of Hugging Face safetensors in GB (10^9 bytes), at most."
    )
    export_dtype: Literal["float16", "bfloat16", "float32"] = Field(
        "float32",
        description="Type of the weights in a last save with last_save_model_only, and in Hugging Face safetensors.",
    )
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = Field(
        "disabled",
        description="Write checkpoints in the background; with_pinned_mem stages them in page-locked memory.",
    )
    on_save_error: Literal["stop", "continue"] = Field(
        "stop",
        description="When a save, or a write to another file of the run, fails: stop the run with code 74, or continue and "
        "try again later. The last save of a run must succeed.",
    )
    keep_latest_k: KeepCount = Field(
        10, description="Number of newest checkpoints kept, at least 2; older ones are deleted. 0 keeps all."
    )
    keep_every: int = Field(
        0,
        ge=0,
        description="Checkpoints of steps divisible by this are kept for ever; 0: none. So is one with a file PIN.",
    )
    load_step: int = Field(-1, ge=-1, description="Step to resume from; -1 is the newest.")
    exclude_from_loading: list[Literal["model", "optimizer", "lr_scheduler", "dataloader", "train_state"]] = Field(
        [], description="Parts of a checkpoint that are not loaded."
    )
    verify: Literal["read", "full"] = Field(
        "read",
        description="Loading compares all it reads with the hashes taken when it was saved. full: also what no rank needs.",
    )
    allow_change: list[str] = Field(
        [],
        description='Patterns of settings that may differ from those of the run that is resumed, e.g. ["optimizer.lr"] '
        'or ["model.*"]. Without them a change of what is computed is refused.',
    )
    enable_first_step_checkpoint: bool = Field(
        False, description="Also save after the first step, to learn early whether saving works."
    )
    create_seed_checkpoint: bool = Field(False, description="Save the initial weights as step-0 on one rank and end.")
    load_only: bool = Field(False, description="Load checkpoints but save none.")
    start: Literal["auto", "resume", "warm", "scratch"] = Field(
        "auto",
        description="auto: newest checkpoint of this run, else initial_load_path, else new weights. resume: there must "
        "be a checkpoint. warm: weights of initial_load_path at step 0. scratch: new weights.",
    )

    rules: ClassVar[tuple[Rule[Checkpoint], ...]] = CHECKPOINT_RULES


class ActivationCheckpoint(Section):
    """Trading computation for the memory of activations."""

    mode: Literal["selective", "full", "memory_budget", "offload", "none"] = Field(
        "selective",
        description="none: keep all activations. full: recompute each block. selective: see selective_ac_option. "
        "memory_budget: let the compiler choose. offload: keep activations in host memory.",
    )
    selective_ac_option: NthOrOp = Field(
        "2", description='A number n: recompute every n-th block. "op": recompute all but expensive operations.'
    )
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = Field(
        ["moe.router.gate"],
        description='With "op": parts of module names; products with weights of these modules\' shapes are recomputed.',
    )
    per_op_sac_save_reduce_scatter: bool = Field(
        True,
        description='With "op": keep the outputs of reduce-scatters (tensor and sequence parallel) instead of sending '
        "again. Costs 2 activations (batch x seq x dim / tensor_parallel_degree) per block.",
    )
    early_stop: bool = Field(False, description="Stop recomputing a block as soon as all that is needed is there.")
    memory_budget: float = Field(
        0.5, ge=0, le=1, description="With memory_budget: share of activation memory to keep; 0 is as full, 1 as none."
    )
    visualize_memory_budget_pareto: bool = Field(
        False,
        description="With memory_budget: write pictures of time against memory (memory_budget_pareto_....svg) to where the run "
        "is started. Needs matplotlib.",
    )
    preserve_rng_state: bool = Field(
        True, description="Restore the random state for recomputation, so that dropout repeats itself."
    )
    determinism_check: Literal["default", "none"] = Field(
        "default", description="Compare shapes and types of recomputed tensors with the first ones, or not."
    )
    debug: bool = Field(False, description="Record the operations of each block to explain a failed determinism check.")


class Compile(Section):
    """torch.compile."""

    enable: bool = Field(False, description="Compile the parts listed in components.")
    components: list[Literal["model", "loss"]] = Field(
        ["model", "loss"], description="What is compiled: model (block by block), loss."
    )
    backend: str = Field(
        "inductor",
        min_length=1,
        description="Backend of torch.compile. Your own: register it in experimental.custom_import.",
    )

    @property
    def is_on(self) -> bool:
        """True if anything is compiled."""
        return self.enable and bool(self.components)


class Float8Linear(Section):
    """float8 matrix products in linear layers (converter quantize.linear.float8)."""

    enable_fsdp_float8_all_gather: bool = Field(False, description="Gather FSDP weights in float8.")
    precompute_float8_dynamic_scale_for_fsdp: bool = Field(
        False, description="Compute the scales of all weights in one pass after each optimizer step."
    )
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = Field(
        None, description="Scaling recipe; unset: tensorwise with the settings of this section."
    )
    filter_fqns: list[str] = Field([], description="Linear layers whose names contain one of these stay as they are.")
    emulate: bool = Field(False, description="Compute as float8 would, on devices without it. For tests.")


class MXLinear(Section):
    """MXFP8 matrix products in linear layers (converter quantize.linear.mx)."""

    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = Field(
        "triton", description="Kernel that casts along the other dimension."
    )
    recipe_name: str = Field("mxfp8_cublas", description="MX recipe of torchao.")
    filter_fqns: list[str] = Field(
        ["output"], description="Linear layers whose names contain one of these stay as they are."
    )


class Float8GroupedMM(Section):
    """float8 in the experts' grouped products (converter quantize.grouped_mm.float8)."""

    fqns: list[str] = Field([], description="Modules whose names contain one of these are converted.")


class MXGroupedMM(Section):
    """MXFP8 in the experts' grouped products (converter quantize.grouped_mm.mx)."""

    recipe_name: str = Field("mxfp8", description="MX recipe of torchao.")
    fqns: list[str] = Field([], description="Modules whose names contain one of these are converted.")


class QuantizeLinear(Section):
    """Low precision in linear layers."""

    float8: Float8Linear = Field(Float8Linear(), description="float8 in linear layers.")
    mx: MXLinear = Field(MXLinear(), description="MXFP8 in linear layers.")


class QuantizeGroupedMM(Section):
    """Low precision in the experts' grouped matrix products."""

    float8: Float8GroupedMM = Field(Float8GroupedMM(), description="float8 in grouped products.")
    mx: MXGroupedMM = Field(MXGroupedMM(), description="MXFP8 in grouped products.")


class Quantize(Section):
    """Settings of the quantising converters of model.converters."""

    linear: QuantizeLinear = Field(QuantizeLinear(), description="Linear layers.")
    grouped_mm: QuantizeGroupedMM = Field(QuantizeGroupedMM(), description="Grouped matrix products.")
