"""The flight recorder of collectives."""

import json
import os
import subprocess
import sys

import pytest
import torch

from torchtitan_like.config.sections_run import Comm
from torchtitan_like.distributed.recorder import set_up_recorder

PROGRAM = """
import json, pickle, sys
from pathlib import Path
from torchtitan_like.config.sections_run import Comm
from torchtitan_like.distributed.recorder import set_up_recorder, trace_file

set_up_recorder(Comm(trace_buf_size=int(sys.argv[1])), Path("."))
import torch, torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
for _ in range(5):
    dist.all_reduce(torch.ones(3))
made = trace_file(Comm(trace_buf_size=int(sys.argv[1])), Path("run"), 7)
dump = pickle.loads(made[1]()) if made else {}
print(json.dumps([str(made and made[0]), [entry["input_sizes"] for entry in dump.get("entries", [])]]))
"""


def run(repo_root, size: int, **environ: str) -> tuple[list, str]:
    command = [sys.executable, "-c", PROGRAM, str(size)]
    env = {**os.environ, **environ}
    done = subprocess.run(
        command, cwd=repo_root, capture_output=True, text=True, timeout=100, env=env
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_last_collectives_are_recorded_and_overrides_are_logged(repo_root):
    entries, log = run(repo_root, 3, TORCH_FR_BUFFER_SIZE="9")
    assert entries == ["run/comm_traces/rank_7", [[[3]]] * 3]
    assert "TORCH_FR_BUFFER_SIZE=9 in the environment is overridden with 3" in log


def test_a_disabled_recorder_keeps_nothing(repo_root):
    assert run(repo_root, 0)[0] == ["None", []]


@pytest.mark.parametrize(("value", "warns"), [("1", False), ("3", False), ("0", True)])
def test_only_a_value_that_a_user_chose_is_reported_as_overridden(
    tmp_path, monkeypatch, caplog, value, warns
):
    """torchrun itself sets TORCH_NCCL_ASYNC_ERROR_HANDLING to 1."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in (
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    ):
        monkeypatch.setenv(name, "")  # so that pytest restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
    set_up_recorder(Comm(), tmp_path)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert ("TORCH_NCCL_ASYNC_ERROR_HANDLING" in caplog.text) is warns
