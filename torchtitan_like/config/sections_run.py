"""Sections about the run itself: job, profiling, metrics, communication, failures, debugging."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from torchtitan_like.config.base import (
    Facts,
    HomePath,
    Minutes,
    NameOf,
    Need,
    Section,
    Steps,
    above,
    enabled,
    field,
    one_of,
)
from torchtitan_like.config.problems import Rule
from torchtitan_like.config.sections_checkpoint import COPY_LATER, LOCAL_FOLDER, is_uri


class Job(Section):
    """The run as a whole: its run directory and its description."""

    facts: ClassVar[Facts] = Facts(affects="nothing")

    config_file: str | None = field(
        None,
        "TOML file to read, relative to the current directory. Only for the command line.",
        ranks_may_differ=True,
    )
    dump_folder: HomePath = field(
        "./outputs", "Run directory. The run writes all its files below it.", min_length=1
    )
    description: str = field(
        "default job", "Free text. The run logs it at the start.", ranks_may_differ=True
    )
    print_config: bool = field(False, "Print the resolved configuration as TOML at the start.")
    save_config_file: HomePath | None = field(
        None,
        "JSON file to which rank 0 also writes the resolved configuration, relative to "
        "job.dump_folder.",
    )
    show_results: bool = field(
        False,
        "After the last step, write report.html into the run directory, and print text that a model "
        "of up to 50 million parameters generates. `titan train` does so on one machine, not in "
        "Slurm jobs.",
        ranks_may_differ=True,
    )
    custom_config_module: str = field(
        "",
        "Import path of a module whose JobConfig is merged into this schema. "
        "Not available yet: leave it out.",
    )

    rules: ClassVar[tuple[Rule[Job], ...]] = (
        Rule(
            "run-directory-uri",
            "dump_folder",
            lambda job: is_uri(job.dump_folder),
            LOCAL_FOLDER,
            COPY_LATER,
        ),
    )


class Profiling(Section):
    """Profiler traces and snapshots of GPU memory."""

    facts: ClassVar[Facts] = Facts(affects="nothing")
    TRACING: ClassVar[Need] = enabled("enable_profiling")

    enable_profiling: bool = field(
        False, "Record a profiler trace on every rank, once every profile_freq steps."
    )
    save_traces_folder: HomePath = field(
        "profile_traces", "Folder of the traces, below job.dump_folder.", needs=TRACING
    )
    profile_freq: int = field(10, "Steps of one profiling cycle: waiting, warmup, recording.", gt=0)
    profiler_active: int = field(
        1, "Steps to record at the end of each cycle.", gt=0, needs=TRACING
    )
    profiler_warmup: int = field(
        3,
        "Steps before the recorded ones. The profiler runs and discards its data.",
        ge=0,
        needs=TRACING,
    )
    with_stack: bool = field(
        False,
        "Record the Python call stack too. Steps become slower and traces about four times as large.",
        needs=TRACING,
    )
    enable_memory_snapshot: bool = field(
        False, "Write a memory snapshot every profile_freq steps and when memory runs out."
    )
    save_memory_snapshot_folder: HomePath = field(
        "memory_snapshot",
        "Folder of the memory snapshots, below job.dump_folder.",
        needs=enabled("enable_memory_snapshot"),
    )

    rules: ClassVar[tuple[Rule[Profiling], ...]] = (
        Rule(
            "short-profiling-cycle",
            "profile_freq",
            lambda section: (
                section.enable_profiling and section.profile_freq < section.num_steps_traced
            ),
            lambda section: (
                f"at least profiler_warmup + profiler_active = {section.num_steps_traced}"
            ),
            lambda section: (
                f"set profile_freq to {section.num_steps_traced} or more, or lower profiler_warmup"
            ),
            ("profiler_warmup", "profiler_active", "enable_profiling"),
        ),
    )

    @property
    def num_steps_traced(self) -> int:
        """Steps of a cycle in which the profiler runs."""
        return self.profiler_warmup + self.profiler_active


class Metrics(Section):
    """Log lines and metrics during training. The run always writes metrics.jsonl."""

    facts: ClassVar[Facts] = Facts(affects="nothing")
    REPORTING: ClassVar[Need] = Need(
        "enable_tensorboard",
        "{key} = true",
        lambda value, config: value or config.metrics.enable_wandb,
    )

    log_freq: int = field(
        10, "Log and record metrics every this many steps, and at the first step of a run.", gt=0
    )
    enable_tensorboard: bool = field(False, "Write TensorBoard files.")
    disable_color_printing: bool = field(False, "Print step lines without terminal colors.")
    save_tb_folder: HomePath = field(
        "tb",
        "Folder of the TensorBoard files, below job.dump_folder. Each run adds <date-time>.",
        needs=REPORTING,
    )
    save_for_all_ranks: bool = field(
        False,
        "Write TensorBoard or W&B metrics on every rank, not only on one that computes the loss.",
        needs=REPORTING,
    )
    enable_wandb: bool = field(
        False, "Report metrics to Weights & Biases. Install the extra `wandb`."
    )
    peak_flops: float | None = field(
        None,
        "Peak FLOP/s of one device, for MFU. Unset: the value for the device's name. "
        "No MFU is reported for unknown devices.",
        gt=0,
    )
    observers: list[Annotated[str, NameOf("observer")]] = field(
        [], "Observers that receive the rows of metrics.jsonl and validation.jsonl on rank 0."
    )
    data_loading_alarm: float = field(
        0.25, "Warn if the run waits for data for more than this fraction of the time.", gt=0, le=1
    )


# 31 years. Timers count in nanoseconds, and overflow after 300 years.
MOST_SECONDS = 1_000_000_000


class Comm(Section):
    """Process groups: timeouts and the flight recorder."""

    facts: ClassVar[Facts] = Facts(affects="nothing")
    RECORDING: ClassVar[Need] = above(0, "trace_buf_size")

    init_timeout_seconds: int = field(
        300,
        "Timeout of collectives in seconds, until the first step of a process is done.",
        gt=0,
        le=MOST_SECONDS,
    )
    train_timeout_seconds: int = field(
        100,
        "Timeout of collectives in seconds, after the first step of a process.",
        gt=0,
        le=MOST_SECONDS,
    )
    checkpoint_timeout_seconds: int = field(
        1800,
        "Seconds that ranks wait for the slowest rank while they save or load a checkpoint. "
        "Allow for the slowest disk. A hung disk costs this much time.",
        gt=0,
        le=MOST_SECONDS,
    )
    trace_buf_size: int = field(
        20000,
        "Collectives that the flight recorder of each rank keeps. Each needs 3 to 4 KiB of host "
        "memory: 60 to 80 MiB a rank for 20000. 0 disables it.",
        ge=0,
    )
    save_traces_folder: HomePath = field(
        "comm_traces",
        "Folder of the flight recorder's dumps, below job.dump_folder. A rank writes one after "
        "80 % of the timeout in one step.",
        needs=RECORDING,
    )
    save_traces_file_prefix: str = field(
        "rank_", "Start of each dump's file name. The rank follows.", needs=RECORDING
    )
    mode: Literal["default", "fake_backend", "local_tensor"] = field(
        "default",
        "default: train. fake_backend, local_tensor: dry-run one rank of each pipeline stage "
        "without communication, report its memory, and end.",
    )


class Resilience(Section):
    """When a run stops by itself, and how it handles non-finite values and loss spikes."""

    facts: ClassVar[Facts] = Facts(affects="nothing")
    DETECTING_SPIKES: ClassVar[Need] = above(0, "spike_threshold")

    kill_switch_path: HomePath = field(
        "KILL",
        "While this file exists, a running job saves and ends, and no job starts. Only you remove "
        "it. Relative to job.dump_folder.",
        min_length=1,
    )
    save_switch_path: HomePath = field(
        "SAVE",
        "Create this file to save a checkpoint. The run removes it. Relative to job.dump_folder.",
        min_length=1,
    )
    max_runtime_minutes: Minutes = field(
        0.0,
        "Save and end with exit code 75 (start again to continue) this many minutes after the "
        'process started. "auto": grace_seconds before the Slurm job ends. 0: never.',
    )
    grace_seconds: float = field(
        600.0,
        "Seconds between the scheduler's signal and its kill. The run warns if twice the measured "
        "time of a step and a checkpoint is longer.",
        ge=0,
    )
    max_cpu_mem_percent: float = field(
        100.0,
        "Save and end with exit code 75 if the used memory of the host, or of the job's cgroup, "
        "exceeds this percentage. It ends a leaking run before the kernel kills it. 100: never.",
        gt=0,
        le=100,
    )
    min_free_gpu_gib: float = field(
        0.0,
        "Save and end with exit code 75 if a GPU has less free memory in GiB, after its cache was "
        "emptied. 0: never.",
        ge=0,
    )
    on_nonfinite: Literal["stop", "skip"] = field(
        "stop",
        "A step with a non-finite loss or gradient never changes the weights. stop: save the "
        "weights from before the step and end. skip: continue with the next step.",
    )
    max_nonfinite_in_a_row: int = field(
        3,
        "Consecutive non-finite steps that are skipped. One more ends the run.",
        gt=0,
        needs=one_of("on_nonfinite", "skip"),
    )
    spike_threshold: float = field(
        8.0,
        "A loss or gradient norm is a spike if its modified z-score over the last spike_window "
        "steps is higher. Spikes are logged and the previous checkpoint is pinned. "
        "0 disables detection.",
        ge=0,
    )
    spike_window: int = field(
        128,
        "Steps over which the z-score is computed. The first steps of a run are not checked.",
        gt=7,
        needs=DETECTING_SPIKES,
    )
    on_spike: Literal["log", "skip"] = field(
        "log",
        "skip: the device skips the update of a step whose gradient norm is a spike. Norms that "
        "stay high for half a window are normal again.",
        needs=DETECTING_SPIKES,
    )
    on_high_norm: Literal["auto", "rerun", "accept"] = field(
        "auto",
        "A step whose gradient norm is above 20 times the median of the last steps. rerun: its "
        "update is not made, and the same samples run again; a second high norm is accepted. "
        "accept: it updates like any other. auto: rerun for models with experts.",
    )
    first_high_norm: float = field(
        1000.0,
        "The gradient norm that is high while fewer than 20 norms are known.",
        gt=0,
        needs=one_of("on_high_norm", "auto", "rerun"),
    )
    replica_check_freq: int = field(
        100,
        "Compare the weights of data-parallel replicas bit for bit, at the first log step after "
        "this many steps and before each checkpoint. Different replicas end the run with exit code 70. "
        "0: never.",
        ge=0,
    )
    verify_gradients_freq: int = field(
        1000,
        "Compute the gradients of a micro-batch twice every this many steps, and compare their "
        "bits. A difference is handled like a non-finite step (on_nonfinite). 0: never. Without "
        "effect if the backward updates the weights (optimizer.early_step_in_backward).",
        ge=0,
    )


class MemoryEstimation(Section):
    """Estimate the memory of a run instead of training."""

    facts: ClassVar[Facts] = Facts(affects="nothing", needs=(enabled(),))

    enable: bool = field(
        False, "Report the peak memory of a dry run of this configuration instead of training."
    )
    disable_fake_mode: bool = field(
        False,
        "Estimate with real tensors instead of fake ones. Not available yet: set it to false.",
    )


# Environment variable with the address of the lighthouse, as in torchft.
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"


class FaultTolerance(Section):
    """Replica groups that continue to train when one of them fails (torchft)."""

    facts: ClassVar[Facts] = Facts(affects="nothing", needs=(enabled(),))
    SEMI_SYNC: ClassVar[Need] = one_of("semi_sync_method", "local_sgd", "diloco")
    DILOCO: ClassVar[Need] = one_of("semi_sync_method", "diloco")

    enable: bool = field(
        False, "Train as one of several groups of ranks that survive each other's failures."
    )
    process_group: Literal["gloo", "nccl"] = field(
        "gloo", "Backend of the process group between replica groups."
    )
    process_group_timeout_ms: int = field(
        10000, "Timeout of a collective between replica groups in milliseconds.", gt=0
    )
    replica_id: int = field(
        0,
        "Number of this replica group, counted from 0. Its run folder is "
        "<job.dump_folder>/replica_<replica_id>.",
        ge=0,
    )
    group_size: int = field(
        0,
        "Number of replica groups that share the samples of a step, also while some are away.",
        ge=0,
    )
    min_replica_size: int = field(
        1, "Fewest live groups for a step. With fewer, the others wait.", gt=0
    )
    semi_sync_method: Literal["local_sgd", "diloco"] | None = field(
        None,
        "Method that synchronizes groups once in sync_steps steps. Unset: at every step.",
        affects="numerics",
    )
    sync_steps: int = field(
        5, "Steps between two synchronizations of semi_sync_method.", gt=0, needs=SEMI_SYNC
    )
    should_quantize: bool = field(
        False, "Quantize the weight changes between groups (diloco).", needs=DILOCO
    )
    fragment_sync_delay: int = field(
        0,
        "Steps between sending the change of a model fragment and applying the mean of all groups.",
        ge=0,
        needs=DILOCO,
    )
    fragment_update_alpha: float = field(
        0.0,
        "Weight of the local parameters when a fragment is merged. 0 uses the global ones.",
        ge=0,
        le=1,
        needs=DILOCO,
    )
    module_fqns_per_model_fragment: list[list[str]] = field(
        [],
        "Names of the modules of each model fragment, one list per fragment. Empty: num_fragments "
        "of about the same number of layers.",
        needs=DILOCO,
    )
    num_fragments: int = field(
        1,
        "Number of model fragments. One of them is synchronized every sync_steps / num_fragments "
        "steps.",
        gt=0,
        needs=DILOCO,
    )

    @property
    def share(self) -> tuple[int, int]:
        """This group's index, and the number of groups that share the samples of a step."""
        return (self.replica_id, self.group_size) if self.enable else (0, 1)

    rules: ClassVar[tuple[Rule[FaultTolerance], ...]] = (
        Rule(
            "replica-id-beyond-group",
            "replica_id",
            lambda section: section.enable and 0 < section.group_size <= section.replica_id,
            lambda section: f"less than group_size = {section.group_size}",
            "number the replicas from 0 to group_size - 1",
            ("group_size", "enable"),
        ),
    )


class Experimental(Section):
    """User code."""

    custom_import: str = field(
        "",
        "Module to import before the configuration is checked, to register models and config "
        "sections: its name, or the path of a .py file relative to the TOML file.",
        affects="model",
    )
    custom_args_module: str = field(
        "",
        "Deprecated name of job.custom_config_module. Not available yet: leave it out.",
        affects="nothing",
    )


class Debug(Section):
    """Reproducibility and numerical precision."""

    DETECTING_OVERFLOW: ClassVar[Need] = enabled("detect_overflow")

    seed: int | None = field(
        None,
        "Seed of the initial weights, the sample order and dropout. Unset: drawn at random, "
        "logged, and saved in checkpoints.",
        ge=0,
        lt=2**63,
        affects="train_state",
    )
    deterministic: bool = field(
        False,
        "Use deterministic algorithms, on GPUs too. Slower, but equal runs are equal bit for bit.",
        affects="nothing",
    )
    deterministic_warn_only: bool = field(
        False,
        "Warn instead of failing where no deterministic algorithm exists.",
        affects="nothing",
        needs=enabled("deterministic"),
    )
    moe_force_load_balance: bool = field(
        False,
        "Route tokens evenly to experts and ignore the router. For speed measurements only.",
        affects="numerics",
    )
    matmul_precision: Literal["highest", "high", "medium"] = field(
        "highest",
        "Precision of float32 matrix products (torch.set_float32_matmul_precision).",
        affects="numerics",
    )
    detect_overflow: bool = field(
        False,
        "Check weights, inputs and outputs of every module in the forward pass. The first inf or "
        "nan ends the run and its module is logged; on GPUs at the next log step. Slow.",
        affects="nothing",
    )
    detect_overflow_frames: int = field(
        21,
        "Modules to log, with absolute minimum and maximum, up to the first non-finite one.",
        gt=0,
        affects="nothing",
        needs=DETECTING_OVERFLOW,
    )
    trace_batch_nums: Steps = field(
        [],
        "Steps at which every module is logged, with absolute minimum and maximum.",
        affects="nothing",
        needs=DETECTING_OVERFLOW,
    )
    abort_after_batch_num: int = field(
        0,
        "Abort the run after this step, as a crash would. 0: never.",
        ge=0,
        affects="nothing",
        needs=DETECTING_OVERFLOW,
    )
    launch_blocking: bool = field(
        False,
        "Wait for each GPU kernel (CUDA_LAUNCH_BLOCKING=1), so that an error names the line that "
        "caused it. Slow.",
        affects="nothing",
    )
