"""Predicted weak scaling to 16,384 GPUs, on paper: no GPU is used.

    python -m benchmarks.weak_scaling predict CURVES.csv
    python -m benchmarks.weak_scaling draw CURVES.csv PICTURE.svg

Each model keeps its tokens per GPU and step (`MODELS`). At each size, the layout is the fastest one
by the closed form of `titan plan search` that fits, of those in `is_considered`. `predict` dry-runs
it with a few layers, and takes the next one if it does not fit.
`draw` draws the CSV file, and prints its table.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from torchtitan_like.plan import closed_form
from torchtitan_like.plan.clusters import Cluster, load_cluster
from torchtitan_like.plan.gpus import Gpu, load_gpu
from torchtitan_like.plan.layouts import (
    Layout,
    Pipeline,
    Space,
    apply,
    meshes,
    variants,
)
from torchtitan_like.plan.search import Screened, rank, space_of
from torchtitan_like.util.pictures import PALETTE, picture

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = "grand-teton-h100"
MAX_MEMORY = 0.92  # fraction of a GPU's memory, as `titan plan search`
MAX_SHARDS = 256  # the closed form has no latency; more data-parallel ranks are replicas
MAX_DRY_RUNS = 6
REFERENCE = 512  # GPUs. On fewer, memory forces some models into slower layouts
PIPELINES = (None, Pipeline("1F1B", 1), Pipeline("Interleaved1F1B", 2))


class Model(NamedTuple):
    """A model and its smallest size. tokens: of a GPU in a step."""

    name: str
    config: str
    tokens: int
    smallest: int


MODELS = (
    Model("llama3 8B", "llama3_8b", 8192, 8),
    Model("llama3 70B", "llama3_70b", 2048, 32),
    Model("llama3 405B", "llama3_405b", 1024, 512),
    Model("qwen3 30B-A3B", "qwen3_30b_a3b", 8192, 8),
)


class Point(NamedTuple):
    """A model on a number of GPUs. Tokens/s of one GPU.

    formula_tps: by the closed form. dry_run_tps, gib, exposed: of the dry run.
    exposed: fraction of the step that waits for communication.
    """

    model: str
    gpus: int
    step_tokens: int
    layout: str
    formula_tps: float
    dry_run_tps: float
    gib: float
    exposed: float


def sizes_of(model: Model) -> list[int]:
    """Return the numbers of GPUs: powers of two up to 16,384."""
    return [2**power for power in range(3, 15) if 2**power >= model.smallest]


def space_for(model: Model, gpus: int, cluster: Cluster) -> Space:
    """Return the layouts of a model on this many GPUs, with its tokens per GPU."""
    from torchtitan_like.check import load_checked

    file = ROOT / f"torchtitan_like/train_configs/{model.config}.toml"
    argv = ["--job.config_file", str(file)]
    config, _ = load_checked(argv, None, training=False, device_type="cuda")
    samples = model.tokens * gpus // config.training.seq_len
    return space_of(config, gpus, cluster.gpus_per_node, samples)


def is_considered(layout: Layout, space: Space) -> bool:
    """Return True for a layout with common schedules, as many shards as possible, and whole steps."""
    shards = layout.shard * layout.cp
    return (
        layout.pipeline in PIPELINES
        and (layout.replicate == 1 or shards == MAX_SHARDS)
        and shards <= MAX_SHARDS
        and layout.num_micro >= 1
        and layout.dp * layout.micro_batch * layout.num_micro == space.global_batch
    )


def fastest(space: Space, gpu: Gpu, cluster: Cluster) -> Iterator[Screened]:
    """Yield the legal layouts that fit, fastest first, by the closed form."""
    from torchtitan_like.check import check_layout
    from torchtitan_like.models.spec import get_spec, resolve_args

    config = space.config
    spec = get_spec(config.model.name)
    args = resolve_args(spec, config.model.flavor, config.model.args)
    sizes = closed_form.sizes_of(spec, args, config.training.seq_len)
    network = closed_form.network_of(gpu, cluster.gpus_per_node, cluster.inter_node_gb_s)
    screened = [
        Screened(
            layout,
            closed_form.memory_gib(layout, sizes, space),
            closed_form.seconds(layout, sizes, space, gpu, network),
        )
        for mesh in meshes(space)
        for layout in variants(space, mesh)
        if is_considered(layout, space)
    ]
    fitting = (each for each in screened if each.gib <= MAX_MEMORY * gpu.memory_gib)
    for each in sorted(fitting, key=rank):
        if not check_layout(apply(each.layout, space), space.world_size, spec, args):
            yield each


def predict(model: Model, gpus: int, gpu: Gpu, cluster: Cluster) -> Point | None:
    """Return the point of a model and size; None if no layout fits.

    The layout is the first of `MAX_DRY_RUNS` that fits in the dry run, too.
    """
    space = space_for(model, gpus, cluster)
    for screened in islice(fastest(space, gpu, cluster), MAX_DRY_RUNS):
        point = dry_run(model, screened, space, gpu, cluster)
        print(point, file=sys.stderr)
        if point.gib <= MAX_MEMORY * gpu.memory_gib:
            return point
    return None


def dry_run(model: Model, screened: Screened, space: Space, gpu: Gpu, cluster: Cluster) -> Point:
    """Return the point of a layout, with the time and memory of a dry run with a few layers."""
    from torchtitan_like.plan.dry_run import DryRun, record_jobs
    from torchtitan_like.plan.extend import Depth, all_jobs, estimate

    layout, gpus = screened.layout, space.world_size
    jobs = list(all_jobs([layout], space, gpu, is_full=False))
    by_depth: dict[Depth, list[DryRun]] = {}
    for index, run in record_jobs([job for _, _, job in jobs]):
        if isinstance(run, RuntimeError):
            raise run
        by_depth.setdefault(jobs[index][1], []).append(run)
    value = estimate(layout, space, dict(sorted(by_depth.items())), gpu, cluster)
    return Point(
        model.name,
        gpus,
        model.tokens * gpus,
        f"{layout.name}, {layout.micro_batch} x {layout.num_micro}, {layout.details}",
        formula_tps=round(model.tokens / screened.seconds, 1),
        dry_run_tps=round(model.tokens / value.seconds, 1),
        gib=round(value.gib, 1),
        exposed=round(value.exposed / value.seconds, 3),
    )


# ---- file, table, and picture


def write_csv(points: Sequence[Point], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Point._fields)
        writer.writerows(points)


def read_csv(path: Path) -> list[Point]:
    """Read the points of `write_csv`."""
    with path.open(newline="") as file:
        return [
            Point(
                row["model"],
                int(row["gpus"]),
                int(row["step_tokens"]),
                row["layout"],
                float(row["formula_tps"]),
                float(row["dry_run_tps"]),
                float(row["gib"]),
                float(row["exposed"]),
            )
            for row in csv.DictReader(file)
        ]


def efficiencies(points: Sequence[Point], kind: str) -> dict[int, float]:
    """Return the tokens/s of a GPU by size, as a fraction of those on `REFERENCE` GPUs, of one model.

    kind: "formula_tps" or "dry_run_tps".
    """
    rates = {point.gpus: getattr(point, kind) for point in points}
    return {gpus: rate / rates[REFERENCE] for gpus, rate in rates.items()}


def by_model(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points of each model, in their order."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.model, []).append(point)
    return groups


def lines(points: Sequence[Point]) -> list[str]:
    """Return the Markdown table."""
    head = ("model", "GPUs", "tokens of a step", "layout", "closed form, tokens/s/GPU",
            "dry run, tokens/s/GPU", f"of {REFERENCE} GPUs (dry run)", "GiB", "waits for communication")  # fmt: skip
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for group in by_model(points).values():
        share = efficiencies(group, "dry_run_tps")
        for point in group:
            cells = [
                point.model,
                f"{point.gpus:,}",
                _tokens(point.step_tokens),
                point.layout,
                f"{point.formula_tps:,.0f}",
                f"{point.dry_run_tps:,.0f}",
                f"{share[point.gpus]:.0%}",
                f"{point.gib:.0f}",
                f"{point.exposed:.0%}",
            ]
            rows.append("| " + " | ".join(cells) + " |")
    return rows


def _tokens(number: int) -> str:
    return f"{number / 1e6:.3g} M" if number >= 1_000_000 else f"{number / 1e3:.3g} k"


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw the efficiency of each model over the number of GPUs."""
    with picture(path, 7.5, 4.5) as figure:
        axes = figure.subplots()
        for (name, group), color in zip(by_model(points).items(), PALETTE, strict=False):
            formula = efficiencies(group, "formula_tps")
            dry = efficiencies(group, "dry_run_tps")
            axes.plot(list(formula), list(formula.values()), color=color, linestyle=":")
            axes.plot(list(dry), list(dry.values()), color=color, marker="o", label=name)
        axes.set_xscale("log", base=2)
        sizes = sorted({point.gpus for point in points})
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
        axes.set_ylim(0, 1.2)
        axes.set_xlabel("GPUs")
        axes.set_ylabel(f"tokens/s of a GPU, relative to {REFERENCE} GPUs")
        axes.set_title("Predicted weak scaling (dotted: closed form)", fontsize="medium")
        axes.grid(visible=True)
        axes.legend(frameon=False, loc="lower left")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("predict", "draw"))
    parser.add_argument("curves", type=Path, help="CSV file")
    parser.add_argument("picture", type=Path, nargs="?", help="SVG file, for draw")
    arguments = parser.parse_args(argv)
    if arguments.command == "predict":
        cluster = load_cluster(CLUSTER)
        gpu = load_gpu(cluster.gpu)
        points = []
        for model in MODELS:
            for gpus in sizes_of(model):
                start = time.monotonic()
                point = predict(model, gpus, gpu, cluster)
                seconds = time.monotonic() - start
                print(f"{model.name}, {gpus} GPUs, {seconds:.0f} s: {point}", file=sys.stderr)
                if point is not None:
                    points.append(point)
                    write_csv(points, arguments.curves)
    points = read_csv(arguments.curves)
    if arguments.picture is not None:
        draw(points, arguments.picture)
    print("\n".join(lines(points)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
