"""Print the predicted time of a step: a table of its parts, and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_like.plan.clusters import Cluster, is_validated
from torchtitan_like.plan.gpus import Gpu
from torchtitan_like.plan.timeline import StepTime


def caveats(gpu: Gpu, cluster: Cluster) -> list[str]:
    """Return what a reader must know about the times of this GPU and cluster."""
    notes = []
    if not is_validated(gpu.key):
        notes.append(f"unvalidated: no published run on {gpu.name} was compared with these times")
    if Path(cluster.gpu).stem not in ("", gpu.key):
        notes.append(f"the constants of cluster {cluster.key} were fitted on {cluster.gpu}")
    if gpu.device_type == "cpu":
        notes.append(
            "times of CPU ranks are CPU seconds: on as many free cores, and without waiting"
        )
    if not cluster.fitted_rows:
        notes.append("the shares of the peaks are not fitted to runs of this cluster")
    if cluster.error_source:
        notes.append(f"+-{cluster.error_percent:g} %: {cluster.error_source}")
    return notes


def lines(time: StepTime, gpu: Gpu, cluster: Cluster) -> Iterator[str]:
    """Yield the lines that `titan plan X.toml` prints about time."""
    yield ""
    yield f"{'Seconds of a step on rank ' + str(time.rank):34}{'':>10}     share"
    for part, seconds in time.parts.items():
        yield f"{part:34}{seconds:10.4f}{100 * seconds / time.seconds:8.1f} %"
    yield f"{'= step':34}{time.seconds:10.4f}"
    yield f"Cluster: {cluster.name}"
    for note in caveats(gpu, cluster):
        yield f"Note: {note}"
    device = {"cuda": "GPU", "cpu": "rank"}[gpu.device_type]
    yield (
        f"{time.seconds:.3g} s a step, {time.tokens_per_second:,.0f} tokens/s of each {device}, "
        f"MFU {time.mfu:.1f} %: each +-{time.error_percent:g} %"
    )


def as_json(time: StepTime, gpu: Gpu, cluster: Cluster) -> dict[str, Any]:
    """Return what `--json` prints about time."""
    return {"cluster": cluster.key, **asdict(time), "notes": caveats(gpu, cluster)}
