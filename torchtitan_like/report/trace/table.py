"""Analyze the traces of all ranks, and format the result as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_like.report.trace.clocks import Clock, Lateness, align, find_straggler
from torchtitan_like.report.trace.files import TraceFile, find_traces
from torchtitan_like.report.trace.merge import GapStacks, merge_traces, read_stacks
from torchtitan_like.report.trace.times import Gap, RankTimes, StepTimes, longest, measure

MAX_FRAMES = 12  # of a stack, the innermost ones
MAX_KINDS = 8
HEAD = ("total ms", "compute", "exposed", "data wait", "idle")


@dataclass(frozen=True)
class Analysis:
    """The times of all ranks at the recorded steps.

    step: the last recorded step. gaps: the longest ones of all ranks, with the frames of the main
    thread in the middle of each, outermost first. problems: of damaged traces.
    """

    step: int
    ranks: list[RankTimes]
    clocks: dict[int, Clock]
    gaps: list[tuple[Gap, list[str]]]
    straggler: Lateness | None
    problems: list[str]

    def steps(self) -> list[tuple[int, StepTimes]]:
        """Return the recorded steps of all ranks by step and rank, with the number of the step."""
        steps = [(self.step_of(each.number), each) for times in self.ranks for each in times.steps]
        return sorted(steps, key=lambda pair: (pair[0], pair[1].rank))

    def step_of(self, number: int) -> int:
        """Return the step of an annotation, whose numbers start with the process."""
        newest = max(each.number for times in self.ranks for each in times.steps)
        return self.step - newest + number


def analyze(run: Path, step: int | None, output: Path | None) -> Analysis:
    """Measure the traces of a run, and merge them into `output` if it is given.

    step: the last step of the traces; None chooses the newest ones. Reads each trace once, and a
    second time to merge it or to find the stacks of gaps. Raises OSError, and ValueError if no trace
    can be used.
    """
    chosen, files = find_traces(run, step)
    ranks = [measure(file) for file in files]
    problems = [file.problem for file in files if file.problem]
    if not any(times.steps for times in ranks):
        raise ValueError(
            f"{files[0].path.parent} contains no complete step: "
            + "; ".join(problems or ["the traces have no annotation ProfilerStep"])
            + ". Expected traces of profiling.enable_profiling. Choose another step."
        )
    clocks = align(ranks, _bases(files))
    gaps = longest(gap for times in ranks for gap in times.gaps)
    stacks = GapStacks(gaps, ranks)
    if output is not None:
        origin = min(times.first + clocks[times.rank].offset for times in ranks)
        shifts = {rank: clock.offset - origin for rank, clock in clocks.items()}
        merge_traces(files, shifts, output, stacks)
    else:
        with_gaps = {gap.rank for gap in gaps}
        have_stacks = {times.rank for times in ranks if times.has_stacks}
        read_stacks([file for file in files if file.rank in with_gaps & have_stacks], stacks)
    straggler = find_straggler(ranks, clocks)
    return Analysis(chosen, ranks, clocks, [(g, stacks.of(g)) for g in gaps], straggler, problems)


def _bases(files: Sequence[TraceFile]) -> dict[int, float]:
    """Return what to add to the times of each rank for the first rank's base, microseconds."""
    first = next((file.header.base for file in files if file.header.base), 0)
    return {file.rank: ((file.header.base or first) - first) / 1000 for file in files}


def trace_lines(analysis: Analysis) -> Iterator[str]:
    """Yield the lines of `titan run trace`."""
    yield from _clock_lines(analysis)
    yield f"{'step':>6}{'rank':>6}" + "".join(f"{name:>11}" for name in HEAD)
    for step, times in analysis.steps():
        total = times.end - times.start
        parts = (total, times.compute, times.exposed, times.data_wait, times.idle)
        yield f"{step:>6}{times.rank:>6}" + "".join(f"{part / 1000:>11.2f}" for part in parts)
    by_kind = Counter[str]()
    steps = analysis.steps()
    compute, exposed, idle = (
        sum(getattr(times, name) for _, times in steps) / max(len(steps), 1) / 1000
        for name in ("compute", "exposed", "idle")
    )
    yield (
        f"mean of a step and rank: compute {compute:.2f} ms, exposed communication {exposed:.2f} ms, "
        f"idle {idle:.2f} ms"
    )
    for _, times in steps:
        by_kind.update(times.by_kind)
    shown = [(kind, time / len(steps)) for kind, time in by_kind.most_common(MAX_KINDS) if time]
    if shown:
        kinds = ", ".join(f"{kind} {time / 1000:.2f}" for kind, time in shown)
        yield f"exposed by kind, ms per step and rank: {kinds}"
    yield from _gap_lines(analysis)
    yield _straggler_line(analysis)


def _clock_lines(analysis: Analysis) -> Iterator[str]:
    for rank, clock in analysis.clocks.items():
        if clock.reference is not None:
            yield (
                f"clock of rank {rank}: {clock.offset / 1000:+.3f} ms, aligned to rank "
                f"{clock.reference} by {clock.num_collectives} collectives; half of them end within "
                f"{clock.error / 1000:.3f} ms of each other"
            )
        elif rank != analysis.ranks[0].rank:
            yield f"clock of rank {rank}: not aligned, because it has no collective with other ranks"


def _gap_lines(analysis: Analysis) -> Iterator[str]:
    starts = {(times.rank, times.number): times.start for _, times in analysis.steps()}
    for gap, frames in analysis.gaps:
        after = gap.start - starts[gap.rank, gap.number]
        yield (
            f"gap of {(gap.end - gap.start) / 1000:.2f} ms on rank {gap.rank} in step "
            f"{analysis.step_of(gap.number)}, {after / 1000:.2f} ms after its start"
        )
        for frame in frames[-MAX_FRAMES:]:
            yield f"    {frame}"


def _straggler_line(analysis: Analysis) -> str:
    late = analysis.straggler
    if late is None:
        return "straggler: unknown, because no collective is recorded on several ranks"
    num_steps = len({step for step, _ in analysis.steps()})
    return (
        f"straggler: rank {late.rank} was the last to start {late.num_last} of "
        f"{late.num_collectives} collectives; the other ranks waited "
        f"{late.waited / 1000 / num_steps:.2f} ms per step for it, in total"
    )
