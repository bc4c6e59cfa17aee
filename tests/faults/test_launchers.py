"""Faults of ranks under run_train.sh and torchrun: what is returned, what is said last, and who starts again by itself."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from tests.faults.drills import BASE, SHORT
from tests.faults.kills import Chain
from tests.faults.plants import Plant
from tests.faults.trainer import Starter, Torchrun, arguments
from tests.harness.runner import ROOT, trainer_environment
from torchtitan_like.monitor.errors import errors_of


def run_train(folder: Path, plant: Plant) -> subprocess.CompletedProcess[str]:
    """./run_train.sh on two ranks, in which a fault is planted."""
    python = folder.parent / "python"
    python.write_text(f'#!/bin/sh\nexec bash -c \'exec {shlex.quote(sys.executable)} '
                      '"${@/torchtitan_like.train/tests.faults.plants}"\' - "$@"\n')  # fmt: skip
    python.chmod(0o755)
    plants = json.dumps({"plants": [plant], "settings": SHORT})
    variables = {"PYTHON": str(python), "NGPU": "2", "FAULT_PLANTS": plants}
    return subprocess.run(
        [str(ROOT / "run_train.sh"), *arguments(folder, **BASE)], env=trainer_environment({**os.environ, **variables}),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_first_error_is_the_last_thing_on_the_screen(tmp_path: Path) -> None:
    """Its peers die within milliseconds of it, of a connection that it has closed."""
    result = run_train(tmp_path / "outputs", Plant("step", "raise", 1, 4))
    assert result.returncode == 1 and not (tmp_path / "outputs/exit.json").exists()
    first, theirs = sorted(errors_of(tmp_path / "outputs/attempts/1"), key=lambda record: record["time"])
    assert (first["rank"], first["step"], first["phase"], first["host"]) == (1, 4, "step", socket.gethostname())
    assert theirs["rank"] == 0 and "Planted" not in theirs["traceback"]
    torchruns, _, ours = result.stderr.partition("FIRST ERROR of 2")
    assert "rank 1, step 4, phase step:\nTraceback" in ours
    assert ours.splitlines()[-1].endswith("Planted: planted in the step"), result.stderr[-3000:]
    # So it is under torchrun alone, whichever rank it takes for the first.
    cause = torchruns.partition("Root Cause")[2]
    assert "rank 1, step 4, phase step:" in cause and "Planted: planted in the step" in cause, torchruns[-3000:]


def test_run_train_returns_the_code_all_have_agreed_on(tmp_path: Path) -> None:
    result = run_train(tmp_path / "outputs", Plant("validation", "SIGTERM", 1, 4))
    assert result.returncode == 75, result.stderr[-3000:]
    assert "requeue (code 75)" in result.stderr.splitlines()[-1]


def test_torchrun_starts_a_killed_run_again(chain: Chain, warm: Starter) -> None:
    """All ranks of it, from the newest checkpoint, to the last step."""
    chain.overrides.update(BASE)
    chain.starter = Torchrun(chain.faults.env, "--max-restarts=1")
    ended = chain.run(plants=[Plant("step", "SIGKILL", 1, 6)], settings=SHORT)
    assert (ended.codes, ended.exit) == ([0], {"reason": "done", "code": 0, "step": 8}), ended.tail
    assert len(chain.check_rows("started again")) == 8
    assert ended.says("Checkpoint start: resume") and ended.says("at step 4"), ended.tail
    assert sorted(path.name for path in (chain.folder / "attempts").iterdir()) == ["1", "2"]
    assert [record["rank"] for record in errors_of(chain.folder / "attempts/1")] == [0]
    assert not errors_of(chain.folder / "attempts/2")
