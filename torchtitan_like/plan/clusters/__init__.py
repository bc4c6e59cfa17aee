"""Descriptions of clusters: how nodes are connected, and what share of the peaks kernels reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

from torchtitan_like.config.toml_text import toml_value
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
    matmul_efficiency: of the peak, for a large matrix product.
    memory_efficiency: of the memory bandwidth, for a large kernel that it limits.
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
    matmul_efficiency: float
    memory_efficiency: float
    async_tp_hidden: float
    fitted_rows: tuple[str, ...] = ()
    error_source: str = ""


# Fields of a file -> (type, exclusive lower bound, inclusive upper bound).
_RANGES: dict[str, tuple[type, float, float]] = {
    "gpus_per_node": (int, 0, 1024),
    "inter_node_gb_s": (float, 0, 1e6),
    "error_percent": (float, 0, 100),
    "matmul_efficiency": (float, 0, 1),
    "memory_efficiency": (float, 0, 1),
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


def is_validated(gpu: str) -> bool:
    """Return True if published runs on this GPU were compared with predictions."""
    return bool(_fitted_on(gpu))


def typical_cluster(gpu: str) -> Cluster:
    """Return the default cluster, with the mean shares of the fitted clusters with a GPU.

    Without such a cluster, the shares stay those of the default.
    """
    fitted = _fitted_on(gpu)
    return with_mean_shares(fitted) if fitted else load_cluster(DEFAULT_CLUSTER)


def with_mean_shares(clusters: Sequence[Cluster]) -> Cluster:
    """Return the default cluster, with the geometric means of the clusters' shares of the peaks."""
    default = load_cluster(DEFAULT_CLUSTER)
    matmul = geometric_mean(cluster.matmul_efficiency for cluster in clusters)
    memory = geometric_mean(cluster.memory_efficiency for cluster in clusters)
    names = " and ".join(cluster.key for cluster in clusters)
    return replace(
        default,
        name=f"{default.name}, shares of the peaks as {names}",
        matmul_efficiency=round(matmul, 3),
        memory_efficiency=round(memory, 3),
    )


def _fitted_on(gpu: str) -> list[Cluster]:
    clusters = (load_cluster(name) for name in cluster_names())
    return [cluster for cluster in clusters if cluster.gpu == gpu and cluster.fitted_rows]


def cluster_text(cluster: Cluster, comment: str) -> str:
    """Return the TOML text that `load_cluster` reads. comment: its first lines, without "#"."""
    lines = [f"# {line}" for line in comment.splitlines()]
    for name, value in vars(cluster).items():
        if name != "key":
            text = toml_value(list(value) if isinstance(value, tuple) else value)
            lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"
