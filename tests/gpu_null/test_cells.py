"""Each cell costs what the table says: launches, copies, collectives, waits and memory of a step,
on every rank.

The table, counts.json, holds the counts of one torch release. `--update-counts` writes the new ones
into it.
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
    build_device,
    describe_calls,
    run_recorded,
)
from tests.gpu_null.recording import ALLOCATIONS

TABLE = Path(__file__).parent / "counts.json"
RELEASE = torch.__version__.partition("+")[0]
STEADY_STEPS = range(4, DETAILED_STEP + 1)
# No line of the log may contain one of these.
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
    """The counts of all cells, by release of torch."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def training_syncs(recording: dict[str, Any]) -> Calls:
    """Waits of the detailed step, without those of the thread that writes checkpoints."""
    return [
        call
        for call in recording["calls"]
        if call[0] == "syncs" and CHECKPOINT_THREAD not in call[2]
    ]


def counts_by_rank(recorded: Recorded) -> dict[str, dict[str, int]]:
    """What a step of each rank costs; equal ranks share a row, as in {"0,1": {...}}."""
    ranks: dict[str, list[str]] = {}
    for rank, recording in enumerate(recorded.ranks):
        step = recording["steps"][str(DETAILED_STEP)]
        counts = {kind: number for kind, number in step.items() if kind not in ALLOCATIONS}
        counts["syncs"] = sum(call[4] for call in training_syncs(recording))
        counts["peak_reserved_mib"] = recording["peak_reserved_mib"]
        ranks.setdefault(json.dumps(counts), []).append(str(rank))
    return {",".join(numbers): json.loads(counts) for counts, numbers in ranks.items()}


def place_of(call: list[Any]) -> str:
    """A name for where a call comes from, without what changes with every edit: kind, phase and
    innermost function."""
    kind, phase, site = call[:3]
    return f"{kind} in {phase}: {site.partition(' < ')[0]}"


def counts_by_place(calls: Calls) -> dict[str, int]:
    """Numbers of calls by `place_of`, sorted by name."""
    places: Counter[str] = Counter()
    for call in calls:
        places[place_of(call)] += call[4]
    return dict(sorted(places.items()))


def explain_change(calls: Calls, pinned: dict[str, int]) -> str:
    """The places whose numbers differ from the pinned ones, with the stacks of today's calls."""
    places = counts_by_place(calls)
    lines = []
    for place in sorted(places.keys() | pinned.keys()):
        now, before = places.get(place, 0), pinned.get(place, 0)
        if now != before:
            lines.append(f"{now - before:+d} ({before} -> {now}) {place}")
            lines += describe_calls([call for call in calls if place_of(call) == place])
    return "\n".join(lines)


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the null CUDA device."""
    if torch.version.cuda is None:
        raise RuntimeError(
            f"torch {torch.__version__} is a CPU build; the null CUDA device needs a CUDA build. "
            "Run ./run_tests.sh --null-gpu"
        )
    return build_device(tmp_path_factory.mktemp("null_cuda"))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_step_has_the_counts_of_the_table(
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
    counts, places = counts_by_rank(recorded), counts_by_place(calls)
    table = read_table()
    if pytestconfig.getoption("--update-counts"):
        table.setdefault(RELEASE, {})[cell.name] = {"ranks": counts, "rank_0_by_place": places}
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return
    if RELEASE not in table:
        pytest.skip(
            f"counts.json holds torch {', '.join(table)}, not {RELEASE}: --update-counts adds this release"
        )
    pinned = table[RELEASE].get(cell.name)
    assert pinned is not None, f"counts.json has no cell {cell.name}: --update-counts adds it"
    assert counts == pinned["ranks"], (
        f"rank 0 by place:\n{explain_change(calls, pinned['rank_0_by_place'])}"
    )


def test_every_pinned_cell_exists() -> None:
    names = {cell.name for cell in CELLS}
    assert {name for release in read_table().values() for name in release} == names
