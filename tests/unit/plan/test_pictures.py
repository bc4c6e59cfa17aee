"""`titan draw`: the mesh of a layout and the timeline of a pipeline schedule."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.harness.runner import ROOT
from torchtitan_like.cli import main
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.schedule_view import order_of
from torchtitan_like.plan.pictures import draw_mesh, draw_timeline

SVG = "{http://www.w3.org/2000/svg}"
LAYOUT = (
    "--parallelism.pipeline_parallel_degree 2 --parallelism.tensor_parallel_degree 2 "
    "--training.local_batch_size 4"
).split()


def texts_of(picture: Path) -> list[str]:
    return [text.text or "" for text in ElementTree.parse(picture).getroot().iter(f"{SVG}text")]


def colors_of(picture: Path) -> Counter[str]:
    """Return the number of filled cells of each color."""
    styles = (
        path.get("style", "") for path in ElementTree.parse(picture).getroot().iter(f"{SVG}path")
    )
    fills = (style.partition("fill: ")[2][:7] for style in styles)
    return Counter(fill for fill in fills if fill.startswith("#"))


def test_the_mesh_has_every_rank_and_its_coordinates(tmp_path: Path) -> None:
    picture = tmp_path / "mesh.svg"
    draw_mesh(ParallelDims(16, pp=2, dp_shard=4, tp=2), 8, picture)
    texts = texts_of(picture)
    assert "16 ranks = pp 2 x dp_shard 4 x tp 2, on 2 nodes of 8" in texts
    assert {*map(str, range(16)), "pp 0  dp_shard 0", "pp 1  dp_shard 3", "tp 0", "tp 1"} <= {
        *texts
    }
    assert sorted(colors_of(picture).values()) == [8, 8]  # each node has a color


@pytest.mark.parametrize(
    "dims", [ParallelDims(1), ParallelDims(4, dp_shard=4), ParallelDims(2, pp=2)]
)
def test_a_mesh_of_one_dimension_is_drawn(tmp_path: Path, dims: ParallelDims) -> None:
    draw_mesh(dims, 8, tmp_path / "mesh.svg")
    assert {*map(str, range(dims.world_size))} <= {*texts_of(tmp_path / "mesh.svg")}


def test_the_timeline_has_every_action(tmp_path: Path) -> None:
    picture = tmp_path / "pipeline.svg"
    draw_timeline("1F1B", order_of("1F1B", 4, 1, 8), picture)
    texts = texts_of(picture)
    assert "1F1B: 4 stages on 4 ranks, 8 micro-batches, bubble 27.3%" in texts
    assert texts.count("5") == 8  # forward and backward of a micro-batch on 4 ranks
    assert {"rank 0", "rank 3", "forward", "backward"} <= {*texts}
    assert sorted(colors_of(picture).values()) == [32 + 1] * 2  # and the legend


def test_the_same_layout_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        draw_timeline("GPipe", order_of("GPipe", 2, 1, 4), tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_configuration_is_drawn_without_torch(tmp_path: Path) -> None:
    words = ["draw", "debug_model.toml", "--world-size", "8", *LAYOUT]
    words += ["--mesh", "mesh.svg", "--pipeline", "pipeline.png"]
    words += ["--parallelism.pipeline_parallel_schedule", "1F1B"]
    code = (
        "import sys; from torchtitan_like.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{':'.join(sys.path)}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["Wrote mesh.svg", "Wrote pipeline.png"]
    assert "8 ranks = pp 2 x dp_shard 2 x tp 2" in texts_of(tmp_path / "mesh.svg")
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = str(tmp_path / "mesh.svg")

    def message_of(code: int, *words: str) -> str:
        assert main(["draw", "debug_model.toml", *words]) == code
        assert list(tmp_path.iterdir()) == []
        return capsys.readouterr().err

    assert "Expected --mesh or --pipeline" in message_of(2, "--world-size", "8")
    assert "has no pipeline" in message_of(2, "--world-size", "8", "--pipeline", mesh)
    three = ["--world-size", "3", "--parallelism.tensor_parallel_degree", "2"]
    assert "the world has 3 ranks" in message_of(78, *three, "--mesh", mesh)
    with pytest.raises(ValueError, match="The mesh has 2,048 ranks"):
        draw_mesh(ParallelDims(2048, dp_shard=2048), 8, tmp_path / "mesh.svg")
