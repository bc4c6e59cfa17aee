"""SIGKILL at every named point of a save and at random moments; after each one the run must go on as if never killed.

A *chain* is one run folder in which the same command is started and killed again and again. Each start must resume from
the newest published step, which must be complete, and every row that any start writes must be, bit for bit, that of a
reference run that nobody disturbed.
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

from tests.faults.plants import Plant
from tests.faults.shim import Faults, Rule
from tests.faults.trainer import EXACT, Ended, Run, Starter, arguments, exact_rows, kill

STEPS = 40
STAGED = "*/checkpoint/step-{step}.tmp-*"
# Name -> the call before which (action park), in the middle of which (half) or after which a rank is halted.
STEP = "*/checkpoint/step-{step}"
EXPORTED = "*/checkpoint/hf/step-{step}"
WEIGHTS = "*/step-{step}.tmp-*/model*.safetensors"  # of an export, or of a last save in that format
SHARD = "/shard-{rank:05d}.bin"
Point = tuple[str, str, str]
# Name -> the call before which (action park), in the middle of which (half) or after which a rank is halted.
SAVE_POINTS: dict[str, Point] = {
    "before the staged folder": ("mkdir", STAGED, "park"),
    "before a shard": ("open", STAGED + SHARD, "park"),
    "in the middle of a shard": ("write", STAGED + SHARD, "half"),
    "before a shard is on disk": ("fsync", STAGED + SHARD, "park"),
    "before .metadata": ("open", STAGED + "/.metadata*", "park"),
    "before the manifest": ("open", STAGED + "/manifest.json.tmp", "park"),
    "in the middle of the manifest": ("write", STAGED + "/manifest.json.tmp", "half"),
    "before the manifest has its name": ("rename", STAGED + "/manifest.json", "park"),
    "before the step has its name": ("rename", STEP, "park"),
    "after the step has its name": ("rename", STEP, "after"),
    "before an old step is put away": ("rename", "*/checkpoint/.trash-*", "park"),
    "in the middle of a deletion": ("unlink", "*/checkpoint/.trash-*", "after"),
}
EXPORT_POINTS: dict[str, Point] = {
    "before an export's weights": ("open", WEIGHTS, "park"),
    "in the middle of an export's weights": ("write", WEIGHTS, "half"),
    "before an export's weights are on disk": ("fsync", WEIGHTS, "park"),
    "before an export's index": ("open", EXPORTED + ".tmp-*/model.safetensors.index.json", "park"),
    "before an export's manifest": ("open", EXPORTED + ".tmp-*/manifest.json.tmp", "park"),
    "before an export has its name": ("rename", EXPORTED, "park"),
    "after an export has its name": ("rename", EXPORTED, "after"),
}
# Of the start that follows a kill in the middle of a save.
START_POINTS: dict[str, Point] = {
    "while the lock is taken": ("write", "*/checkpoint/run.lock*", "half"),
    "while an unfinished save is removed": ("unlink", "*/checkpoint/step-*.tmp-*/*", "after"),
    "while rows that come again are put away": ("write", "*/metrics.discarded-*", "half"),
    "before these rows are cut off": ("rename", "*/metrics.jsonl", "park"),
}
POINTS = SAVE_POINTS | EXPORT_POINTS | START_POINTS


@dataclass(frozen=True)
class Kill:
    """When, and whom. point: a name in POINTS, or "save" (during one) or "run" (any time), `seconds` later."""

    point: str
    victims: tuple[int, ...]
    parked_rank: int = 0
    seconds: float = 0.0
    steps_ahead: int = 2  # how many steps after its start the run is to be killed

    def __str__(self) -> str:
        where = {"save": f"{self.seconds * 1e3:.0f} ms into a save", "run": f"{self.seconds:.2f} s after the start"}
        whom = "all ranks" if len(self.victims) > 1 else f"rank {self.victims[0]}"
        return f"{whom} killed {where.get(self.point, self.point)}"

    def rules(self, step: int) -> list[Rule]:
        if self.point not in POINTS:
            return []
        call, pattern, action = POINTS[self.point]
        # The writer of a part of an export is not fixed: the first rank that arrives is halted.
        rank = "*" if self.point in EXPORT_POINTS else self.parked_rank
        return [Rule(call, pattern.format(step=step, rank=self.parked_rank), action, rank=rank)]


class BadResume(AssertionError):
    """A run that was killed did not go on as if it had not been."""


def published(folder: Path) -> list[int]:
    """The steps that a start may see, oldest first. BadResume when one of them, or an export, is not complete."""
    steps = []
    for path in [*folder.glob("checkpoint/step-*"), *folder.glob("checkpoint/hf/step-*")]:
        if found := re.fullmatch(r"step-(\d+)", path.name):
            if problem := what_is_torn(path):
                raise BadResume(f"{path} is published, but {problem}")
            if path.parent.name != "hf":
                steps.append(int(found[1]))
    return sorted(steps)


def what_is_torn(step: Path) -> str | None:
    """What is wrong with a published step, by its manifest, read without the code under test; None: nothing."""
    try:
        manifest = json.loads((step / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        return f"its manifest cannot be read: {error}"
    files = {str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()} - {"manifest.json", "PIN"}
    if files != set(manifest["files"]):
        return f"it holds {sorted(files)}, and its manifest names {sorted(manifest['files'])}"
    for name, record in manifest["files"].items():
        content, size = (step / name).read_bytes(), manifest["extent_bytes"]
        extents = [xxh3_128_hexdigest(content[begin : begin + size]) for begin in range(0, len(content), size)]
        if (len(content), extents) != (record["size"], record["extents"]):
            return f"{name} is not what the manifest says"
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
    resumes: int = 0  # starts that went on from a step and wrote rows beyond it

    def argv(self, **overrides: Any) -> list[str]:
        """The command line of every start."""
        return arguments(self.folder, **{**self.overrides, **overrides})

    def begin_anew(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def live(self, plan: Kill) -> bool:
        """One start, killed as planned; False if it was over before that. Raises BadResume."""
        target = self.newest + plan.steps_ahead
        killed: list[int] = []
        ended = self.run(plan.rules(target), str(plan), lambda run: killed.extend(self._kill(run, plan, target)))
        if not killed and (ended.exit is None or ended.exit["reason"] != "done"):
            raise BadResume(f"{plan}: the start ended by itself: {ended.exit}, {ended.codes}\n{ended.tail}")
        return bool(killed)

    def finish(self) -> None:
        """Run one undisturbed start to the last step. Raises BadResume."""
        ended = self.run(what="the last start", checkpoint__interval=STEPS)
        if ended.exit is None or ended.exit["reason"] != "done":
            raise BadResume(f"the last start of a chain did not finish: {ended.exit}, {ended.codes}\n{ended.tail}")

    @property
    def newest(self) -> int:
        """The step from which the next start resumes; 0: none."""
        return max(published(self.folder), default=0)

    def run(
        self,
        rules: Sequence[Rule] = (),
        what: str = "",
        act: Callable[[Run], None] = lambda run: None,
        plants: Sequence[Plant] = (),
        settings: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> Ended:
        """One start under `rules`, with which `act` may do something; it must go on from the newest step.

        Raises BadResume when it did not, or left something else than complete steps and the reference's rows behind.
        """
        newest = self.newest
        self.faults.set(*rules)
        run = self.starter.start(self.argv(**overrides), self.num_ranks, self.folder, plants, settings)
        act(run)
        ended = run.wait()
        self._check(ended, newest, what)
        return ended

    def _kill(self, run: Run, plan: Kill, step: int) -> list[int]:
        """Wait for the moment and kill; the pids that were alive."""
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

    def _check(self, ended: Ended, newest: int, what: str) -> None:
        start = re.search(r"Checkpoint start: (\w+).* at step (\d+)", ended.output)
        if start is not None:
            wanted = ("resume", str(newest)) if newest else ("scratch", "0")
            if start.groups() != wanted:
                raise BadResume(f"{what}: {newest} was the newest step, but the start was {start[0]!r}")
        if "damaged" in ended.output:
            raise BadResume(f"{what}: nothing had been damaged, but it says so:\n{ended.tail}")
        rows = self.check_rows(what)
        self.resumes += newest > 0 and len(rows) > newest
        steps = published(self.folder)
        if steps and len(rows) < steps[-1]:
            raise BadResume(f"{what}: step {steps[-1]} is published, but metrics.jsonl ends at {len(rows)}")
        if newest and (not steps or steps[-1] < newest):
            raise BadResume(f"{what}: step {newest} was published and is gone; left: {steps}")

    def check_rows(self, what: str) -> list[list[Any]]:
        """Return the rows of metrics.jsonl, except steps that were skipped because of a non-finite number.

        Raises BadResume when they are not the reference's first ones.
        """
        rows = [row for row in exact_rows(self.folder) if not row[EXACT.index("skipped")]]
        if rows != self.reference[: len(rows)]:
            pairs = zip(rows, self.reference, strict=False)
            first = next(((a, b) for a, b in pairs if a != b), "none")
            raise BadResume(f"{what}: {len(rows)} rows, the first that differs: {first}")
        return rows


def wait_for_staging(folder: Path, step: int, run: Run, timeout: float = 60) -> None:
    """Wait until the save of `step` has begun (or the run is over)."""
    give_up = time.monotonic() + timeout
    while not any(folder.glob(f"step-{step}.tmp-*")) and not (folder / f"step-{step}").exists():
        if run.is_over():
            return
        if time.monotonic() > give_up:
            raise AssertionError(f"the save of step {step} did not begin within {timeout:g} s")
        time.sleep(0.001)


def named_kills(num_ranks: int = 2, points: Iterable[str] = SAVE_POINTS) -> Iterator[Kill]:
    """Return every named point with the victim: the halted rank, another one, or all."""
    everyone = tuple(range(num_ranks))
    for point in points:
        for rank in everyone if SHARD in POINTS[point][1] else (0,):
            for victims in (everyone, (rank,), ((rank + 1) % num_ranks,)):
                if point in START_POINTS:
                    yield Kill("in the middle of a shard", everyone, rank)
                yield Kill(point, victims, rank)


def random_kill(draw: random.Random, life_seconds: float, save_seconds: float, num_ranks: int = 2) -> Kill:
    """A moment drawn uniformly from a save (2 of 3) or from a whole run; all ranks, or one of them."""
    victims = draw.choice([tuple(range(num_ranks)), (draw.randrange(num_ranks),)])
    if draw.random() < 2 / 3:
        return Kill("save", victims, seconds=draw.uniform(0, save_seconds), steps_ahead=draw.randint(1, 3))
    return Kill("run", victims, seconds=draw.uniform(0, life_seconds))


def make_reference(starter: Starter, faults: Faults, folder: Path, num_ranks: int = 2, **overrides: Any) -> Chain:
    """An undisturbed run; the chain that is returned is compared with it."""
    faults.set()
    outputs = folder / "reference" / "outputs"
    argv = arguments(outputs, **{**overrides, "checkpoint__interval": STEPS})
    ended = starter.start(argv, num_ranks, outputs).wait()
    rows = exact_rows(outputs)
    assert [row[0] for row in rows] == list(range(1, STEPS + 1)), ended.tail
    return Chain(starter, faults, folder / "chain" / "outputs", rows, num_ranks, overrides)
