"""Print the layouts that a search has found, and write the best one as a TOML file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_like.config.toml_text import extending_toml
from torchtitan_like.models.spec import describe_size, get_spec, resolve_args
from torchtitan_like.plan.durations import mfu_peak
from torchtitan_like.plan.layouts import Layout, Space, settings_of
from torchtitan_like.plan.search import SearchResult

if TYPE_CHECKING:
    from torchtitan_like.plan.clusters import Cluster
    from torchtitan_like.plan.extend import Estimate
    from torchtitan_like.plan.gpus import Gpu

BAR = 20  # characters
DAY, HOUR = 86400.0, 3600.0
NUM_QUOTED = 5  # refusals


class Request(NamedTuple):
    """What a search was asked for. limit: fraction of the memory. tokens: of the whole training.

    price: of a GPU for one hour, in any currency; None if it is not known.
    """

    gpu: Gpu
    cluster: Cluster
    limit: float
    tokens: float
    price: float | None


class Numbers(NamedTuple):
    """What a layout reaches. mfu: percent. exposed: fraction of the step. cost: None without a price."""

    tokens_per_gpu: float
    mfu: float
    exposed: float
    days: float
    cost: float | None


def numbers(estimate: Estimate, space: Space, request: Request) -> Numbers:
    """Return the numbers of a layout that follow from its step time."""
    config = space.config
    spec = get_spec(config.model.name)
    args = resolve_args(spec, config.model.flavor, config.model.args)
    tokens = space.global_batch * config.training.seq_len
    rate = tokens / estimate.seconds
    peak = mfu_peak(config.training.mixed_precision_param, request.gpu)
    seconds = request.tokens / rate
    cost = None
    if request.price is not None:
        cost = seconds / HOUR * space.world_size * request.price
    return Numbers(
        rate / space.world_size,
        100 * rate / space.world_size * spec.flops_per_token(args, config.training.seq_len) / peak,
        estimate.exposed / estimate.seconds,
        seconds / DAY,
        cost,
    )


def lines(found: SearchResult, request: Request) -> Iterator[str]:
    """Yield the lines that `titan plan search` prints."""
    space = found.space
    yield from _head(space, request)
    yield ""
    for number, (layout, estimate) in enumerate(found.ranked, start=1):
        yield from _row(number, layout, estimate, space, request)
        if number > 1:
            yield f"    {why_slower(estimate, found.ranked[0][1])}"
    if not found.ranked:
        yield _nothing_fits(found, request)
    yield ""
    yield from _tail(found, request)


def _head(space: Space, request: Request) -> Iterator[str]:
    config = space.config
    spec = get_spec(config.model.name)
    size = describe_size(spec, resolve_args(spec, config.model.flavor, config.model.args))
    tokens = space.global_batch * config.training.seq_len
    yield (
        f"{config.model.name} {config.model.flavor}: {size}; {space.world_size:,} x "
        f"{request.gpu.name}, {request.cluster.gpus_per_node} on a node"
    )
    yield (
        f"Steps of {space.global_batch:,} samples x {config.training.seq_len:,} tokens = "
        f"{tokens:,} tokens; times +- {request.cluster.error_percent:g} % "
        f"({request.cluster.name})"
    )


def _row(
    number: int, layout: Layout, estimate: Estimate, space: Space, request: Request
) -> Iterator[str]:
    reached = numbers(estimate, space, request)
    share = estimate.gib / request.gpu.memory_gib
    samples = f"{layout.num_micro} x {layout.micro_batch}"
    mark = " " if estimate.is_full else "~"
    yield (
        f"{number:>2}. {layout.name:32} {samples:>8} {mark}{estimate.gib:6.1f} GiB {bar(share)} "
        f"{100 * share:3.0f} %  {estimate.seconds:8.3f} s/step"
    )
    cost = "" if reached.cost is None else f", cost {reached.cost:,.0f}"
    bubble = f"bubble {100 * estimate.bubble:.1f} %, " if layout.pipeline else ""
    yield (
        f"    {layout.details}: {reached.tokens_per_gpu:,.0f} tokens/s/GPU, MFU {reached.mfu:.1f} %, "
        f"{bubble}exposed {100 * reached.exposed:.1f} %, {reached.days:,.1f} days{cost}"
    )


def bar(share: float) -> str:
    """Return a bar of a fraction of the memory."""
    filled = min(BAR, round(share * BAR))
    return f"[{'=' * filled}{'.' * (BAR - filled)}]"


def why_slower(estimate: Estimate, best: Estimate) -> str:
    """Return by what a layout is slower than the best one."""
    more = estimate.seconds - best.seconds
    parts = {
        "bubble": estimate.bubble * estimate.seconds - best.bubble * best.seconds,
        "exposed communication": estimate.exposed - best.exposed,
    }
    parts["computing and the rest"] = more - sum(parts.values())
    terms = [
        f"{value:+.3f} s {name}"
        for name, value in sorted(parts.items(), key=lambda item: -item[1])
        if abs(value) >= 0.0005
    ]
    return f"{more:+.3f} s a step: {', '.join(terms) or 'no difference'}"


def _nothing_fits(found: SearchResult, request: Request) -> str:
    smallest = f"{found.smallest.gib:.0f} GiB by formula" if found.smallest else ""
    if found.rejected:
        smallest = f"{min(estimate.gib for _, estimate in found.rejected):.1f} GiB"
    needs = f": the smallest takes {smallest}" if smallest else ""
    return (
        f"Nothing fits into {100 * request.limit:g} % of {request.gpu.memory_gib:.1f} GiB{needs}. "
        "Use more GPUs, shorter sequences or a smaller model"
    )


def _tail(found: SearchResult, request: Request) -> Iterator[str]:
    yield f"{found.num_layouts:,} layouts"
    for refusal in found.refusals[:NUM_QUOTED]:
        yield f"  {refusal.num_layouts:,} refused by {refusal.rule}, such as: {refusal.problem}"
    others = sum(refusal.num_layouts for refusal in found.refusals[NUM_QUOTED:])
    if others:
        yield f"  {others:,} refused by {len(found.refusals) - NUM_QUOTED} other rules"
    if found.smallest is not None:
        layout = found.smallest.layout
        yield (
            f"  {found.num_too_large:,} do not fit by formula; the smallest of them, {layout.name} "
            f"({layout.details}), takes {found.smallest.gib:.0f} GiB"
        )
    for layout, estimate in found.rejected:
        yield (
            f"  {layout.name} ({layout.details}) does not fit: {estimate.gib:.1f} GiB of "
            f"{request.limit * request.gpu.memory_gib:.1f}"
        )
    for layout, message in found.failed.items():
        yield f"  {layout.name} ({layout.details}) failed: {message.strip().splitlines()[-1]}"
    if found.slower is not None:
        slower = found.slower
        yield (
            f"  {found.num_slower:,} were not dry-run. By formula they are slower, or need more "
            "memory, or they differ little from a layout above. The fastest of them is "
            f"{slower.layout.name} ({slower.layout.details})"
        )
    if any(not estimate.is_full for _, estimate in found.ranked):
        yield "~ a few layers were dry-run, and extended to all of them"


def as_json(found: SearchResult, request: Request) -> dict[str, Any]:
    """Return what `--json` prints. Sizes are GiB, times seconds."""
    space = found.space

    def row(layout: Layout, estimate: Estimate) -> dict[str, Any]:
        return {
            "name": layout.name,
            "layout": asdict(layout),
            "settings": settings_of(layout, space),
            **asdict(estimate),
            **numbers(estimate, space, request)._asdict(),
        }

    return {
        "world_size": space.world_size,
        "gpu": request.gpu.key,
        "cluster": request.cluster.key,
        "error_percent": request.cluster.error_percent,
        "global_batch_size": space.global_batch,
        "limit_gib": request.limit * request.gpu.memory_gib,
        "num_layouts": found.num_layouts,
        "refused": {refusal.rule: refusal.num_layouts for refusal in found.refusals},
        "num_too_large": found.num_too_large,
        "num_slower": found.num_slower,
        "ranked": [row(*pair) for pair in found.ranked],
        "rejected": [row(*pair) for pair in found.rejected],
        "failed": {layout.name: message for layout, message in found.failed.items()},
    }


# ---- the winner


def toml_of(layout: Layout, space: Space, extends: str) -> str:
    """Return a TOML file with the settings of a layout. extends: see `extending_toml`."""
    title = f"{layout.name} ({layout.details}), {space.world_size} ranks"
    comment = f"{title}: written by `titan plan search`."
    return extending_toml(space.config, settings_of(layout, space), extends, comment)
