"""Non-finite updates are skipped or frozen by policy, and the last good step is recorded."""

from __future__ import annotations

import math
import random

import pytest
import torch

from torchtitan_like.config.sections_run import Resilience
from torchtitan_like.resilience.nonfinite import UpdateGate, nonfinite_names

FINITE, NAN = 1.0, math.nan
CPU = torch.device("cpu")


def run_gate(
    norms: list[float], limit: int, num_in_a_row: int = 0
) -> tuple[UpdateGate[int], list[int]]:
    """Run the gate with these gradient norms and return its decisions.

    limit: max_nonfinite_in_a_row of the policy "skip"; 0 selects the policy "stop".
    """
    section = (
        Resilience(on_nonfinite="skip", max_nonfinite_in_a_row=limit) if limit else Resilience()
    )
    gate, skipped = UpdateGate(section, CPU, 0, {"nonfinite_in_a_row": num_in_a_row}), []
    for step, norm in enumerate(norms, start=1):
        skipped.append(int(gate.gate(torch.tensor(norm))))
        gate.record(step)
    return gate, skipped


@pytest.mark.parametrize(
    ("norms", "limit", "skipped", "last_good"),
    [
        ([FINITE, FINITE, FINITE], 0, [0, 0, 0], None),
        ([FINITE, NAN, FINITE], 0, [0, 1, 1], 1),  # stop: updates are frozen
        ([NAN, FINITE, FINITE], 0, [1, 1, 1], 0),
        ([FINITE, math.inf, FINITE, NAN], 1, [0, 1, 0, 1], None),  # skip: never two in a row
        ([FINITE, NAN, -math.inf, FINITE], 1, [0, 1, 1, 1], 2),  # two in a row: frozen
        ([NAN, NAN, NAN, FINITE], 2, [1, 1, 1, 1], 2),
    ],
)
def test_updates_are_skipped_and_frozen_by_policy(
    norms: list[float], limit: int, skipped: list[int], last_good: int | None
) -> None:
    gate, decisions = run_gate(norms, limit)
    assert (decisions, gate.last_good_progress()) == (skipped, last_good)


def test_the_host_detects_frozen_updates_two_steps_later() -> None:
    gate, frozen = UpdateGate(Resilience(), CPU, 0, {}), []
    for step, norm in enumerate([FINITE, NAN, FINITE, FINITE], start=1):
        frozen.append(gate.was_frozen())
        gate.gate(torch.tensor(norm))
        gate.record(step)
    assert frozen == [False, False, False, True]


def test_consecutive_nonfinite_steps_are_counted_across_a_checkpoint() -> None:
    gate, _ = run_gate([FINITE, NAN, NAN], limit=2)
    assert gate.state_dict() == {"nonfinite_in_a_row": 2}
    resumed, skipped = run_gate([NAN], limit=2, num_in_a_row=2)
    assert (skipped, resumed.last_good_progress(), resumed.state_dict()) == (
        [1],
        0,
        {"nonfinite_in_a_row": 2},
    )
    assert run_gate([FINITE, NAN], limit=2, num_in_a_row=2)[0].last_good_progress() is None


def test_norm_spikes_are_skipped_until_they_fill_most_of_the_window() -> None:
    section = Resilience(on_spike="skip", spike_window=8, spike_threshold=5.0)
    draw = random.Random(1)
    norms = [draw.gauss(mean, mean / 20) for mean in [1] * 8 + [9, 1] + [9] * 16]
    expected = [0] * 8 + [1, 0] + [1] * 4 + [0] * 12  # then five of the last eight are high
    for resume_at in (9, 12):
        decisions, state = [], {}
        for run_norms in (norms[:resume_at], norms[resume_at:]):
            gate = UpdateGate(section, CPU, 0, state)
            for norm in run_norms:
                decisions.append(int(gate.gate(torch.tensor(norm))))
                gate.record(0)
            state = gate.state_dict()
        assert decisions == expected
        assert gate.last_good_progress() is None


def test_a_step_without_labels_is_no_spike_and_has_no_norm() -> None:
    gate = UpdateGate(Resilience(on_spike="skip", spike_window=8), CPU, 0, {})
    for norm in (1.0, 1.1, 0.9, 1.0) * 2:
        gate.gate(torch.tensor(norm))
    gate.record(0)
    assert gate.gate(torch.tensor(50.0), has_labels=False) == 0
    gate.record(0)
    *norms, last = gate.state_dict()["grad_norms"]
    assert norms == pytest.approx([1.1, 0.9, 1.0, 1.0, 1.1, 0.9, 1.0]) and last is None


def holding_gate(norms: list[float], first_high_norm: float = 100.0) -> UpdateGate[int]:
    """Return a gate that holds high norms, after these norms."""
    section = Resilience(first_high_norm=first_high_norm, spike_window=32)
    gate: UpdateGate[int] = UpdateGate(section, CPU, 0, {"grad_norms": norms}, holds_norms=True)
    gate.start_holding()
    return gate


def test_a_loop_that_runs_no_step_again_holds_none() -> None:
    gate: UpdateGate[int] = UpdateGate(Resilience(), CPU, 0, {}, holds_norms=True)
    assert gate.gate(torch.tensor(1e6)) == 0


@pytest.mark.parametrize(
    ("norms", "norm", "is_held"),
    [
        ([], 101.0, True),
        ([], 99.0, False),
        ([1.0] * 19, 99.0, False),  # too few for a median
        ([1.0] * 20, 20.5, True),
        ([1.0] * 20, 19.5, False),
        ([1.0] * 20, math.inf, False),  # skipped as non-finite
        ([1.0] * 20, NAN, False),
    ],
)
def test_norms_out_of_proportion_hold_updates(
    norms: list[float], norm: float, is_held: bool
) -> None:
    gate = holding_gate(norms)
    gate.gate(torch.tensor(norm))
    gate.record(1)
    assert gate.is_held() == is_held
    assert gate.gate(torch.tensor(50.0), has_labels=False) == (is_held or not math.isfinite(norm))


def test_held_steps_leave_no_trace_and_the_second_norm_is_accepted() -> None:
    gate = holding_gate([1.0] * 20)
    decisions, held = [], []
    for step, norm in enumerate([1.0, 30.0, NAN, 40.0], start=1):
        held.append(gate.was_held())
        decisions.append(int(gate.gate(torch.tensor(norm))))
        gate.record(step)
    assert decisions == [0, 1, 1, 1] and held == [False, False, False, True]
    step = gate.release()
    assert step is not None and step[:] == (1, 30.0, 20.0, 0.0)
    assert gate.state_dict() == {"nonfinite_in_a_row": 0, "grad_norms": [1.0] * 21}
    assert gate.release() is None
    for step, norm in enumerate([30.0, 1.0, 30.0], start=2):
        decisions.append(int(gate.gate(torch.tensor(norm))))
        gate.record(step)
    assert decisions[4:] == [0, 0, 1]


@pytest.mark.parametrize("holds_norms", [True, False])
def test_an_overflow_holds_updates_even_after_release(holds_norms: bool) -> None:
    """Norms do not matter: they may be of a step that was not computed completely."""
    gate: UpdateGate[int] = UpdateGate(Resilience(), CPU, 0, {}, holds_norms=holds_norms)
    gate.start_holding()
    for step, (norm, overflow) in enumerate([(1.0, 0.0), (NAN, 0.5), (1.0, 0.0)], start=1):
        skip = gate.gate(torch.tensor(norm), overflow=torch.tensor(overflow))
        assert int(skip) == (step > 1)
        gate.record(step)
    held = gate.release()
    assert held is not None and (held.progress, held.overflow) == (1, 0.5)
    assert gate.gate(torch.tensor(1.0), overflow=torch.tensor(0.25)) == 1
    gate.record(2)
    held = gate.release()
    assert held is not None and (held.progress, held.overflow) == (1, 0.25)
    assert gate.gate(torch.tensor(1.0), overflow=torch.tensor(0.0)) == 0
    assert gate.state_dict()["nonfinite_in_a_row"] == 0


def test_the_norm_of_a_step_that_runs_again_after_an_overflow_is_checked() -> None:
    gate = holding_gate([1.0] * 20)
    gate.gate(torch.tensor(1.0), overflow=torch.tensor(0.5))
    gate.record(1)
    assert gate.release() is not None
    for decision in (1, 0):  # its first complete norm is too high, its second one is accepted
        assert gate.gate(torch.tensor(1e6), overflow=torch.tensor(0.0)) == decision
        gate.record(1)
        assert (gate.release() is not None) == bool(decision)


@pytest.mark.parametrize("num_before", [3, 8, 13])
def test_norms_after_the_last_good_step_are_not_saved(num_before: int) -> None:
    """The host detects frozen updates two steps late; the state must be from the last good step."""
    section = Resilience(on_spike="skip", spike_window=8)
    gate, states = UpdateGate(section, CPU, 0, {}), []
    for step, norm in enumerate([*range(1, num_before + 1), NAN, 2.5, 0.0], start=1):
        gate.gate(torch.tensor(float(norm)), has_labels=norm != 0.0)
        gate.record(step)
        states.append(gate.state_dict())
    kept = [float(norm) for norm in range(max(1, num_before - 7), num_before + 1)]
    assert states[num_before - 1] == {"nonfinite_in_a_row": 0, "grad_norms": kept}
    assert states[num_before:] == [states[num_before - 1]] * 3


def test_nonfinite_tensors_are_named() -> None:
    named = {
        "fine": torch.ones(3),
        "large": torch.full((4,), 3e38),  # its norm overflows
        "nan": torch.tensor([1.0, math.nan]),
        "inf in bf16": torch.tensor([-math.inf], dtype=torch.bfloat16),
        "inf in float64": torch.tensor(math.inf, dtype=torch.float64),
        "empty": torch.empty(0),
        "integers": torch.arange(3),
    }
    assert nonfinite_names(named.items()) == ["nan", "inf in bf16", "inf in float64"]
