"""Peak FLOP/s by device name; MFU and HFU equal values in papers and TorchTitan's logs."""

from __future__ import annotations

import logging

import pytest
import torch

from torchtitan_like.monitor import throughput
from torchtitan_like.monitor.memory import build_memory_monitor
from torchtitan_like.monitor.throughput import log_hardware


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
        ("NVIDIA L40S", 362),  # TorchTitan 0.2 compares with "l40s" and never matches
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GB300", 2500),
        ("NVIDIA RTX A6000", 154.85),
        ("Tesla V100-SXM2-32GB", 125),
        ("AMD Instinct MI300X", 1300),
        ("AMD Instinct MI355X", 2500),
        ("AMD Instinct MI250X", 191.5),  # one of the card's two devices
        # A name that some of these devices report: the larger peak gives the lower MFU.
        ("AMD Instinct MI250X / MI250", 191.5),
        ("TPU v5p", 459),
    ],
)
def test_the_device_name_selects_the_peak(device_name: str, tera: float) -> None:
    assert throughput.peak_flops(device_name, None) == pytest.approx(tera * 1e12, rel=1e-12)


@pytest.mark.parametrize(
    "device_name", ["NVIDIA T4", "NVIDIA L40", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "A1000"]
)
def test_an_unknown_device_has_no_peak_and_one_warning(
    device_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    throughput._warned.clear()
    with caplog.at_level(logging.WARNING):
        assert [throughput.peak_flops(device_name, None) for _ in range(3)] == [None] * 3
    assert (
        len(caplog.records) == 1
        and "metrics.peak_flops" in caplog.text
        and device_name in caplog.text
    )


def test_a_cpu_has_no_peak_unless_set(caplog: pytest.LogCaptureFixture) -> None:
    assert throughput.peak_flops("cpu", None) is None and not caplog.records
    assert throughput.peak_flops("cpu", 2e11) == 2e11


@pytest.mark.parametrize(
    ("precision", "expected"), [("bf16", 312e12), ("tf32", 156e12), ("fp8", 624e12)]
)
def test_the_peak_depends_on_the_precision(precision: str, expected: float) -> None:
    assert throughput.peak_flops("NVIDIA A100-SXM4-40GB", None, precision) == expected


def test_mfu_of_624_tflop_in_4_seconds_on_a100() -> None:
    assert throughput.mfu(
        624e12, 1 / 4, throughput.peak_flops("NVIDIA A100-SXM4-80GB", None)
    ) == pytest.approx(50.0)


def test_mfu_of_llama3_8b_equals_torchtitans_log() -> None:
    peak = throughput.peak_flops("NVIDIA H100 80GB HBM3", None)
    assert round(57.914e9 * 7031 / 1e12, 1) == 407.2
    assert throughput.mfu(57.914e9, 7031, peak) == pytest.approx(41.17, abs=0.005)


def test_full_recomputation_increases_hfu_by_a_third() -> None:
    assert throughput.hfu(1e9, 1000, 1e13) == pytest.approx(4 / 3 * 10.0)
    assert throughput.hfu(1e9, 1000, 1e13, num_passes=3) == throughput.mfu(1e9, 1000, 1e13)
    assert throughput.hfu(1e9, 1000, None) is None


def test_utilization_equals_the_estimate_of_megatron() -> None:
    """2 FLOPs per parameter, token and pass (Narayanan et al. 2021); recomputation is a 4th pass."""
    # 8e9 parameters, 2,048 samples of 4,096 tokens in 40 s on 256 devices of 100 TFLOP/s.
    model_tflops, hardware_tflops = (8 * k * 2 * 4096 * 2048 / (40 * 256 * 1e3) for k in (3, 4))
    tps = 4096 * 2048 / (40 * 256)
    assert model_tflops == pytest.approx(39.32, abs=0.01)
    assert throughput.mfu(6 * 8e9, tps, 1e14) == pytest.approx(model_tflops)
    assert throughput.hfu(6 * 8e9, tps, 1e14) == pytest.approx(hardware_tflops)


def test_the_log_states_the_formula(caplog: pytest.LogCaptureFixture) -> None:
    """The queries of latent attention are wider than its values; windows limit the keys."""
    with caplog.at_level(logging.INFO):
        log_hardware(build_memory_monitor(torch.device("cpu")), "cpu", None, 2e9)
    formula = "6 (P - P_embedding) + 6 H (qk_dim + v_dim) sum of each layer's keys"
    assert f"2.000 GFLOP per token = {formula}" in caplog.text
