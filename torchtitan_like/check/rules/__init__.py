"""Rules over several sections, the ranks, the model and the hardware: one list per section."""

from __future__ import annotations

from torchtitan_like.check.context import RunContext
from torchtitan_like.check.rules.compute_rules import (
    ACTIVATION_CHECKPOINT_RULES,
    COMPILE_RULES,
    CUDA_GRAPH_RULES,
    QUANTIZE_RULES,
)
from torchtitan_like.check.rules.model_rules import MODEL_RULES
from torchtitan_like.check.rules.no_effect_rules import NO_EFFECT_RULES
from torchtitan_like.check.rules.parallelism_rules import PARALLELISM_RULES
from torchtitan_like.check.rules.replica_groups_rules import FAULT_TOLERANCE_RULES
from torchtitan_like.check.rules.run_rules import (
    CHECKPOINT_RULES,
    DEBUG_RULES,
    JOB_RULES,
    PACKAGE_RULES,
    PROFILING_RULES,
    RESILIENCE_RULES,
)
from torchtitan_like.check.rules.training_rules import (
    EMA_RULES,
    LR_SCHEDULER_RULES,
    OPTIMIZER_RULES,
    TRAINING_RULES,
    VALIDATION_RULES,
)
from torchtitan_like.config.problems import Rule

# In the order in which their problems are reported.
RULES: tuple[Rule[RunContext], ...] = (
    *TRAINING_RULES,
    *OPTIMIZER_RULES,
    *EMA_RULES,
    *PARALLELISM_RULES,
    *MODEL_RULES,
    *VALIDATION_RULES,
    *LR_SCHEDULER_RULES,
    *ACTIVATION_CHECKPOINT_RULES,
    *COMPILE_RULES,
    *CUDA_GRAPH_RULES,
    *QUANTIZE_RULES,
    *PROFILING_RULES,
    *RESILIENCE_RULES,
    *DEBUG_RULES,
    *CHECKPOINT_RULES,
    *FAULT_TOLERANCE_RULES,
    *PACKAGE_RULES,
    *JOB_RULES,
    *NO_EFFECT_RULES,
)
