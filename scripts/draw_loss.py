"""Draw the loss curve of a run as an SVG picture.

    python scripts/draw_loss.py outputs docs/images/loss.svg

Reads metrics.jsonl and validation.jsonl of the run directory. Exit code 2: there are fewer than two steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 16, 40
TRAIN_COLOR, VALIDATION_COLOR, TEXT_COLOR, GRID_COLOR = "#2f6fde", "#d9480f", "#777", "#8884"

Point = tuple[float, float]


def read_losses(path: Path) -> list[Point]:
    """Return (step, loss in nats per token) of each row with a finite loss; empty without the file."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["loss"]) for row in rows if isinstance(row["loss"], float)]


def draw(train: Sequence[Point], validation: Sequence[Point]) -> str:
    """Return the picture: the training loss as a line, the validation loss as dots."""
    losses = [loss for _, loss in (*train, *validation)]
    low, high = int(min(losses)), int(max(losses)) + 1
    last_step = max(step for step, _ in train)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last_step

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    def text(at_x: float, at_y: float, content: str, anchor: str, color: str = TEXT_COLOR) -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" fill="{color}">{content}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        ' font-family="sans-serif" font-size="13">',
        f"<title>Loss from step 1 to {last_step:.0f}</title>",
    ]
    for loss in range(low, high + 1):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"'
            f' stroke="{GRID_COLOR}"/>'
        )
        parts.append(text(LEFT - 8, y(loss) + 4, str(loss), "end"))
    for quarter in range(5):
        step = last_step * quarter / 4
        parts.append(text(x(step), HEIGHT - BOTTOM + 20, f"{step:.0f}", "middle"))
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in train)
    parts.append(
        f'<polyline points="{points}" fill="none" stroke="{TRAIN_COLOR}" stroke-width="1.5"/>'
    )
    parts += [
        f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4" fill="{VALIDATION_COLOR}"/>'
        for step, loss in validation
    ]
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(text(middle, HEIGHT - 4, "step", "middle"))
    parts.append(text(WIDTH - RIGHT, TOP + 16, "training loss, nats per token", "end", TRAIN_COLOR))
    if validation:
        parts.append(text(WIDTH - RIGHT, TOP + 34, "validation loss", "end", VALIDATION_COLOR))
    return "\n".join([*parts, "</svg>", ""])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    arguments = parser.parse_args(argv)
    train = read_losses(arguments.run / "metrics.jsonl")
    if len(train) < 2:
        print(
            f"{arguments.run} has {len(train)} steps with a loss; a curve needs at least 2.",
            file=sys.stderr,
        )
        return 2
    picture = draw(train, read_losses(arguments.run / "validation.jsonl"))
    arguments.picture.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
