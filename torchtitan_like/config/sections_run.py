"""Sections about the run itself: job, profiling, metrics, communication, debugging."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from torchtitan_like.config.base import HomePath, Minutes, Section, Steps
from torchtitan_like.config.rules import Rule
from torchtitan_like.config.uris import COPY_LATER, LOCAL_FOLDER, is_uri


class Job(Section):
    """The run as a whole: where it writes and how it is described."""

    config_file: str | None = Field(
        None, description="TOML file to read; for the command line only. Relative to the current directory."
    )
    dump_folder: HomePath = Field(
        "./outputs", min_length=1, description="Run directory: everything the run writes lies below it."
    )
    description: str = Field("default job", description="Free text, printed when the run starts.")
    print_config: bool = Field(False, description="Print the resolved configuration as TOML when the run starts.")
    save_config_file: HomePath | None = Field(
        None,
        description="Also write the resolved configuration as JSON to this file (rank 0), relative to job.dump_folder.",
    )
    custom_config_module: str = Field(
        "", description="Import path of a module whose JobConfig is merged into this schema."
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
    """Traces of the profiler and snapshots of accelerator memory."""

    enable_profiling: bool = Field(False, description="Record a trace on every rank each profile_freq steps.")
    save_traces_folder: HomePath = Field("profile_traces", description="Folder of the traces, below job.dump_folder.")
    profile_freq: int = Field(10, gt=0, description="Length of one profiling cycle in steps: wait, warm up, record.")
    profiler_active: int = Field(1, gt=0, description="Steps recorded at the end of each cycle.")
    profiler_warmup: int = Field(
        3, ge=0, description="Steps before the recorded ones in which the profiler already runs but keeps nothing."
    )
    enable_memory_snapshot: bool = Field(
        False, description="Write a memory snapshot each profile_freq steps and when memory runs out."
    )
    save_memory_snapshot_folder: HomePath = Field(
        "memory_snapshot", description="Folder of the memory snapshots, below job.dump_folder."
    )

    rules: ClassVar[tuple[Rule[Profiling], ...]] = (
        Rule(
            "short-profiling-cycle",
            "profile_freq",
            lambda section: section.enable_profiling and section.profile_freq < section.num_steps_traced,
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
    """What is printed and recorded while training. metrics.jsonl is always written."""

    log_freq: int = Field(
        10, gt=0, description="Print and record metrics every this many steps (and at the first step of a run)."
    )
    enable_tensorboard: bool = Field(False, description="Write TensorBoard files.")
    disable_color_printing: bool = Field(False, description="Print step lines without terminal colours.")
    save_tb_folder: HomePath = Field(
        "tb", description="Folder of the TensorBoard files, below job.dump_folder; each run adds <date-time>."
    )
    save_for_all_ranks: bool = Field(
        False,
        description="Every rank writes TensorBoard or W&B metrics of its own, not only one that knows the loss.",
    )
    enable_wandb: bool = Field(False, description="Report metrics to Weights & Biases (install the extra `wandb`).")
    peak_flops: float | None = Field(
        None,
        gt=0,
        description="Peak FLOP/s of one device, for MFU. Unset: by the device's name; unknown devices have no MFU.",
    )
    data_loading_alarm: float = Field(
        0.25, gt=0, le=1, description="Warn when waiting for data takes more than this share of the time (0 to 1)."
    )


MOST_SECONDS = 1_000_000_000  # 31 years: what waits counts in nanoseconds, and 300 years are too many of them


class Comm(Section):
    """Process groups: time limits and the flight recorder."""

    init_timeout_seconds: int = Field(
        300,
        gt=0,
        le=MOST_SECONDS,
        description="Seconds a collective may take until the first step of a process is done.",
    )
    train_timeout_seconds: int = Field(
        100, gt=0, le=MOST_SECONDS, description="Seconds a collective may take after the first step of a process."
    )
    checkpoint_timeout_seconds: int = Field(
        1800,
        gt=0,
        le=MOST_SECONDS,
        description="Seconds ranks wait for the slowest one in a save or a load: longer than its disk may take, and not longer "
        "than a hung one may cost.",
    )
    trace_buf_size: int = Field(
        20000,
        ge=0,
        description="Collectives that each rank's flight recorder keeps in memory; 0 switches it off. Each takes 3 to 4 KiB "
        "of host memory, which grows until the recorder is full: by 60 to 80 MiB a rank at 20000.",
    )
    save_traces_folder: HomePath = Field(
        "comm_traces",
        description="Folder of the flight recorder's dumps, below job.dump_folder. A rank that has been in a step for 80 % of "
        "its time-out writes one.",
    )
    save_traces_file_prefix: str = Field("rank_", description="Start of each dump's file name; the rank follows.")
    mode: Literal["default", "fake_backend", "local_tensor"] = Field(
        "default",
        description="default: real communication. fake_backend: one process plays one of many, without exchange. "
        "local_tensor: one process computes all ranks.",
    )


class Resilience(Section):
    """When a run stops by itself, and what becomes of bad numbers."""

    kill_switch_path: HomePath = Field(
        "KILL",
        min_length=1,
        description="While this file is there no run starts, and one that runs saves and ends; only you remove it. Relative "
        "to job.dump_folder.",
    )
    save_switch_path: HomePath = Field(
        "SAVE", min_length=1, description="`touch` this file to save once; it is removed. Relative to job.dump_folder."
    )
    max_runtime_minutes: Minutes = Field(
        0.0,
        description="Save and end with code 75 (start again to continue) so many minutes after the process has begun; "
        '"auto": grace_seconds before the end of the Slurm job. 0: never.',
    )
    grace_seconds: float = Field(
        600.0,
        ge=0,
        description="Seconds that the scheduler leaves between its signal and the kill. The run warns when a step and a save, "
        "as measured and doubled, take longer.",
    )
    max_cpu_mem_percent: float = Field(
        100.0,
        gt=0,
        le=100,
        description="Save and end with code 75 when more of a host's memory, or of the job's share of it (cgroup), is in use: "
        "before the kernel kills a run that leaks. 100: never.",
    )
    min_free_gpu_gib: float = Field(
        0.0,
        ge=0,
        description="Save and end with code 75 when a GPU has less memory left although its cache was emptied. 0: never.",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="A step with a non-finite loss or gradient changes no weight. stop: the run then saves the weights from "
        "before it and ends. skip: it goes on with the next step.",
    )
    max_nonfinite_in_a_row: int = Field(
        3, gt=0, description='With on_nonfinite = "skip": one more non-finite step in a row than this ends the run.'
    )
    spike_threshold: float = Field(
        8.0,
        ge=0,
        description="A loss or gradient norm is a spike when its modified z-score over the last spike_window steps is higher. "
        "It is told of, and the newest checkpoint before it is pinned. 0: nothing is looked for.",
    )
    spike_window: int = Field(128, gt=7, description="Steps over which spikes are judged; before these there are none.")
    on_spike: Literal["log", "skip"] = Field(
        "log",
        description="skip: the update of a step whose gradient norm is a spike is left out, decided on the device. Norms that "
        "stay high become the rule after half a window.",
    )
    replica_check_freq: int = Field(
        100,
        ge=0,
        description="Compare the weights of all data-parallel replicas bit for bit at the first log step after this many "
        "steps, and before each save; a run whose replicas differ ends with code 70, unsaved, and names rank and "
        "parameter. 0: never.",
    )


class MemoryEstimation(Section):
    """Estimate the memory of a run instead of training."""

    enable: bool = Field(False, description="Estimate peak memory for this configuration instead of training.")
    disable_fake_mode: bool = Field(False, description="Estimate with real tensors instead of fake ones.")


class FaultTolerance(Section):
    """Replicas that train on when one of them dies (torchft)."""

    enable: bool = Field(False, description="Train as one of several replicas that survive each other's failures.")
    process_group: Literal["gloo", "nccl"] = Field("gloo", description="Backend of the group between replicas.")
    process_group_timeout_ms: int = Field(
        10000, gt=0, description="Milliseconds a collective between replicas may take."
    )
    replica_id: int = Field(0, ge=0, description="Number of this replica, counted from 0.")
    group_size: int = Field(0, ge=0, description="Number of replicas; the data is divided among them.")
    min_replica_size: int = Field(1, gt=0, description="Fewest live replicas with which a step is taken.")
    semi_sync_method: Literal["local_sgd", "diloco"] | None = Field(
        None, description="Synchronise replicas only now and then: local_sgd or diloco. Unset: at every step."
    )
    sync_steps: int = Field(5, gt=0, description="Steps between two synchronisations of a semi_sync_method.")
    should_quantize: bool = Field(False, description="Send quantised gradients between replicas (diloco).")
    fragment_sync_delay: int = Field(
        0, ge=0, description="Steps between sending a model fragment and applying what came back (streaming diloco)."
    )
    fragment_update_alpha: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Weight of the local parameters when a fragment is merged; 0 takes the global ones.",
    )
    module_fqns_per_model_fragment: list[list[str]] = Field(
        [], description="Names of the modules of each model fragment, one list per fragment."
    )
    num_fragments: int = Field(1, gt=0, description="Number of fragments the model is cut into (diloco).")

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
    """Code from outside this package."""

    custom_import: str = Field(
        "",
        description="Module imported before the model is looked up, for example to register it: its name, or the path "
        "of a .py file, relative to the TOML file.",
    )
    custom_args_module: str = Field("", description="Deprecated name of job.custom_config_module.")


class Debug(Section):
    """Reproducibility and numerical precision."""

    seed: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="Seed of weights, data order and dropout. Unset: drawn at random, printed, saved.",
    )
    deterministic: bool = Field(
        False,
        description="Use deterministic algorithms everywhere, on GPUs too. Slower; needed for bitwise equal reruns.",
    )
    deterministic_warn_only: bool = Field(
        False, description="With deterministic: warn instead of failing where no deterministic algorithm exists."
    )
    moe_force_load_balance: bool = Field(
        False, description="Route tokens to experts evenly, whatever the router says. For speed measurements only."
    )
    matmul_precision: Literal["highest", "high", "medium"] = Field(
        "highest", description="Precision of float32 matrix products (torch.set_float32_matmul_precision)."
    )
    detect_overflow: bool = Field(
        False,
        description="Look at weights, inputs and outputs of every module in the forward pass; the first inf or nan ends the "
        "run, which names the module; on GPUs at the next log step. Slow.",
    )
    detect_overflow_frames: int = Field(
        21,
        gt=0,
        description="With detect_overflow: modules that are shown, with abs min and max, up to the first bad one.",
    )
    trace_batch_nums: Steps = Field(
        [], description="With detect_overflow: steps of which every module is logged, with abs min and max."
    )
    abort_after_batch_num: int = Field(
        0, ge=0, description="With detect_overflow: end the run, as a crash does, behind this step. 0: never."
    )
    launch_blocking: bool = Field(
        False,
        description="Wait for each GPU kernel (CUDA_LAUNCH_BLOCKING=1), so that an error shows the line that it comes from. "
        "Slow.",
    )

    rules: ClassVar[tuple[Rule[Debug], ...]] = (
        Rule(
            "traced-step-below-one",
            "trace_batch_nums",
            lambda section: section.detect_overflow and min(section.trace_batch_nums, default=1) < 1,
            "step numbers, which are counted from 1",
            "write [1, 5], for example",
            ("detect_overflow",),
        ),
    )
