"""Rules of [fault_tolerance]: replica groups, and what is not offered with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from torchtitan_like.check.context import RunContext
from torchtitan_like.check.rules.keys import (
    CP,
    EARLY_STEP,
    MODEL_KEYS,
    PP,
    REPLICATE,
    TP,
)
from torchtitan_like.config.dataset_names import datasets_for
from torchtitan_like.config.problems import Rule
from torchtitan_like.config.sections_run import LIGHTHOUSE
from torchtitan_like.distributed.stages import check_explicit, model_fragments, module_names

ENABLE = "fault_tolerance.enable"
METHOD = "fault_tolerance.semi_sync_method"
SYNC_STEPS = "fault_tolerance.sync_steps"
FRAGMENTS = "fault_tolerance.module_fqns_per_model_fragment"
NUM_FRAGMENTS = "fault_tolerance.num_fragments"


def _streams(run: RunContext) -> bool:
    """Return True if a source of the training data is streamed."""
    training, sources = run.config.training, run.config.data.sources
    if sources:
        return any(source.streaming for source in sources.values())
    dataset = datasets_for("training").get(training.dataset)
    return training.dataset_path is None and dataset is not None and dataset.streaming


class Refusal(NamedTuple):
    """A setting that is not offered with replica groups: when it is used, and what it must be."""

    name: str
    key: str
    when: Callable[[RunContext], bool]
    expected: str
    remedy: str

    def rule(self) -> Rule[RunContext]:
        """Return the rule that refuses it."""
        return Rule(
            self.name,
            self.key,
            lambda run: run.config.fault_tolerance.enable and self.when(run),
            f"{self.expected} with {ENABLE} = true",
            self.remedy,
            (ENABLE, *(MODEL_KEYS if self.key in MODEL_KEYS else ())),
        )


REFUSALS = (
    Refusal("groups-pp", PP, lambda run: run.dims.pp > 1, "1", "set it to 1"),
    Refusal("groups-cp", CP, lambda run: run.dims.cp > 1, "1", "set it to 1"),
    Refusal("groups-tp", TP, lambda run: run.dims.tp > 1, "1", "set it to 1"),
    Refusal(
        "groups-replicate",
        REPLICATE,
        lambda run: run.dims.dp_replicate > 1,
        "1, because the groups are the replicas,",
        "set it to 1, and start more groups",
    ),
    Refusal(
        "groups-experts",
        "model.flavor",
        lambda run: bool(run.size("n_experts")),
        "a dense model",
        "choose one, or set fault_tolerance.enable = false",
    ),
    Refusal(
        "groups-early-step",
        EARLY_STEP,
        lambda run: run.config.optimizer.early_step_in_backward,
        "false",
        "set it to false",
    ),
    Refusal(
        "groups-high-norm",
        "resilience.on_high_norm",
        lambda run: run.config.resilience.on_high_norm == "rerun",
        '"accept"',
        "leave it out",
    ),
    Refusal(
        "groups-average",
        "ema.enable",
        lambda run: (
            run.config.ema.enable and run.config.fault_tolerance.semi_sync_method is not None
        ),
        "false with a semi_sync_method, because the weights of the groups differ between two "
        "synchronizations,",
        "set it to false, or leave out fault_tolerance.semi_sync_method",
    ),
    Refusal(
        "groups-offload",
        "training.enable_cpu_offload",
        lambda run: run.config.training.enable_cpu_offload,
        "false",
        "set it to false",
    ),
    Refusal(
        "groups-stream",
        "training.dataset",
        _streams,
        "a dataset on disk",
        "download it, or set streaming = false in its table",
    ),
    Refusal(
        "groups-ramp",
        "training.batch_ramp",
        lambda run: bool(run.config.training.batch_ramp),
        "[]",
        "leave it out",
    ),
    Refusal(
        "groups-seed-checkpoint",
        "checkpoint.create_seed_checkpoint",
        lambda run: run.config.checkpoint.enable and run.config.checkpoint.create_seed_checkpoint,
        "false",
        "create it without [fault_tolerance]",
    ),
    Refusal(
        "groups-quantize",
        "fault_tolerance.should_quantize",
        lambda run: _is_diloco(run) and run.config.fault_tolerance.should_quantize,
        "false",
        "set it to false",
    ),
)


def _is_diloco(run: RunContext) -> bool:
    section = run.config.fault_tolerance
    return section.enable and section.semi_sync_method == "diloco"


def _num_fragments(run: RunContext) -> int:
    section = run.config.fault_tolerance
    return len(section.module_fqns_per_model_fragment) or section.num_fragments


def _fragment_problem(run: RunContext) -> str:
    """Return what is wrong with the fragments of the model; an empty string if nothing is."""
    if not _is_diloco(run) or run.spec is None or "n_layers" not in (run.limits or {}):
        return ""
    try:
        fragments = model_fragments(run.config.fault_tolerance, run.spec, run.args)
    except ValueError as error:
        return str(error)
    return "; ".join(check_explicit(module_names(run.spec, run.args), fragments))


FAULT_TOLERANCE_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "groups-without-size",
        "fault_tolerance.group_size",
        lambda run: run.config.fault_tolerance.enable and not run.config.fault_tolerance.group_size,
        "the number of replica groups of the job, which share the samples of a step",
        "set it to the same number in all groups",
        (ENABLE,),
    ),
    Rule(
        "more-live-groups-than-groups",
        "fault_tolerance.min_replica_size",
        lambda run: (
            run.config.fault_tolerance.enable
            and 0
            < run.config.fault_tolerance.group_size
            < run.config.fault_tolerance.min_replica_size
        ),
        lambda run: f"at most group_size = {run.config.fault_tolerance.group_size}",
        "lower it",
        ("fault_tolerance.group_size", ENABLE),
    ),
    Rule(
        "groups-without-lighthouse",
        ENABLE,
        lambda run: run.config.fault_tolerance.enable and not os.environ.get(LIGHTHOUSE),
        f"the address of a lighthouse in the environment variable {LIGHTHOUSE}",
        f"start `python -m torchtitan_like.distributed.lighthouse`, and set {LIGHTHOUSE}=http://HOST:29510",
        severity="training_error",
    ),
    Rule(
        "groups-over-nccl",
        "fault_tolerance.process_group",
        lambda run: (
            run.config.fault_tolerance.enable and run.config.fault_tolerance.process_group == "nccl"
        ),
        "groups exchange gradients over gloo: NCCL between groups is not tested",
        'set it to "gloo". Collectives inside a group still use NCCL',
        (ENABLE,),
        "warning",
    ),
    Rule(
        "uneven-fragments",
        SYNC_STEPS,
        lambda run: (
            _is_diloco(run) and run.config.fault_tolerance.sync_steps % _num_fragments(run) != 0
        ),
        lambda run: f"a multiple of the {_num_fragments(run)} model fragments",
        lambda run: f"set it to {_num_fragments(run)} or a multiple",
        (NUM_FRAGMENTS, FRAGMENTS, METHOD, ENABLE),
    ),
    Rule(
        "late-fragment",
        "fault_tolerance.fragment_sync_delay",
        lambda run: (
            _is_diloco(run)
            and run.config.fault_tolerance.fragment_sync_delay
            >= max(1, run.config.fault_tolerance.sync_steps // _num_fragments(run))
        ),
        lambda run: (
            "less than sync_steps / fragments = "
            f"{run.config.fault_tolerance.sync_steps // _num_fragments(run)}"
        ),
        "lower it, or raise sync_steps",
        (SYNC_STEPS, NUM_FRAGMENTS, FRAGMENTS, METHOD, ENABLE),
    ),
    Rule(
        "wrong-fragments",
        FRAGMENTS,
        lambda run: bool(_fragment_problem(run)),
        lambda run: f"each module in one fragment, and a layer in each: {_fragment_problem(run)}",
        "correct it, or lower num_fragments",
        (NUM_FRAGMENTS, METHOD, ENABLE, *MODEL_KEYS),
    ),
    *(refusal.rule() for refusal in REFUSALS),
)
