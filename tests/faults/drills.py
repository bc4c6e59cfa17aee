"""The table of drills. A drill injects one fault into a run and checks how the run ends.

After every drill, all ranks have ended in time and no process remains. The metrics are bit-equal to
the metrics of a run without faults and contain no step twice. Every published step is complete. The
next start resumes from the newest one and finishes.
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

from tests.faults.injection import Injection
from tests.faults.kills import Chain, published
from tests.faults.shim import Rule
from tests.faults.trainer import ASSETS, FinishedRun, ForkServer, kill
from torchtitan_like.slurm import watchdog

STEPS = 8
PROMPT, TRAIN_TIMEOUT, START_TIMEOUT = 30, 3, 8  # seconds
# For drills in which a rank waits until its timeout. Other drills allow for a slow machine.
SHORT_TIMEOUTS = {
    "comm__train_timeout_seconds": TRAIN_TIMEOUT,
    "comm__checkpoint_timeout_seconds": TRAIN_TIMEOUT,
}
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
ALL = None  # all ranks
CODES = {"done": 0, "bad_numbers": 70, "storage": 74, "requeue": 75, "interrupted": 130}
# Location -> the number of the call that fails, in the middle of a run.
CALLS = {"start": 1, "step": 4, "save": 2, "validation": 4, "end of a step": 4}
STOPS = {"SIGTERM": "requeue", "SIGINT": "interrupted"}
RANKS = {"rank 1": 1, "all ranks": ALL}


class Drill(NamedTuple):
    """One row of the table."""

    name: str
    injections: tuple[Injection, ...]
    # Allowed reasons in exit.json. None: a crash, without exit.json.
    reasons: tuple[str | None, ...]
    seconds: float = PROMPT  # from the fault to the end of the last rank
    rules: tuple[Rule, ...] = ()
    overrides: Mapping[str, Any] = {}
    num_ranks: int = 2
    # An additional check before the next start.
    check: Callable[[Chain, FinishedRun], None] = lambda chain, run: None
    # Whether the watchdog of slurm/ must detect the fault, because no process of the run can.
    is_watched: bool = False

    def __str__(self) -> str:
        return self.name


def _drills_by_fault() -> Iterator[Drill]:
    """Yield the drills of each fault, on one rank and on all, at each location."""
    for (location, call), (ranks_name, rank) in product(CALLS.items(), RANKS.items()):
        for fault in ("raise", "SIGKILL"):
            reasons: tuple[str | None, ...] = (None,)
            if (fault, location) == ("raise", "save"):
                reasons = ("storage",)  # all ranks agree on any error during a checkpoint
            elif location == "start" and rank is not ALL:
                # The launcher stops rank 0 with SIGTERM, like a scheduler.
                reasons = (None, "requeue")
            yield Drill(
                f"{fault} of {ranks_name}: {location}",
                (Injection(location, fault, rank, call),),
                reasons,
            )
        for fault, reason in STOPS.items():
            # Before the first step ranks do not vote: a rank that ends looks like a crashed one.
            reasons = (None,) if location == "start" and rank is not ALL else (reason,)
            yield Drill(
                f"{fault} to {ranks_name}: {location}",
                (Injection(location, fault, rank, call),),
                reasons,
            )
        for fault in ("SIGSTOP", "hang"):
            if rank is ALL and location != "start":
                yield Drill(
                    f"{fault} of {ranks_name}: {location}",
                    (Injection(location, fault, rank, call),),
                    (None,),
                    TRAIN_TIMEOUT + 10,
                    is_watched=True,
                )
            elif rank is not ALL:
                patience = START_TIMEOUT if location == "start" else TRAIN_TIMEOUT
                overrides = (
                    {"comm__init_timeout_seconds": START_TIMEOUT}
                    if location == "start"
                    else SHORT_TIMEOUTS
                )
                yield Drill(
                    f"{fault} of {ranks_name}: {location}",
                    (Injection(location, fault, rank, call),),
                    (None,),
                    patience + 10,
                    overrides=overrides,
                    check=check_stacks if fault == "hang" else _nothing,
                )


def _nothing(chain: Chain, run: FinishedRun) -> None:
    pass


def check_stacks(chain: Chain, run: FinishedRun) -> None:
    """Check that all ranks wrote their stacks if the hang was in a step."""
    attempt = chain.folder / "attempts" / "1"
    phases = [
        json.loads(path.read_text())["phase"] for path in attempt.glob("heartbeat/rank-*.json")
    ]
    if phases == ["step", "step"]:
        stacks = [
            (attempt / "heartbeat" / f"stacks-rank-{rank}.txt").read_text() for rank in range(2)
        ]
        assert "trigger_fault" in stacks[1] and "trigger_fault" not in stacks[0], run.tail


def check_extra_checkpoint(chain: Chain, run: FinishedRun) -> None:
    """Check that the switch file caused exactly one checkpoint."""
    extra = set(published(chain.folder)) - {2, 4, 6, 8}
    assert len(extra) == 1 and extra <= {5}, published(chain.folder)
    assert not (chain.folder / "SAVE").exists()


def check_kill_switch(chain: Chain, run: FinishedRun) -> None:
    """Check that the KILL switch prevents further starts until it is removed."""
    check_last_checkpoint(chain, run)
    next_start = chain.run(description="with the kill switch")
    assert next_start.exit == run.exit and next_start.has_output("Not starting: "), next_start.tail
    (chain.folder / "KILL").unlink()


def check_last_checkpoint(chain: Chain, run: FinishedRun) -> None:
    """Check that the newest checkpoint belongs to the last step of the run."""
    assert run.exit is not None and chain.newest == run.exit["step"], (chain.newest, run.exit)


FIRST_SIGTERM = Injection("end of a step", "SIGTERM", 1, 3)
NO_INTERVAL = {"checkpoint__interval": 100}  # only the last checkpoint
SHARD = "*/checkpoint/step-4.tmp-*/shard-*.bin"


def _further_drills() -> Iterator[Drill]:
    """Yield drills in addition to the product of faults and locations."""
    for fault, (ranks_name, rank) in product(STOPS, RANKS.items()):
        injections = (FIRST_SIGTERM, Injection("save", fault, rank, 1))
        yield Drill(
            f"{fault} to {ranks_name} while it saves after a SIGTERM",
            injections,
            ("requeue",),
            overrides=NO_INTERVAL,
            check=check_last_checkpoint,
        )
    for location, call in CALLS.items():
        yield Drill(
            f"KILL: {location}",
            (Injection(location, "touch KILL", 0, call),),
            ("interrupted",),
            check=check_kill_switch,
        )
    for limit, value in (("max_runtime_minutes", 1e-9), ("max_cpu_mem_percent", 1e-9)):
        yield Drill(
            limit,
            (),
            ("requeue",),
            overrides={f"resilience__{limit}": value},
            check=check_last_checkpoint,
        )
    yield Drill(
        "SAVE",
        (Injection("end of a step", "touch SAVE", 0, 3),),
        ("done",),
        overrides={"checkpoint__keep_latest_k": 0},
        check=check_extra_checkpoint,
    )
    for ranks_name, rank in RANKS.items():
        yield Drill(
            f"NaN in a gradient of {ranks_name}: step",
            (Injection("step", "NaN in a gradient", rank, 4),),
            ("bad_numbers",),
            check=check_last_checkpoint,
        )
        writers = "*" if rank is ALL else rank
        yield Drill(
            f"full disk of {ranks_name}: save",
            (),
            ("storage",),
            rules=(Rule("write", SHARD, "ENOSPC", writers),),
        )
        yield Drill(
            f"full disk of {ranks_name}: next batch",
            (Injection("next batch", "full disk", rank, 4),),
            ("storage",),
            check=check_last_checkpoint,
        )
    for call, rank in (("write", 1), ("fsync", 0)):
        yield Drill(
            f"stalled {call} of rank {rank}: save",
            (),
            (None,),
            TRAIN_TIMEOUT + 10,
            rules=(Rule(call, SHARD, "stall", rank, seconds=3600),),
            overrides=SHORT_TIMEOUTS,
        )
    for (location, call), (fault, reason) in product(
        CALLS.items(), {"raise": None, "SIGKILL": None, **STOPS}.items()
    ):
        reasons = ("storage",) if (fault, location) == ("raise", "save") else (reason,)
        yield Drill(
            f"{fault}, one process: {location}",
            (Injection(location, fault, 0, call),),
            reasons,
            num_ranks=1,
        )


DRILLS = [*_drills_by_fault(), *_further_drills()]


def run_drill(chain: Chain, row: Drill) -> float:
    """Run a drill in the chain's new folder, check it, then let the run finish.

    Return the seconds from the fault to the end of the run. Raise AssertionError if a check fails.
    """
    chain.overrides.update(BASE)
    started = time.time()
    with watched(chain) if row.is_watched else nullcontext():
        run = chain.run(
            row.rules, row.name, injections=row.injections, settings=SHORT, **row.overrides
        )
    end = time.time()
    check_end(row, run)
    seconds = end - fault_time(row, chain, run, started)
    assert seconds <= row.seconds + chain.starter.grace, (
        f"{row}: the run took {seconds:.1f} s to end\n{run.tail}"
    )
    deadline = time.monotonic() + 10
    # A git process may still be running.
    while (remaining := remaining_processes(chain)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not remaining, f"{row}: these processes still run: {remaining}"
    row.check(chain, run)
    run = chain.run(description=f"after {row}")  # the next start, without faults
    assert run.exit == {"reason": "done", "code": 0, "step": STEPS}, (
        f"after {row}: {run.exit}\n{run.tail}"
    )
    assert len(chain.check_rows(row.name)) == STEPS and chain.newest == STEPS
    return seconds


def fault_time(row: Drill, chain: Chain, run: FinishedRun, started: float) -> float:
    """Return the time of the last fault of the row, or of the start of the run, in Unix seconds."""
    times = [float(text) for text in re.findall(r"INJECTED on rank \d+ at ([\d.]+)", run.output)]
    assert len(times) >= len(row.injections), f"{row}: the fault was not injected\n{run.tail}"
    hits = chain.faults.rules.with_name(f"{chain.faults.rules.name}.hits")
    return max([started, *times, *([hits.stat().st_mtime] if row.rules else [])])


def check_end(row: Drill, run: FinishedRun) -> None:
    """Check exit codes and exit.json."""
    reason = None if run.exit is None else run.exit["reason"]
    assert reason in row.reasons, f"{row}: {run.exit}, {run.codes}\n{run.tail}"
    if None in row.reasons:
        assert all(run.codes), f"{row}: a rank ended with 0: {run.codes}\n{run.tail}"
        # Peers must end without a kill. The code of torchrun is that of any rank, also of a victim.
        if len(run.codes) == row.num_ranks:
            victims = {injection.rank for injection in row.injections} | {
                rule.rank for rule in row.rules
            }
            peers = {code for rank, code in enumerate(run.codes) if not victims & {rank, ALL}}
            assert peers <= {1, 75}, f"{row}: {run.codes}\n{run.tail}"
        return
    code = CODES[str(reason)]
    assert run.exit is not None and run.exit["code"] == code, f"{row}: {run.exit}"
    assert set(run.codes) in ({code}, {0}), f"{row}: {run.codes}\n{run.tail}"


@contextmanager
def watched(chain: Chain) -> Iterator[None]:
    """Kill the run when the watchdog of slurm/ reports no sign of it for longer than the timeout."""
    stop, run = threading.Event(), chain.folder

    def watch() -> None:
        while not stop.wait(0.5):
            has_rows = (run / "metrics.jsonl").exists()
            if has_rows and watchdog.observe_run(run, TRAIN_TIMEOUT / 60, time.time()).is_alert:
                kill(
                    [
                        json.loads(file.read_text())["pid"]
                        for file in run.glob("attempts/1/heartbeat/rank-*")
                    ]
                )

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def remaining_processes(chain: Chain) -> list[str]:
    """Return the processes of runs with these faults, except the fork server."""
    import psutil

    remaining = []
    for process in psutil.process_iter():
        try:
            has_faults = process.environ().get("FAULT_RULES") == str(chain.faults.rules)
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        is_server = (
            isinstance(chain.starter, ForkServer) and process.pid == chain.starter.process.pid
        )
        if (
            has_faults
            and not is_server
            and "tests.faults.fork_server" not in command
            and process.pid != os.getpid()
        ):
            remaining.append(f"{process.pid} {command}")
    return remaining
