"""Timeline of a pipeline schedule, computed without ranks: order of actions -> timeline -> bubble.

An order lists the actions that each rank computes. Time is counted in forward passes of one stage.
A backward pass takes 2 units (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): 1 for the
gradient of its input (I) and 1 for the gradient of its weights (W). Messages take no time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}
MAX_ROWS, MAX_COLUMNS = 12, 120
_ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)")
_MESSAGE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)")


class Action(NamedTuple):
    """One stage computes one micro-batch: F forward, B backward, or I and W, the two halves of B."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = list[list[Action]]


class Timeline(NamedTuple):
    """Start of each action by rank, and the end of the last one, in forward passes of one stage."""

    starts: list[list[tuple[int, Action]]]
    end: int

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time that they are idle."""
        busy = sum(DURATION[action.kind] for row in self.starts for _, action in row)
        return 1 - busy / (len(self.starts) * self.end)


# ---- orders


def order_of(schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> Order:
    """Return the order of a schedule. Raises ValueError if it does not support these sizes."""
    if reason := refusal(schedule, num_micro_batches, pp, pp * stages_per_rank):
        raise ValueError(f"{schedule}: {reason}")
    if schedule in ("GPipe", "1F1B"):
        return _single_stage_order(schedule, pp, num_micro_batches)
    return _torch_order(schedule, pp, stages_per_rank, num_micro_batches)


def refusal(schedule: str, number: int, pp: int, num_stages: int) -> str:
    """Return why torch's schedule does not support `number` micro-batches; "" if it does."""
    if schedule in ("1F1B", "DualPipeV") and number < num_stages:
        return f"{number} are fewer than the {num_stages} stages"
    rounds = max(1, number // pp)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and number % rounds:
        return f"{number} on {pp} ranks are {rounds} rounds, which is no divisor"
    return ""


def _single_stage_order(schedule: str, pp: int, num_micro_batches: int) -> Order:
    """Return the order of a schedule with one stage per rank.

    GPipe: all forward passes first (Huang et al. 2018, arXiv:1811.06965). 1F1B: as many forward
    passes as stages remain, then one backward for each forward (Narayanan et al. 2019,
    PipeDream-flush).
    """
    order: Order = []
    for rank in range(pp):
        warmup = num_micro_batches if schedule == "GPipe" else min(num_micro_batches, pp - rank)
        forward = [Action(rank, "F", i) for i in range(num_micro_batches)]
        backward = [Action(rank, "B", i) for i in range(num_micro_batches)]
        steady = [a for pair in zip(backward, forward[warmup:], strict=False) for a in pair]
        order.append(forward[:warmup] + steady + backward[num_micro_batches - warmup :])
    return order


def _torch_order(schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> Order:
    """Return torch's order of a schedule with several stages per rank; it needs only sizes."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages = [
        SimpleNamespace(
            num_stages=pp * stages_per_rank,
            group_size=pp,
            group_rank=0,
            submod=None,
            stage_index_to_group_rank={},
        )
        for _ in range(stages_per_rank)
    ]
    schedule_class: Any = get_schedule_class(schedule)
    return flatten(schedule_class(stages, num_micro_batches).pipeline_order)


def flatten(pipeline_order: dict[int, list[Any]]) -> Order:
    """Convert torch's `pipeline_order`: idle steps are dropped, overlapped actions become sequential."""
    return [
        _parse(";".join(map(str, filter(None, pipeline_order[rank]))))
        for rank in sorted(pipeline_order)
    ]


def parse_csv(text: str) -> Order:
    """Parse torch's schedule file: one row per rank, `2F0` = stage 2, forward, micro-batch 0.

    Raises ValueError if an entry is no action.
    """
    order: Order = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        for cell in re.split(r"[,;]", line):
            bare = re.sub(r"^\(|\)OVERLAP_F_B$", "", cell.strip())
            if bare and not _ACTION.fullmatch(bare) and not _MESSAGE.fullmatch(bare):
                raise ValueError(
                    f'line {number} has {cell.strip()!r}: expected an action such as "2F0"'
                )
        order.append(_parse(line))
    if not order:
        raise ValueError("it is empty: expected one line per rank")
    return order


def _parse(text: str) -> list[Action]:
    """Return the actions in a row of cells. Messages, such as 2SEND_F0, do not match."""
    return [Action(int(stage), kind, int(micro)) for stage, kind, micro in _ACTION.findall(text)]


# ---- time


def simulate(order: Order) -> Timeline:
    """Start each action as soon as its rank is free and its inputs are ready.

    Raises ValueError if ranks wait for each other forever, or an action occurs twice.
    """
    rows = schedule(order, lambda action: DURATION[action.kind])
    starts = [[(int(start), action) for start, action in row] for row in rows]
    end = max(start + DURATION[action.kind] for row in starts for start, action in row)
    return Timeline(starts, end)


def schedule(
    order: Order, duration: Callable[[Action], float], message: float = 0
) -> list[list[tuple[float, Action]]]:
    """Return the start of each action by rank, for any durations.

    message: time between the end of a stage's action and the start of its neighbor's.

    Raises ValueError if ranks wait for each other forever, or an action occurs twice.
    """
    num_stages = 1 + max(action.stage for row in order for action in row)
    done: dict[Action, float] = {}
    starts: list[list[tuple[float, Action]]] = [[] for _ in order]
    free = [0.0] * len(order)
    waiting = [rank for rank, row in enumerate(order) if row]
    while waiting:
        stuck = True
        for rank in waiting:
            for action in order[rank][len(starts[rank]) :]:
                needed = _needs(action, num_stages, done, message)
                if needed is None:
                    break
                if action in done:
                    raise ValueError(f"{action} occurs twice")
                start = max(free[rank], needed)
                starts[rank].append((start, action))
                free[rank] = done[action] = start + duration(action)
                stuck = False
        waiting = [rank for rank in waiting if len(starts[rank]) < len(order[rank])]
        if stuck:
            blocked = ", ".join(
                f"rank {rank} at {order[rank][len(starts[rank])]}" for rank in waiting
            )
            raise ValueError(f"it cannot be run: {blocked} would wait forever")
    return starts


def _needs(
    action: Action, num_stages: int, done: dict[Action, float], message: float
) -> float | None:
    """Return when all inputs of an action are ready; None if that is not known yet."""
    stage, kind, micro = action
    if kind == "F":
        if stage == 0:
            return 0
        previous = done.get(Action(stage - 1, "F", micro))
        return None if previous is None else previous + message
    if kind == "W":
        return done.get(Action(stage, "I", micro))
    forward = done.get(Action(stage, "F", micro))
    if stage == num_stages - 1 or forward is None:
        return forward
    next_stage = [done.get(Action(stage + 1, kind, micro)) for kind in "BI"]
    return next((max(forward, time + message) for time in next_stage if time is not None), None)


# ---- text


def timeline_lines(schedule: str, order: Order) -> list[str]:
    """Return the timeline as at most 20 lines of at most 120 columns, its legend, and the bubble."""
    timeline = simulate(order)
    pp = len(order)
    num_stages = 1 + max(action.stage for row in order for action in row)
    num_micro_batches = 1 + max(action.micro_batch for row in order for action in row)
    cell = 2 + len(str(num_micro_batches - 1))
    cell = cell if cell * timeline.end <= MAX_COLUMNS - 10 else 1
    shown = list(range(pp))
    if pp > MAX_ROWS:
        shown = [*range(MAX_ROWS // 2), *range(pp - MAX_ROWS // 2, pp)]
    lines = [
        f"Pipeline {schedule}: {num_stages} stages on {pp} ranks, {num_micro_batches} micro-batches "
        "per step"
    ]
    for before, rank in zip([-1, *shown], shown, strict=False):
        if rank != before + 1:
            lines.append(f"... ranks {before + 1} to {rank - 1}")
        row = f"rank {rank:<{len(str(pp - 1))}} |" + _cells(
            timeline.starts[rank], timeline.end, cell
        )
        lines.append(row if len(row) <= MAX_COLUMNS else row[: MAX_COLUMNS - 4] + " ...")
    lines.append(_legend(order, with_numbers=cell > 1))
    lines.append(
        f"bubble: {timeline.bubble:.1%} of the ranks' time, {timeline.end} forward passes of a stage "
        f"long{_formula(schedule, pp, num_micro_batches)}"
    )
    if num_micro_batches < pp:
        lines.append(few_micro_batches(num_micro_batches, pp))
    return lines


def _cells(starts: Sequence[tuple[int, Action]], end: int, cell: int) -> str:
    """Return one cell per unit of time; upper and lower case distinguish a rank's stages.

    Cells of one column have no micro-batch numbers.
    """
    stages = sorted({action.stage for _, action in starts})
    cells = [".".ljust(cell)] * end
    for start, (stage, kind, micro) in starts:
        kind = kind.lower() if stages.index(stage) % 2 else kind
        cells[start] = f"{kind}{micro}".ljust(cell) if cell > 1 else kind
        for later in range(start + 1, start + DURATION[kind.upper()]):
            cells[later] = ("-" * (cell - 1)).ljust(cell) if cell > 1 else "-"
    return "".join(cells).rstrip()


def _legend(order: Order, *, with_numbers: bool) -> str:
    kinds = {action.kind for row in order for action in row}
    labels = {
        "F": "F forward (1)",
        "B": "B backward (2)",
        "I": "I (1) + W (1) backward in two parts",
    }
    parts = [labels[kind] for kind in labels if kind in kinds]
    parts += ["number = micro-batch"] * with_numbers + [". idle"]
    if any(len({action.stage for action in row}) > 1 for row in order):
        parts.append("case = a rank's stages in turn")
    return ", ".join(parts)


def _formula(schedule: str, pp: int, num_micro_batches: int) -> str:
    """Return the bubble of schedules with one stage per rank by formula."""
    total = num_micro_batches + pp - 1
    prefix = "" if schedule in ("GPipe", "1F1B") else "of 1F1B: "
    return f"; {prefix}(p - 1) / (m + p - 1) = {pp - 1}/{total} = {(pp - 1) / total:.1%}"


def few_micro_batches(num_micro_batches: int, pp: int) -> str:
    """Return the warning for a pipeline whose ranks are never all busy."""
    return (
        f"warning: {num_micro_batches} micro-batches on {pp} pipeline ranks: they are never all busy. Lower "
        "pipeline_parallel_microbatch_size or raise the batch size"
    )
