"""Peaks by device name, and the utilisations whose values the literature and TorchTitan's logs give."""

from __future__ import annotations

import logging

import pytest

from torchtitan_like.monitor import flops


@pytest.mark.parametrize(
    ("device_name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA L40S", 362),  # TorchTitan 0.2 compares with "l40s" and never finds it
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GB300", 2500),
        ("NVIDIA RTX A6000", 154.85),
        ("Tesla V100-SXM2-32GB", 125),
        ("AMD Instinct MI300X", 1300),
        ("AMD Instinct MI355X", 2500),
        ("AMD Instinct MI250X", 191.5),  # one of the card's two devices
        ("AMD Instinct MI250X / MI250", 191.5),  # as some are called: the larger of both, which flatters neither
        ("TPU v5p", 459),
    ],
)
def test_peak_by_device_name(device_name: str, tera: float) -> None:
    assert flops.peak_flops(device_name, None) == pytest.approx(tera * 1e12, rel=1e-12)


@pytest.mark.parametrize("device_name", ["NVIDIA T4", "NVIDIA L40", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "A1000"])
def test_unknown_device_has_no_peak_and_one_warning(device_name: str, caplog: pytest.LogCaptureFixture) -> None:
    flops._warned.clear()
    with caplog.at_level(logging.WARNING):
        assert [flops.peak_flops(device_name, None) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1 and "metrics.peak_flops" in caplog.text and device_name in caplog.text


def test_cpu_has_no_peak_unless_set(caplog: pytest.LogCaptureFixture) -> None:
    assert flops.peak_flops("cpu", None) is None and not caplog.records
    assert flops.peak_flops("cpu", 2e11) == 2e11


@pytest.mark.parametrize(("precision", "expected"), [("bf16", 312e12), ("tf32", 156e12), ("fp8", 624e12)])
def test_precisions(precision: str, expected: float) -> None:
    assert flops.peak_flops("NVIDIA A100-SXM4-40GB", None, precision) == expected


def test_mfu_of_624_tflop_in_4_seconds_on_a100() -> None:
    assert flops.mfu(624e12, 1 / 4, flops.peak_flops("NVIDIA A100-SXM4-80GB", None)) == pytest.approx(50.0)


def test_mfu_of_llama3_8b_as_torchtitan_logs_it() -> None:
    peak = flops.peak_flops("NVIDIA H100 80GB HBM3", None)
    assert round(57.914e9 * 7031 / 1e12, 1) == 407.2
    assert flops.mfu(57.914e9, 7031, peak) == pytest.approx(41.17, abs=0.005)


def test_full_recomputation_adds_a_third() -> None:
    assert flops.hfu(1e9, 1000, 1e13) == pytest.approx(4 / 3 * 10.0)
    assert flops.hfu(1e9, 1000, 1e13, num_passes=3) == flops.mfu(1e9, 1000, 1e13)
    assert flops.hfu(1e9, 1000, None) is None


def test_estimate_in_tflops_per_device() -> None:
    # 8 B parameters, 2,048 samples of 4,096 tokens in 40 s on 256 devices, without and with recomputation
    expected = 8 * 3 * 2 * 4096 * 2048 / (40 * 256 * 1e3)
    assert flops.estimate_tflops(8, 3, 4096, 2048, 40, 256) == pytest.approx(expected) == pytest.approx(39.32, abs=0.01)
    assert flops.estimate_tflops(8, 4, 4096, 2048, 40, 256) == pytest.approx(expected * 4 / 3)


def test_forward_flops_per_layer() -> None:
    batch, seq, dim = 2, 8, 16
    projections = 2 * batch * seq * dim * (4 * dim) + 2 * batch * seq * dim * (8 * dim)  # q, k, v, o; both of the MLP
    attention = 2 * 2 * batch * seq * seq * dim  # scores, and scores times values
    assert flops.forward_flops_per_layer(batch, seq, dim) == projections + attention
