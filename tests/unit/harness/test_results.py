"""The table at the end of ./run_tests.sh counts each test once, with and without pytest-xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runner import ROOT

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
def test_skips(): pytest.skip("needs a GPU")
@pytest.mark.nightly
def test_long(): pass
@pytest.fixture
def broken(): raise ValueError
def test_setup_fails(broken): pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_each_outcome_is_counted(workers: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "tests/unit/data").mkdir(parents=True)
    (tmp_path / "tests/unit/data/test_it.py").write_text(TESTS)
    (tmp_path / "tests/test_top.py").write_text("def test_top(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = nightly\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TEST_RESULTS": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.harness.results", "-m", "not nightly"]
    subprocess.run([*command, *workers, "tests"], cwd=tmp_path, env=environment, check=False)
    printed = subprocess.run(
        [sys.executable, "-m", "tests.harness.results"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    numbers = {line.split()[0]: line.split()[1:5] for line in printed[1:4]}
    assert printed[0].split()[1:5] == ["passed", "failed", "skipped", "nightly"]
    assert numbers == {
        "tests": ["1", "0", "0", "0"],
        "unit/data": ["1", "2", "1", "1"],
        "all": ["2", "2", "1", "1"],
    }
    assert printed[4] == "skipped 1: needs a GPU"


def test_a_run_without_tests_is_an_error(tmp_path: Path) -> None:
    environment = os.environ | {"TEST_RESULTS": str(tmp_path)}
    command = [sys.executable, "-m", "tests.harness.results"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "No test ran" in done.stderr
