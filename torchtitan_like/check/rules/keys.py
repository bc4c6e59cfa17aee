"""Dotted keys that several rules blame or read."""

from __future__ import annotations


def parallelism_keys(*names: str) -> tuple[str, ...]:
    """Return the dotted keys of [parallelism] settings."""
    return tuple(f"parallelism.{name}" for name in names)


MODEL_KEYS = ("model.name", "model.flavor", "model.args")
HF_ASSETS = "model.hf_assets_path"
TP = "parallelism.tensor_parallel_degree"
CP = "parallelism.context_parallel_degree"
PP = "parallelism.pipeline_parallel_degree"
EP = "parallelism.expert_parallel_degree"
ETP = "parallelism.expert_tensor_parallel_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
DEGREES = (REPLICATE, "parallelism.data_parallel_shard_degree", CP, TP, PP)
IMPL = "parallelism.data_parallel_impl"
SEQUENCE_PARALLEL = "parallelism.enable_sequence_parallel"
ROTATE = "parallelism.context_parallel_rotate_method"
BALANCER = "parallelism.context_parallel_load_balancer"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
COMPILE = ("compile.enable", "compile.components")
CUDA_GRAPHS = "compile.cuda_graphs"
BATCH = ("training.global_batch_size", "training.local_batch_size")
EARLY_STEP = "optimizer.early_step_in_backward"
AC_MODE = "activation_checkpoint.mode"
# The settings that decide the stages and micro-batches of a pipeline; see distributed/stages.py.
PIPELINE_KEYS = (
    PP,
    *parallelism_keys(
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
