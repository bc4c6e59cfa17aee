"""scripts/comm_compute.py reproduces published figures of runs."""

from __future__ import annotations

import pytest

from scripts.comm_compute import gigabytes, main, tflop
from torchtitan_like.node.bench import bandwidths

IDEFICS = [
    "--params",
    "80e9",
    "--gpus",
    "512",
    "--seq-len",
    "1024",
    "--batch",
    "3584",
    "--recompute",
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((10e9, "zero3", 2, 1), 60),
        ((10e9, "ddp", 2, 1), 40),
        ((10e9, "zero1", 2, 1), 40),
        ((10e9, "zero1", 2, 8), 40),  # gradients are reduced once
        ((10e9, "zero2", 2, 8), 320),
        ((10e9, "zero3", 2, 8), 480),
        ((2e9, "ddp", 4, 1), 16),
    ],
)
def test_bytes_sent_per_step(arguments: tuple, expected: float) -> None:
    assert gigabytes(*arguments) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sent", "gbs", "seconds"),
    [
        (16, 300, 0.053),
        (16, 450, 0.0356),
        (16, 200 / 8, 0.64),
        (16, 400 / 8, 0.32),
        (320, 200 / 8, 12.8),
        (320, 1600 / 8, 1.6),
    ],
)
def test_time_to_send_float32_gradients_of_2b_and_80b(
    sent: float, gbs: float, seconds: float, capsys
) -> None:
    """DDP sends 16 GB with 2 B parameters. 320 GB is one direction of DDP with 80 B."""
    params = 2e9 if sent == 16 else 40e9
    run = [
        "--gpus",
        "8",
        "--tflops",
        "156",
        "--seq-len",
        "2048",
        "--batch",
        "2",
        "--sharding",
        "ddp",
        "--bytes",
        "4",
    ]
    assert main(["--params", str(params), "--gbs", str(gbs), *run]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert f"= {sent} GB, " in line
    assert float(line.split(" GB, ")[1].split()[0]) == pytest.approx(seconds, rel=0.01)


def test_compute_per_step() -> None:
    """2 B weights, 4,096 tokens, recomputation: 65.536 TFLOP, 0.42 s at 156 TFLOP/s."""
    assert tflop(2e9, 4096, recompute=True) == pytest.approx(65.536)
    assert tflop(2e9, 4096, recompute=True) / 156 == pytest.approx(0.42, abs=0.001)
    assert tflop(2e9, 4096, recompute=False) == pytest.approx(49.152)


@pytest.mark.parametrize(
    ("gbs", "tflops", "comm", "compute", "verdict"),
    [
        (42.5, 250, 11.3, 18.4, "compute-bound: communication takes 62%"),
        (
            8.5,
            250,
            56.5,
            18.4,
            "network-bound: at least 68% of a step is waiting; above 26.2 GB/s",
        ),
        (212, 90, 2.26, 51, "compute-bound: communication takes 4%"),
    ],
)
def test_verdicts_for_80b_on_512_gpus(gbs, tflops, comm, compute, verdict, capsys) -> None:
    assert main([*IDEFICS, "--gbs", str(gbs), "--tflops", str(tflops)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("communication: 3 x 2 bytes x 80 B x 1 micro-batches = 480 GB, ")
    assert f" {comm:g} s at" in lines[0] and f" {compute:g} s on 512 GPUs" in lines[1]
    assert lines[2].startswith(verdict)


def test_an_impossible_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*IDEFICS, "--gbs", "0", "--tflops", "90"])
    assert "expected numbers above 0: gbs" in capsys.readouterr().err


@pytest.mark.parametrize(("num_ranks", "factor"), [(2, 1), (8, 1.75), (64, 1.97)])
def test_factor_of_bus_bandwidth(num_ranks: int, factor: float) -> None:
    assert bandwidths(1, 1, num_ranks)[1] == pytest.approx(factor, abs=0.002)
