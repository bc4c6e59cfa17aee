"""The search chooses what to dry-run, ranks it, and says why the others lose."""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.check import load_checked
from torchtitan_like.config.toml_text import path_to_extend
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.plan import search as searching
from torchtitan_like.plan.closed_form import network_of
from torchtitan_like.plan.clusters import load_cluster
from torchtitan_like.plan.extend import Estimate
from torchtitan_like.plan.gpus import load_gpu
from torchtitan_like.plan.layouts import Layout, apply
from torchtitan_like.plan.search import (
    MEMORY_MARGINS,
    NUM_DRY_RUN,
    NUM_FULL,
    PER_GROUP,
    Screened,
    SearchResult,
    global_batch_of,
    screen,
    search,
    shortlist,
    space_of,
)
from torchtitan_like.plan.search_report import (
    Request,
    as_json,
    bar,
    lines,
    numbers,
    toml_of,
    why_slower,
)
from torchtitan_like.util.modules import pip_install

CONFIGS = Path(__file__).resolve().parents[3] / "train_configs"
GPU, CLUSTER = load_gpu("h100-80g"), load_cluster("default")
REQUEST = Request(GPU, CLUSTER, 0.92, 1e12, 2.0)
LIMIT = 0.92 * GPU.memory_gib
SECTIONS = ("parallelism", "training", "activation_checkpoint", "optimizer", "model", "compile")
COMMAND_LINE = ("--optimizer.lr=1e-3", "--model.args.n_layers=8")


def space(world_size: int = 4, batch: int = 8, *settings: str) -> searching.Space:
    argv = ["--job.config_file", str(CONFIGS / "debug_model.toml"), *settings]
    config, _ = load_checked(argv, None, training=False, device_type="cuda")
    return space_of(config, world_size, 8, batch)


@functools.cache
def screened() -> tuple[SearchResult, list[Screened]]:
    """Screen the layouts of four ranks once, because it takes a second."""
    return screen(space(), GPU, network_of(GPU, 8), LIMIT)


Estimating = Callable[[Layout, bool], Estimate | str]


def search_with(
    monkeypatch: pytest.MonkeyPatch, estimating: Estimating
) -> tuple[SearchResult, list[tuple[bool, list[Layout]]]]:
    """Search with estimates of a function. A text is the message of a failed dry run."""
    calls: list[tuple[bool, list[Layout]]] = []

    def dry_run(layouts: Sequence[Layout], *rest: Any, is_full: bool) -> dict[Layout, Estimate]:
        found: SearchResult = rest[-1]
        calls.append((is_full, list(layouts)))
        estimates = {}
        for layout in layouts:
            outcome = estimating(layout, is_full)
            if isinstance(outcome, str):
                found.failed[layout] = outcome
            else:
                estimates[layout] = outcome
        return estimates

    monkeypatch.setattr(searching, "_dry_run", dry_run)
    monkeypatch.setattr(searching, "screen", lambda *arguments: copy.deepcopy(screened()))
    return search(space(), GPU, CLUSTER, 0.92, lambda *progress: None), calls


def as_given(layout: Layout) -> Layout:
    return replace(layout, compiles=False, float8=False, async_tp=False)


def by_tp(layout: Layout, is_full: bool) -> Estimate:
    """Let the layout with most tensor parallelism be the fastest."""
    return Estimate(10.0, 1 / layout.tp + 0.01 * layout.pp, 0.1, 0.05, is_full)


def test_the_fastest_dry_runs_are_the_finalists(monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = search_with(monkeypatch, by_tp)
    assert [(is_full, len(layouts)) for is_full, layouts in calls] == [
        (False, NUM_DRY_RUN),
        (False, NUM_DRY_RUN),
        (False, NUM_FULL),  # in float8
        (True, NUM_FULL),
    ]
    seconds = [estimate.seconds for _, estimate in found.ranked]
    assert [estimate.is_full for _, estimate in found.ranked] == [True] * 3 + [False] * 9
    assert seconds[:3] == sorted(seconds)[:3] and seconds[3:] == sorted(seconds[3:])
    assert found.num_slower > 0 and found.slower is not None and not found.rejected


def test_the_fastest_kernels_of_a_layout_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimating(layout: Layout, is_full: bool) -> Estimate:
        estimate = by_tp(layout, is_full)
        if not layout.float8:
            return estimate
        # In float8 all are faster. With tensor parallelism of 4 they do not fit.
        gib = LIMIT + 1 if layout.tp == 4 else 10.0
        return replace(estimate, gib=gib, seconds=0.5 * estimate.seconds)

    found, calls = search_with(monkeypatch, estimating)
    twins = calls[2][1]
    assert all(layout.float8 and layout.compiles for layout in twins)
    assert any(layout.tp == 4 for layout in twins) and any(layout.tp < 4 for layout in twins)
    ranked = [layout for layout, _ in found.ranked]
    assert len(ranked) == len(set(map(as_given, ranked))) == 2 * NUM_DRY_RUN
    assert {layout for layout in ranked if layout.float8} == {one for one in twins if one.tp < 4}
    assert not found.rejected
    assert ("float8" in " ".join(found.notes())) == ranked[0].float8


def test_a_search_says_why_float8_was_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name)
    )
    found, calls = search_with(monkeypatch, by_tp)
    assert not any(layout.float8 for _, layouts in calls for layout in layouts)
    (note,) = found.notes()
    assert note.startswith("float8 was not tried: ") and pip_install("torchao") in note


def test_a_finalist_that_does_not_fit_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fastest_is_too_large(layout: Layout, is_full: bool) -> Estimate:
        gib = LIMIT + 1 if is_full and layout.tp == 4 else 10.0
        return replace(by_tp(layout, is_full), gib=gib)

    found, calls = search_with(monkeypatch, fastest_is_too_large)
    too_large = [layout for layout, _ in found.rejected]
    assert too_large and all(layout.tp == 4 for layout in too_large)
    assert sum(estimate.is_full for _, estimate in found.ranked) == NUM_FULL
    assert len(calls) == 5
    assert any("does not fit: 73.8 GiB of 72.8" in line for line in lines(found, REQUEST))


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = search_with(
        monkeypatch, lambda layout, is_full: Estimate(500.0, 1.0, 0.0, 0.0, is_full)
    )
    assert not found.ranked and len(calls) == len(MEMORY_MARGINS) + 1
    assert len(found.rejected) == sum(len(layouts) for _, layouts in calls)
    text = "\n".join(lines(found, REQUEST))
    assert "Nothing fits into 92 % of 79.1 GiB: the smallest takes 500.0 GiB" in text


def test_smaller_layouts_follow_if_too_few_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    by_formula = {each.layout: each.gib for each in screened()[1]}
    small = sorted(by_formula.values())[len(by_formula) // 8]
    monkeypatch.setattr(searching, "MEMORY_MARGINS", (1.0, 1.25, small / LIMIT, 0.0))

    def only_small_ones_fit(layout: Layout, is_full: bool) -> Estimate:
        gib = 10.0 if by_formula[as_given(layout)] <= small else LIMIT + 1
        return replace(by_tp(layout, is_full), gib=gib)

    found, calls = search_with(monkeypatch, only_small_ones_fit)
    assert [is_full for is_full, _ in calls] == [False, False, False, False, True]
    assert sum(by_formula[layout] <= small for _, each in calls[:2] for layout in each) < NUM_FULL
    assert all(by_formula[layout] <= small for layout in calls[2][1])
    tried = [layout for _, each in calls[:3] for layout in each]
    assert len(tried) == len(set(tried))
    assert sum(estimate.is_full for _, estimate in found.ranked) == NUM_FULL


def test_a_failed_dry_run_is_named_and_the_search_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(layout: Layout, is_full: bool) -> Estimate | str:
        return (
            "Traceback\nValueError: no such kernel\n" if layout.tp == 4 else by_tp(layout, is_full)
        )

    found, _ = search_with(monkeypatch, failing)
    assert found.failed and all(layout.tp < 4 for layout, _ in found.ranked)
    text = "\n".join(lines(found, REQUEST))
    assert "failed: ValueError: no such kernel" in text


@pytest.mark.parametrize(
    ("batch", "num_layouts", "refused"),
    [
        # As in test_layouts.py, with one kind of recomputation: FSDP, DDP, TP and PP.
        # Too few micro-batches for their stages: 2 and 1 of DualPipeV, 1 of 1F1B.
        (8, 3 * 2 + 3 + 4 + 6 * 4, [3]),
        # Two data-parallel ranks cannot share 3 samples: FSDP (resharding or not) and DDP.
        # DualPipeV needs as many micro-batches as its 4 stages.
        (3, 2 + 1 + 1 + 6, [3, 1]),
    ],
)
def test_layouts_are_counted_once(batch: int, num_layouts: int, refused: list[int]) -> None:
    given = space(2, batch, "--activation_checkpoint.mode=none")
    found, legal = screen(given, GPU, network_of(GPU, 8), LIMIT)
    assert [refusal.num_layouts for refusal in found.refusals] == refused
    assert found.num_layouts == num_layouts == sum(refused) + len(legal)
    assert found.num_too_large == 0


def test_layouts_that_are_too_large_are_counted() -> None:
    found, legal = screen(space(2, 8), GPU, network_of(GPU, 8), 1e-3)
    assert not legal and found.num_too_large > 0 and found.smallest is not None


def test_similar_layouts_do_not_fill_the_shortlist() -> None:
    chosen = shortlist(screened()[1], NUM_DRY_RUN)
    groups = [(layout.pp, layout.cp, layout.tp) for layout in chosen]
    assert len(chosen) == NUM_DRY_RUN and max(map(groups.count, groups)) == PER_GROUP


@pytest.mark.parametrize(
    ("tokens", "settings", "samples"),
    [
        (None, (), 16 * 8 // 4),  # the local batch of the debug model, 8 ranks of TP 4
        (None, ("--training.global_batch_size=48",), 48),
        (2**15, (), 2**15 // 256),
        (1e5, (), 512),  # 391 samples: a power of two is nearest
        (1, (), 1),
    ],
)
def test_the_global_batch(tokens: float | None, settings: tuple[str, ...], samples: int) -> None:
    given = ("--parallelism.tensor_parallel_degree=4", "--training.local_batch_size=16")
    config = space(8, 1, *given, "--training.seq_len=256", *settings).config
    assert global_batch_of(config, 8, tokens) == samples


# ---- the table


def test_the_numbers_of_a_layout_follow_from_its_time() -> None:
    given = space(8, 32)
    estimate = Estimate(10.0, 2.0, 0.1, 0.5, True)
    reached = numbers(estimate, given, REQUEST)
    tokens = 32 * given.config.training.seq_len
    assert reached.tokens_per_gpu == tokens / 2 / 8
    assert reached.exposed == 0.25
    assert reached.days * 86400 == pytest.approx(1e12 / tokens * 2)
    assert reached.cost == pytest.approx(reached.days * 24 * 8 * 2)
    spec = get_spec("llama3")
    args = resolve_args(spec, "debugmodel", given.config.model.args)
    flops = spec.flops_per_token(args, given.config.training.seq_len)
    assert reached.mfu == pytest.approx(100 * reached.tokens_per_gpu * flops / 989.4e12)


def test_the_parts_of_a_difference_add_up() -> None:
    best, other = Estimate(1, 10.0, 0.1, 2.0, True), Estimate(1, 14.0, 0.25, 3.0, True)
    text = why_slower(other, best)
    assert text == (
        "+4.000 s a step: +2.500 s bubble, +1.000 s exposed communication, "
        "+0.500 s computing and the rest"
    )
    assert why_slower(best, best) == "+0.000 s a step: no difference"


@pytest.mark.parametrize(("share", "filled"), [(0, 0), (0.5, 10), (1.0, 20), (3.0, 20)])
def test_the_memory_bar(share: float, filled: int) -> None:
    assert bar(share) == f"[{'=' * filled}{'.' * (20 - filled)}]"


def test_the_table_and_the_json_have_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = search_with(monkeypatch, by_tp)
    text = list(lines(found, REQUEST))
    rows = [line for line in text if "s/step" in line]
    assert len(rows) == 2 * NUM_DRY_RUN and len([line for line in text if "a step: " in line]) == 11
    assert rows[0].startswith(f" 1. {found.ranked[0][0].name}") and "~" not in rows[0]
    assert "~  10.0 GiB" in rows[3]
    content = as_json(found, REQUEST)
    assert [row["name"] for row in content["ranked"]] == [layout.name for layout, _ in found.ranked]
    assert content["num_layouts"] == found.num_layouts and content["limit_gib"] == LIMIT


# ---- the winner as a TOML file


def test_the_written_file_is_the_layout(tmp_path: Path) -> None:
    """It extends the given file, passes the check, and has the settings of the command line."""
    given = space(4, 8, *COMMAND_LINE)
    _, legal = screen(given, GPU, network_of(GPU, 8), LIMIT)
    output, given_file = tmp_path / "best.toml", CONFIGS / "debug_model.toml"
    layouts = shortlist(legal, 12)
    layouts += [
        replace(layout, compiles=True, float8=layout.tp == 1, async_tp=layout.tp > 1)
        for layout in layouts
        if layout.pipeline is None
    ]
    assert any(layout.pipeline for layout in layouts) and any(layout.tp > 1 for layout in layouts)
    for layout in layouts:
        base = path_to_extend(str(given_file), given_file, output)
        output.write_text(toml_of(layout, given, base))
        config, _ = load_checked(
            ["--job.config_file", str(output)], 4, training=False, device_type="cuda"
        )
        expected = apply(layout, given)
        for section in SECTIONS:
            assert getattr(config, section) == getattr(expected, section), (layout, section)
        assert config.optimizer.lr == 1e-3 and config.model.args == {"n_layers": 8}


def test_the_written_file_has_only_changed_settings() -> None:
    layout = next(
        one.layout
        for one in screened()[1]
        if one.layout.name == "TP 2 x FSDP 2" and one.layout.recompute == "full"
    )
    text = toml_of(layout, space(), "debug_model.toml")
    keys = [line.partition(" = ")[0] for line in text.splitlines() if " = " in line]
    assert keys[0] == "extends"
    assert {"tensor_parallel_degree", "mode", "global_batch_size"} <= set(keys)
    assert not {"pipeline_parallel_degree", "lr", "data_parallel_shard_degree"} & set(keys)


@pytest.mark.parametrize(
    ("given", "found", "expected"),
    [
        ("llama3_8b.toml", "/pkg/train_configs/llama3_8b.toml", "llama3_8b.toml"),  # bundled
        ("/a/b/run.toml", "/a/b/run.toml", "../b/run.toml"),
        ("/a/out/run.toml", "/a/out/run.toml", "run.toml"),
    ],
)
def test_the_path_to_extend(given: str, found: str, expected: str) -> None:
    assert path_to_extend(given, Path(found), Path("/a/out/best.toml")) == expected
