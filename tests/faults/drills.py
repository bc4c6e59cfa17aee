"""The table of drills: what befalls whom and when, and how the run must end. `drill` holds one and checks all that it promises.

After any drill: every rank has ended in time and left no process; the rows are, bit for bit, those of an undisturbed
run, no step twice; what is published is complete; and the next start goes on from it to the last step.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any, NamedTuple

from tests.faults.kills import Chain, published
from tests.faults.plants import Plant
from tests.faults.shim import Rule
from tests.faults.trainer import ASSETS, Ended, Warm, kill
from torchtitan_like.slurm import watchdog

STEPS = 8
PROMPT, TRAIN_TIMEOUT, START_TIMEOUT = 30, 3, 8  # seconds
# Where a rank waits in vain. In the other drills a slow disk or a busy machine may take as long.
SHORT_TIMEOUTS = {"comm__train_timeout_seconds": TRAIN_TIMEOUT, "comm__checkpoint_timeout_seconds": TRAIN_TIMEOUT}
BASE = {
    "training__steps": STEPS,
    "comm__train_timeout_seconds": 60,
    "comm__checkpoint_timeout_seconds": 60,
    "checkpoint__interval": 2,
    "validation__enable": "true",
    "validation__dataset_path": ASSETS / "text.jsonl",
    "validation__seq_len": 16,
    "validation__local_batch_size": 1,
    "validation__steps": 4,
    "validation__freq": 3,
}  # fmt: skip
SHORT = {"torchtitan_like.resilience.heartbeat:INTERVAL": 0.1}
ALL = None  # ranks
CODES = {"done": 0, "bad_numbers": 70, "storage": 74, "requeue": 75, "interrupted": 130}
# Place -> the passing of it at which it happens: in the middle of a run.
CALLS = {"start": 1, "step": 4, "save": 2, "validation": 4, "end of a step": 4}
STOPS = {"SIGTERM": "requeue", "SIGINT": "interrupted"}
WHOM = {"rank 1": 1, "all ranks": ALL}


class Drill(NamedTuple):
    """One row."""

    name: str
    plants: tuple[Plant, ...]
    ends: tuple[str | None, ...]  # exit.json has one of these reasons; None: a crash, without such a file
    seconds: float = PROMPT  # from the fault to the last rank's end
    rules: tuple[Rule, ...] = ()
    overrides: Mapping[str, Any] = {}
    num_ranks: int = 2
    then: Callable[[Chain, Ended], None] = lambda chain, ended: None  # what else must hold, before the next start
    is_watched: bool = False  # by titan slurm watchdog, because no process of the run can notice the fault

    def __str__(self) -> str:
        return self.name


def _table() -> Iterator[Drill]:
    """Each cause, on one rank and on all, in each phase."""
    for (place, call), (whom, rank) in product(CALLS.items(), WHOM.items()):
        for what in ("raise", "SIGKILL"):
            ends: tuple[str | None, ...] = (None,)
            if (what, place) == ("raise", "save"):
                ends = ("storage",)  # whatever goes wrong in a save is everyone's, by vote
            elif place == "start" and rank is not ALL:
                ends = (None, "requeue")  # the launcher stops rank 0 with SIGTERM, as a scheduler does
            yield Drill(f"{what} of {whom}: {place}", (Plant(place, what, rank, call),), ends)
        for what, reason in STOPS.items():
            # Before the first step no agreement is needed: one rank that ends looks like one that died.
            ends = (None,) if place == "start" and rank is not ALL else (reason,)
            yield Drill(f"{what} to {whom}: {place}", (Plant(place, what, rank, call),), ends)
        for what in ("SIGSTOP", "hang"):
            if rank is ALL and place != "start":
                yield Drill(f"{what} of {whom}: {place}", (Plant(place, what, rank, call),), (None,), TRAIN_TIMEOUT + 10,
                            is_watched=True)  # fmt: skip
            elif rank is not ALL:
                patience = START_TIMEOUT if place == "start" else TRAIN_TIMEOUT
                overrides = {"comm__init_timeout_seconds": START_TIMEOUT} if place == "start" else SHORT_TIMEOUTS
                yield Drill(f"{what} of {whom}: {place}", (Plant(place, what, rank, call),), (None,), patience + 10,
                            overrides=overrides, then=stacks_of_all if what == "hang" else _nothing)  # fmt: skip


def _nothing(chain: Chain, ended: Ended) -> None:
    pass


def stacks_of_all(chain: Chain, ended: Ended) -> None:
    """Who waits in a step, and who is waited for, have left their stacks before the end."""
    attempt = chain.folder / "attempts" / "1"
    phases = [json.loads(path.read_text())["phase"] for path in attempt.glob("heartbeat/rank-*.json")]
    if phases == ["step", "step"]:
        stacks = [(attempt / "heartbeat" / f"stacks-rank-{rank}.txt").read_text() for rank in range(2)]
        assert "happen" in stacks[1] and "happen" not in stacks[0], ended.tail


def one_more_save(chain: Chain, ended: Ended) -> None:
    """The switch has asked once."""
    extra = set(published(chain.folder)) - {2, 4, 6, 8}
    assert len(extra) == 1 and extra <= {5}, published(chain.folder)
    assert not (chain.folder / "SAVE").exists()


def killed_for_good(chain: Chain, ended: Ended) -> None:
    """No start gets past the switch until it is removed."""
    saved_where_it_stopped(chain, ended)
    again = chain.run(what="with the kill switch")
    assert again.exit == ended.exit and again.says("Not starting: "), again.tail
    (chain.folder / "KILL").unlink()


def saved_where_it_stopped(chain: Chain, ended: Ended) -> None:
    assert ended.exit is not None and chain.newest == ended.exit["step"], (chain.newest, ended.exit)


TERM_THEN = Plant("end of a step", "SIGTERM", 1, 3)
NO_SAVE = {"checkpoint__interval": 100}  # but the last
SHARD = "*/checkpoint/step-4.tmp-*/shard-*.bin"


def _more() -> Iterator[Drill]:
    """What the product of causes and phases does not hold."""
    for what, (whom, rank) in product(STOPS, WHOM.items()):
        plants = (TERM_THEN, Plant("save", what, rank, 1))
        yield Drill(f"{what} to {whom} while it saves after a SIGTERM", plants, ("requeue",), overrides=NO_SAVE,
                    then=saved_where_it_stopped)  # fmt: skip
    for place, call in CALLS.items():
        yield Drill(f"KILL: {place}", (Plant(place, "touch KILL", 0, call),), ("interrupted",), then=killed_for_good)
    for limit, value in (("max_runtime_minutes", 1e-9), ("max_cpu_mem_percent", 1e-9)):
        yield Drill(limit, (), ("requeue",), overrides={f"resilience__{limit}": value}, then=saved_where_it_stopped)
    yield Drill("SAVE", (Plant("end of a step", "touch SAVE", 0, 3),), ("done",),
                overrides={"checkpoint__keep_latest_k": 0}, then=one_more_save)  # fmt: skip
    for whom, rank in WHOM.items():
        yield Drill(f"NaN in a gradient of {whom}: step", (Plant("step", "NaN in a gradient", rank, 4),),
                    ("bad_numbers",), then=saved_where_it_stopped)  # fmt: skip
        writers = "*" if rank is ALL else rank
        yield Drill(f"full disk of {whom}: save", (), ("storage",), rules=(Rule("write", SHARD, "ENOSPC", writers),))
        yield Drill(f"full disk of {whom}: next batch", (Plant("next batch", "full disk", rank, 4),), ("storage",),
                    then=saved_where_it_stopped)  # fmt: skip
    for call, rank in (("write", 1), ("fsync", 0)):
        yield Drill(f"{call} of rank {rank} that never returns: save", (), (None,), TRAIN_TIMEOUT + 10,
                    rules=(Rule(call, SHARD, "stall", rank, seconds=3600),), overrides=SHORT_TIMEOUTS)  # fmt: skip
    for (place, call), (what, reason) in product(CALLS.items(), {"raise": None, "SIGKILL": None, **STOPS}.items()):
        ends = ("storage",) if (what, place) == ("raise", "save") else (reason,)
        yield Drill(f"{what}, one process: {place}", (Plant(place, what, 0, call),), ends, num_ranks=1)


ROWS = [*_table(), *_more()]


def drill(chain: Chain, row: Drill) -> float:
    """Hold one in the chain's folder, which is new; then let the run finish. The seconds from the fault to the end.

    AssertionError when a promise is not kept.
    """
    chain.overrides.update(BASE)
    begun = time.time()
    with watched(chain) if row.is_watched else nullcontext():
        ended = chain.run(row.rules, row.name, plants=row.plants, settings=SHORT, **row.overrides)
    over = time.time()
    check_end(row, ended)
    took = over - begin_of(row, chain, ended, begun)
    assert took <= row.seconds + chain.starter.grace, f"{row}: the run took {took:.1f} s to end\n{ended.tail}"
    give_up = time.monotonic() + 10
    while (left := left_behind(chain)) and time.monotonic() < give_up:  # git may still be telling of the checkout
        time.sleep(0.01)
    assert not left, f"{row}: these processes are left: {left}"
    row.then(chain, ended)
    ended = chain.run(what=f"after {row}")  # the next start, undisturbed
    assert ended.exit == {"reason": "done", "code": 0, "step": STEPS}, f"after {row}: {ended.exit}\n{ended.tail}"
    assert len(chain.check_rows(row.name)) == STEPS and chain.newest == STEPS
    return took


def begin_of(row: Drill, chain: Chain, ended: Ended, begun: float) -> float:
    """When the last of the row's faults has come, in seconds since 1970; when the run began, where that is the fault."""
    times = [float(found) for found in re.findall(r"PLANTED on rank \d+ at ([\d.]+)", ended.output)]
    assert len(times) >= len(row.plants), f"{row}: it did not happen\n{ended.tail}"
    hits = chain.faults.rules.with_name(f"{chain.faults.rules.name}.hits")
    return max([begun, *times, *([hits.stat().st_mtime] if row.rules else [])])


def check_end(row: Drill, ended: Ended) -> None:
    """Exit codes and exit.json."""
    reason = None if ended.exit is None else ended.exit["reason"]
    assert reason in row.ends, f"{row}: {ended.exit}, {ended.codes}\n{ended.tail}"
    if None in row.ends:
        assert all(ended.codes), f"{row}: a rank ended with 0: {ended.codes}\n{ended.tail}"
        # A peer ends by itself: it is not killed.
        victims = {plant.rank for plant in row.plants} | {rule.rank for rule in row.rules}
        peers = {code for rank, code in enumerate(ended.codes) if not victims & {rank, ALL}}
        assert peers <= {1, 75}, f"{row}: {ended.codes}\n{ended.tail}"
        return
    code = CODES[str(reason)]
    assert ended.exit is not None and ended.exit["code"] == code, f"{row}: {ended.exit}"
    assert set(ended.codes) in ({code}, {0}), f"{row}: {ended.codes}\n{ended.tail}"


@contextmanager
def watched(chain: Chain) -> Iterator[None]:
    """Somebody kills the run when titan slurm watchdog reports that its log has been silent for as long as the time-out."""
    over, log = threading.Event(), chain.folder / "metrics.jsonl"

    def watch() -> None:
        while not over.wait(0.5):
            if log.exists() and watchdog.observe_log(log, TRAIN_TIMEOUT / 60, time.time()).is_alert:
                kill([json.loads(file.read_text())["pid"] for file in chain.folder.glob("attempts/1/heartbeat/rank-*")])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def left_behind(chain: Chain) -> list[str]:
    """Processes of the runs that use these faults, but for the one that forks ranks."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("FAULT_RULES") == str(chain.faults.rules)
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        is_server = isinstance(chain.starter, Warm) and process.pid == chain.starter.process.pid
        if is_ours and not is_server and "tests.faults.warm" not in command and process.pid != os.getpid():
            found.append(f"{process.pid} {command}")
    return found
