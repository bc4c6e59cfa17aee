"""The choice of layouts for the scaling curves, and the page's table and picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import weak_scaling as scaling
from tests.harness.runner import ROOT
from torchtitan_like.plan.clusters import load_cluster
from torchtitan_like.plan.gpus import load_gpu
from torchtitan_like.plan.layouts import Layout, Pipeline

CSV = ROOT / "docs/benchmarks/2026-11-25-scaling.csv"
CLUSTER = load_cluster(scaling.CLUSTER)
GPU = load_gpu(CLUSTER.gpu)
LLAMA_8B, LLAMA_405B = scaling.MODELS[0], scaling.MODELS[2]


def test_a_gpu_keeps_its_tokens_at_each_size() -> None:
    for model in scaling.MODELS:
        for gpus in (model.smallest, 16384):
            space = scaling.space_for(model, gpus, CLUSTER)
            assert space.global_batch * space.config.training.seq_len == model.tokens * gpus


def test_chosen_layouts_use_all_gpus_and_fit() -> None:
    space = scaling.space_for(LLAMA_8B, 1024, CLUSTER)
    chosen = list(scaling.fastest(space, GPU, CLUSTER))
    assert chosen
    for screened in chosen:
        layout = screened.layout
        assert layout.pp * layout.cp * layout.tp * layout.dp == 1024
        assert screened.gib <= 0.92 * GPU.memory_gib
    seconds = [float(f"{screened.seconds:.2g}") for screened in chosen]
    assert seconds == sorted(seconds)


def test_more_than_256_shards_are_replicas() -> None:
    space = scaling.space_for(LLAMA_8B, 1024, CLUSTER)
    layout = Layout(1, 4, 256, 1, 1, 1, 1, None, 1, 1, "op", True)
    assert scaling.is_considered(layout, space)
    assert not scaling.is_considered(replace(layout, replicate=1, shard=1024), space)
    assert not scaling.is_considered(replace(layout, replicate=8, shard=128), space)
    assert not scaling.is_considered(replace(layout, num_micro=2), space)
    other = replace(layout, pipeline=Pipeline("DualPipeV", 2))
    assert not scaling.is_considered(other, space)


def test_a_size_without_a_fitting_layout_has_no_point() -> None:
    assert scaling.predict(LLAMA_405B, 64, GPU, CLUSTER) is None


def test_efficiencies_are_relative_to_512_gpus() -> None:
    points = [
        scaling.Point("m", 1024, 1, "", 90.0, 40.0, 70.0, 0.1),
        scaling.Point("m", 512, 1, "", 100.0, 50.0, 70.0, 0.1),
    ]
    formula = scaling.efficiencies(points, "formula_tps")
    assert formula == pytest.approx({512: 1, 1024: 0.9})
    assert scaling.efficiencies(points, "dry_run_tps") == pytest.approx({512: 1, 1024: 0.8})


def test_points_survive_the_file(tmp_path: Path) -> None:
    points = [
        scaling.Point("m", 8, 65536, "FSDP 8, 1 x 1, AC op", 100.5, 50.0, 70.1, 0.02),
        scaling.Point("m", 16, 131072, "FSDP 16, 1 x 1, AC op", 99.0, 49.5, 65.0, 0.03),
    ]
    scaling.write_csv(points, tmp_path / "curves.csv")
    assert scaling.read_csv(tmp_path / "curves.csv") == points


def test_the_page_has_the_table_of_the_committed_points() -> None:
    text = (ROOT / "docs/benchmarks/2026-11-25-scaling.md").read_text(encoding="utf-8")
    for line in scaling.lines(scaling.read_csv(CSV)):
        assert line in text


def test_the_committed_picture_is_drawn_from_the_committed_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scaling.draw(scaling.read_csv(CSV), tmp_path / "scaling.svg")
    committed = (ROOT / "docs/images/scaling.svg").read_text(encoding="utf-8")
    drawn = (tmp_path / "scaling.svg").read_text(encoding="utf-8")
    for model in scaling.MODELS:
        assert model.name in drawn and model.name in committed
    assert drawn.count("<path") == committed.count("<path")
