"""Draw the loss curve of a run directory."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from scripts import draw_loss

SVG = "{http://www.w3.org/2000/svg}"


def test_every_finite_loss_is_drawn_at_its_height(tmp_path: Path) -> None:
    losses = [8.0, 6.5, "nan", 5.0]
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "validation.jsonl").write_text('{"step": 4, "loss": 5.5}\n')
    picture = tmp_path / "loss.svg"
    assert draw_loss.main([str(tmp_path), str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    (line,) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == 3
    assert points[0][1] < points[1][1] < points[2][1]  # y grows downward
    (dot,) = root.iter(f"{SVG}circle")
    assert float(dot.attrib["cx"]) == points[2][0]


def test_a_run_without_steps_is_refused(tmp_path: Path, capsys) -> None:
    assert draw_loss.main([str(tmp_path), str(tmp_path / "loss.svg")]) == 2
    assert "has 0 steps" in capsys.readouterr().err
