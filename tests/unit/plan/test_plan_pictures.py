"""`titan plan --svg` and `titan plan search --svg`: bars and spans are where the plan's numbers say."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.unit.plan.test_closed_form import FSDP_8
from tests.unit.plan.test_timeline import compute, gather, recorded, wait
from torchtitan_like.distributed.schedule_view import order_of, schedule
from torchtitan_like.plan.extend import Estimate
from torchtitan_like.plan.gpus import load_gpu
from torchtitan_like.plan.ledger import RankMemory
from torchtitan_like.plan.plan_pictures import (
    draw_layouts,
    draw_memory,
    draw_pipeline,
    draw_streams,
)
from torchtitan_like.plan.timeline import play
from torchtitan_like.util.pictures import PALETTE
from torchtitan_like.util.units import GIB

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(picture: Path) -> list[str]:
    return [text.text or "" for text in ElementTree.parse(picture).getroot().iter(f"{SVG}text")]


def colors_of(picture: Path) -> Counter[str]:
    """Return the number of filled cells of each color."""
    styles = (
        path.get("style", "") for path in ElementTree.parse(picture).getroot().iter(f"{SVG}path")
    )
    fills = (style.partition("fill: ")[2][:7] for style in styles)
    return Counter(fill for fill in fills if fill.startswith("#"))


def boxes_of(picture: Path, color: str) -> list[tuple[float, float]]:
    """Return the left and right edges of the filled shapes of one color, in points, from the left."""
    found = []
    for path in ElementTree.parse(picture).getroot().iter(f"{SVG}path"):
        if color in path.get("style", ""):
            xs = [float(x) for x in re.findall(r"[ML] ([\d.]+) -?[\d.]+", path.get("d", ""))]
            found.append((min(xs), max(xs)))
    return sorted(found)


def memory(rank: int, **gib: float) -> RankMemory:
    by_category: dict[Any, int] = {name: round(size * GIB) for name, size in gib.items()}
    total = sum(by_category.values())
    return RankMemory(rank, 0, total + 2 * GIB, total, by_category, "step 1", {}, 0, {})


def test_the_bars_of_memory_have_the_sizes_of_the_ledger(tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    draw_memory([memory(0, parameters=40, gradients=10), memory(4, parameters=20)],
                load_gpu("h100-80g"), picture)  # fmt: skip
    *bars, _ = sorted(boxes_of(picture, PALETTE[0]), key=lambda box: box[0] - box[1])
    first, second = (right - left for left, right in bars)
    assert first == pytest.approx(2 * second, rel=1e-3)
    (gradients,) = [box for box in boxes_of(picture, PALETTE[1]) if box[1] - box[0] > first / 5]
    assert gradients[0] == pytest.approx(bars[0][1], abs=1e-3)  # starts where the parameters end
    assert gradients[1] - gradients[0] == pytest.approx(first / 4, rel=1e-3)
    assert {"rank 0", "rank 4", "parameters", "NVIDIA H100 SXM, 80 GB"} <= {*texts_of(picture)}
    assert "activations" not in texts_of(picture)


def test_the_spans_of_streams_are_those_of_the_play(tmp_path: Path) -> None:
    picture = tmp_path / "streams.svg"
    recording, seconds = recorded(gather(5), compute(2), wait(0, 0), compute(1))
    draw_streams(recording, play(recording, seconds, host_operator=0), 3, picture)
    assert {"compute", "collectives of 8 ranks (dp_shard)", "matrix products", "data parallel"} <= {
        *texts_of(picture)
    }
    _, first, last = boxes_of(picture, PALETTE[0])  # after the one of the legend
    _, (left, right) = boxes_of(picture, PALETTE[1])
    second = (right - left) / 5
    assert first == pytest.approx((left, left + 2 * second))
    assert last == pytest.approx((right, right + second))


def test_a_pipeline_is_drawn_with_its_seconds(tmp_path: Path) -> None:
    picture = tmp_path / "pipeline.svg"
    order = order_of("1F1B", 2, 1, 4)
    seconds = {action: {"F": 0.1, "B": 0.3}[action.kind] for row in order for action in row}
    draw_pipeline(schedule(order, seconds.__getitem__), seconds, 2.5, picture)
    assert (
        "Pipeline of 2 ranks: a step of 2.5 s, 1.6 to 1.6 s of it in forward and backward passes"
        in texts_of(picture)
    )
    forward, backward = colors_of(picture)
    widths = [
        max(right - left for left, right in boxes_of(picture, color))
        for color in (forward, backward)
    ]
    assert max(widths) == pytest.approx(3 * min(widths), rel=1e-3)


def test_a_step_with_many_actions_is_not_drawn(tmp_path: Path) -> None:
    order = order_of("GPipe", 2, 1, 3000)
    seconds = dict.fromkeys((action for row in order for action in row), 0.1)
    with pytest.raises(ValueError, match="The schedule has 12,000 actions"):
        draw_pipeline(schedule(order, seconds.__getitem__), seconds, 2.5, tmp_path / "a.svg")


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    order = order_of("GPipe", 2, 1, 4)
    seconds = dict.fromkeys((action for row in order for action in row), 0.1)
    for name in "ab":
        draw_pipeline(schedule(order, seconds.__getitem__), seconds, 2.5, tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_layouts_are_drawn_with_their_memory_and_time(tmp_path: Path) -> None:
    picture = tmp_path / "layouts.svg"
    ranked = [
        (FSDP_8, Estimate(gib=60, seconds=1.0, bubble=0, exposed=0.25, is_full=True)),
        (FSDP_8, Estimate(gib=30, seconds=2.0, bubble=0, exposed=0.5, is_full=False)),
    ]
    draw_layouts(ranked, load_gpu("h100-80g"), 0.92, picture)
    texts = {*texts_of(picture)}
    assert {f"1. {FSDP_8.name}", f"2. {FSDP_8.name}", "seconds of a step"} <= texts
    assert "92 % of the memory of NVIDIA H100 SXM, 80 GB" in texts
    assert "bubble of the pipeline" not in texts
    half, full = (right - left for left, right in boxes_of(picture, PALETTE[5]))
    assert full == pytest.approx(2 * half, rel=1e-3)
    one, two = sorted(right - left for left, right in boxes_of(picture, PALETTE[1]))[-2:]
    assert two == pytest.approx(2 * one, rel=1e-3)
