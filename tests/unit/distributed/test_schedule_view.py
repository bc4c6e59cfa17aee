"""Pipeline timelines: order, duration, bubble, printed lines, and the script."""

from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction

import pytest

from scripts import pp_bubble
from torchtitan_like.distributed.schedule_view import (
    Action,
    order_of,
    parse_csv,
    refusal,
    simulate,
    timeline_lines,
)

MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 2), (2, 7), (4, 8), (5, 5), (8, 64)])
def test_the_bubble_of_one_stage_per_rank_equals_the_formula(schedule, pp, m):
    assert simulate(order_of(schedule, pp, 1, m)).bubble == pytest.approx(
        Fraction(pp - 1, m + pp - 1), abs=1e-12
    )


@pytest.mark.parametrize(("pp", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_interleaving_divides_the_bubble(pp, v, m):
    """Idle time is (p - 1) / v micro-batches (Narayanan et al., arXiv:2104.04473, section 2.2)."""
    bubble = simulate(order_of("Interleaved1F1B", pp, v, m)).bubble
    assert bubble == pytest.approx(Fraction(pp - 1, v * m + pp - 1), abs=1e-12)


def test_splitting_the_backward_pass_fills_the_bubble():
    bubbles = {schedule: simulate(order_of(schedule, 4, 2, 8)).bubble for schedule in MULTI}
    assert (
        max(bubbles[name] for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"))
        < 0.06
    )
    assert min(bubbles[name] for name in ("Interleaved1F1B", "LoopedBFS")) > 0.15


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", *MULTI])
def test_each_micro_batch_passes_each_stage_once_in_order(schedule):
    v = 1 if schedule in ("GPipe", "1F1B") else 2
    timeline = simulate(order_of(schedule, 4, v, 8))
    ends = {action: start for row in timeline.starts for start, action in row}
    for stage in range(4 * v):
        for micro in range(8):
            forward = ends[Action(stage, "F", micro)]
            assert stage == 0 or forward > ends[Action(stage - 1, "F", micro)]
            backward = [
                ends[action] for kind in "BI" if (action := Action(stage, kind, micro)) in ends
            ]
            assert len(backward) == 1
            assert backward[0] > forward
            assert (Action(stage, "W", micro) in ends) == (Action(stage, "I", micro) in ends)
    for row in timeline.starts:
        assert [start for start, _ in row] == sorted(start for start, _ in row)


def test_1f1b_holds_at_most_as_many_micro_batches_as_remaining_stages():
    for rank, row in enumerate(order_of("1F1B", 4, 1, 16)):
        held = [sum(1 if a.kind == "F" else -1 for a in row[: i + 1]) for i in range(len(row))]
        assert max(held) == 4 - rank


@pytest.mark.parametrize(
    "schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_refusals_equal_torch(schedule):
    """Compare with torch directly, because `order_of` calls `refusal` first."""
    from torchtitan_like.distributed.schedule_view import _torch_order

    for pp in (2, 3, 4):
        for m in range(1, 15):
            try:
                _torch_order(schedule, pp, 2, m)
                refused = False
            except ValueError:
                refused = True
            assert bool(refusal(schedule, m, pp, 2 * pp)) == refused, (pp, m)


def test_1f1b_refuses_too_few_micro_batches():
    with pytest.raises(ValueError, match="1F1B: 3 are fewer than the 4 stages"):
        order_of("1F1B", 4, 1, 3)


# ---- files


def test_parse_csv_accepts_idle_steps_overlaps_and_messages():
    text = "0UNSHARD,0F0,,0SEND_F0,(0F1;0B0)OVERLAP_F_B\n1RECV_F0,1F0,1I0,1W0,1REDUCE_GRAD,1SEND_B0\n\n"
    assert parse_csv(text) == [
        [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0)],
        [Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", 'line 1 has "0X0"'),
        ("0F0\n0F\n", 'line 2 has "0F"'),
        ("\n", "it is empty"),
        ("", "it is empty"),
    ],
)
def test_a_malformed_file_is_reported_with_its_line(text, message):
    with pytest.raises(ValueError, match=message.replace('"', "'")):
        parse_csv(text)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["0F0", "0B0"], ["1B0", "1F0"]], "rank 0 at 0B0, rank 1 at 1B0 would wait forever"),
        ([["0F0", "0F0"], ["1F0", "1B0"]], "0F0 occurs twice"),
        ([["0F0", "0W0"], ["1F0", "1B0"]], "rank 0 at 0W0 would wait"),
    ],
)
def test_an_impossible_order_is_refused(rows, message):
    order = [[Action(int(cell[0]), cell[1], int(cell[2])) for cell in row] for row in rows]
    with pytest.raises(ValueError, match=message):
        simulate(order)


# ---- printed timelines


def test_the_timeline_of_1f1b():
    assert timeline_lines("1F1B", order_of("1F1B", 2, 1, 2)) == [
        "Pipeline 1F1B: 2 stages on 2 ranks, 2 micro-batches per step",
        "rank 0 |F0 F1 .  .  B0 -- .  B1 --",
        "rank 1 |.  F0 B0 -- F1 B1 -- .  .",
        "F forward (1), B backward (2), number = micro-batch, . idle",
        "bubble: 33.3% of the ranks' time, 9 forward passes of a stage long; (p - 1) / (m + p - 1) = 1/3 = 33.3%",
    ]


@pytest.mark.parametrize(("schedule", "pp", "v", "m"), [
    ("1F1B", 4, 1, 8), ("1F1B", 64, 1, 512), ("ZBVZeroBubble", 8, 2, 32), ("Interleaved1F1B", 16, 4, 32),
    ("GPipe", 13, 1, 2), ("DualPipeV", 4, 2, 8),
])  # fmt: skip
def test_the_timeline_fits_a_terminal(schedule, pp, v, m):
    lines = timeline_lines(schedule, order_of(schedule, pp, v, m))
    assert len(lines) <= 20
    assert max(map(len, lines[:-1])) <= 120


def test_a_narrow_timeline_shows_every_action():
    """57 units do not fit with numbers. Upper case marks the first stage of a rank."""
    lines = timeline_lines("Interleaved1F1B", order_of("Interleaved1F1B", 4, 2, 8))
    for line in lines[1:5]:
        assert [line.partition("|")[2].count(letter) for letter in "FfBb"] == [8, 8, 8, 8]


def test_fewer_micro_batches_than_ranks_cause_a_warning():
    def warns(m):
        return any(
            "never all busy" in line for line in timeline_lines("GPipe", order_of("GPipe", 4, 1, m))
        )

    assert warns(3)
    assert not warns(4)


# ---- the script


def test_the_script_shows_one_schedule(capsys):
    assert (
        pp_bubble.main(
            "--schedule ZBVZeroBubble --pp 2 --microbatches 4 --stages-per-rank 3".split()
        )
        == 0
    )
    assert (
        "Pipeline ZBVZeroBubble: 4 stages on 2 ranks, 4 micro-batches per step"
        in capsys.readouterr().out
    )


def test_the_script_compares_all_schedules(capsys):
    assert pp_bubble.main("--pp 4 --microbatches 5".split()) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"per rank +\d+\.\d%", printed)) == 6
    assert "InterleavedZeroBubble  2 per rank" in printed
    assert (
        "DualPipeV              2 per rank      -  DualPipeV: 5 are fewer than the 8 stages"
        in printed
    )


def test_the_script_shows_a_file(tmp_path, capsys):
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert pp_bubble.main(["--csv", str(path)]) == 0
    assert "bubble: 50.0%" in capsys.readouterr().out
    assert pp_bubble.main(["--csv", str(tmp_path / "none.csv")]) == 1
    assert "none.csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", ["", "--pp 4", "--pp 0 --microbatches 1", "--schedule None --pp 1"]
)
def test_the_script_refuses_schedules_without_a_timeline(arguments):
    with pytest.raises(SystemExit):
        pp_bubble.main(arguments.split())


def test_schedules_of_one_stage_per_rank_need_no_torch():
    code = (
        "import sys; from scripts.pp_bubble import main; main('--schedule 1F1B --pp 4 --microbatches 8'.split()); "
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
