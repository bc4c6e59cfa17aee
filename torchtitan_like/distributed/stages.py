"""Assign modules to pipeline stages, and stages to ranks. Does not import torch.

A stage is the whole model without the modules of the other stages. So a parameter has the same name
for any number of stages. `ModelSpec` names the first, the repeated, and the last modules of a
model.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_like.config.problems import Problem, Severity
from torchtitan_like.distributed import schedule_view

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from torchtitan_like.config.sections_run import FaultTolerance
    from torchtitan_like.config.sections_scale import Parallelism
    from torchtitan_like.models.spec import ModelSpec


class Schedule(NamedTuple):
    """The layout that a schedule requires.

    is_multi: each rank has several stages.
    is_v_shaped: stage i and stage n - 1 - i of n are on the same rank.
    splits_backward: gradients of inputs and of weights are computed in separate passes.
    """

    is_multi: bool = False
    is_v_shaped: bool = False
    splits_backward: bool = False


SCHEDULES = {
    "GPipe": Schedule(),
    "1F1B": Schedule(),
    "Interleaved1F1B": Schedule(is_multi=True),
    "LoopedBFS": Schedule(is_multi=True),
    "InterleavedZeroBubble": Schedule(is_multi=True, splits_backward=True),
    "ZBVZeroBubble": Schedule(is_multi=True, is_v_shaped=True, splits_backward=True),
    "DualPipeV": Schedule(is_multi=True, is_v_shaped=True, splits_backward=True),
    "PipelineScheduleSingle": Schedule(),  # this one and the next read a schedule file
    "PipelineScheduleMulti": Schedule(is_multi=True),
}
_KEY = "parallelism.pipeline_parallel_"
Fqns = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class StagePlan:
    """Stages of a pipeline.

    csv, text, rows: path of the schedule file, its content, and the actions in it by rank; empty
    without one.
    splits_backward: gradients of inputs and of weights are computed in separate passes.
    fqns: the modules of each stage, in the order of the model.
    ranks: the stages of each rank, ascending.
    problems: why there are no stages, or why they cannot work.
    """

    schedule: str
    csv: str
    text: str
    rows: schedule_view.Order
    splits_backward: bool
    fqns: Fqns = ()
    ranks: tuple[tuple[int, ...], ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.fqns)

    @property
    def pp(self) -> int:
        return len(self.ranks)

    def order(self, num_micro_batches: int) -> schedule_view.Order:
        """Return the actions of each rank in a step, in order.

        Imports torch if ranks have several stages.
        """
        if self.rows:
            return self.rows
        stages_per_rank = self.num_stages // self.pp
        return schedule_view.order_of(self.schedule, self.pp, stages_per_rank, num_micro_batches)


def plan_stages(spec: ModelSpec | None, args: Any, section: Parallelism) -> StagePlan:
    """Plan the stages of a pipeline. Nothing else reads the schedule file.

    spec: None if there is no such model. Then there are no stages.
    """
    schedule, csv = section.pipeline_parallel_schedule, section.pipeline_parallel_schedule_csv
    text = ""
    rows: schedule_view.Order = []
    problems: tuple[Problem, ...] = ()
    splits_backward = SCHEDULES[schedule].splits_backward
    if csv:
        try:
            text = Path(csv).read_text()
            rows = schedule_view.parse_csv(text)
            schedule_view.simulate(rows)
        except (OSError, ValueError) as error:
            expected = f"a schedule file without deadlock; {error}"
            problems = (Problem(_KEY + "schedule_csv", None, expected),)
        splits_backward = any(action.kind in "IW" for row in rows for action in row)
    plan = StagePlan(schedule, csv, text, rows, splits_backward, problems=problems)
    return plan if spec is None else _with_stages(plan, spec, args, section)


# ---- modules of stages


class ModuleNames(NamedTuple):
    """The fqns of a model's modules, in order: the first ones, the repeated blocks, the last ones."""

    first: tuple[str, ...]
    blocks: tuple[str, ...]
    last: tuple[str, ...]

    def in_order(self) -> tuple[str, ...]:
        return self.first + self.blocks + self.last


def module_names(spec: ModelSpec, args: Any) -> ModuleNames:
    """Return the names in a model of these sizes. Blocks are numbered from 0."""
    num_layers = spec.constraints(args)["n_layers"]
    blocks = tuple(spec.block_pattern.replace("*", str(i)) for i in range(num_layers))
    return ModuleNames(spec.first_modules, blocks, spec.last_modules)


def split(
    names: ModuleNames, num_stages: int, first_less: int, last_less: int
) -> tuple[tuple[str, ...], ...]:
    """Distribute the blocks over the stages in order; the first stages get one more if they do not divide.

    The first and the last modules count as `first_less` and `last_less` blocks, as in TorchTitan.
    Raises ValueError if a stage would have no module.
    """
    total = first_less + len(names.blocks) + last_less
    each, rest = divmod(total, num_stages)
    counts = [each + (stage < rest) for stage in range(num_stages)]
    if each < max(first_less, last_less, 1):
        raise ValueError(
            f"{len(names.blocks)} layers + {first_less} for the first and {last_less} for the last "
            f"modules = {total}: {each} for each of {num_stages} stages"
        )
    counts[0] -= first_less
    counts[-1] -= last_less
    ends = [sum(counts[: stage + 1]) for stage in range(num_stages)]
    stages = [names.blocks[end - count : end] for end, count in zip(ends, counts, strict=True)]
    stages[0] = names.first + stages[0]
    stages[-1] = stages[-1] + names.last
    return tuple(stages)


def model_fragments(section: FaultTolerance, spec: ModelSpec, args: Any) -> Sequence[Sequence[str]]:
    """Return the names of the modules of each fragment of `[fault_tolerance]`.

    Raises ValueError if there are too many fragments.
    """
    if section.module_fqns_per_model_fragment:
        return section.module_fqns_per_model_fragment
    names = module_names(spec, args)
    if section.num_fragments == 1:
        return [names.in_order()]
    return split(names, section.num_fragments, 1, 1)


def check_explicit(names: ModuleNames, stages: Sequence[Sequence[str]]) -> list[str]:
    """Return the problems of configured stages: each module must occur once, in the order of the model."""
    model = names.in_order()
    configured = [fqn for stage in stages for fqn in stage]
    counts = Counter(configured)
    problems = [f"{fqn!r} is no module of this model" for fqn in counts if fqn not in model]
    problems += [f"{fqn!r} occurs {count} times" for fqn, count in counts.items() if count > 1]
    problems += [f"{fqn!r} is in no stage" for fqn in model if fqn not in counts]
    problems += [f"stage {stage} is empty" for stage, fqns in enumerate(stages) if not fqns]
    if not problems and tuple(configured) != model:
        first = next(fqn for fqn, right in zip(configured, model, strict=True) if fqn != right)
        problems.append(
            f"{first!r} comes before modules that it follows in the model ({', '.join(model)})"
        )
    return problems


def prune(model: nn.Module, spec: ModelSpec, fqns: Iterable[str]) -> nn.Module:
    """Remove the modules that are not among `fqns` from a model, in place. The other names do not change.

    First and last modules become None; blocks are deleted from their container. Raises ValueError
    if a parameter belongs to none of the first, repeated, and last modules: each stage would train
    its own copy.
    """
    kept = set(fqns)
    parent_fqn, _, _ = spec.block_pattern.rpartition(".")
    container = model.get_submodule(parent_fqn)
    for name, _ in list(container.named_children()):
        if f"{parent_fqn}.{name}" not in kept:
            delattr(container, name)
    for fqn in (*spec.first_modules, *spec.last_modules):
        if fqn not in kept:
            above, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(above), name, None)
    stray = [
        name
        for name, _ in model.named_parameters()
        if not any(name.startswith(f"{fqn}.") for fqn in kept)
    ]
    if stray:
        raise ValueError(
            f"{', '.join(stray)}: in none of the first, repeated and last modules of {spec.name!r}. Each "
            "pipeline stage would have its own copy: name its module in first_modules or last_modules "
            "of the ModelSpec"
        )
    return model


# ---- stages of ranks


def stage_ids(rank: int, pp: int, num_stages: int, schedule: str) -> tuple[int, ...]:
    """Return the stages of a rank: rank, rank + pp, ...; in a V-shaped schedule, the rank-th from each end."""
    if SCHEDULES[schedule].is_v_shaped:
        return (rank, num_stages - 1 - rank)
    return tuple(range(rank, num_stages, pp))


def _with_stages(plan: StagePlan, spec: ModelSpec, args: Any, section: Parallelism) -> StagePlan:
    """Return the plan with its stages, or with the problems. It may have both."""
    if "n_layers" not in spec.constraints(args):
        expected = (
            f'1: {spec.name} does not state its number of layers ("n_layers" in its constraints)'
        )
        return replace(plan, problems=(Problem(_KEY + "degree", None, expected),))
    names = module_names(spec, args)
    configured = section.module_fqns_per_model_part
    first_less = section.pipeline_parallel_first_stage_less_layers
    last_less = section.pipeline_parallel_last_stage_less_layers
    problems: list[Problem] = []
    fqns: Fqns
    if configured is not None:
        problems = [
            Problem(
                "parallelism.module_fqns_per_model_part",
                None,
                f"each module once, in order; {text}",
            )
            for text in check_explicit(names, configured)
        ]
    ranks, problems_of_ranks = _ranks(plan, section, len(names.blocks))
    problems += problems_of_ranks
    if ranks is None or problems:
        return replace(plan, problems=tuple(problems))
    num_stages = sum(map(len, ranks))
    try:
        if configured:
            fqns = tuple(map(tuple, configured))
        else:
            fqns = split(names, num_stages, first_less, last_less)
    except ValueError as error:
        remedy = (
            "lower it, or pipeline_parallel_first_stage_less_layers and "
            "pipeline_parallel_last_stage_less_layers"
        )
        expected = f"enough layers for each stage; {error}"
        return replace(plan, problems=(Problem(_KEY + "degree", None, expected, remedy),))
    for alias, name in spec.tied(args):
        if _stage_of(alias, fqns) != _stage_of(name, fqns):
            expected = (
                f"1 with this model: {alias} and {name} are one tensor, but on different stages"
            )
            problems.append(Problem(_KEY + "degree", None, expected, "untie them in [model.args]"))
    return replace(plan, fqns=fqns, ranks=ranks, problems=tuple(problems))


def _stage_of(parameter: str, fqns: Fqns) -> int:
    return next(
        stage
        for stage, names in enumerate(fqns)
        if any(parameter.startswith(f"{fqn}.") for fqn in names)
    )


def _ranks(
    plan: StagePlan, section: Parallelism, num_layers: int
) -> tuple[tuple[tuple[int, ...], ...] | None, list[Problem]]:
    """Return the stages of each rank, or None with the problems."""
    pp, schedule = section.pipeline_parallel_degree, plan.schedule
    if schedule.startswith("PipelineSchedule"):
        return _ranks_of_csv(plan, section)
    configured = section.module_fqns_per_model_part
    per_stage = section.pipeline_parallel_layers_per_stage
    is_multi = SCHEDULES[schedule].is_multi
    formula = ""
    if configured is not None:
        key = "parallelism.module_fqns_per_model_part"
        num_stages = len(configured)
    elif per_stage is not None:
        key = _KEY + "layers_per_stage"
        first = section.pipeline_parallel_first_stage_less_layers
        last = section.pipeline_parallel_last_stage_less_layers
        num_stages = math.ceil((num_layers + first + last) / per_stage)
        formula = (
            f" = ({num_layers} layers + {first} for the first + {last} for the last modules) / "
            f"{per_stage}, rounded up"
        )
    else:
        key = _KEY + "schedule"
        num_stages = pp * (2 if is_multi else 1)
    if num_stages % pp:
        expected = (
            f"a number of stages that {pp} pipeline ranks divide; it is {num_stages}{formula}"
        )
        return None, [Problem(key, None, expected)]
    num_local, allowed = num_stages // pp, _stages_per_rank(schedule)
    if num_local not in allowed:
        bound = "at least" if len(allowed) > 1 else "exactly"
        expected = (
            f"{bound} {allowed[0]} stages per rank with {schedule}; the number of stages is "
            f"{num_stages}{formula}, and so {num_local} on each of {pp} ranks"
        )
        remedy = "use Interleaved1F1B" if num_local > 1 and not is_multi else ""
        remedy = "use 1F1B" if num_local == 1 else remedy
        return None, [Problem(key, None, expected, remedy)]
    return tuple(stage_ids(rank, pp, num_stages, schedule) for rank in range(pp)), []


def _stages_per_rank(schedule: str) -> range:
    if SCHEDULES[schedule].is_v_shaped:
        return range(2, 3)
    return range(2, 1 << 30) if SCHEDULES[schedule].is_multi else range(1, 2)


def _ranks_of_csv(
    plan: StagePlan, section: Parallelism
) -> tuple[tuple[tuple[int, ...], ...] | None, list[Problem]]:
    """Return the stages of each rank in the schedule file, or None with the problems of the file."""
    key, pp, num_rows = _KEY + "schedule_csv", section.pipeline_parallel_degree, len(plan.rows)
    if plan.problems:
        return None, [*plan.problems]
    if not plan.rows:
        expected = f"the file with the schedule, for {plan.schedule}"
        return None, [Problem(key, None, expected)]
    if num_rows != pp:
        return None, [Problem(key, None, f"one line per pipeline rank: {pp}; it has {num_rows}")]
    ranks = tuple(tuple(sorted({action.stage for action in row})) for row in plan.rows)
    num_stages = 1 + max(stage for stages in ranks for stage in stages)
    configured = section.module_fqns_per_model_part
    if configured is not None and len(configured) != num_stages:
        expected = f"as many stages as module_fqns_per_model_part has: {len(configured)}; it has {num_stages}"
        return None, [Problem(key, None, expected)]
    round_robin = tuple(stage_ids(rank, pp, num_stages, plan.schedule) for rank in range(pp))
    if ranks != round_robin:
        expected = f"stages distributed round robin, {round_robin}; it has {ranks}"
        return None, [Problem(key, None, expected)]
    return ranks, []


# ---- micro-batches


def micro_batch_problems(
    plan: StagePlan, size: int, *, local_batch_size: int, num_accumulated: int
) -> list[Problem]:
    """Return the problems of a step's micro-batches, by the rules of torch's schedules.

    size: samples of a micro-batch. num_accumulated: local batches in a step, which run in one
    schedule. 0: unknown.
    """
    if local_batch_size % size:
        expected = f"a divisor of training.local_batch_size = {local_batch_size}"
        return [Problem(_KEY + "microbatch_size", None, expected)]
    number = local_batch_size // size * num_accumulated
    if not number or not plan.fqns:
        return []
    if plan.rows:
        return _csv_problems(plan, number)
    reason = schedule_view.refusal(plan.schedule, number, plan.pp, plan.num_stages)
    if not reason:
        return []
    possible = [
        n
        for n in range(1, 2 * max(number, plan.num_stages) + 1)
        if not schedule_view.refusal(plan.schedule, n, plan.pp, plan.num_stages)
    ]
    smaller = max((n for n in possible if n < number), default=0)
    larger = min(n for n in possible if n > number)
    sizes = " or ".join(str(n) for n in (smaller, larger) if n)
    remedy = f"change it or the batch size so that there are {sizes}"
    expected = f"a number of micro-batches that {plan.schedule} supports; {reason}"
    # A file may leave a larger batch size to the command of the run, as one of TorchTitan's does.
    severity: Severity = "error" if smaller else "training_error"
    return [Problem(_KEY + "microbatch_size", None, expected, remedy, severity=severity)]


def _csv_problems(plan: StagePlan, number: int) -> list[Problem]:
    """Check that a schedule file computes each of `number` micro-batches once on each stage."""
    actions = [action for row in plan.rows for action in row]
    forward = sorted((action.stage, action.micro_batch) for action in actions if action.kind == "F")
    backward = sorted(
        (action.stage, action.micro_batch) for action in actions if action.kind in "BW"
    )
    expected = [(stage, micro) for stage in range(plan.num_stages) for micro in range(number)]
    if forward == expected == backward:
        return []
    scheduled = 1 + max(action.micro_batch for action in actions)
    actual = f"{scheduled} micro-batches"
    if scheduled == number:
        actual = "micro-batches that do not occur once, forward and backward, on each stage"
    text = f"a schedule of the {number} micro-batches of a step; it has {actual}"
    return [Problem(_KEY + "schedule_csv", None, text)]
