"""The counted runs: layouts, schedules and features whose CUDA calls CPU ranks cannot show."""

from __future__ import annotations

from dataclasses import dataclass, field

# bf16 and 8 x 2,048 tokens per rank, as on a GPU. No log line, validation or checkpoint is between
# the counted steps.
BASE = """
    --job.config_file train_configs/debug_model.toml --training.mixed_precision_param bfloat16
    --training.local_batch_size 8 --training.seq_len 2048 --metrics.log_freq 100
        --metrics.no-enable_tensorboard --validation.no-enable --checkpoint.no-enable
""".split()

# The null device cannot model the following, so no cell covers it:
# - asynchronous tensor parallelism: needs symmetric memory, in which ranks map their peers' memory
# - cuDNN attention: cuDNN needs a real device; the cells use the flash kernel
# - values: all values read from the device are zero, including losses, norms and restored weights
# - times, NCCL errors, out-of-memory errors of kernels, several nodes: the device executes nothing


@dataclass(frozen=True)
class Cell:
    """One run: arguments in addition to BASE, number of ranks, accepted host syncs with reasons."""

    name: str
    num_ranks: int
    arguments: str = ""
    # A part of the call's stack -> the reason for which the host may wait.
    syncs: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """The trainer's arguments."""
        return [*BASE, *self.arguments.split()]


DP_REPLICATE = "--parallelism.data_parallel_replicate_degree"
DP_SHARD = "--parallelism.data_parallel_shard_degree"
TP = "--parallelism.tensor_parallel_degree"
PP = "--parallelism.pipeline_parallel_degree"
CP = "--parallelism.context_parallel_degree"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
AC = "--activation_checkpoint.mode"
FLOAT8 = (
    "--model.converters quantize.linear.float8 --quantize.linear.float8.filter_fqns [] "
    "--quantize.linear.float8.recipe_name"
)

OP = "selective --activation_checkpoint.selective_ac_option op"
EP = "--parallelism.expert_parallel_degree"
EXPERTS = "--model.name qwen3 --model.flavor debugmodel_moe --model.args.load_balance global"
OFFLOAD_WAITS = {
    "_fully_shard/": "FSDP2 waits for each block's offloaded gradients at the end of backward"
}
GRAPHS = "--compile.cuda_graphs"
SAVES = "--checkpoint.enable --checkpoint.interval 2 --checkpoint.async_mode async_with_pinned_mem"
SKIPS = "--resilience.on_nonfinite skip --resilience.on_spike skip --resilience.spike_threshold 6"

CELLS = [
    # data parallel
    Cell("one_device", 1),
    Cell("fsdp", 2),
    Cell("hsdp", 4, f"{DP_REPLICATE} 2 {DP_SHARD} 2"),
    Cell("ddp", 2, f"{DP_REPLICATE} 2 {DP_SHARD} 1"),
    Cell("accumulation", 2, "--training.global_batch_size 64"),
    Cell("simple_fsdp", 2, "--parallelism.data_parallel_impl simple_fsdp"),
    Cell("cpu_offload", 2, "--training.enable_cpu_offload", OFFLOAD_WAITS),
    # tensor, context and pipeline parallel
    Cell("tensor_parallel", 2, f"{TP} 2"),
    Cell(
        "tensor_parallel_without_sequence", 2, f"{TP} 2 --parallelism.no-enable_sequence_parallel"
    ),
    Cell("tensor_parallel_whole_logits", 2, f"{TP} 2 --parallelism.disable_loss_parallel"),
    Cell("fsdp_tensor_parallel", 4, f"{TP} 2"),
    Cell("hsdp_tensor_parallel", 8, f"{DP_REPLICATE} 2 {DP_SHARD} 2 {TP} 2"),
    Cell("context_allgather", 2, f"{CP} 2"),
    Cell("context_ring", 2, f"{CP} 2 --parallelism.context_parallel_rotate_method alltoall"),
    Cell("context_ulysses", 2, f"{CP} 2 --parallelism.context_parallel_rotate_method ulysses"),
    Cell("pipeline_1f1b", 2, f"{PP} 2 {SCHEDULE} 1F1B"),
    Cell("pipeline_1f1b_of_four", 4, f"{PP} 4 {SCHEDULE} 1F1B"),
    Cell("pipeline_zbv", 2, f"{PP} 2 {SCHEDULE} ZBVZeroBubble"),
    Cell("pipeline_dualpipev", 2, f"{PP} 2 {SCHEDULE} DualPipeV"),
    Cell("fsdp_pipeline_interleaved_zero_bubble", 4, f"{PP} 2 {SCHEDULE} InterleavedZeroBubble"),
    # 8 layers of 64 experts
    Cell("experts_one_device", 1, EXPERTS),
    Cell("expert_parallel", 2, f"{EXPERTS} {EP} 2"),
    Cell("expert_tensor_parallel", 2, f"{EXPERTS} {EP} 2 {TP} 2"),
    # 4 layers on a stage, 8 micro-batches
    Cell("expert_parallel_pipeline", 4, f"{EXPERTS} {EP} 2 {PP} 2 {SCHEDULE} 1F1B"),
    Cell("expert_parallel_full_checkpointing", 2, f"{EXPERTS} {EP} 2 {AC} full"),
    # activation checkpointing
    Cell("full_checkpointing", 2, f"{AC} full"),
    Cell("per_op_checkpointing", 2, f"{AC} {OP}"),
    Cell("per_op_checkpointing_tensor_parallel", 2, f"{AC} {OP} {TP} 2"),
    # optimizers
    Cell("foreach_optimizer", 2, "--optimizer.implementation foreach"),
    Cell("lion", 2, "--optimizer.name Lion"),
    Cell("bfloat16_states", 2, "--optimizer.state_dtype bfloat16"),
    Cell("muon", 2, "--optimizer.name Muon"),
    Cell("optimizer_in_backward", 2, "--optimizer.early_step_in_backward"),
    # checkpoints and handling of non-finite numbers
    Cell("step_after_async_save", 2, SAVES),  # writes a checkpoint after step 4
    Cell("skipped_steps", 2, SKIPS),
    Cell("overflow_detector", 2, "--debug.detect_overflow"),
    Cell("deterministic", 2, "--debug.deterministic"),
    # CUDA graphs
    Cell("cuda_graphs", 1, GRAPHS),
    Cell("cuda_graphs_accumulation", 1, f"{GRAPHS} --training.global_batch_size 32"),
    Cell(
        "cuda_graphs_per_op_checkpointing",
        1,
        f"{GRAPHS} {AC} {OP} --activation_checkpoint.no-preserve_rng_state",
    ),
    Cell("cuda_graphs_experts", 1, f"{GRAPHS} {EXPERTS}"),
    Cell("cuda_graphs_compiled", 1, f"{GRAPHS} --compile.enable"),
    # compiled
    Cell("compiled", 2, "--compile.enable"),
    Cell("float8_rowwise_compiled", 2, f"--compile.enable {FLOAT8} rowwise"),
    Cell("float8_tensor_parallel_compiled", 2, f"--compile.enable {FLOAT8} tensorwise {TP} 2"),
    Cell(
        "simple_fsdp_compiled", 2, "--compile.enable --parallelism.data_parallel_impl simple_fsdp"
    ),
    Cell("memory_budget_compiled", 2, f"--compile.enable {AC} memory_budget"),
    Cell("flex_attention", 2, "--model.flavor debugmodel_flex_attn"),
    Cell("varlen_attention", 2, "--model.flavor debugmodel_varlen_attn"),
]
