"""Pictures of `titan run report`: curves are where the rows say, in a file that does not change."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.report.run_folder import (
    SCRIPT,
    step_row,
    write_killed_run,
    write_rows,
    write_steady_run,
)
from torchtitan_like.cli import main
from torchtitan_like.report.figures import MAX_POINTS
from torchtitan_like.util.modules import pip_install

SVG = "{http://www.w3.org/2000/svg}"
PNG = b"\x89PNG"
Point = tuple[float, float]


def plot(output: Path, *arguments: object) -> int:
    return main(["run", "report", *map(str, arguments), "-o", str(output)])


def points_of(picture: Path, curve: str) -> list[Point]:
    """Return the points of a curve in the picture; y grows downward."""
    for group in ElementTree.parse(picture).getroot().iter(f"{SVG}g"):
        if group.get("id") == curve:
            (path,) = list(group.iter(f"{SVG}path"))[:1]
            pairs = re.findall(r"[ML] (\S+) (\S+)", path.attrib["d"])
            return [(float(x), float(y)) for x, y in pairs]
    raise AssertionError(f"{picture} has no curve {curve}")


def texts_of(picture: Path) -> str:
    return " ".join(
        text.text or "" for text in ElementTree.parse(picture).getroot().iter(f"{SVG}text")
    )


def test_every_finite_value_is_drawn_at_its_row(tmp_path: Path) -> None:
    losses = [8.0, 6.5, "nan", 5.0, 7.0]
    rows = [step_row(n, 1000.0 + n, loss=loss) for n, loss in enumerate(losses, start=1)]
    write_rows(tmp_path / "run/metrics.jsonl", rows)
    write_rows(
        tmp_path / "run/validation.jsonl", [{"step": 4, "loss": 5.5}, {"step": 5, "loss": 7.0}]
    )
    output = tmp_path / "loss.svg"
    assert plot(output, tmp_path / "run") == 0
    points = points_of(output, "loss-0")
    assert len(points) == 4
    (x1, y1), (x2, y2), (x4, y4), (x5, y5) = points
    assert (x4 - x1) / (x2 - x1) == pytest.approx(3, abs=1e-4)  # six decimals in the file
    assert (y4 - y1) / (y2 - y1) == pytest.approx((5.0 - 8.0) / (6.5 - 8.0), abs=1e-4)
    validation = points_of(output, "loss-2")
    assert validation[1] == pytest.approx((x5, y5), abs=1e-4)
    assert validation[0][0] == pytest.approx(x4, abs=1e-4)


def test_several_runs_and_metrics_are_drawn_together(tmp_path: Path) -> None:
    runs = [write_steady_run(tmp_path / name) for name in ("a", "b$x$")]
    output = tmp_path / "plot.svg"
    words = ["--metric", "loss", "--metric", "grad_norm", "--axis", "tokens"]
    assert plot(output, *runs, *words) == 0
    assert len(points_of(output, "grad_norm-1")) == 20
    text = texts_of(output)
    for expected in ("a: train", "b$x$: train", "Gradient norm", "nats per token", "tokens"):
        assert expected in text, expected
    assert points_of(output, "loss-0") == points_of(output, "loss-2")  # equal runs


@pytest.mark.parametrize(("axis", "third"), [("step", 3), ("tokens", 3), ("hours", 7)])
def test_the_horizontal_axis_is_chosen(tmp_path: Path, axis: str, third: int) -> None:
    times = {1: 10.0, 2: 20.0, 3: 80.0}
    write_rows(tmp_path / "run/metrics.jsonl", [step_row(n, t) for n, t in times.items()])
    assert plot(tmp_path / "plot.svg", tmp_path / "run", "--axis", axis) == 0
    x1, x2, x3 = (x for x, _ in points_of(tmp_path / "plot.svg", "loss-0"))
    assert (x3 - x1) / (x2 - x1) == pytest.approx(third - (axis != "hours"), abs=1e-4)


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path / "run")
    shutil.copytree(run, tmp_path / "copies/run")
    for name, folder in (("a.svg", run), ("b.svg", tmp_path / "copies/run")):
        assert plot(tmp_path / name, folder) == 0
    content = (tmp_path / "a.svg").read_bytes()
    assert content == (tmp_path / "b.svg").read_bytes()
    assert b"<dc:date>" not in content


def test_a_long_curve_keeps_its_spike(tmp_path: Path) -> None:
    rows = [step_row(n, 1000.0 + n, loss=9.0 if n == 12_345 else 3.0) for n in range(1, 20_001)]
    write_rows(tmp_path / "run/metrics.jsonl", rows)
    assert plot(tmp_path / "plot.svg", tmp_path / "run") == 0
    points = points_of(tmp_path / "plot.svg", "loss-0")
    assert len(points) <= MAX_POINTS
    heights = sorted({y for _, y in points})
    assert heights[0] < heights[-1] - 50  # the spike, in points of 1/72 inch


def test_a_png_file_is_written(tmp_path: Path) -> None:
    assert plot(tmp_path / "plot.png", write_steady_run(tmp_path / "run")) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_names_of_runs_are_escaped(tmp_path: Path) -> None:
    sources = {SCRIPT: {"loss": 5.0}}
    write_rows(
        tmp_path / "run/metrics.jsonl", [step_row(n, 9.0 + n, sources=sources) for n in (1, 2)]
    )
    assert plot(tmp_path / "plot.svg", tmp_path / "run", "--metric", f"sources.{SCRIPT}.loss") == 0
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert not list(root.iter(f"{SVG}script")) and SCRIPT in texts_of(tmp_path / "plot.svg")


# ---- errors


def test_a_torn_line_is_reported_and_the_others_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_steady_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_row(21, 2000.0))[:30])
    assert plot(tmp_path / "plot.svg", run) == 0
    message = "run: metrics.jsonl: skipped 1 of 21 lines (incomplete): line 21\n"
    assert capsys.readouterr().err == message
    assert len(points_of(tmp_path / "plot.svg", "loss-0")) == 20


@pytest.mark.parametrize("name", ["attempts", "events.jsonl", "config.toml"])
def test_other_files_may_be_missing(tmp_path: Path, name: str) -> None:
    path = write_killed_run(tmp_path / "run") / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert plot(tmp_path / "plot.svg", tmp_path / "run") == 0
    assert len(points_of(tmp_path / "plot.svg", "loss-0")) == 7


def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def message_of(*words: object, output: str = "plot.svg") -> str:
        assert plot(tmp_path / output, *words) == 2
        assert not (tmp_path / output).exists()
        return capsys.readouterr().err

    run = write_steady_run(tmp_path / "run")
    message = message_of(run, "--metric", "los")
    assert "No run has a finite value of 'los'. Expected one of: grad_norm, loss, lr" in message
    assert message.endswith("Did you mean 'loss'?\n")
    pdf = message_of(run, "--metric", "loss", output="plot.pdf")
    assert "its suffix is '.pdf'. Expected .svg or .png" in pdf
    assert "--redact, --every and --json are options of a page" in message_of(run, "--redact")
    assert "is not the folder of a run" in message_of(tmp_path / "nowhere")
    (run / "metrics.jsonl").write_bytes(b"")
    assert "No run has a finite value of 'loss'. Expected one of: none." in message_of(run)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "Expected the package: " + pip_install("matplotlib") in message_of(run)
