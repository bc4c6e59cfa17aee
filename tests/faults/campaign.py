"""`./run_tests.sh --faults`: run all drills, and kill and resume real runs more than 200 times.

Runs start in two ways. With *torchrun*, run_train.sh's command starts the workers. *Forked*
ranks run the same `torchtitan_like.run.main` in forks of a process that has imported torch
(fork_server.py). A forked start takes one second instead of six.
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

from tests.faults.drills import DRILLS, run_drill
from tests.faults.kills import (
    EXPORT_POINTS,
    SAVE_POINTS,
    START_POINTS,
    Chain,
    Kill,
    ResumeError,
    make_reference,
    named_kills,
    random_kill,
)
from tests.faults.shim import Faults, build_shim
from tests.faults.trainer import ForkServer, Starter, Torchrun


class Part(NamedTuple):
    """A number of kills of one kind of run: first at the named points, then at random times."""

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
    Part("checkpoints in the foreground", 64, "forked", points=SAVES),
    Part("checkpoints in the background", 40, "forked", points=SAVES, overrides=ASYNC),
    Part("exports", 24, "forked", points=tuple(EXPORT_POINTS), overrides=EXPORTS),
    Part("starts", 24, "forked", points=tuple(START_POINTS)),
    Part("random moments", 16, "forked", num_ranks=4),
    Part("checkpoints in the foreground", 46, "torchrun", points=SAVES),
    Part("random moments in the background", 8, "torchrun", overrides=ASYNC),
    Part("random moments", 6, "torchrun", num_ranks=4),
)


UNDER_TORCHRUN = {
    "raise of rank 1: start", "raise of rank 1: step", "SIGKILL of all ranks: validation",
    "SIGSTOP of rank 1: step", "hang of rank 1: save", "SIGTERM to rank 1: validation",
    "SIGTERM to all ranks: save", "SIGINT to rank 1: step",
    "SIGKILL, one process: save",
}  # fmt: skip


def run_drills(starters: Mapping[str, Starter], faults: Faults, folder: Path, only: str) -> int:
    """Run all drills forked and some with torchrun; return the number of failed drills."""
    drills = [("forked", row) for row in DRILLS] + [
        ("torchrun", row) for row in DRILLS if row.name in UNDER_TORCHRUN
    ]
    drills = [(launcher, row) for launcher, row in drills if only in f"{launcher}, drill: {row}"]
    references = {
        n: make_reference(starters["forked"], faults, folder / f"{n}", n)
        for n in {r.num_ranks for _, r in drills}
    }
    num_failed = 0
    for number, (launcher, row) in enumerate(drills, start=1):
        outputs = folder / f"drill-{number}" / "outputs"
        chain = Chain(
            starters[launcher], faults, outputs, references[row.num_ranks].reference, row.num_ranks
        )
        try:
            result = f"ended {run_drill(chain, row):.1f} s later"
        except AssertionError as problem:
            num_failed += 1
            result = f"FAILED: {problem}\n  files are in {outputs}"
        print(f"drill {number}/{len(drills)}  {launcher}, drill: {row}: {result}", flush=True)
    return num_failed


class Campaign:
    """Kills runs one after another and prints the count, the rate and the remaining time."""

    def __init__(self, parts: Sequence[Part], seed: int) -> None:
        self.parts, self.draw, self.started = parts, random.Random(seed), time.monotonic()
        self.kills = self.bad = self.resumes = 0
        self.done: Counter[Part] = Counter()
        self.seconds: Counter[str] = Counter()  # by launcher

    def work_through(self, part: Part, starter: Starter, faults: Faults, folder: Path) -> None:
        """Perform all kills of a part. Each run has a new folder."""
        start = time.monotonic()
        chain = make_reference(
            starter, faults, folder / "0", part.num_ranks, **dict(part.overrides)
        )
        life = time.monotonic() - start
        print(f"-- {part}: a run without faults took {life:.1f} s", flush=True)
        named = named_kills(part.num_ranks, part.points)
        while self.done[part] < part.kills:
            plan = next(named, None) or random_kill(self.draw, life, 0.25, part.num_ranks)
            # A run may end before the time of the kill. Then repeat the kill in a new folder.
            if self._make(chain, plan, part) or self._make(chain, plan, part):
                self.seconds[part.starter] += time.monotonic() - start
                start = time.monotonic()
                self._count(part, plan)
        try:
            chain.finish()
        except ResumeError as problem:
            self._note(problem, chain, part)
        self.resumes += chain.resumes

    def _make(self, chain: Chain, plan: Kill, part: Part) -> bool:
        """Perform one kill. Return False and delete the folder if the run ended before it."""
        try:
            killed = chain.run_and_kill(plan)
        except ResumeError as problem:
            self._note(problem, chain, part)
            return True
        if not killed:
            chain.reset()
        return killed

    def _note(self, problem: ResumeError, chain: Chain, part: Part) -> None:
        """Print a resume error and continue in another folder, to keep this one for inspection."""
        self.bad += 1
        print(f"FAILED RESUME ({part}): {problem}\n  files are in {chain.folder}", flush=True)
        chain.folder = chain.folder.parent.with_name(f"chain-{self.bad}") / "outputs"

    def _count(self, part: Part, plan: Kill) -> None:
        self.kills += 1
        self.done[part] += 1
        total = sum(each_part.kills for each_part in self.parts)
        rate = 60 * self.kills / (time.monotonic() - self.started)
        seconds_left = sum(
            (each_part.kills - self.done[each_part]) * self._seconds_each(each_part.starter)
            for each_part in self.parts
        )
        print(
            f"kill {self.kills}/{total}  {rate:.1f} a minute  {seconds_left:.0f} s left  "
            f"{part}: {plan}",
            flush=True,
        )

    def _seconds_each(self, starter: str) -> float:
        """Return the mean seconds per kill of a launcher, or 10 before its first kill."""
        kills = sum(count for part, count in self.done.items() if part.starter == starter)
        return self.seconds[starter] / kills if kills else 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--factor", type=float, default=1.0, help="multiply the number of kills by this factor"
    )
    parser.add_argument(
        "--only", default="", help="run only parts and drills whose description contains this text"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random times")
    options = parser.parse_args()
    parts = [
        part._replace(kills=round(part.kills * options.factor))
        for part in PARTS
        if options.only in str(part)
    ]
    parts = [part for part in parts if part.kills]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    print(
        f"Drills, and {sum(part.kills for part in parts)} kills in {folder}, seed {options.seed}",
        flush=True,
    )
    campaign = Campaign(parts, options.seed)
    faults = Faults(build_shim(folder), folder / "rules")
    fork_server = ForkServer(faults.env)
    starters: dict[str, Starter] = {"forked": fork_server, "torchrun": Torchrun(faults.env)}
    try:
        bad_drills = run_drills(starters, faults, folder / "drills", options.only)
        for number, part in enumerate(parts):
            campaign.work_through(part, starters[part.starter], faults, folder / f"part-{number}")
    finally:
        fork_server.close()
    for part, count in campaign.done.items():
        print(f"  {count:4} kills: {part}")
    print(f"  {campaign.resumes} starts after a kill resumed from a step and wrote later rows")
    print(f"{campaign.kills} kills, {campaign.bad} failed resumes, {bad_drills} failed drills")
    if campaign.bad + bad_drills == 0:
        shutil.rmtree(folder)
    return int(campaign.bad + bad_drills > 0)


if __name__ == "__main__":
    sys.exit(main())
