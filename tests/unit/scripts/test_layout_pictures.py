"""The scripts in docs/images draw the committed pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.harness.runner import ROOT
from tests.unit.plan.test_plan_pictures import colors_of, texts_of

IMAGES = ROOT / "docs/images"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("pictures")
    for name in ("layouts", "house"):
        spec = importlib.util.spec_from_file_location(name, IMAGES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        script.main(folder)
    return folder


@pytest.mark.parametrize("name", ["mesh.svg", "pipeline.svg", "house.svg"])
def test_the_committed_pictures_are_drawn_by_the_script(drawn: Path, name: str) -> None:
    assert texts_of(drawn / name) == texts_of(IMAGES / name)
    assert colors_of(drawn / name) == colors_of(IMAGES / name)


def test_the_mesh_has_every_rank_and_its_coordinates(drawn: Path) -> None:
    texts = texts_of(drawn / "mesh.svg")
    assert "16 ranks = pp 2 x dp_shard 4 x tp 2, on 2 nodes of 8" in texts
    assert {*map(str, range(16)), "pp 0  dp_shard 0", "pp 1  dp_shard 3", "tp 0", "tp 1"} <= {
        *texts
    }
    assert sorted(colors_of(drawn / "mesh.svg").values()) == [8, 8]  # each node has a color


def test_the_schedule_has_every_action(drawn: Path) -> None:
    texts = texts_of(drawn / "pipeline.svg")
    assert "1F1B: 4 stages on 4 ranks, 8 micro-batches, bubble 27.3%" in texts
    assert texts.count("5") == 8  # forward and backward of a micro-batch on 4 ranks
    assert {"rank 0", "rank 3", "forward", "backward"} <= {*texts}
    assert sorted(colors_of(drawn / "pipeline.svg").values()) == [32 + 1] * 2  # and the legend
