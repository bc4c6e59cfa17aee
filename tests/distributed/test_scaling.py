"""The scaling harness measures FSDP and DDP of a small model on two ranks."""

import re
import subprocess
import sys

import pytest

from tests.harness.runner import ROOT


@pytest.mark.nightly
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_harness_reports_rates_of_fsdp_and_ddp(replicas: int) -> None:
    """No rate is asserted: these machines are shared and noisy."""
    words = ["--ranks", "2", "--rounds", "1", "--case", "XS", "--"]
    words += ["--parallelism.data_parallel_replicate_degree", str(replicas)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\| 2 \| [\d,]+", done.stdout, re.MULTILINE), done.stdout
