"""Kinds of damage to the files of a published step, and a start that must detect them."""

from __future__ import annotations

import functools
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from tests.faults.trainer import arguments
from torchtitan_like.build import identify
from torchtitan_like.checkpoint.checkpointer import Checkpointer
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.config.sections_checkpoint import Checkpoint
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.run import resolve_run


def flip(path: Path, offset: float, bit: int) -> None:
    """Flip one bit of the byte at `offset`, a fraction of the file size in [0, 1)."""
    content = bytearray(path.read_bytes())
    content[int(offset * len(content))] ^= 1 << bit
    path.write_bytes(content)


def append(path: Path, byte: bytes) -> None:
    with open(path, "ab") as file:
        file.write(byte)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "half of the file": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
    "one byte more": lambda path: append(path, b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


def all_damages(
    draw: random.Random, num_flips: int
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield (description, damage function): every kind once, and bits flipped at random offsets."""
    yield from DAMAGES.items()
    for _ in range(num_flips):
        offset, bit = draw.random(), draw.randrange(8)
        yield f"bit {bit} flipped at {offset:.4%}", partial(flip, offset=offset, bit=bit)


def list_files(step: Path) -> list[str]:
    """Return the paths of all files of a step, relative to the step."""
    return sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file())


@dataclass
class StatePart:
    """One state of a checkpoint: tensors to load into, and strings."""

    content: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict


def states_like(step: Path) -> dict[str, StatePart]:
    """Return the states of an intact native step of any format version, filled with NaN."""
    import pickle

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    states: dict[str, StatePart] = {}
    for name, entry in pickle.loads((step / ".metadata").read_bytes()).state_dict_metadata.items():
        part, _, rest = name.partition(".")
        value: Any = ""
        if isinstance(entry, TensorStorageMetadata):
            value = torch.full(tuple(entry.size), torch.nan).to(entry.properties.dtype)
        states.setdefault(part, StatePart({})).content[rest] = value
    return states


def content_hash(states: dict[str, StatePart]) -> str:
    """Return the hash of all names and values."""
    digest = xxhash.xxh3_128()
    for part in sorted(states):
        for name, value in sorted(states[part].content.items()):
            digest.update(f"{part}.{name}".encode())
            digest.update(
                value.numpy().tobytes() if isinstance(value, torch.Tensor) else value.encode()
            )
    return digest.hexdigest()


@dataclass(frozen=True)
class StartResult:
    """The result of a start.

    `step` is None if the start was rejected, -1 if it crashed. `output` has all log lines and
    errors.
    """

    step: int | None
    content: str
    output: str


@functools.cache
def identity() -> Identity:
    """Return the model of these runs, which formats other than the native one require."""
    return identify(resolve_run(arguments(Path("outputs")), 1).config.model)


def start_one_rank(folder: Path, like: Path, **section: Any) -> StartResult:
    """Find and load a checkpoint, like a run of one rank with this dump folder.

    `like` is an intact step of that run.
    """
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    states = states_like(like)
    checkpointer = Checkpointer(
        Checkpoint(enable=True, **section), dump_folder=str(folder), group=HostGroup.alone(),
        device=torch.device("cpu"), identity=identity(),
    )  # fmt: skip
    step = None
    try:
        starts = checkpointer.find_start(10**6)
        lines.append(str(starts[0]))
        if starts[0].kind != "scratch":
            checkpointer.load(starts, states, on_fallback=lambda start: lines.append(str(start)))
        matches = [re.search(r"at step (\d+)", line) for line in lines]
        step = int([match[1] for match in matches if match][-1])
    except CheckpointError as error:
        lines.append(str(error))
    except Exception as error:
        step = -1
        lines.append(f"crashed: {error!r}")
    finally:
        checkpointer.close()
        logging.getLogger().removeHandler(handler)
    return StartResult(step, content_hash(states), "\n".join(lines))


def copy_steps(source: Path, target: Path, steps: list[int]) -> Path:
    """Copy some steps of a run to a new run folder; return the new checkpoint folder."""
    shutil.rmtree(target, ignore_errors=True)
    for step in steps:
        shutil.copytree(source / f"step-{step}", target / "checkpoint" / f"step-{step}")
    return target / "checkpoint"
