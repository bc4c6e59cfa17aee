"""The shipped descriptions of clusters are complete, and mistakes are explained."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from torchtitan_like.plan.clusters import (
    FOLDER,
    cluster_names,
    is_validated,
    load_cluster,
    typical_cluster,
)
from torchtitan_like.plan.descriptions import names_in
from torchtitan_like.plan.gpus import FOLDER as GPUS

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


def test_gpus_without_a_published_run_are_unvalidated() -> None:
    assert is_validated("h100-96g")
    assert not is_validated("mi300x-192g")


def test_the_default_has_the_mean_shares_of_the_clusters_with_its_gpu() -> None:
    default, typical = load_cluster("default"), typical_cluster("h100-96g")
    shares = [
        load_cluster(name).matmul_efficiency for name in ("grand-teton-h100", "h100-hosts-2025")
    ]
    assert min(shares) < typical.matmul_efficiency < max(shares)
    assert typical.matmul_efficiency**2 == pytest.approx(shares[0] * shares[1], rel=0.01)
    assert (typical.key, typical.error_percent) == ("default", default.error_percent)
    assert typical.fitted_rows == () and "grand-teton-h100 and h100-hosts-2025" in typical.name
    assert typical_cluster("mi300x-192g") == default


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
        ("matmul_efficiency = 0.72", "matmul_efficiency = 72", "above 0 and at most 1:"),
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
