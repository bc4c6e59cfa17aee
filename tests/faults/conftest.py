"""What the fault tests share: the library that injects faults, and a process that forks the trainer's ranks quickly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.kills import Chain, make_reference
from tests.faults.shim import Faults, build_shim
from tests.faults.trainer import Starter, Torchrun, Warm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.faults)


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    folder = tmp_path_factory.mktemp("shim")
    try:
        library = build_shim(folder)
    except RuntimeError as problem:
        pytest.skip(str(problem))
    return Faults(library, folder / "rules")


@pytest.fixture(scope="session")
def warm(faults: Faults) -> Iterator[Starter]:
    starter = Warm(faults.env)
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def reference(warm: Starter, faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The rows of an undisturbed run on 2 ranks."""
    return make_reference(warm, faults, tmp_path_factory.mktemp("reference"))


@pytest.fixture
def chain(reference: Chain, tmp_path: Path) -> Chain:
    """A run folder of 2 forked ranks, compared with the reference."""
    return Chain(reference.starter, reference.faults, tmp_path / "outputs", reference.reference)


@pytest.fixture
def torchrun_chain(reference: Chain, tmp_path: Path) -> Chain:
    """The same under torchrun: its rows must be those of the forked ranks."""
    return Chain(Torchrun(reference.faults.env), reference.faults, tmp_path / "outputs", reference.reference)
