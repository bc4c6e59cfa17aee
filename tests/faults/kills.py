"""Kill runs with SIGKILL at every named point of a checkpoint and at random times.

A *chain* is one run folder in which the same command is started and killed repeatedly. Each start
must resume from the newest published step, which must be complete. All metrics must be bit-equal to
the metrics of a reference run without faults.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from tests.faults.injection import Injection
from tests.faults.shim import Faults, Rule
from tests.faults.trainer import EXACT, FinishedRun, Run, Starter, arguments, exact_rows, kill

STEPS = 40
STAGED = "*/checkpoint/step-{step}.tmp-*"
STEP = "*/checkpoint/step-{step}"
EXPORTED = "*/checkpoint/hf/step-{step}"
WEIGHTS = (
    "*/step-{step}.tmp-*/model*.safetensors"  # of an export, or of a last checkpoint in that format
)
SHARD = "/shard-{rank:05d}.bin"
Point = tuple[str, str, str]
# Name -> (call, path, action). A rank halts before ("park"), in the middle of ("half") or after
# ("after") the call.
SAVE_POINTS: dict[str, Point] = {
    "before the staged folder": ("mkdir", STAGED, "park"),
    "before a shard": ("open", STAGED + SHARD, "park"),
    "in the middle of a shard": ("write", STAGED + SHARD, "half"),
    "before a shard is synced": ("fsync", STAGED + SHARD, "park"),
    "before .metadata": ("open", STAGED + "/.metadata*", "park"),
    "before the manifest": ("open", STAGED + "/manifest.json.tmp", "park"),
    "in the middle of the manifest": ("write", STAGED + "/manifest.json.tmp", "half"),
    "before the manifest is renamed": ("rename", STAGED + "/manifest.json", "park"),
    "before the step is published": ("rename", STEP, "park"),
    "after the step is published": ("rename", STEP, "after"),
    "before an old step is moved to the trash": ("rename", "*/checkpoint/.trash-*", "park"),
    "in the middle of a deletion": ("unlink", "*/checkpoint/.trash-*", "after"),
}
EXPORT_POINTS: dict[str, Point] = {
    "before an export's weights": ("open", WEIGHTS, "park"),
    "in the middle of an export's weights": ("write", WEIGHTS, "half"),
    "before an export's weights are synced": ("fsync", WEIGHTS, "park"),
    "before an export's index": ("open", EXPORTED + ".tmp-*/model.safetensors.index.json", "park"),
    "before an export's manifest": ("open", EXPORTED + ".tmp-*/manifest.json.tmp", "park"),
    "before an export is published": ("rename", EXPORTED, "park"),
    "after an export is published": ("rename", EXPORTED, "after"),
}
# Points in a start after a kill in the middle of a checkpoint.
START_POINTS: dict[str, Point] = {
    "while the lock is acquired": ("write", "*/checkpoint/run.lock*", "half"),
    "while an unfinished checkpoint is removed": ("unlink", "*/checkpoint/step-*.tmp-*/*", "after"),
    "while rows that will be repeated are moved": ("write", "*/metrics.discarded-*", "half"),
    "before these rows are removed": ("rename", "*/metrics.jsonl", "park"),
}
POINTS = SAVE_POINTS | EXPORT_POINTS | START_POINTS


@dataclass(frozen=True)
class Kill:
    """The time and the victims of a kill.

    `point` is a name in POINTS, or "save" or "run": `seconds` after the start of a checkpoint or
    run.
    """

    point: str
    victims: tuple[int, ...]
    parked_rank: int = 0
    seconds: float = 0.0
    steps_ahead: int = 2  # steps from the start of the run to the kill

    def __str__(self) -> str:
        times = {
            "save": f"{self.seconds * 1e3:.0f} ms into a checkpoint",
            "run": f"{self.seconds:.2f} s after the start",
        }
        victims = "all ranks" if len(self.victims) > 1 else f"rank {self.victims[0]}"
        return f"{victims} killed {times.get(self.point, self.point)}"

    def rules(self, step: int) -> list[Rule]:
        if self.point not in POINTS:
            return []
        call, pattern, action = POINTS[self.point]
        # Any rank may write a part of an export: the first rank at the point halts.
        rank = "*" if self.point in EXPORT_POINTS else self.parked_rank
        return [Rule(call, pattern.format(step=step, rank=self.parked_rank), action, rank=rank)]


class ResumeError(AssertionError):
    """A killed run did not resume correctly."""


def published(folder: Path) -> list[int]:
    """Return the published steps, oldest first.

    Raise ResumeError if a published step or export is incomplete.
    """
    steps = []
    for path in [*folder.glob("checkpoint/step-*"), *folder.glob("checkpoint/hf/step-*")]:
        if match := re.fullmatch(r"step-(\d+)", path.name):
            if problem := describe_damage(path):
                raise ResumeError(f"{path} is published, but {problem}")
            if path.parent.name != "hf":
                steps.append(int(match[1]))
    return sorted(steps)


def describe_damage(step: Path) -> str | None:
    """Return a description of the damage to a published step, or None.

    This check reads the manifest without the code under test.
    """
    try:
        manifest = json.loads((step / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        return f"its manifest cannot be read: {error}"
    files = {str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()} - {
        "manifest.json",
        "PIN",
    }
    if files != set(manifest["files"]):
        return f"it contains {sorted(files)}, and its manifest lists {sorted(manifest['files'])}"
    for name, record in manifest["files"].items():
        content, size = (step / name).read_bytes(), manifest["extent_bytes"]
        extents = [
            xxh3_128_hexdigest(content[start : start + size])
            for start in range(0, len(content), size)
        ]
        if (len(content), extents) != (record["size"], record["extents"]):
            return f"{name} does not match the manifest"
    return None


@dataclass
class Chain:
    """One run folder, its reference rows, and the starts that share it."""

    starter: Starter
    faults: Faults
    folder: Path  # the dump folder
    reference: list[list[Any]] = field(repr=False)
    num_ranks: int = 2
    overrides: dict[str, Any] = field(default_factory=dict)
    resumes: int = 0  # starts that resumed from a step and wrote later rows

    def argv(self, **overrides: Any) -> list[str]:
        """Return the command line of a start."""
        return arguments(self.folder, **{**self.overrides, **overrides})

    def reset(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run_and_kill(self, plan: Kill) -> bool:
        """Start and kill the run as planned; return False if it ended before. Raise ResumeError."""
        target = self.newest + plan.steps_ahead
        killed: list[int] = []
        finished = self.run(
            plan.rules(target), str(plan), lambda run: killed.extend(self._kill(run, plan, target))
        )
        if not killed and (finished.exit is None or finished.exit["reason"] != "done"):
            raise ResumeError(
                f"{plan}: the run ended without a kill: {finished.exit}, {finished.codes}\n"
                f"{finished.tail}"
            )
        return bool(killed)

    def finish(self) -> None:
        """Run to the last step without faults. Raise ResumeError if the run does not finish."""
        finished = self.run(description="the last start", checkpoint__interval=STEPS)
        if finished.exit is None or finished.exit["reason"] != "done":
            raise ResumeError(
                "the last start of a chain did not finish: "
                f"{finished.exit}, {finished.codes}\n{finished.tail}"
            )

    @property
    def newest(self) -> int:
        """The step from which the next start resumes, or 0."""
        return max(published(self.folder), default=0)

    def run(
        self,
        rules: Sequence[Rule] = (),
        description: str = "",
        callback: Callable[[Run], None] = lambda run: None,
        injections: Sequence[Injection] = (),
        settings: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> FinishedRun:
        """Start the run with faults, wait for its end and check it.

        `callback` receives the started run. Raise ResumeError if the run does not resume from the
        newest step, leaves an incomplete step, or writes metrics that differ from the reference.
        """
        newest = self.newest
        self.faults.set(*rules)
        run = self.starter.start(
            self.argv(**overrides), self.num_ranks, self.folder, injections, settings
        )
        callback(run)
        finished = run.wait()
        self._check(finished, newest, description)
        return finished

    def _kill(self, run: Run, plan: Kill, step: int) -> list[int]:
        """Wait for the planned time and kill; return the killed pids."""
        if plan.point in POINTS:
            if not self.faults.wait_for_parked(1, run.is_over):
                return []
        elif plan.point == "save":
            wait_for_staging(self.folder / "checkpoint", step, run)
            time.sleep(plan.seconds)
        else:
            time.sleep(plan.seconds)
        if run.is_over():
            return []
        pids = run.pids()
        killed = kill([pids[rank] for rank in plan.victims if rank in pids])
        self.faults.release()
        return killed

    def _check(self, finished: FinishedRun, newest: int, description: str) -> None:
        start = re.search(r"Checkpoint start: (\w+).* at step (\d+)", finished.output)
        if start is not None:
            expected = ("resume", str(newest)) if newest else ("scratch", "0")
            if start.groups() != expected:
                raise ResumeError(
                    f"{description}: {newest} was the newest step, but the start was {start[0]!r}"
                )
        if "damaged" in finished.output:
            raise ResumeError(
                f"{description}: the log reports damage without any damage:\n{finished.tail}"
            )
        rows = self.check_rows(description)
        self.resumes += newest > 0 and len(rows) > newest
        steps = published(self.folder)
        if steps and len(rows) < steps[-1]:
            raise ResumeError(
                f"{description}: step {steps[-1]} is published, "
                f"but metrics.jsonl ends at {len(rows)}"
            )
        if newest and (not steps or steps[-1] < newest):
            raise ResumeError(
                f"{description}: step {newest} was published and is gone; left: {steps}"
            )

    def check_rows(self, description: str) -> list[list[Any]]:
        """Return the rows of metrics.jsonl except skipped steps.

        Raise ResumeError if they differ from the first rows of the reference.
        """
        rows = [row for row in exact_rows(self.folder) if not row[EXACT.index("skipped")]]
        if rows != self.reference[: len(rows)]:
            pairs = zip(rows, self.reference, strict=False)
            first = next(((a, b) for a, b in pairs if a != b), "none")
            raise ResumeError(f"{description}: {len(rows)} rows, the first that differs: {first}")
        return rows


def wait_for_staging(folder: Path, step: int, run: Run, timeout: float = 60) -> None:
    """Wait until the checkpoint of `step` starts, or the run ends."""
    deadline = time.monotonic() + timeout
    while not any(folder.glob(f"step-{step}.tmp-*")) and not (folder / f"step-{step}").exists():
        if run.is_over():
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"the checkpoint of step {step} did not start in {timeout:g} s")
        time.sleep(0.001)


def named_kills(num_ranks: int = 2, points: Iterable[str] = SAVE_POINTS) -> Iterator[Kill]:
    """Yield kills at every named point of the halted rank, of another rank, and of all ranks."""
    all_ranks = tuple(range(num_ranks))
    for point in points:
        for rank in all_ranks if SHARD in POINTS[point][1] else (0,):
            for victims in (all_ranks, (rank,), ((rank + 1) % num_ranks,)):
                if point in START_POINTS:
                    yield Kill("in the middle of a shard", all_ranks, rank)
                yield Kill(point, victims, rank)


def random_kill(
    draw: random.Random, life_seconds: float, save_seconds: float, num_ranks: int = 2
) -> Kill:
    """Return a kill of one or all ranks at a uniform random time of a checkpoint or run.

    Two of three kills are during a checkpoint.
    """
    victims = draw.choice([tuple(range(num_ranks)), (draw.randrange(num_ranks),)])
    if draw.random() < 2 / 3:
        return Kill(
            "save", victims, seconds=draw.uniform(0, save_seconds), steps_ahead=draw.randint(1, 3)
        )
    return Kill("run", victims, seconds=draw.uniform(0, life_seconds))


def make_reference(
    starter: Starter, faults: Faults, folder: Path, num_ranks: int = 2, **overrides: Any
) -> Chain:
    """Run once without faults and return a chain that is compared with this run."""
    faults.set()
    outputs = folder / "reference" / "outputs"
    argv = arguments(outputs, **{**overrides, "checkpoint__interval": STEPS})
    finished = starter.start(argv, num_ranks, outputs).wait()
    rows = exact_rows(outputs)
    assert [row[0] for row in rows] == list(range(1, STEPS + 1)), finished.tail
    return Chain(starter, faults, folder / "chain" / "outputs", rows, num_ranks, overrides)
