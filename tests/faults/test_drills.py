"""The drills of CI; ./run_tests.sh --faults holds all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.drills import ROWS, Drill, drill
from tests.faults.kills import Chain, make_reference
from tests.faults.shim import Faults
from tests.faults.trainer import Starter


@pytest.fixture(scope="session")
def alone(warm: Starter, faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The rows of an undisturbed run of one process."""
    return make_reference(warm, faults, tmp_path_factory.mktemp("alone"), num_ranks=1)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_drill(row: Drill, reference: Chain, alone: Chain, tmp_path: Path) -> None:
    like = reference if row.num_ranks == 2 else alone
    drill(Chain(like.starter, like.faults, tmp_path / "outputs", like.reference, row.num_ranks), row)
