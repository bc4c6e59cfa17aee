"""Checkpoint folders for tests: steps by short names."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.harness.extents import record_file
from torchtitan_like.checkpoint.checkpointer import Checkpointer
from torchtitan_like.checkpoint.step_folders import MANIFEST, write_manifest
from torchtitan_like.config.sections_scale import Checkpoint
from torchtitan_like.distributed.world import HostGroup

CONFIG = '[job]\ndescription = "stored"\n'
SHARD = "shard-00000.bin"


def make_steps(folder: Path, *names: str) -> None:
    """Steps with a file of 100 bytes, seed 7 and a stored configuration. Behind a step's number stands what it is:

    nothing: full. w: weights only. h: an export of ours. !: its file is cut short. m: its manifest is garbled.
    ?: of no known format. x: its manifest is gone. e: all is gone but config.toml. H, D, M: somebody else's safetensors,
    DCP, Meta's files.
    """
    for name in names:
        number = name.rstrip("wh!mx?eHDM")
        what = name[len(number) :]
        step = folder / f"step-{number}"
        step.mkdir(parents=True)
        if "h" in what or "e" in what:
            (step / "config.toml").write_text(CONFIG)
        if "e" in what:
            continue
        foreign = {"H": "model.safetensors", "D": ".metadata", "M": "consolidated.00.pth", "?": "notes.txt",
                   "hx": "model.safetensors"}.get(what)  # fmt: skip
        (step / (foreign or SHARD)).write_bytes(bytes(100))
        if foreign or "x" in what:
            continue
        kind = "weights" if "w" in what else "hf" if "h" in what else "full"
        files = {SHARD: record_file(step / SHARD)}
        write_manifest(step, {"kind": kind, "step": int(number), "seed": 7, "files": files, "config": CONFIG})
        if "!" in what:
            (step / SHARD).write_bytes(bytes(50))
        if "m" in what:
            flip_bit(step / MANIFEST, 100)


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """One wrong bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def one_rank(dump_folder: Path) -> Checkpointer:
    """The checkpointer of a run of one process, which is not to ask what its model is."""
    return Checkpointer(
        Checkpoint(enable=True),
        dump_folder=str(dump_folder),
        group=HostGroup.alone(),
        device=torch.device("cpu"),
        identity=None,  # type: ignore[arg-type]
    )
