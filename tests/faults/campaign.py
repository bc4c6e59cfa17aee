"""`./run_tests.sh --faults`: all drills, and more than 200 kills of real runs; each must go on as if nothing had been.

What is killed: under *torchrun*, workers of the command that run_train.sh uses; *forked*, ranks that execute the same
`torchtitan_like.launch.main`, but are forked from a process that has done the imports (warm.py), which takes a second
instead of six.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.drills import ROWS, drill
from tests.faults.kills import (
    EXPORT_POINTS,
    SAVE_POINTS,
    START_POINTS,
    BadResume,
    Chain,
    Kill,
    make_reference,
    named_kills,
    random_kill,
)
from tests.faults.shim import Faults, build_shim
from tests.faults.trainer import Starter, Torchrun, Warm


class Part(NamedTuple):
    """So many kills of one kind of run: first at the named points, then at random moments."""

    name: str
    kills: int
    starter: str
    num_ranks: int = 2
    points: tuple[str, ...] = ()
    overrides: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.starter}, {self.num_ranks} ranks, {self.name}"


ASYNC = (("checkpoint__async_mode", "async"),)
EXPORTS = (("checkpoint__hf_interval", 1), ("checkpoint__hf_shard_gb", 2e-5))
SAVES = tuple(SAVE_POINTS)
PARTS = (
    Part("saves in the foreground", 64, "forked", points=SAVES),
    Part("saves in the background", 40, "forked", points=SAVES, overrides=ASYNC),
    Part("exports", 24, "forked", points=tuple(EXPORT_POINTS), overrides=EXPORTS),
    Part("starts", 24, "forked", points=tuple(START_POINTS)),
    Part("random moments", 16, "forked", num_ranks=4),
    Part("saves in the foreground", 46, "torchrun", points=SAVES),
    Part("random moments in the background", 8, "torchrun", overrides=ASYNC),
    Part("random moments", 6, "torchrun", num_ranks=4),
)


UNDER_TORCHRUN = {
    "raise of rank 1: start", "raise of rank 1: step", "SIGKILL of all ranks: validation", "SIGSTOP of rank 1: step",
    "hang of rank 1: save", "SIGTERM to rank 1: validation", "SIGTERM to all ranks: save", "SIGINT to rank 1: step",
    "SIGKILL, one process: save",
}  # fmt: skip


def hold_drills(starters: Mapping[str, Starter], faults: Faults, folder: Path, only: str) -> int:
    """The whole table, and some of it under torchrun; the number of drills in which a promise was not kept."""
    drills = [("forked", row) for row in ROWS] + [("torchrun", row) for row in ROWS if row.name in UNDER_TORCHRUN]
    drills = [(launcher, row) for launcher, row in drills if only in f"{launcher}, drill: {row}"]
    like = {n: make_reference(starters["forked"], faults, folder / f"{n}", n) for n in {r.num_ranks for _, r in drills}}
    bad = 0
    for number, (launcher, row) in enumerate(drills, start=1):
        outputs = folder / f"drill-{number}" / "outputs"
        chain = Chain(starters[launcher], faults, outputs, like[row.num_ranks].reference, row.num_ranks)
        try:
            result = f"ended {drill(chain, row):.1f} s later"
        except AssertionError as problem:
            bad += 1
            result = f"BAD: {problem}\n  left in {outputs}"
        print(f"drill {number}/{len(drills)}  {launcher}, drill: {row}: {result}", flush=True)
    return bad


class Campaign:
    """Kills, one after another, with their count, rate and time left."""

    def __init__(self, parts: Sequence[Part], seed: int) -> None:
        self.parts, self.draw, self.started = parts, random.Random(seed), time.monotonic()
        self.kills = self.bad = self.resumes = 0
        self.done: Counter[Part] = Counter()
        self.seconds: Counter[str] = Counter()  # by launcher

    def work_through(self, part: Part, starter: Starter, faults: Faults, folder: Path) -> None:
        """Make all kills of a part. Each run has a new folder."""
        begin = time.monotonic()
        chain = make_reference(starter, faults, folder / "0", part.num_ranks, **dict(part.overrides))
        life = time.monotonic() - begin
        print(f"-- {part}: an undisturbed run took {life:.1f} s", flush=True)
        named = named_kills(part.num_ranks, part.points)
        while self.done[part] < part.kills:
            plan = next(named, None) or random_kill(self.draw, life, 0.25, part.num_ranks)
            # A run may be over before its moment comes; in a new folder there is time for it.
            if self._make(chain, plan, part) or self._make(chain, plan, part):
                self.seconds[part.starter] += time.monotonic() - begin
                begin = time.monotonic()
                self._count(part, plan)
        try:
            chain.finish()
        except BadResume as problem:
            self._note(problem, chain, part)
        self.resumes += chain.resumes

    def _make(self, chain: Chain, plan: Kill, part: Part) -> bool:
        """One kill; False, and a new folder, if the run was over before."""
        try:
            killed = chain.live(plan)
        except BadResume as problem:
            self._note(problem, chain, part)
            return True
        if not killed:
            chain.begin_anew()
        return killed

    def _note(self, problem: BadResume, chain: Chain, part: Part) -> None:
        """Report a bad resume and continue in another folder, so that this one can be inspected."""
        self.bad += 1
        print(f"BAD RESUME ({part}): {problem}\n  left in {chain.folder}", flush=True)
        chain.folder = chain.folder.parent.with_name(f"chain-{self.bad}") / "outputs"

    def _count(self, part: Part, plan: Kill) -> None:
        self.kills += 1
        self.done[part] += 1
        total = sum(each.kills for each in self.parts)
        rate = 60 * self.kills / (time.monotonic() - self.started)
        left = sum((each.kills - self.done[each]) * self._seconds_each(each.starter) for each in self.parts)
        print(f"kill {self.kills}/{total}  {rate:.1f} a minute  {left:.0f} s left  {part}: {plan}", flush=True)

    def _seconds_each(self, starter: str) -> float:
        """What a kill takes: measured, or a guess for a launcher that has had none yet."""
        kills = sum(count for part, count in self.done.items() if part.starter == starter)
        return self.seconds[starter] / kills if kills else 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--factor", type=float, default=1.0, help="so many times the usual number of kills")
    parser.add_argument("--only", default="", help="only the parts and drills in whose description this stands")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    options = parser.parse_args()
    parts = [part._replace(kills=round(part.kills * options.factor)) for part in PARTS if options.only in str(part)]
    parts = [part for part in parts if part.kills]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    print(f"Drills, and {sum(part.kills for part in parts)} kills in {folder}, seed {options.seed}", flush=True)
    campaign = Campaign(parts, options.seed)
    faults = Faults(build_shim(folder), folder / "rules")
    warm = Warm(faults.env)
    starters: dict[str, Starter] = {"forked": warm, "torchrun": Torchrun(faults.env)}
    try:
        bad_drills = hold_drills(starters, faults, folder / "drills", options.only)
        for number, part in enumerate(parts):
            campaign.work_through(part, starters[part.starter], faults, folder / f"part-{number}")
    finally:
        warm.close()
    for part, count in campaign.done.items():
        print(f"  {count:4} kills: {part}")
    print(f"  {campaign.resumes} starts after a kill went on from a step and wrote rows beyond it")
    print(f"{campaign.kills} kills, {campaign.bad} bad resumes, {bad_drills} bad drills")
    if campaign.bad + bad_drills == 0:
        shutil.rmtree(folder)
    return int(campaign.bad + bad_drills > 0)


if __name__ == "__main__":
    sys.exit(main())
