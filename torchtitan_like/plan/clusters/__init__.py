"""Descriptions of clusters: how nodes are connected, and how fast their GPUs compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

from torchtitan_like.plan.descriptions import create, names_in, read_description

FOLDER = Path(__file__).parent
DEFAULT_CLUSTER = "default"


@dataclass(frozen=True)
class Cluster:
    """A cluster of nodes of one kind of GPU.

    gpu: name of the GPU on which the constants were fitted, or path of its file; "" for any.
    gpus_per_node: GPUs that NVLink (or its like) connects.
    inter_node_gb_s: of one GPU's network card, per direction.
    error_percent: of predicted step times. error_source: what it was measured on; "" for other runs
    of such clusters.
    matmul_factor: speed of matrix products and attention, relative to the GPU alone (`Gpu.matmul_share`).
    A power limit and older software lower it.
    async_tp_hidden: share of tensor-parallel communication that asynchronous TP overlaps.
    fitted_rows: what the constants were fitted to, published runs or measurements; empty for
    assumptions.
    """

    key: str
    name: str
    gpu: str
    gpus_per_node: int
    inter_node_gb_s: float
    error_percent: float
    matmul_factor: float
    async_tp_hidden: float
    fitted_rows: tuple[str, ...] = ()
    error_source: str = ""


# Fields of a file -> (type, exclusive lower bound, inclusive upper bound).
_RANGES: dict[str, tuple[type, float, float]] = {
    "gpus_per_node": (int, 0, 1024),
    "inter_node_gb_s": (float, 0, 1e6),
    "error_percent": (float, 0, 100),
    "matmul_factor": (float, 0, 2),
    "async_tp_hidden": (float, -1e-9, 1),
}


def upper_bound(field: str) -> float:
    """Return the largest value of a number in a file."""
    return _RANGES[field][2]


def cluster_names() -> list[str]:
    """Return the names that `load_cluster` accepts, next to paths of files."""
    return names_in(FOLDER)


def load_cluster(name: str) -> Cluster:
    """Read a cluster by name, or from a TOML file of the same form.

    Raises ValueError if there is neither, or if a field is missing, unknown or out of range.
    """
    path, fields = read_description(name, FOLDER, "cluster")
    for field, (kind, low, high) in _RANGES.items():
        value = fields.get(field, high)
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not is_number or not low < value <= high:
            raise ValueError(
                f"{path}: {field} = {value!r}. Expected a number above {max(low, 0):g} and at most "
                f"{high:g}: correct the file"
            )
    fields["fitted_rows"] = tuple(fields.get("fitted_rows", ()))
    if str(fields.get("gpu", "")).endswith(".toml"):
        fields["gpu"] = str(path.parent / fields["gpu"])
    return create(Cluster, fields, path, "cluster")


def clusters_with(gpu: str) -> list[Cluster]:
    """Return the shipped clusters that are fitted to runs on a GPU."""
    clusters = (load_cluster(name) for name in cluster_names())
    return [cluster for cluster in clusters if cluster.gpu == gpu and cluster.fitted_rows]


def typical_cluster(gpu: str, world_size: int) -> Cluster:
    """Return the default cluster, with the mean factor of the clusters that have a GPU.

    Without such a cluster, the factor stays that of the default. One GPU alone has none.
    """
    default = load_cluster(DEFAULT_CLUSTER)
    if world_size == 1:
        return replace(default, name="one GPU alone", matmul_factor=1.0)
    fitted = clusters_with(gpu)
    return with_mean_factor(fitted) if fitted else default


def with_mean_factor(clusters: Sequence[Cluster]) -> Cluster:
    """Return the default cluster, with the geometric mean of the clusters' factors."""
    default = load_cluster(DEFAULT_CLUSTER)
    factor = geometric_mean(cluster.matmul_factor for cluster in clusters)
    names = " and ".join(cluster.key for cluster in clusters)
    return replace(
        default,
        name=f"{default.name}, as fast as {names}",
        matmul_factor=round(factor, 3),
    )
