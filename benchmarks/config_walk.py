"""Count the modules that the configuration passes while a Trainer is built, and its ways back up.

    python -m benchmarks.config_walk [--section.key value ...]
    torchrun --nproc_per_node=2 -m benchmarks.config_walk [--section.key value ...]

Traces all calls in `Trainer.__init__` of the debug model. A room is a module in which a function
receives a `Run`, a `JobConfig` or a section of it. A climb is such a call from a lower layer of
pyproject.toml to a higher one. Rank 0 prints both, and how many modules of ours it has loaded.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torchtitan_like
from torchtitan_like.config import JobConfig
from torchtitan_like.config.base import Section
from torchtitan_like.config.layers import parse_toml
from torchtitan_like.distributed.world import launched_as
from torchtitan_like.resolved import Run
from torchtitan_like.run import main as run_main
from torchtitan_like.train import Trainer

PACKAGE = Path(torchtitan_like.__file__).parent
CARRIERS = (Run, JobConfig, Section)


class Walk:
    """Records (caller, callee) of calls with a part of the configuration, as paths of modules."""

    def __init__(self) -> None:
        self.calls: set[tuple[str, str]] = set()

    def trace(self, frame: FrameType, event: str, _: object) -> None:
        """Be the profile function of `sys.setprofile`."""
        room = room_of(frame)
        if event != "call" or room is None:
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(isinstance(frame.f_locals.get(name), CARRIERS) for name in names):
            caller = frame.f_back
            while caller is not None and room_of(caller) is None:
                caller = caller.f_back
            self.calls.add(((caller and room_of(caller)) or "", room))

    @property
    def rooms(self) -> list[str]:
        return sorted({callee for _, callee in self.calls})

    def climbs(self) -> list[tuple[str, str]]:
        """Return the calls from a lower layer to a higher one."""
        layers = read_layers()
        return sorted(
            (caller, callee)
            for caller, callee in self.calls
            if caller and layers[top_of(callee)] < layers[top_of(caller)]
        )


def room_of(frame: FrameType) -> str | None:
    """Return the path of a frame's module in the package; None for other modules."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


def top_of(room: str) -> str:
    """Return the package or the module next to train.py."""
    return room.partition("/")[0].removesuffix(".py")


def read_layers() -> dict[str, int]:
    """Return the number of the layer of each package, from the top."""
    content = parse_toml((PACKAGE.parent / "pyproject.toml").read_text())
    contracts = content["tool"]["importlinter"]["contracts"]
    (house,) = (contract for contract in contracts if contract["id"] == "house")
    return {
        room.strip(): number
        for number, layer in enumerate(house["layers"])
        for room in layer.split("|")
    }


def main() -> None:
    """Build one Trainer, train one step, and print the walk."""
    walk = Walk()
    build = Trainer.__init__

    def traced(trainer: Trainer, *arguments: Any) -> None:
        sys.setprofile(walk.trace)
        try:
            build(trainer, *arguments)
        finally:
            sys.setprofile(None)

    Trainer.__init__ = traced  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        config = str(PACKAGE / "train_configs/debug_model.toml")
        settings = ["--training.steps", "1", "--validation.no_enable", *sys.argv[1:]]
        code = run_main(["--job.config_file", config, "--job.dump_folder", folder, *settings])
    if code or launched_as().rank:
        sys.exit(code)
    loaded = [name for name in sys.modules if name.startswith(torchtitan_like.__name__)]
    print(f"{len(walk.rooms)} rooms: {', '.join(walk.rooms)}")
    print(f"{len(walk.climbs())} climbs: {walk.climbs()}")
    print(f"{len(loaded)} modules of ours are loaded")


if __name__ == "__main__":
    main()
