"""Draw house.svg: the packages in the layers of pyproject.toml, with a line for each import.

    python docs/images/house.py [FOLDER]

Needs the extras `dev` and `plot`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp

from torchtitan_like.config.layers import parse_toml
from torchtitan_like.util.pictures import GRAY, LIGHT_GRAY, PALETTE, picture

ROOT = Path(__file__).resolve().parents[2]
NAME = "torchtitan_like"
ROOM_WIDTH, ROOM_HEIGHT = 1.5, 0.34  # inches
GAP = 0.25  # between rooms of a floor
FLOOR = 0.72  # from one floor to the next
FIRST_OF_THE_RUN = "run"  # the highest floor of the lower storey
USED_BY_ALL = {"config", "util"}  # without lines

Point = tuple[float, float]


def read_floors() -> list[list[str]]:
    """Return the packages and modules of each layer, the highest first."""
    contracts = parse_toml((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (house,) = (contract for contract in contracts["contracts"] if contract["id"] == "house")
    return [[room.strip() for room in layer.split("|")] for layer in house["layers"]]


def read_imports() -> set[tuple[str, str]]:
    """Return (importer, imported) for all packages and modules next to train.py."""
    graph = grimp.build_graph(NAME, exclude_type_checking_imports=True)
    pairs = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            ends = [name.split(".")[1] for name in (module, imported) if "." in name]
            if len(ends) == 2 and ends[0] != ends[1]:
                pairs.add((ends[0], ends[1]))
    return pairs


def positions_of(floors: list[list[str]]) -> dict[str, Point]:
    """Return the center of each room, inches from the top left corner."""
    width = max(map(len, floors)) * (ROOM_WIDTH + GAP)
    positions = {}
    storey = 0.0
    for number, rooms in enumerate(floors):
        if rooms[0] == FIRST_OF_THE_RUN:
            storey = FLOOR / 2
        left = (width - len(rooms) * (ROOM_WIDTH + GAP)) / 2
        for index, room in enumerate(rooms):
            x = left + (index + 0.5) * (ROOM_WIDTH + GAP)
            positions[room] = (x, 0.5 + number * FLOOR + storey)
    return positions


def draw_house(path: Path) -> None:
    """Draw the tools in one color, and the run below them in another."""
    floors = read_floors()
    positions = positions_of(floors)
    width = max(map(len, floors)) * (ROOM_WIDTH + GAP)
    height = max(y for _, y in positions.values()) + 0.5
    border = positions[FIRST_OF_THE_RUN][1] - FLOOR * 0.75
    with picture(path, width, height) as figure:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.axhline(border, color=GRAY, linestyle=":", linewidth=1)
        axes.text(0.05, border - 0.08, "tools", fontsize=11, va="bottom")
        axes.text(0.05, border + 0.08, "the run", fontsize=11, va="top")
        for importer, imported in sorted(read_imports()):
            (x, y), (to_x, to_y) = positions[importer], positions[imported]
            if to_y > y and imported not in USED_BY_ALL:  # train.py starts `run`, above it
                ends = (y + ROOM_HEIGHT / 2, to_y - ROOM_HEIGHT / 2)
                axes.plot((x, to_x), ends, color=LIGHT_GRAY, linewidth=0.8, zorder=0)
        for room, (x, y) in positions.items():
            color = PALETTE[1] if y < border else PALETTE[0]
            axes.text(
                x, y, room, ha="center", va="center", fontsize=9, color="white",
                bbox={"boxstyle": "round,pad=0.45", "facecolor": color, "edgecolor": "none"},
            )  # fmt: skip


def main(folder: Path) -> None:
    """Draw the picture into a folder."""
    draw_house(folder / "house.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
