"""The shipped descriptions of clusters are complete, and mistakes are explained."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from torchtitan_like.plan.clusters import (
    FOLDER,
    cluster_names,
    load_cluster,
    typical_cluster,
)
from torchtitan_like.plan.descriptions import names_in
from torchtitan_like.plan.gpus import FOLDER as GPUS
from torchtitan_like.plan.gpus import load_gpu
from torchtitan_like.plan.plan_report import caveats

ROWS = Path(__file__).parents[2] / "assets/published_runs.csv"


@pytest.mark.parametrize("name", cluster_names())
def test_each_cluster_is_fitted_to_at_most_three_rows_none_of_them_held_out(name: str) -> None:
    cluster = load_cluster(name)
    with ROWS.open() as file:
        split = {row["id"]: row["split"] for row in csv.DictReader(file)}
    assert len(cluster.fitted_rows) <= 3
    assert {split[row] for row in cluster.fitted_rows} <= {"fit"}
    assert cluster.gpu in ("", *names_in(GPUS))
    assert bool(cluster.fitted_rows) == (name != "default")
    assert (FOLDER / f"{name}.toml").read_text().startswith("# ")  # its sources


@pytest.mark.parametrize(
    ("gpu", "note"),
    [
        ("b200-180g", "unvalidated: no run on this GPU, NVIDIA B200"),
        ("h200-141g", "runs on this GPU were compared in one cluster only: h200-whitefiber"),
        ("h100-96g", ""),
    ],
)
def test_plans_say_how_many_runs_on_their_gpu_were_compared(gpu: str, note: str) -> None:
    first = caveats(load_gpu(gpu), typical_cluster(gpu, 8))[0]
    assert first.startswith(note or "the speed is not fitted to runs of this cluster")


def test_the_default_has_the_mean_factor_of_the_clusters_with_its_gpu() -> None:
    default, typical = load_cluster("default"), typical_cluster("h100-96g", 8)
    factors = [load_cluster(name).matmul_factor for name in ("grand-teton-h100", "h100-hosts-2025")]
    assert min(factors) < typical.matmul_factor < max(factors)
    assert typical.matmul_factor**2 == pytest.approx(factors[0] * factors[1], rel=0.01)
    assert (typical.key, typical.error_percent) == ("default", default.error_percent)
    assert typical.fitted_rows == () and "grand-teton-h100 and h100-hosts-2025" in typical.name
    assert typical_cluster("mi300x-192g", 8) == default


def test_one_gpu_alone_is_as_fast_as_its_file_says() -> None:
    assert typical_cluster("h200-141g", 1).matmul_factor == 1
    assert typical_cluster("h200-141g", 2).matmul_factor < 1


def test_an_unknown_cluster_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="there is no cluster 'dgxh100'.*default.*mean dgx-h100"):
        load_cluster("dgxh100")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus_per_node = 8", "", "gpus_per_node"),
        ("gpus_per_node = 8", "gpus_per_node = 8\nrails = 8", "rails"),
        ("gpus_per_node = 8", "gpus_per_node = 0", "above 0 and at most 1024"),
        ("gpus_per_node = 8", "gpus_per_node = 8.5", "gpus_per_node = 8.5"),
        ("inter_node_gb_s = 50", 'inter_node_gb_s = "50"', "inter_node_gb_s = '50'"),
        ("matmul_factor = 0.8", "matmul_factor = 80", "above 0 and at most 2:"),
    ],
)
def test_bad_files_name_the_field_and_what_is_expected(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    text = (FOLDER / "default.toml").read_text()
    assert old in text
    path = tmp_path / "own.toml"
    path.write_text(text)
    assert load_cluster(str(path)).gpus_per_node == 8
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message) as error:
        load_cluster(str(path))
    assert "correct the file" in str(error.value)
