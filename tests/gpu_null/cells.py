"""The runs whose steps are counted: layouts, schedules and features that CPU ranks cannot show on CUDA."""

from __future__ import annotations

from dataclasses import dataclass, field

# bf16 and 8 x 2,048 tokens per rank, as on a GPU; no log line, validation or checkpoint between the counted steps.
BASE = """
    --job.config_file train_configs/debug_model.toml --training.mixed_precision_param bfloat16
    --training.local_batch_size 8 --training.seq_len 2048 --metrics.log_freq 100 --metrics.no-enable_tensorboard
    --validation.no-enable --checkpoint.no-enable
""".split()

# What the stand-in cannot model, and so no cell runs.
NOT_MODELED = {
    "asynchronous tensor parallelism": "needs symmetric memory: ranks map each other's device memory",
    "CUDA graphs": "no capture; the trainer does not use them",
    "cuDNN attention": "cuDNN's own library needs a device; the cells take the flash kernel",
    "values": "everything read from a device is zero, so losses, norms and restored weights mean nothing",
    "times, NCCL progress and errors, out-of-memory behavior of kernels, several nodes": "nothing is executed",
}


@dataclass(frozen=True)
class Cell:
    """One run: its arguments beside BASE, the number of ranks, and host syncs that are accepted with a reason."""

    name: str
    num_ranks: int
    arguments: str = ""
    syncs: dict[str, str] = field(default_factory=dict)  # part of the call's stack -> why the host may wait there

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

CELLS = [
    Cell("one_device", 1),
    Cell("fsdp", 2),
    Cell("hsdp", 4, f"{DP_REPLICATE} 2 {DP_SHARD} 2"),
    Cell("ddp", 2, f"{DP_REPLICATE} 2 {DP_SHARD} 1"),
    Cell("tensor_parallel", 2, f"{TP} 2"),
    Cell("fsdp_tensor_parallel", 4, f"{TP} 2"),
    Cell("full_checkpointing", 2, f"{AC} full"),
    Cell("per_op_checkpointing", 2, f"{AC} selective --activation_checkpoint.selective_ac_option op"),
    Cell("accumulation", 2, "--training.global_batch_size 64"),
    Cell("foreach_optimizer", 2, "--optimizer.implementation foreach"),
    Cell("optimizer_in_backward", 2, "--optimizer.early_step_in_backward"),
    Cell("ulysses", 2, f"{CP} 2 --parallelism.context_parallel_rotate_method ulysses"),
    Cell("pipeline_1f1b", 2, f"{PP} 2 {SCHEDULE} 1F1B"),
]
