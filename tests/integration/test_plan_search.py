"""`titan plan search` from the command line to the written file, and its end by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.runner import listen_to_signals
from torchtitan_like.cli import main as titan

# Few layouts, so that the search takes a minute.
WORDS = [
    *("search", "debug_model.toml", "--world-size", "2", "--global-batch-tokens", "4096"),
    *("--parallelism.pipeline_parallel_degree", "1", "--activation_checkpoint.mode", "none"),
    *("--training.local_batch_size", "4"),
]
COMMAND = [sys.executable, "-m", "torchtitan_like", "plan", *WORDS]


@pytest.mark.nightly
def test_a_search_writes_its_best_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = tmp_path / "best.toml"
    command = [*COMMAND, "--json", "-o", str(best)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # 16 samples: FSDP 2 (resharding or not), DDP 2 and TP 2, each with 4 samples at once.
    assert found["num_layouts"] == 4 and found["global_batch_size"] == 16
    ranked = found["ranked"]
    assert {row["name"] for row in ranked} == {"FSDP 2", "DDP 2", "TP 2"}
    assert [row["is_full"] for row in ranked[:3]] == [True] * 3
    assert ranked[0]["seconds"] == min(row["seconds"] for row in ranked[:3])
    assert "a few layers: " in done.stderr and "full depth: " in done.stderr

    assert titan(["check", str(best), "--world-size", "2"]) == 0
    capsys.readouterr()
    assert titan(["plan", str(best), "--world-size", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    # The whole dry run of the written file, with all micro-batches.
    assert ranked[0]["seconds"] == pytest.approx(plan["time"]["seconds"], rel=0.03)
    reserved = max(rank["reserved"] for rank in plan["ranks"]) + plan["outside_allocator_bytes"]
    assert ranked[0]["gib"] * 2**30 == pytest.approx(reserved, rel=0.01)


@pytest.mark.nightly
def test_a_search_tries_the_degrees_of_experts(tmp_path: Path) -> None:
    """Four layers, which are dry-run at once, on two ranks without pipelines."""
    best = tmp_path / "best.toml"
    given = ["--model.args.n_layers", "4", "--parallelism.data_parallel_replicate_degree", "1"]
    words = ["search", "qwen3_moe_debug.toml", *WORDS[2:], *given, "--json", "-o", str(best)]
    command = [sys.executable, "-m", "torchtitan_like", "plan", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["failed"]
    assert {row["name"] for row in found["ranked"]} == {
        "FSDP 2",
        "FSDP 2 x EP 2",
        "TP 2",
        "TP 2 x EP 2",
        "TP 2 x ETP 2",
    }
    assert any(note.startswith("even routing assumed") for note in found["notes"])
    assert titan(["check", str(best), "--world-size", "2"]) == 0


@pytest.mark.nightly
def test_ctrl_c_ends_a_search_and_its_children(tmp_path: Path) -> None:
    best = tmp_path / "best.toml"
    process = subprocess.Popen(
        [*COMMAND, "-o", str(best)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=listen_to_signals,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("a few layers: 0 of"):
            break
    time.sleep(1)  # the first dry runs have begun
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    # Python ends itself with the signal if that interrupted `exec`. A shell shows 130 for both.
    assert process.returncode in (130, -signal.SIGINT)
    assert errors.endswith("Interrupted: no layout is written\n") and "Traceback" not in errors
    assert not best.exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
