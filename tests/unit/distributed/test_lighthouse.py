"""`python -m torchtitan_like.distributed.lighthouse`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.harness.ports import listening_addresses
from tests.harness.runner import ROOT
from torchtitan_like.distributed import lighthouse
from torchtitan_like.util.modules import pip_install


def test_the_example_serves_on_loopback() -> None:
    pytest.importorskip("torchft", reason="needs the extra ft")
    [example] = [line for line in str(lighthouse.__doc__).splitlines() if "python -m" in line]
    words = example.replace(":29510", ":0").split()
    process = subprocess.Popen(
        [sys.executable, *words[1:]],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(
        "Lighthouse: start the replica groups with TORCHFT_LIGHTHOUSE=http://127.0.0.1:"
    )
    assert set(listening_addresses([process.pid])) == {"127.0.0.1"}
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_lighthouse_without_torchft_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert lighthouse.main([]) == 2
    assert pip_install("torchft>=0.2,<0.3") in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--min-replicas", "--join-timeout-ms", "--heartbeat-timeout-ms"]
)
@pytest.mark.parametrize("value", ["0", "x"])
def test_numbers_must_be_positive(option: str, value: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        lighthouse.main([option, value])
