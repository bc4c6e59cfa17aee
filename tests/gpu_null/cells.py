"""The runs whose steps are counted: layouts, schedules and features that CPU ranks cannot show on
CUDA."""

from __future__ import annotations

from dataclasses import dataclass, field

# bf16 and 8 x 2,048 tokens per rank, as on a GPU; no log line, validation or checkpoint between the
# counted steps.
BASE = """
    --job.config_file train_configs/debug_model.toml --training.mixed_precision_param bfloat16
    --training.local_batch_size 8 --training.seq_len 2048 --metrics.log_freq 100 --metrics.no-enable_tensorboard
    --validation.no-enable --checkpoint.no-enable
""".split()

# No cell covers what the stand-in for a GPU cannot model:
#
# - asynchronous tensor parallelism: it needs symmetric memory, in which ranks map each other's device memory
# - CUDA graphs: there is no capture, and the trainer does not use them
# - cuDNN attention: cuDNN's own library needs a device; the cells use the flash kernel
# - varlen attention: the device finds the borders of documents, and all positions are zero there
# - values: everything read from a device is zero, so losses, norms and restored weights mean nothing
# - times, NCCL progress and errors, out-of-memory behavior of kernels, several nodes: nothing is executed


@dataclass(frozen=True)
class Cell:
    """One run: its arguments in addition to BASE, the number of ranks, and host syncs that are
    accepted with a reason."""

    name: str
    num_ranks: int
    arguments: str = ""
    syncs: dict[str, str] = field(
        default_factory=dict
    )  # part of the call's stack -> why the host may wait there

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
FLOAT8 = "--model.converters quantize.linear.float8 --quantize.linear.float8.recipe_name"

OP = "selective --activation_checkpoint.selective_ac_option op"
OFFLOAD_WAITS = {
    "_fully_shard/": "FSDP2 waits for each block's offloaded gradients at the end of the backward pass"
}
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
    # activation checkpointing
    Cell("full_checkpointing", 2, f"{AC} full"),
    Cell("per_op_checkpointing", 2, f"{AC} {OP}"),
    Cell("per_op_checkpointing_tensor_parallel", 2, f"{AC} {OP} {TP} 2"),
    # optimizers
    Cell("foreach_optimizer", 2, "--optimizer.implementation foreach"),
    Cell("optimizer_in_backward", 2, "--optimizer.early_step_in_backward"),
    # saving, and decisions about numbers
    Cell("step_after_async_save", 2, SAVES),  # saves after step 4
    Cell("skipped_steps", 2, SKIPS),
    Cell("overflow_detector", 2, "--debug.detect_overflow"),
    Cell("deterministic", 2, "--debug.deterministic"),
    # compiled
    Cell("compiled", 2, "--compile.enable"),
    Cell("float8_rowwise_compiled", 2, f"--compile.enable {FLOAT8} rowwise"),
    Cell("float8_tensor_parallel_compiled", 2, f"--compile.enable {FLOAT8} tensorwise {TP} 2"),
    Cell(
        "simple_fsdp_compiled", 2, "--compile.enable --parallelism.data_parallel_impl simple_fsdp"
    ),
    Cell("memory_budget_compiled", 2, f"--compile.enable {AC} memory_budget"),
    Cell("flex_attention", 2, "--model.flavor debugmodel_flex_attn"),
]
