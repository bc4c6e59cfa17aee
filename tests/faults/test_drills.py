"""The drills of every test run and of nightly runs. `./run_tests.sh --faults` runs the whole table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.drills import BASE, CALLS, DRILLS, SHORT, run_drill
from tests.faults.injection import Injection
from tests.faults.kills import Chain, make_reference
from tests.faults.shim import Faults
from tests.faults.trainer import EXACT, Starter, exact_rows

REGULAR = [
    "raise of rank 1: save",
    "SIGKILL of rank 1: validation",
    "SIGSTOP of rank 1: validation",
    "hang of rank 1: step",
    "SIGTERM to rank 1: validation",
    "SIGTERM to all ranks: start",
    "SIGINT to all ranks: end of a step",
    "SIGINT to rank 1 while it saves after a SIGTERM",
    "KILL: save",
    "SAVE",
    "NaN in a gradient of rank 1: step",
    "full disk of rank 1: next batch",
    "SIGKILL, one process: save",
]
NIGHTLY = [
    "raise of rank 1: step",
    "raise of rank 1: start",
    "raise of all ranks: validation",
    "SIGKILL of all ranks: end of a step",
    "SIGTERM to all ranks: step",
    "KILL: validation",
    "max_runtime_minutes",
    "max_cpu_mem_percent",
    "full disk of rank 1: save",
    "stalled write of rank 1: save",
    "raise, one process: step",
    "SIGTERM, one process: validation",
]


@pytest.fixture(scope="session")
def reference_of_one_rank(
    fork_server: Starter, faults: Faults, tmp_path_factory: pytest.TempPathFactory
) -> Chain:
    """Return a chain with the metrics of a run without faults in one process."""
    return make_reference(fork_server, faults, tmp_path_factory.mktemp("one-rank"), num_ranks=1)


@pytest.mark.parametrize(
    "name", [*REGULAR, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]
)
def test_drill(name: str, reference: Chain, reference_of_one_rank: Chain, tmp_path: Path) -> None:
    (row,) = (row for row in DRILLS if row.name == name)
    row_reference = reference if row.num_ranks == 2 else reference_of_one_rank
    run_drill(
        Chain(
            row_reference.starter,
            row_reference.faults,
            tmp_path / "outputs",
            row_reference.reference,
            row.num_ranks,
        ),
        row,
    )


def test_ci_covers_every_fault_and_location() -> None:
    rows = [row for row in DRILLS if row.name in REGULAR]
    assert {injection.fault for row in rows for injection in row.injections} == {
        p.fault for row in DRILLS for p in row.injections
    }
    assert {injection.location for row in rows for injection in row.injections} == {
        *CALLS,
        "next batch",
    }


def test_step_with_nan_weight_is_never_resumed(chain: Chain) -> None:
    chain.overrides.update(BASE)
    run = chain.run(injections=[Injection("step", "NaN in a weight", 1, 4)], settings=SHORT)
    assert run.exit == {"reason": "bad_numbers", "code": 70, "step": 4}, run.tail
    assert run.codes == [70, 70] and chain.newest == 2, run.tail
    assert (chain.folder / "checkpoint/step-4.nonfinite").is_dir(), (
        "the step must be kept for analysis"
    )
    run = chain.run(description="from the step before")
    assert run.exit == {"reason": "done", "code": 0, "step": 8}, run.tail
    assert run.has_output("step-4.nonfinite"), run.tail


def test_run_killed_on_two_ranks_resumes_on_one(chain: Chain) -> None:
    """Sums have another order then, but each step reads the same data."""
    chain.overrides.update(BASE)
    chain.run(injections=[Injection("validation", "SIGKILL", 1, 4)], settings=SHORT)
    assert chain.newest == 2
    run = chain.starter.start(chain.argv(), 1, chain.folder).wait()
    assert run.exit == {"reason": "done", "code": 0, "step": 8}, run.tail
    assert run.has_output("Checkpoint start: resume") and run.has_output("at step 2"), run.tail
    digests = slice(EXACT.index("data_digest"), EXACT.index("data_digest_chain") + 1)
    rows = exact_rows(chain.folder)
    assert [(row[0], *row[digests]) for row in rows] == [
        (row[0], *row[digests]) for row in chain.reference[:8]
    ]
