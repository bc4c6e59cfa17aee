"""Checkpoint folders for tests, described by short names."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.harness.extents import record_file
from torchtitan_like.checkpoint.checkpointer import Checkpointer
from torchtitan_like.checkpoint.step_folders import write_manifest
from torchtitan_like.config.sections_checkpoint import Checkpoint
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.run_directory import MANIFEST

CONFIG = '[job]\ndescription = "stored"\n'
SHARD = "shard-00000.bin"


def make_steps(folder: Path, *names: str) -> None:
    """Make steps with one file of 100 bytes, seed 7 and a stored configuration.

    A name is a step number and letters for the kind of step. Without a letter, the step is full.

    - w: a weights-only checkpoint.
    - h: a Hugging Face export by this program.
    - !: the file is truncated.
    - m: the manifest is damaged.
    - x: the manifest is missing.
    - e: everything except config.toml is missing.
    - H, D, M: safetensors, a DCP folder, or Meta's files, written by another program.
    - ?: an unknown format.
    """
    for name in names:
        number = name.rstrip("wh!mx?eHDM")
        flags = name[len(number) :]
        step = folder / f"step-{number}"
        step.mkdir(parents=True)
        if "h" in flags or "e" in flags:
            (step / "config.toml").write_text(CONFIG)
        if "e" in flags:
            continue
        foreign = {"H": "model.safetensors", "D": ".metadata", "M": "consolidated.00.pth", "?": "notes.txt",
                   "hx": "model.safetensors"}.get(flags)  # fmt: skip
        (step / (foreign or SHARD)).write_bytes(bytes(100))
        if foreign or "x" in flags:
            continue
        kind = "weights" if "w" in flags else "hf" if "h" in flags else "full"
        files = {SHARD: record_file(step / SHARD)}
        write_manifest(
            step, {"kind": kind, "step": int(number), "seed": 7, "files": files, "config": CONFIG}
        )
        if "!" in flags:
            (step / SHARD).write_bytes(bytes(50))
        if "m" in flags:
            flip_bit(step / MANIFEST, 100)


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def one_rank(dump_folder: Path) -> Checkpointer:
    """Return the checkpointer of a single-process run whose model identity is never used."""
    return Checkpointer(
        Checkpoint(enable=True),
        dump_folder=str(dump_folder),
        group=HostGroup.alone(),
        device=torch.device("cpu"),
        identity=None,  # type: ignore[arg-type]
    )
