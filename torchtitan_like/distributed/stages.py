"""Which modules of a model belong to which pipeline stage, and which stages to which rank. No torch is imported.

A stage is the whole model without the modules of the other stages, so that a parameter's name is the same on any
number of stages. What is first, repeated and last in a model is known from its `ModelSpec`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_like.config.problems import Problem
from torchtitan_like.distributed import schedule_view

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from torchtitan_like.config.sections_scale import Parallelism
    from torchtitan_like.models.spec import ModelSpec


class Schedule(NamedTuple):
    """What a schedule asks of a layout."""

    is_multi: bool = False  # each rank has several stages
    is_v_shaped: bool = False  # the second half of the stages goes back over the ranks


SCHEDULES = {
    "GPipe": Schedule(),
    "1F1B": Schedule(),
    "Interleaved1F1B": Schedule(is_multi=True),
    "LoopedBFS": Schedule(is_multi=True),
    "InterleavedZeroBubble": Schedule(is_multi=True),
    "ZBVZeroBubble": Schedule(is_multi=True, is_v_shaped=True),
    "DualPipeV": Schedule(is_multi=True, is_v_shaped=True),
    "PipelineScheduleSingle": Schedule(),  # these two follow a file
    "PipelineScheduleMulti": Schedule(is_multi=True),
}
_KEY = "parallelism.pipeline_parallel_"


@dataclass(frozen=True)
class StagePlan:
    """fqns: the modules of each stage, in the model's order. ranks: the stages of each rank, ascending."""

    schedule: str
    csv: str
    fqns: tuple[tuple[str, ...], ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.fqns)

    @property
    def pp(self) -> int:
        return len(self.ranks)

    def order(self, num_micro_batches: int) -> schedule_view.Order:
        """What each rank computes in a step, in order. Imports torch for schedules of several stages per rank."""
        if self.csv:
            return schedule_view.read_csv(self.csv)
        return schedule_view.order_of(self.schedule, self.pp, self.num_stages // self.pp, num_micro_batches)


def plan_stages(spec: ModelSpec, args: Any, section: Parallelism) -> StagePlan:
    """The stages that a checked configuration asks for. Raises ValueError with all that is wrong with it."""
    plan, faults = _resolve(spec, args, section)
    if plan is None or faults:
        raise ValueError("\n".join(f"{fault.key}: expected {fault.expected}" for fault in faults))
    return plan


def problems(
    spec: ModelSpec, args: Any, section: Parallelism, *, local_batch_size: int, num_accumulation: int
) -> list[Problem]:
    """All that is wrong with a pipeline before anything is built; nothing without one.

    num_accumulation: local batches in a step; all of them are one schedule's. 0: unknown.
    """
    if section.pipeline_parallel_degree == 1:
        return []
    plan, faults = _resolve(spec, args, section)
    micro = section.pipeline_parallel_microbatch_size
    if local_batch_size % micro:
        faults.append(Problem(_KEY + "microbatch_size", None, f"a divisor of training.local_batch_size = {local_batch_size}"))
    elif plan is not None and num_accumulation:
        faults += _micro_batch_faults(plan, local_batch_size // micro * num_accumulation)
    return faults


# ---- stages of modules


class ModuleNames(NamedTuple):
    """The fqns that make up a model, in order: what comes first, the repeated blocks, what comes last."""

    first: tuple[str, ...]
    blocks: tuple[str, ...]
    last: tuple[str, ...]

    def in_order(self) -> tuple[str, ...]:
        return self.first + self.blocks + self.last


def module_names(spec: ModelSpec, args: Any) -> ModuleNames:
    """The names in a model of these sizes; blocks are numbered from 0."""
    blocks = tuple(spec.block_pattern.replace("*", str(i)) for i in range(spec.constraints(args)["n_layers"]))
    return ModuleNames(spec.first_modules, blocks, spec.last_modules)


def split(names: ModuleNames, num_stages: int, first_less: int, last_less: int) -> tuple[tuple[str, ...], ...]:
    """Blocks dealt to stages in order, as evenly as possible; what does not divide goes to the first stages.

    The first and last modules count as `first_less` and `last_less` blocks, the rule of TorchTitan. Raises ValueError
    where a stage would be left without a module.
    """
    total = first_less + len(names.blocks) + last_less
    each, rest = divmod(total, num_stages)
    counts = [each + (stage < rest) for stage in range(num_stages)]
    if each < max(first_less, last_less, 1):
        raise ValueError(
            f"{len(names.blocks)} layers + {first_less} for the first and {last_less} for the last modules = {total} "
            f"make {each} per stage on {num_stages} stages"
        )
    counts[0] -= first_less
    counts[-1] -= last_less
    ends = [sum(counts[: stage + 1]) for stage in range(num_stages)]
    stages = [names.blocks[end - count : end] for end, count in zip(ends, counts, strict=True)]
    stages[0] = names.first + stages[0]
    stages[-1] = stages[-1] + names.last
    return tuple(stages)


def check_explicit(names: ModuleNames, stages: Sequence[Sequence[str]]) -> list[str]:
    """What is wrong with stages that were written down: every module stands once, in the model's order."""
    wanted, given = names.in_order(), [fqn for stage in stages for fqn in stage]
    found = [f"{fqn!r} is no module of this model" for fqn in dict.fromkeys(given) if fqn not in wanted]
    found += [f"{fqn!r} is in {given.count(fqn)} places" for fqn in dict.fromkeys(given) if given.count(fqn) > 1]
    found += [f"{fqn!r} is in no stage" for fqn in wanted if fqn not in given]
    found += [f"stage {stage} is empty" for stage, fqns in enumerate(stages) if not fqns]
    if not found and tuple(given) != wanted:
        wrong = next(fqn for fqn, right in zip(given, wanted, strict=True) if fqn != right)
        found.append(f"{wrong!r} comes before modules that it follows in the model ({', '.join(wanted)})")
    return found


def prune(model: nn.Module, spec: ModelSpec, fqns: Iterable[str]) -> nn.Module:
    """Take from a model the modules that are not among `fqns`, in place; the names of the others stay.

    First and last modules become None, blocks leave their container. Raises ValueError where a parameter is in none
    of a model's first, repeated and last modules: every stage would train a copy of its own.
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
    stray = [name for name, _ in model.named_parameters() if not any(name.startswith(f"{fqn}.") for fqn in kept)]
    if stray:
        raise ValueError(
            f"{', '.join(stray)}: in none of the first, repeated and last modules of {spec.name!r}, so that each "
            "pipeline stage would have its own. Name its module in first_modules or last_modules of the ModelSpec"
        )
    return model


# ---- stages of ranks


def stage_ids(rank: int, pp: int, num_stages: int, schedule: str) -> tuple[int, ...]:
    """Loop: rank, rank + pp, ... In a V the first half goes down the ranks and the second back up."""
    if SCHEDULES[schedule].is_v_shaped:
        return (rank, num_stages - 1 - rank)
    return tuple(range(rank, num_stages, pp))


def _resolve(spec: ModelSpec, args: Any, section: Parallelism) -> tuple[StagePlan | None, list[Problem]]:
    """The plan, or None with the reasons. A plan may come with faults too."""
    if "n_layers" not in spec.constraints(args):
        return None, [Problem(_KEY + "degree", None, f'1: the constraints of {spec.name} do not say its number of "n_layers"')]
    names, explicit = module_names(spec, args), section.module_fqns_per_model_part
    first_less = section.pipeline_parallel_first_stage_less_layers
    last_less = section.pipeline_parallel_last_stage_less_layers
    faults: list[Problem] = []
    fqns: tuple[tuple[str, ...], ...]
    if explicit is not None:
        faults = [
            Problem("parallelism.module_fqns_per_model_part", None, f"each module once, in order; {wrong}")
            for wrong in check_explicit(names, explicit)
        ]
    ranks, of_ranks = _ranks(section, len(names.blocks))
    faults += of_ranks
    if ranks is None or faults:
        return None, faults
    num_stages = sum(map(len, ranks))
    try:
        fqns = tuple(map(tuple, explicit)) if explicit else split(names, num_stages, first_less, last_less)
    except ValueError as error:
        remedy = "lower it, or pipeline_parallel_first_stage_less_layers and pipeline_parallel_last_stage_less_layers"
        return None, [Problem(_KEY + "degree", None, f"layers enough for every stage; {error}", remedy)]
    for tied, source in spec.tied(args):
        if _stage_of(tied, fqns) != _stage_of(source, fqns):
            expected = f"1 with this model: {tied} is the same tensor as {source}, which would be on another stage"
            faults.append(Problem(_KEY + "degree", None, expected, "untie them in [model.args]"))
    plan = StagePlan(section.pipeline_parallel_schedule, section.pipeline_parallel_schedule_csv, fqns, ranks)
    return plan, faults


def _stage_of(parameter: str, fqns: tuple[tuple[str, ...], ...]) -> int:
    return next(stage for stage, names in enumerate(fqns) if any(parameter.startswith(f"{fqn}.") for fqn in names))


def _ranks(section: Parallelism, num_layers: int) -> tuple[tuple[tuple[int, ...], ...] | None, list[Problem]]:
    """The stages of each rank."""
    pp, schedule = section.pipeline_parallel_degree, section.pipeline_parallel_schedule
    explicit, per_stage = section.module_fqns_per_model_part, section.pipeline_parallel_layers_per_stage
    if schedule.startswith("PipelineSchedule"):
        return _ranks_of_csv(section)
    num_stages, why, key = pp * (2 if SCHEDULES[schedule].is_multi else 1), "", _KEY + "schedule"
    if explicit is not None:
        num_stages, key = len(explicit), "parallelism.module_fqns_per_model_part"
    elif per_stage is not None:
        first = section.pipeline_parallel_first_stage_less_layers
        last = section.pipeline_parallel_last_stage_less_layers
        num_stages, key = math.ceil((num_layers + first + last) / per_stage), _KEY + "layers_per_stage"
        why = (
            f" = ({num_layers} layers + {first} for the first + {last} for the last modules) / {per_stage}, rounded up"
        )
    if num_stages % pp:
        return None, [Problem(key, None, f"stages that {pp} pipeline ranks can share evenly; they are {num_stages}{why}")]
    each, wanted = num_stages // pp, _stages_per_rank(schedule)
    if each not in wanted:
        most = "at least" if len(wanted) > 1 else "exactly"
        found = f"{num_stages}{why}, on {pp} ranks: {each} each"
        remedy = "use Interleaved1F1B" if each > 1 and not SCHEDULES[schedule].is_multi else ""
        remedy = "use 1F1B" if each == 1 else remedy
        return None, [Problem(key, None, f"{most} {wanted[0]} stages per rank with {schedule}; they are {found}", remedy)]
    return tuple(stage_ids(rank, pp, num_stages, schedule) for rank in range(pp)), []


def _stages_per_rank(schedule: str) -> range:
    if SCHEDULES[schedule].is_v_shaped:
        return range(2, 3)
    return range(2, 1 << 30) if SCHEDULES[schedule].is_multi else range(1, 2)


def _ranks_of_csv(section: Parallelism) -> tuple[tuple[tuple[int, ...], ...] | None, list[Problem]]:
    """As the file deals them, which is in turn. It must be one that can be run."""
    key, pp, path = _KEY + "schedule_csv", section.pipeline_parallel_degree, section.pipeline_parallel_schedule_csv
    try:
        order = schedule_view.read_csv(path) if path else []
        if order:
            schedule_view.simulate(order)
    except (OSError, ValueError) as error:
        return None, [Problem(key, None, f"a schedule file that can be run; {error}")]
    if not order:
        return None, [Problem(key, None, f"the file with the schedule, for {section.pipeline_parallel_schedule}")]
    if len(order) != pp:
        return None, [Problem(key, None, f"one line per pipeline rank: {pp}; it has {len(order)}")]
    ranks = tuple(tuple(sorted({action.stage for action in row})) for row in order)
    num_stages = 1 + max(stage for stages in ranks for stage in stages)
    explicit = section.module_fqns_per_model_part
    if explicit is not None and len(explicit) != num_stages:
        expected = f"as many stages as module_fqns_per_model_part has: {len(explicit)}; it has {num_stages}"
        return None, [Problem(key, None, expected)]
    in_turn = tuple(stage_ids(rank, pp, num_stages, section.pipeline_parallel_schedule) for rank in range(pp))
    if ranks != in_turn:
        return None, [Problem(key, None, f"stages dealt to the ranks in turn, {in_turn}; it has {ranks}")]
    return ranks, []


# ---- micro-batches


def _micro_batch_faults(plan: StagePlan, number: int) -> list[Problem]:
    """`number` of micro-batches of a step against what the schedule can deal with: torch's own rules, said earlier."""
    if plan.csv:
        return _csv_faults(plan, number)
    reason = schedule_view.refusal(plan.schedule, number, plan.pp, plan.num_stages)
    if not reason:
        return []
    workable = [n for n in range(1, 2 * max(number, plan.num_stages) + 1)
                if not schedule_view.refusal(plan.schedule, n, plan.pp, plan.num_stages)]  # fmt: skip
    nearest = [max((n for n in workable if n < number), default=0), min(n for n in workable if n > number)]
    sizes = " or ".join(str(n) for n in nearest if n)
    remedy = f"change it or the batch size so that there are {sizes}"
    return [Problem(_KEY + "microbatch_size", None, f"micro-batches that {plan.schedule} can deal with; {reason}", remedy)]


def _csv_faults(plan: StagePlan, number: int) -> list[Problem]:
    """A file is for one number of micro-batches, and computes each of them once on every stage."""
    found = [action for row in schedule_view.read_csv(plan.csv) for action in row]
    forward = sorted((action.stage, action.micro_batch) for action in found if action.kind == "F")
    backward = sorted((action.stage, action.micro_batch) for action in found if action.kind in "BW")
    wanted = [(stage, micro) for stage in range(plan.num_stages) for micro in range(number)]
    if forward == wanted == backward:
        return []
    held = 1 + max(action.micro_batch for action in found)
    text = f"{held} of them" if held != number else "but not each of them once, forward and backward, on every stage"
    return [Problem(_KEY + "schedule_csv", None, f"a schedule of the {number} micro-batches of a step; it has {text}")]
