"""Damage to files as tables: what can happen to any file of a published step, and a loader that sees it."""

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
from torchtitan_like.config.sections_scale import Checkpoint
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.launch import read_config


def flip(path: Path, place: float, bit: int) -> None:
    """Flip one bit of the byte at a share `place` in [0, 1) of the file."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)


def append(path: Path, byte: bytes) -> None:
    with open(path, "ab") as file:
        file.write(byte)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "half of it": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
    "one byte more": lambda path: append(path, b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


def all_damages(draw: random.Random, num_flips: int) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """(what it is, what does it to a file): every kind once, and flipped bits at random places."""
    yield from DAMAGES.items()
    for _ in range(num_flips):
        place, bit = draw.random(), draw.randrange(8)
        yield f"bit {bit} flipped at {place:.4%}", partial(flip, place=place, bit=bit)


def files_of(step: Path) -> list[str]:
    """Every file of a step, relative to it."""
    return sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file())


@dataclass
class Held:
    """A part of the state: tensors to be filled in place, and strings."""

    content: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict


def states_like(step: Path) -> dict[str, Held]:
    """The parts of the state that an intact native step (of any format version) holds, of its shapes, all NaN."""
    import pickle

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    states: dict[str, Held] = {}
    for name, entry in pickle.loads((step / ".metadata").read_bytes()).state_dict_metadata.items():
        part, _, rest = name.partition(".")
        value: Any = ""
        if isinstance(entry, TensorStorageMetadata):
            value = torch.full(tuple(entry.size), torch.nan).to(entry.properties.dtype)
        states.setdefault(part, Held({})).content[rest] = value
    return states


def content_hash(states: dict[str, Held]) -> str:
    """Names and bytes of all that is held."""
    digest = xxhash.xxh3_128()
    for part in sorted(states):
        for name, value in sorted(states[part].content.items()):
            digest.update(f"{part}.{name}".encode())
            digest.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else value.encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Loaded:
    """The outcome of a start. step: None if it was refused, -1 if it crashed. output: all log lines and errors."""

    step: int | None
    content: str
    output: str


@functools.cache
def identity() -> Identity:
    """The model of the runs here, which other formats than the native one need to know."""
    return identify(read_config(arguments(Path("outputs")), 1).model)


def start_here(folder: Path, like: Path, **section: Any) -> Loaded:
    """Decide and load as a run of one rank does whose dump folder is `folder`; `like`: an intact step of that run."""
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
            checkpointer.load(starts, states, consider=lambda start: lines.append(str(start)))
        found = [re.search(r"at step (\d+)", line) for line in lines]
        step = int([match[1] for match in found if match][-1])
    except CheckpointError as error:
        lines.append(str(error))
    except Exception as error:
        step = -1
        lines.append(f"crashed: {error!r}")
    finally:
        checkpointer.close()
        logging.getLogger().removeHandler(handler)
    return Loaded(step, content_hash(states), "\n".join(lines))


def copy_steps(source: Path, target: Path, steps: list[int]) -> Path:
    """A run folder with some of the steps of another one; its checkpoint folder."""
    shutil.rmtree(target, ignore_errors=True)
    for step in steps:
        shutil.copytree(source / f"step-{step}", target / "checkpoint" / f"step-{step}")
    return target / "checkpoint"
