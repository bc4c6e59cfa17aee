"""Ranks wait for the `run.lock` of another run, which may have crashed."""

import json
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.checkpointer import Checkpointer
from torchtitan_like.config.sections_checkpoint import Checkpoint
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.run_directory import LOCK

TIMEOUT_SECONDS = 5.0
PATIENCE_SECONDS = 8.0


class NoAssets:
    hf_assets = Path("nowhere")


def start_kind(folder):
    group = HostGroup(list(range(dist.get_world_size())), timedelta(seconds=TIMEOUT_SECONDS))
    checkpointer = Checkpointer(
        Checkpoint(enable=True),
        dump_folder=folder,
        group=group,
        device=torch.device("cpu"),
        identity=NoAssets(),
    )
    if checkpointer._lock is not None:
        checkpointer._lock.interval, checkpointer._lock.patience = 4.0, PATIENCE_SECONDS
    with closing(checkpointer):
        kind = checkpointer.find_start(10)[0].kind
        if checkpointer._lock is not None:
            checkpointer._lock.check()
    group.destroy()
    return kind


def test_wait_for_a_crashed_run_may_exceed_the_group_timeout(tmp_path):
    """The lock belongs to another machine, so ranks wait longer than the checkpoint timeout."""
    assert PATIENCE_SECONDS > TIMEOUT_SECONDS
    lock = tmp_path / "checkpoint" / LOCK
    lock.parent.mkdir()
    holder = {"host": "node-7", "machine": "another", "pid": 1, "started": "5", "token": "theirs"}
    lock.write_text(json.dumps(holder))
    assert run_ranks(start_kind, 2, str(tmp_path)) == ["scratch", "scratch"]
    assert not lock.exists()
