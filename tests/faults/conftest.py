"""Fixtures of the fault tests: the injection library, the fork server and a reference run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.kills import Chain, make_reference
from tests.faults.shim import Faults, build_shim
from tests.faults.trainer import ForkServer, Starter, Torchrun


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    fault_folder = Path(__file__).parent
    for item in items:
        if fault_folder in item.path.parents:
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
def fork_server(faults: Faults) -> Iterator[Starter]:
    starter = ForkServer(faults.env)
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def reference(
    fork_server: Starter, faults: Faults, tmp_path_factory: pytest.TempPathFactory
) -> Chain:
    """Return a chain with the metrics of a run without faults on 2 ranks."""
    return make_reference(fork_server, faults, tmp_path_factory.mktemp("reference"))


@pytest.fixture
def chain(reference: Chain, tmp_path: Path) -> Chain:
    """A run folder of 2 forked ranks, compared with the reference."""
    return Chain(reference.starter, reference.faults, tmp_path / "outputs", reference.reference)


@pytest.fixture
def torchrun_chain(reference: Chain, tmp_path: Path) -> Chain:
    """The same with torchrun. Torchrun and forked ranks must give equal metrics."""
    return Chain(
        Torchrun(reference.faults.env), reference.faults, tmp_path / "outputs", reference.reference
    )
