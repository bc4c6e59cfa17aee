"""Descriptions of GPUs: one TOML file for each, with its sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchtitan_like.config.layers import parse_toml
from torchtitan_like.util.suggestions import nearest

FOLDER = Path(__file__).parent
DEFAULT_GPU = "h100-80g"


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    memory_gib: total memory as PyTorch reports it. peak_tflops: dense, by dtype. hbm_tb_s: bandwidth
    of its memory. link_gb_s: of its links to the GPUs of the same node, per direction.
    cublas_workspace_mib: what PyTorch allocates for each cuBLAS handle.
    """

    key: str
    name: str
    memory_gib: float
    hbm_tb_s: float
    multiprocessors: int
    link_gb_s: float
    cublas_workspace_mib: float
    peak_tflops: dict[str, float]


def gpu_names() -> list[str]:
    """Return the names that `load_gpu` accepts, next to paths of files."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_gpu(name: str) -> Gpu:
    """Read a GPU by name, or from a TOML file of the same form.

    Raises ValueError if there is neither, or if a field is missing or unknown.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        names = gpu_names()
        similar = nearest(name, names)
        remedy = f"did you mean {similar}?" if similar else "choose one, or write such a file"
        raise ValueError(
            f"there is no GPU {name!r}. Expected {', '.join(names)}, or a TOML file: {remedy}"
        ) from None
    fields = {"key": path.stem, **parse_toml(text)}
    try:
        return Gpu(**fields)
    except TypeError as error:
        wanted = ", ".join(sorted(Gpu.__dataclass_fields__.keys() - {"key"}))
        raise ValueError(
            f"{path} does not describe a GPU: {error}. Expected the fields {wanted}: correct the file"
        ) from None
