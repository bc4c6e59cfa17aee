"""Search the layouts around a configuration: rules, then formulas, then dry runs of the best ones."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from torchtitan_like.check import check_config, check_layout
from torchtitan_like.config import JobConfig
from torchtitan_like.config.problems import Problem
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.plan import closed_form
from torchtitan_like.plan.closed_form import Network, network_of, sizes_of
from torchtitan_like.plan.gpus import Gpu
from torchtitan_like.plan.layouts import (
    Layout,
    Space,
    apply,
    keeps_given_settings,
    meshes,
    variants,
    with_faster_kernels,
    with_float8,
)

if TYPE_CHECKING:
    from torchtitan_like.plan.clusters import Cluster
    from torchtitan_like.plan.extend import Estimate
    from torchtitan_like.plan.record import Progress

NUM_DRY_RUN = 6  # layouts of a round that are dry-run at two depths
NUM_FULL = 3  # layouts that are dry-run at full depth
MAX_FULL = 6  # of them, if some do not fit
PER_GROUP = 2  # of those with the same degrees, which differ little
# The largest memory by the closed form in each round, as a share of the limit. The closed form is
# too high for some layouts, and too low for others. The third and the fourth round take place only
# if fewer than NUM_FULL layouts fit.
MEMORY_MARGINS = (1.0, 1.25, 0.8, 0.6)


class Screened(NamedTuple):
    """A layout with its memory (GiB) and seconds by the closed form."""

    layout: Layout
    gib: float
    seconds: float


class Refusal(NamedTuple):
    """Layouts that a rule refuses. problem: of one of them."""

    rule: str
    num_layouts: int
    problem: Problem


@dataclass
class SearchResult:
    """The outcome of a search.

    num_layouts: enumerated. refusals: most frequent first. num_too_large: by the closed form.
    ranked: dry-run layouts that fit, fastest first, those at full depth before the others.
    rejected: dry-run layouts that do not fit. failed: messages of dry runs that failed.
    slower: the fastest by the closed form of those that were not dry-run. num_slower: how many.
    no_float8: why a rule refuses float8; "" if none does.
    """

    space: Space
    num_layouts: int
    refusals: list[Refusal]
    num_too_large: int
    smallest: Screened | None
    ranked: list[tuple[Layout, Estimate]] = field(default_factory=list)
    rejected: list[tuple[Layout, Estimate]] = field(default_factory=list)
    failed: dict[Layout, str] = field(default_factory=dict)
    slower: Screened | None = None
    num_slower: int = 0
    no_float8: str = ""

    def notes(self) -> list[str]:
        """Return what the dry runs assume, and whether the best layout changes results."""
        from torchtitan_like.plan.dry_memory import assumptions

        if not self.ranked:
            return assumptions(self.space.config)
        best, _ = self.ranked[0]
        notes = assumptions(apply(best, self.space))
        if self.no_float8:
            notes.append(f"float8 was not tried: {self.no_float8}")
        if best.float8:
            notes.append(
                "float8 rounds more than bfloat16, so the loss differs. To search without it, give "
                "--model.converters"
            )
        return notes


def space_of(config: JobConfig, world_size: int, ranks_per_node: int, global_batch: int) -> Space:
    """Return the space of a configuration. global_batch: samples of a step."""
    spec = get_spec(config.model.name)
    args = resolve_args(spec, config.model.flavor, config.model.args)
    limits = spec.constraints(args)
    return Space(
        config,
        world_size,
        ranks_per_node,
        global_batch,
        limits.get("n_layers", 1),
        limits.get("n_experts", 0),
    )


def global_batch_of(config: JobConfig, world_size: int, tokens: float | None) -> int:
    """Return the samples of a step: of `tokens`, else of the configuration.

    The samples of `tokens` are rounded to a power of two, which most layouts can share out. A
    configuration without a global batch has one local batch for each data-parallel rank.
    """
    if tokens is not None:
        samples = max(1.0, tokens / config.training.seq_len)
        power: int = 2 ** round(math.log2(samples))
        return power
    if config.training.global_batch_size > 0:
        return config.training.global_batch_size
    section = config.parallelism
    model_ranks = (
        section.pipeline_parallel_degree
        * section.tensor_parallel_degree
        * section.context_parallel_degree
    )
    return config.training.local_batch_size * max(1, world_size // model_ranks)


# ---- rules and formulas


def screen(
    space: Space, gpu: Gpu, network: Network, limit_gib: float
) -> tuple[SearchResult, list[Screened]]:
    """Enumerate, check and estimate all layouts. Returns the legal ones, the fastest first.

    Layouts far above `limit_gib` are left out. So are those that change settings of the command line.
    """
    spec = get_spec(space.config.model.name)
    args = resolve_args(spec, space.config.model.flavor, space.config.model.args)
    sizes = sizes_of(spec, args, space.config.training.seq_len)
    found = SearchResult(space, 0, [], 0, None)
    counts: Counter[str] = Counter()
    quoted: dict[str, Problem] = {}
    legal: list[Screened] = []
    for layout in (each for mesh in meshes(space) for each in variants(space, mesh)):
        if not keeps_given_settings(layout, space):
            continue
        found.num_layouts += 1
        problems = check_layout(apply(layout, space), space.world_size, spec, args)
        if problems:
            name = problems[0].rule or problems[0].key
            counts[name] += 1
            quoted.setdefault(name, problems[0])
            continue
        screened = Screened(
            layout,
            closed_form.memory_gib(layout, sizes, space),
            closed_form.seconds(layout, sizes, space, gpu, network),
        )
        if screened.gib > limit_gib * max(MEMORY_MARGINS):
            found.num_too_large += 1
            if found.smallest is None or screened.gib < found.smallest.gib:
                found.smallest = screened
            continue
        legal.append(screened)
    found.refusals = [Refusal(name, count, quoted[name]) for name, count in counts.most_common()]
    return found, sorted(legal, key=rank)


def rank(screened: Screened) -> tuple[float, int, float, float]:
    """Return the sort key of a layout. Of times equal to two digits, fewer kinds of parallelism win."""
    layout = screened.layout
    return float(f"{screened.seconds:.2g}"), layout.num_kinds, screened.seconds, screened.gib


def shortlist(
    legal: Sequence[Screened], number: int, before: Sequence[Layout] = ()
) -> list[Layout]:
    """Return the first layouts, at most `PER_GROUP` of those with the same degrees.

    before: layouts that are chosen already, and count.
    """
    counts = Counter(map(_degrees, before))
    chosen: list[Layout] = []
    for screened in legal:
        group = _degrees(screened.layout)
        counts[group] += 1
        if counts[group] <= PER_GROUP:
            chosen.append(screened.layout)
        if len(chosen) == number:
            break
    return chosen


def _degrees(layout: Layout) -> tuple[int, ...]:
    return layout.pp, layout.cp, layout.tp, layout.ep, layout.expert_tp


# ---- dry runs


def search(
    space: Space,
    gpu: Gpu,
    cluster: Cluster,
    max_memory: float,
    progress: Progress,
) -> SearchResult:
    """Find the fastest layouts that fit. max_memory: fraction of the GPU's memory that they may use."""
    limit = gpu.memory_gib * max_memory
    network = network_of(gpu, cluster.gpus_per_node, cluster.inter_node_gb_s)
    found, legal = screen(space, gpu, network, limit)
    estimates: dict[Layout, Estimate] = {}
    rest = legal

    def dry_run(layouts: Sequence[Layout], *, is_full: bool) -> None:
        nonlocal estimates
        estimates |= _dry_run(layouts, space, gpu, cluster, progress, found, is_full=is_full)
        estimates = _fastest_kernels(estimates, limit)

    for number, margin in enumerate(MEMORY_MARGINS):
        if number > 1 and sum(each.gib <= limit for each in estimates.values()) >= NUM_FULL:
            break
        small = [screened for screened in rest if screened.gib <= limit * margin]
        # A later round looks for other recomputation with the same degrees.
        chosen = shortlist(small, NUM_DRY_RUN, list(estimates) if number == 1 else ())
        rest = [screened for screened in rest if screened.layout not in chosen]
        dry_run(chosen, is_full=False)
    found.num_slower = len(rest)
    found.slower = rest[0] if rest else None
    dry_run(_in_float8(_fastest(estimates, limit)[:NUM_FULL], found, gpu), is_full=False)
    waiting = _fastest(estimates, limit)[:MAX_FULL]
    num_fit = 0
    while waiting and num_fit < NUM_FULL:  # one that does not fit after all is replaced
        now, waiting = waiting[: NUM_FULL - num_fit], waiting[NUM_FULL - num_fit :]
        dry_run([layout for layout in now if not estimates[layout].is_full], is_full=True)
        num_fit += sum(estimates[layout].gib <= limit for layout in now)
    for layout in sorted(
        estimates, key=lambda one: (not estimates[one].is_full, estimates[one].seconds)
    ):
        group = found.ranked if estimates[layout].gib <= limit else found.rejected
        group.append((layout, estimates[layout]))
    return found


def _fastest(estimates: Mapping[Layout, Estimate], limit: float) -> list[Layout]:
    """Return the layouts that fit, the fastest first."""
    fitting = (layout for layout, each in estimates.items() if each.gib <= limit)
    return sorted(fitting, key=lambda layout: estimates[layout].seconds)


def _fastest_kernels(estimates: Mapping[Layout, Estimate], limit: float) -> dict[Layout, Estimate]:
    """Return, of the layouts that differ only in their kernels, the one that is the best.

    That is the fastest one that fits, or the smallest one if none does.
    """
    best: dict[Layout, Layout] = {}

    def key(layout: Layout) -> tuple[bool, float]:
        value = estimates[layout]
        is_too_large = value.gib > limit
        return is_too_large, value.gib if is_too_large else value.seconds

    for layout in estimates:
        plain = replace(layout, compiles=False, float8=False, async_tp=False)
        best[plain] = min(best.get(plain, layout), layout, key=key)
    return {layout: estimates[layout] for layout in best.values()}


def _in_float8(layouts: Sequence[Layout], found: SearchResult, gpu: Gpu) -> list[Layout]:
    """Return layouts with float8 products, if the GPU has them and the rules allow them.

    The reason of a refusal is written to `found.no_float8`.
    """
    space = found.space
    allowed = []
    for layout in layouts if "float8" in gpu.peak_tflops else ():
        changed = with_float8(layout, space.config)
        if changed is None or not keeps_given_settings(changed, space):
            continue
        if errors := _errors(changed, space, gpu):
            found.no_float8 = str(errors[0])
        else:
            allowed.append(changed)
    return allowed


def _errors(layout: Layout, space: Space, gpu: Gpu) -> list[Problem]:
    """Return the errors of a layout by all rules, not only by those of `check_layout`."""
    config, device_type = apply(layout, space), gpu.device_type
    problems = check_config(config, space.world_size, training=False, device_type=device_type)
    return [problem for problem in problems if problem.severity == "error"]


def _dry_run(
    layouts: Sequence[Layout],
    space: Space,
    gpu: Gpu,
    cluster: Cluster,
    progress: Progress,
    found: SearchResult,
    *,
    is_full: bool,
) -> dict[Layout, Estimate]:
    """Return the estimates of layouts; at few layers, also of those with faster kernels.

    One whose dry run fails is added to `found.failed`.
    """
    from torchtitan_like.plan.dry_run import DryRun, record_jobs
    from torchtitan_like.plan.extend import Depth, all_jobs, estimate

    jobs = list(all_jobs(layouts, space, gpu, is_full=is_full))
    if not jobs:
        return {}
    phase = "full depth" if is_full else "a few layers"
    started = time.monotonic()
    runs: dict[Layout, dict[Depth, list[DryRun]]] = {}
    missing = Counter(layout for layout, _, _ in jobs)
    estimates: dict[Layout, Estimate] = {}
    progress(phase, 0, len(jobs), 0.0)
    for done, (index, run) in enumerate(record_jobs([job for _, _, job in jobs]), start=1):
        layout, depth, _ = jobs[index]
        progress(phase, done, len(jobs), time.monotonic() - started)
        if isinstance(run, RuntimeError):
            found.failed.setdefault(layout, str(run))
            continue
        runs.setdefault(layout, {}).setdefault(depth, []).append(run)
        missing[layout] -= 1
        if not missing[layout]:
            by_depth = dict(sorted(runs.pop(layout).items()))
            estimates[layout] = estimate(layout, space, by_depth, gpu, cluster)
            for faster in () if is_full else with_faster_kernels(layout, space.config):
                is_new = faster != layout and keeps_given_settings(faster, space)
                if is_new and not _errors(faster, space, gpu):
                    estimates[faster] = estimate(faster, space, by_depth, gpu, cluster)
    return estimates
