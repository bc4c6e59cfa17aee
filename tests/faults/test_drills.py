"""The drills of CI: every cause, every phase, one rank or all; ./run_tests.sh --faults holds all of the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.drills import BASE, CALLS, ROWS, SHORT, drill
from tests.faults.kills import Chain, make_reference
from tests.faults.plants import Plant
from tests.faults.shim import Faults
from tests.faults.trainer import EXACT, Starter, exact_rows

IN_CI = [
    "raise of rank 1: step",
    "raise of rank 1: save",
    "raise of rank 1: start",
    "raise of all ranks: validation",
    "SIGKILL of rank 1: validation",
    "SIGKILL of all ranks: end of a step",
    "SIGSTOP of rank 1: validation",
    "hang of rank 1: step",
    "SIGTERM to rank 1: validation",
    "SIGTERM to all ranks: start",
    "SIGTERM to all ranks: step",
    "SIGINT to all ranks: end of a step",
    "SIGINT to rank 1 while it saves after a SIGTERM",
    "KILL: save",
    "KILL: validation",
    "max_runtime_minutes",
    "max_cpu_mem_percent",
    "SAVE",
    "NaN in a gradient of rank 1: step",
    "full disk of rank 1: save",
    "full disk of rank 1: next batch",
    "write of rank 1 that never returns: save",
    "raise, one process: step",
    "SIGKILL, one process: save",
    "SIGTERM, one process: validation",
]


@pytest.fixture(scope="session")
def alone(warm: Starter, faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The rows of an undisturbed run of one process."""
    return make_reference(warm, faults, tmp_path_factory.mktemp("alone"), num_ranks=1)


@pytest.mark.parametrize("name", IN_CI)
def test_drill(name: str, reference: Chain, alone: Chain, tmp_path: Path) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    like = reference if row.num_ranks == 2 else alone
    drill(Chain(like.starter, like.faults, tmp_path / "outputs", like.reference, row.num_ranks), row)


def test_ci_leaves_out_no_cause_and_no_phase() -> None:
    rows = [row for row in ROWS if row.name in IN_CI]
    assert {plant.what for row in rows for plant in row.plants} == {p.what for row in ROWS for p in row.plants}
    assert {plant.place for row in rows for plant in row.plants} == {*CALLS, "next batch"}


def test_a_weight_that_became_nan_is_never_resumed_from(chain: Chain) -> None:
    chain.overrides.update(BASE)
    ended = chain.run(plants=[Plant("step", "NaN in a weight", 1, 4)], settings=SHORT)
    assert ended.exit == {"reason": "bad_numbers", "code": 70, "step": 4}, ended.tail
    assert ended.codes == [70, 70] and chain.newest == 2, ended.tail
    assert (chain.folder / "checkpoint/step-4.nonfinite").is_dir(), "kept for study"
    ended = chain.run(what="from the step before")
    assert ended.exit == {"reason": "done", "code": 0, "step": 8}, ended.tail
    assert ended.says("step-4.nonfinite"), ended.tail


def test_a_run_killed_on_two_ranks_resumes_on_one(chain: Chain) -> None:
    """Sums are made in another order then; what is read in which step is the same."""
    chain.overrides.update(BASE)
    chain.run(plants=[Plant("validation", "SIGKILL", 1, 4)], settings=SHORT)
    assert chain.newest == 2
    ended = chain.starter.start(chain.argv(), 1, chain.folder).wait()
    assert ended.exit == {"reason": "done", "code": 0, "step": 8}, ended.tail
    assert ended.says("Checkpoint start: resume") and ended.says("at step 2"), ended.tail
    read = slice(EXACT.index("data_digest"), EXACT.index("data_digest_chain") + 1)
    rows = exact_rows(chain.folder)
    assert [(row[0], *row[read]) for row in rows] == [(row[0], *row[read]) for row in chain.reference[:8]]
