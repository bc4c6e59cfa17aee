"""`titan node check|bench`: problems of machines and ranks, and the table of all-reduce speeds."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.examples import example_words
from tests.harness.rank_pool import run_ranks
from tests.harness.runner import ROOT
from torchtitan_like.cli import main, node_commands
from torchtitan_like.node import bench, machine, ranks

HEALTHY = "{}, GPU-{}, 40, 0, No, No, No, Not Active"


def csv(*rows: str) -> str:
    return "\n".join(row.format(n, n) if "{}" in row else row for n, row in enumerate(rows)) + "\n"


@pytest.mark.parametrize(
    ("rows", "problems"),
    [
        ((HEALTHY, HEALTHY), []),
        ((HEALTHY,), ["1 GPUs instead of 2"]),
        ((HEALTHY, "1, GPU-1, 40, [N/A], [N/A], [N/A], [N/A], [N/A]"), []),
        ((HEALTHY, "1, GPU-1, 84, 0, No, No, No, Not Active"), ["GPU 1: 84 degrees"]),
        (
            (HEALTHY, "1, GPU-1, 40, 3, No, No, No, Not Active"),
            ["GPU 1: ecc.errors.uncorrected.volatile.total is 3"],
        ),
        (
            (HEALTHY, "1, GPU-1, 40, 0, No, Yes, No, Not Active"),
            ["GPU 1: remapped_rows.pending is Yes"],
        ),
        (
            (HEALTHY, "1, GPU-1, 40, 0, No, No, No, Active"),
            ["GPU 1: clocks_throttle_reasons.hw_slowdown is Active"],
        ),
        ((HEALTHY, "1, GPU-9, 40, 0, No, No, No, Not Active"), ["GPU 1: GPU-9 is known to be bad"]),
        (
            (HEALTHY, "Unable to determine the device handle"),
            ["nvidia-smi printed 'Unable to determine the device handle'"],
        ),
    ],
)
def test_gpu_problems_are_reported(rows: Sequence[str], problems: list[str]) -> None:
    assert machine.gpu_problems(csv(*rows), 2, {"GPU-9"}) == problems


def test_xid_errors_are_reported_once_per_gpu() -> None:
    line = "[12.3] NVRM: Xid (PCI:0000:{}:00): {}, pid=1, GPU has fallen off the bus.\n"
    log = (
        line.format("19", 79)
        + "usb 1-1: new device\n"
        + line.format("19", 79)
        + line.format("3b", 48)
    )
    assert machine.xid_problems(log) == ["Xid 79 of PCI:0000:19:00", "Xid 48 of PCI:0000:3b:00"]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "1",
            },
            (3, 4, 1),
        ),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, (5, 8, 1)),
        ({f"OMPI_COMM_WORLD_{key}": "2" for key in ("RANK", "SIZE", "LOCAL_RANK")}, (2, 2, 2)),
        ({}, (0, 1, 0)),
    ],
)
def test_ranks_are_read_from_the_launcher(
    env: dict[str, str], expected: tuple[int, int, int]
) -> None:
    assert ranks.launched_ranks(env) == expected


def test_connected_ranks_are_ok() -> None:
    first, second = run_ranks(ranks.exercise_group, 2, "cpu", 0.01)
    assert first[0].startswith(f"[{machine.host_name()}-0] is OK (cpu, ") and first[1].startswith(
        "2 ranks, gloo, torch "
    )
    assert [line.partition(" (")[0] for line in second] == [f"[{machine.host_name()}-1] is OK"]


def test_a_rank_without_connection_reports_its_name(monkeypatch, capsys) -> None:
    def join_ranks(*_: object) -> None:
        raise TimeoutError("1 of 2 ranks joined")

    monkeypatch.setattr(ranks, "join_ranks", join_ranks)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    assert ranks.check_ranks(None, 60, 0) is False
    assert capsys.readouterr().out == f"[{machine.host_name()}-3] is BROKEN: 1 of 2 ranks joined\n"


def test_a_machine_without_gpus_is_ok_unless_gpus_are_required(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "output", lambda *_: "")
    assert main(["node", "check", "--host-memory-gib", "0.001"]) == 0
    assert capsys.readouterr().out == f"{machine.host_name()} is OK (0 GPUs)\n"
    assert main(["node", "check", "--gpus", "8", "--host-memory-gib", "1e6"]) == 1
    assert "is BAD: 0 GPUs instead of 8; " in capsys.readouterr().out


def test_a_hung_driver_makes_a_machine_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "ANSWER_SECONDS", 0.1)
    assert main(["node", "check", "--no-pairs"]) == 1
    assert (
        f"{machine.host_name()} is BAD: nvidia-smi printed 'no answer within 0.1 s'"
        in capsys.readouterr().out
    )


# ---- all_reduce


def test_bus_bandwidth_formula() -> None:
    """4 GB in 20 ms on 8 ranks are 200 GB/s. Each link carries 2 x 7/8 times as much."""
    assert bench.bandwidths(4_000_000_000, 0.02, 8) == pytest.approx((200e9, 350e9))
    row = bench.format_row(4_000_000_000, 0.02, 8, advertised=450).split()
    assert row == ["4,000,000,000", "20.000", "200.00", "1600.0", "350.00", "2800.0", "77.8%"]


@pytest.mark.parametrize(
    ("text", "expected"), [("4GB", 4 * 10**9), ("1.5KiB", 1536), (" 7 ", 7), ("2MB", 2 * 10**6)]
)
def test_sizes_are_parsed(text: str, expected: int) -> None:
    assert bench.parse_size(text) == expected


def test_a_malformed_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["node", "bench", "--sizes", "4TB"])
    assert "it is '4TB'. Expected numbers with KB, MB" in capsys.readouterr().err


def test_all_ranks_report_the_time_of_the_slowest_rank() -> None:
    first, second = run_ranks(bench.measure_all_reduce, 2, 4096, 1, bench.Repetitions("cpu", 1, 3))
    assert first == second and 0 < first < 10


def count_collectives(size: int, parts: int) -> list[int]:
    """Return the bytes of each all_reduce of one repetition. The last one sends the time."""
    import torch.distributed as dist

    sent, original = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        bench.measure_all_reduce(size, parts, bench.Repetitions("cpu", 0, 1))
    finally:
        dist.all_reduce = original
    return sent


def test_parts_send_the_same_number_of_bytes() -> None:
    assert run_ranks(count_collectives, 2, 4096, 1)[0] == [4096, 8]
    assert run_ranks(count_collectives, 2, 4096, 4)[0] == [1024] * 4 + [8]


def table(*options: str) -> list[str]:
    """Return the lines that a rank of the pool prints."""
    import torch.distributed as dist

    original = bench.join_ranks, dist.destroy_process_group, node_commands.end_rank
    this = ranks.Ranks(dist.get_rank(), dist.get_world_size(), 0)
    bench.join_ranks = lambda *_: (this, "cpu")
    node_commands.end_rank = lambda code: code
    dist.destroy_process_group = lambda: None
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            assert main(["node", "bench", *options]) == 0
    finally:
        bench.join_ranks, dist.destroy_process_group, node_commands.end_rank = original
    return printed.getvalue().splitlines()


def test_options_add_rows_to_the_table() -> None:
    options = ["--sizes", "1KB,4KB", "--parts", "10", "--flags", "--warmup", "0", "--repeat", "1"]
    lines, other_lines = run_ranks(table, 2, *options)
    assert lines[0].startswith("all_reduce, 2 ranks, gloo on cpu") and other_lines == []
    assert [line.split()[0] for line in lines[3:7]] == ["1,000", "1,000", "4,000", "4,000"]
    assert "in 10 parts: " in lines[4] and "x slower" in lines[6] and "parts" not in lines[5]
    assert lines[7].startswith("a flag: all_reduce ") and "all_gather_object" in lines[7]


# ---- the commands


def test_the_examples_in_the_help_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "output", lambda *_: "")
    assert main(example_words("node check")) == 0
    assert capsys.readouterr().out == f"{machine.host_name()} is OK (0 GPUs)\n"
    titan = [sys.executable, "-m", "torchtitan_like"]
    done = start([*titan, *example_words("node bench")])
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[3:]] == ["32,000", "1,000,000"]


def test_check_of_ranks_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = start([*torchrun, "-m", "torchtitan_like", "node", "check", "--ranks"])
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"[{machine.host_name()}-{rank}] is OK (cpu, " in done.stdout
    assert "2 ranks, gloo, torch " in done.stdout


def start(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_an_unreadable_list_of_bad_gpus_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["node", "check", "--known-bad", str(tmp_path / "nowhere")]) == 2
    assert "nowhere cannot be read: No such file" in capsys.readouterr().err
