"""What a pipeline schedule does with the ranks' time: order of actions -> timeline -> bubble. Needs no ranks.

An order is, for each rank, the sequence of actions that it computes; sending and receiving follow from it. Time is
counted in forward passes of one stage: a backward pass takes twice as long (Narayanan et al. 2021, arXiv:2104.04473,
section 2.2), or once for the gradient of its input (I) and once for that of its weights (W). Messages take no time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}
MOST_ROWS, MOST_COLUMNS = 12, 120
_ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)")
_MESSAGE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)")


class Action(NamedTuple):
    """One stage computes one micro-batch: F forward, B backward, or B in two parts, I (input) and W (weights)."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = list[list[Action]]


class Timeline(NamedTuple):
    """When each rank starts each of its actions, in forward passes of one stage, and when the last one ends."""

    starts: list[list[tuple[int, Action]]]
    end: int

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        busy = sum(DURATION[action.kind] for row in self.starts for _, action in row)
        return 1 - busy / (len(self.starts) * self.end)


# ---- orders


def order_of(schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> Order:
    """The order in which `schedule` computes. Raises ValueError where it cannot."""
    if reason := refusal(schedule, num_micro_batches, pp, pp * stages_per_rank):
        raise ValueError(f"{schedule}: {reason}")
    if schedule in ("GPipe", "1F1B"):
        return _single_stage_order(schedule, pp, num_micro_batches)
    return _torch_order(schedule, pp, stages_per_rank, num_micro_batches)


def refusal(schedule: str, number: int, pp: int, num_stages: int) -> str:
    """Why a schedule cannot be made with `number` of micro-batches; "" when it can. These are torch's own rules."""
    if schedule in ("1F1B", "DualPipeV") and number < num_stages:
        return f"{number} are fewer than the {num_stages} stages"
    rounds = max(1, number // pp)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and number % rounds:
        return f"{number} on {pp} ranks are {rounds} rounds, which they do not fill evenly"
    return ""


def _single_stage_order(schedule: str, pp: int, num_micro_batches: int) -> Order:
    """Of one stage per rank. GPipe: all forward passes first (Huang et al. 2018, arXiv:1811.06965). 1F1B: only as many
    as there are stages from here on, then one backward for each forward (Narayanan et al. 2019, PipeDream-flush).
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
    """The order that torch itself makes for a schedule of several stages per rank: it asks its stages for sizes only."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages = [
        SimpleNamespace(
            num_stages=pp * stages_per_rank, group_size=pp, group_rank=0, submod=None, stage_index_to_group_rank={}
        )
        for _ in range(stages_per_rank)
    ]
    made: Any = get_schedule_class(schedule)
    return flatten(made(stages, num_micro_batches).pipeline_order)


def flatten(pipeline_order: dict[int, list[Any]]) -> Order:
    """Torch's `pipeline_order` as an `Order`: idle steps left out, overlapped actions one after the other."""
    return [_parse(";".join(map(str, filter(None, pipeline_order[rank])))) for rank in sorted(pipeline_order)]


def read_csv(path: str | Path) -> Order:
    """The order in a schedule file of torch: one row per rank, `2F0` = stage 2, forward, micro-batch 0.

    Raises OSError when it cannot be read, and ValueError when something in it is no action.
    """
    order: Order = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        if not line.strip():
            continue
        for cell in re.split(r"[,;]", line):
            bare = re.sub(r"^\(|\)OVERLAP_F_B$", "", cell.strip())
            if bare and not _ACTION.fullmatch(bare) and not _MESSAGE.fullmatch(bare):
                raise ValueError(f'line {number} has {cell.strip()!r}: an action is written like "2F0"')
        order.append(_parse(line))
    if not order:
        raise ValueError("it is empty: one line per rank is needed")
    return order


def has_messages(path: str | Path) -> bool:
    """True when a schedule file also says when to send and receive."""
    return re.search(r"SEND_|RECV_", Path(path).read_text()) is not None


def _parse(text: str) -> list[Action]:
    """Actions in a row of cells. Those of a message, such as 2SEND_F0, do not match."""
    return [Action(int(stage), kind, int(micro)) for stage, kind, micro in _ACTION.findall(text)]


# ---- time


def simulate(order: Order) -> Timeline:
    """Let each action start as soon as its rank is free and what it needs is there.

    Raises ValueError when ranks wait for each other for ever, or an action is there twice.
    """
    num_stages = 1 + max(action.stage for row in order for action in row)
    done: dict[Action, int] = {}
    starts: list[list[tuple[int, Action]]] = [[] for _ in order]
    free = [0] * len(order)
    waiting = [rank for rank, row in enumerate(order) if row]
    while waiting:
        stuck = True
        for rank in waiting:
            for action in order[rank][len(starts[rank]) :]:
                needed = _needs(action, num_stages, done)
                if needed is None:
                    break
                if action in done:
                    raise ValueError(f"{action} is there twice")
                start = max(free[rank], needed)
                starts[rank].append((start, action))
                free[rank] = done[action] = start + DURATION[action.kind]
                stuck = False
        waiting = [rank for rank in waiting if len(starts[rank]) < len(order[rank])]
        if stuck:
            blocked = ", ".join(f"rank {rank} at {order[rank][len(starts[rank])]}" for rank in waiting)
            raise ValueError(f"it cannot be run: {blocked} would wait for ever")
    return Timeline(starts, max(free))


def _needs(action: Action, num_stages: int, done: dict[Action, int]) -> int | None:
    """When everything that an action needs is there; None: not yet known."""
    stage, kind, micro = action
    if kind == "F":
        return 0 if stage == 0 else done.get(Action(stage - 1, "F", micro))
    if kind == "W":
        return done.get(Action(stage, "I", micro))
    forward = done.get(Action(stage, "F", micro))
    if stage == num_stages - 1 or forward is None:
        return forward
    above = [done.get(Action(stage + 1, part, micro)) for part in "BI"]
    return next((max(forward, time) for time in above if time is not None), None)


# ---- text


def timeline_lines(schedule: str, order: Order) -> list[str]:
    """The timeline as at most 20 lines of at most 120 columns, the bubble, and what to know of it."""
    timeline = simulate(order)
    pp = len(order)
    num_stages = 1 + max(action.stage for row in order for action in row)
    num_micro_batches = 1 + max(action.micro_batch for row in order for action in row)
    cell = 2 + len(str(num_micro_batches - 1))
    cell = cell if cell * timeline.end <= MOST_COLUMNS - 10 else 1
    shown = list(range(pp)) if pp <= MOST_ROWS else [*range(MOST_ROWS // 2), *range(pp - MOST_ROWS // 2, pp)]
    lines = [f"Pipeline {schedule}: {num_stages} stages on {pp} ranks, {num_micro_batches} micro-batches per step"]
    for before, rank in zip([-1, *shown], shown, strict=False):
        if rank != before + 1:
            lines.append(f"... ranks {before + 1} to {rank - 1}")
        row = f"rank {rank:<{len(str(pp - 1))}} |" + _cells(timeline.starts[rank], timeline.end, cell)
        lines.append(row if len(row) <= MOST_COLUMNS else row[: MOST_COLUMNS - 4] + " ...")
    lines.append(_legend(order, with_numbers=cell > 1))
    length = f"{timeline.end} forward passes of a stage long"
    lines.append(
        f"bubble: {timeline.bubble:.1%} of the ranks' time, {length}{_formula(schedule, pp, num_micro_batches)}"
    )
    if num_micro_batches < pp:
        lines.append(few_micro_batches(num_micro_batches, pp))
    return lines


def _cells(starts: Sequence[tuple[int, Action]], end: int, cell: int) -> str:
    """One cell per unit of time, without numbers where it is one column wide; case tells a rank's stages apart."""
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
    words = {"F": "F forward (1)", "B": "B backward (2)", "I": "I (1) + W (1) backward in two parts"}
    parts = [words[kind] for kind in words if kind in kinds] + ["number = micro-batch"] * with_numbers + [". idle"]
    if any(len({action.stage for action in row}) > 1 for row in order):
        parts.append("case = a rank's stages in turn")
    return ", ".join(parts)


def _formula(schedule: str, pp: int, num_micro_batches: int) -> str:
    """What theory says of schedules with one stage per rank."""
    total, of_another = num_micro_batches + pp - 1, "" if schedule in ("GPipe", "1F1B") else "of 1F1B: "
    return f"; {of_another}(p - 1) / (m + p - 1) = {pp - 1}/{total} = {(pp - 1) / total:.1%}"


def few_micro_batches(num_micro_batches: int, pp: int) -> str:
    """The warning when a pipeline can never be full."""
    return (
        f"warning: {num_micro_batches} micro-batches on {pp} pipeline ranks: they are never all busy. Lower "
        "pipeline_parallel_microbatch_size or raise the batch size"
    )
