"""Launches, copies, collectives, waits and memory of a step equal the table, on every rank.

The table counts.json has the counts of torch releases. `--update-counts` writes new counts.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_null.cells import CELLS, Cell
from tests.gpu_null.harness import (
    DETAILED_STEP,
    Recorded,
    describe_calls,
    run_recorded,
)
from tests.gpu_null.recording import ALLOCATIONS

TABLE = Path(__file__).parent / "counts.json"
RELEASE = torch.__version__.partition("+")[0]
STEADY_STEPS = range(4, DETAILED_STEP + 1)
# No log line may contain any of these.
UNWANTED = (
    "Traceback",
    "unbatched P2P",
    "is overridden with",
    "FutureWarning",
    "DeprecationWarning",
)
CHECKPOINT_THREAD = "checkpoint/checkpointer.py:_commit"

Calls = list[list[Any]]  # rows [kind, phase, site, detail, number]


def read_table() -> dict[str, Any]:
    """Return the counts of all cells by torch release."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def training_syncs(recording: dict[str, Any]) -> Calls:
    """Return the waits of the detailed step, except waits of the checkpoint thread."""
    return [
        call
        for call in recording["calls"]
        if call[0] == "syncs" and CHECKPOINT_THREAD not in call[2]
    ]


def counts_by_rank(recorded: Recorded) -> dict[str, dict[str, int]]:
    """Return the counts of a step by rank. Ranks with equal counts share a row: {"0,1": {...}}."""
    ranks: dict[str, list[str]] = {}
    for rank, recording in enumerate(recorded.ranks):
        step = recording["steps"][str(DETAILED_STEP)]
        counts = {kind: number for kind, number in step.items() if kind not in ALLOCATIONS}
        counts["syncs"] = sum(call[4] for call in training_syncs(recording))
        counts["peak_reserved_mib"] = recording["peak_reserved_mib"]
        ranks.setdefault(json.dumps(counts), []).append(str(rank))
    return {",".join(numbers): json.loads(counts) for counts, numbers in ranks.items()}


def call_origin(call: list[Any]) -> str:
    """Return kind, phase and innermost function of a call.

    This name does not depend on line numbers or outer frames.
    """
    kind, phase, site = call[:3]
    return f"{kind} in {phase}: {site.partition(' < ')[0]}"


def counts_by_origin(calls: Calls) -> dict[str, int]:
    """Return the numbers of calls by `call_origin`, sorted by name."""
    origins: Counter[str] = Counter()
    for call in calls:
        origins[call_origin(call)] += call[4]
    return dict(sorted(origins.items()))


def explain_change(calls: Calls, pinned: dict[str, int]) -> str:
    """Return the origins whose numbers differ from the table, with the stacks of the new calls."""
    origins = counts_by_origin(calls)
    lines = []
    for origin in sorted(origins.keys() | pinned.keys()):
        current, expected = origins.get(origin, 0), pinned.get(origin, 0)
        if current != expected:
            lines.append(f"{current - expected:+d} ({expected} -> {current}) {origin}")
            lines += describe_calls([call for call in calls if call_origin(call) == origin])
    return "\n".join(lines)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_step_has_the_counts_of_the_table(
    cell: Cell, device: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    recorded = run_recorded(device, tmp_path, cell.command, cell.num_ranks)
    for rank, recording in enumerate(recorded.ranks):
        steady = [recording["steps"][str(step)] for step in STEADY_STEPS]
        allocations = [call for call in recording["calls"] if call[0] in ALLOCATIONS]
        assert not any(counts[kind] for counts in steady for kind in ALLOCATIONS), (
            f"rank {rank} allocates after step 3; in step {DETAILED_STEP}:\n"
            + "\n".join(describe_calls(allocations))
        )
        syncs = training_syncs(recording)
        unexplained = [call for call in syncs if not any(part in call[2] for part in cell.syncs)]
        assert not unexplained, f"rank {rank} waits for the device:\n" + "\n".join(
            describe_calls(unexplained)
        )
    assert [
        line for line in recorded.output.splitlines() if any(part in line for part in UNWANTED)
    ] == []

    calls = recorded.ranks[0]["calls"]
    counts, origins = counts_by_rank(recorded), counts_by_origin(calls)
    table = read_table()
    if pytestconfig.getoption("--update-counts"):
        table.setdefault(RELEASE, {})[cell.name] = {"ranks": counts, "rank_0_by_origin": origins}
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return
    if RELEASE not in table:
        pytest.skip(
            f"counts.json has torch {', '.join(table)}, not {RELEASE}: "
            "--update-counts adds this release"
        )
    pinned = table[RELEASE].get(cell.name)
    assert pinned is not None, f"counts.json has no cell {cell.name}: --update-counts adds it"
    assert counts == pinned["ranks"], (
        f"rank 0 by origin:\n{explain_change(calls, pinned['rank_0_by_origin'])}"
    )


def test_every_pinned_cell_exists() -> None:
    names = {cell.name for cell in CELLS}
    assert {name for release in read_table().values() for name in release} == names
