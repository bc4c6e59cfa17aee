"""scripts/node_check.py, all_reduce_bench.py and slurm/find_bad_nodes.py: what is found, and who is blamed."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.rank_pool import run_ranks
from tests.harness.runner import ROOT

sys.path.insert(0, str(ROOT / "scripts"))  # scripts import each other by name

from scripts import all_reduce_bench, node_check
from scripts.slurm import find_bad_nodes

WELL = "{}, GPU-{}, 40, 0, No, No, No, Not Active"


def csv(*rows: str) -> str:
    return "\n".join(row.format(n, n) if "{}" in row else row for n, row in enumerate(rows)) + "\n"


@pytest.mark.parametrize(
    ("rows", "problems"),
    [
        ((WELL, WELL), []),
        ((WELL,), ["1 GPUs instead of 2"]),
        ((WELL, "1, GPU-1, 40, [N/A], [N/A], [N/A], [N/A], [N/A]"), []),
        ((WELL, "1, GPU-1, 84, 0, No, No, No, Not Active"), ["GPU 1: 84 degrees"]),
        ((WELL, "1, GPU-1, 40, 3, No, No, No, Not Active"), ["GPU 1: ecc.errors.uncorrected.volatile.total is 3"]),
        ((WELL, "1, GPU-1, 40, 0, No, Yes, No, Not Active"), ["GPU 1: remapped_rows.pending is Yes"]),
        ((WELL, "1, GPU-1, 40, 0, No, No, No, Active"), ["GPU 1: clocks_throttle_reasons.hw_slowdown is Active"]),
        ((WELL, "1, GPU-9, 40, 0, No, No, No, Not Active"), ["GPU 1: GPU-9 is known to be bad"]),
        ((WELL, "Unable to determine the device handle"), ["nvidia-smi says 'Unable to determine the device handle'"]),
    ],
)
def test_what_is_wrong_with_gpus(rows: Sequence[str], problems: list[str]) -> None:
    assert node_check.gpu_problems(csv(*rows), 2, {"GPU-9"}) == problems


def test_xid_errors_are_told_once_for_each_card() -> None:
    line = "[12.3] NVRM: Xid (PCI:0000:{}:00): {}, pid=1, GPU has fallen off the bus.\n"
    log = line.format("19", 79) + "usb 1-1: new device\n" + line.format("19", 79) + line.format("3b", 48)
    assert node_check.xid_problems(log) == ["Xid 79 of PCI:0000:19:00", "Xid 48 of PCI:0000:3b:00"]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (3, 4, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, (5, 8, 1)),
        ({f"OMPI_COMM_WORLD_{key}": "2" for key in ("RANK", "SIZE", "LOCAL_RANK")}, (2, 2, 2)),
        ({}, (0, 1, 0)),
    ],
)
def test_ranks_are_what_the_launcher_says(env: dict[str, str], expected: tuple[int, int, int]) -> None:
    assert node_check.ranks_of(env) == expected


def test_ranks_that_reach_each_other_say_so() -> None:
    first, second = run_ranks(node_check.exercise, 2, "cpu", 0.01)
    assert first[0].startswith(f"[{node_check.host()}-0] is OK (cpu, ") and first[1].startswith("2 ranks, gloo, torch ")
    assert [line.partition(" (")[0] for line in second] == [f"[{node_check.host()}-1] is OK"]


def test_a_rank_that_does_not_reach_the_others_names_itself(monkeypatch, capsys) -> None:
    def join(*_: object) -> None:
        raise TimeoutError("1 of 2 ranks came")

    monkeypatch.setattr(node_check, "join", join)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    assert node_check.main(["--ranks"]) == 1
    assert capsys.readouterr().out == f"[{node_check.host()}-3] is BROKEN: 1 of 2 ranks came\n"


def test_a_machine_by_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "output", lambda *_: "")
    assert node_check.main(["--host-memory-gib", "0.001"]) == 0
    assert capsys.readouterr().out == f"{node_check.host()} is OK (0 GPUs)\n"
    assert node_check.main(["--gpus", "8", "--host-memory-gib", "1e6"]) == 1
    assert "is BAD: 0 GPUs instead of 8; " in capsys.readouterr().out


def test_a_driver_that_hangs_makes_a_machine_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(node_check, "ANSWER", 0.1)
    assert node_check.main(["--no-pairs"]) == 1
    assert f"{node_check.host()} is BAD: nvidia-smi says 'no answer within 0.1 s'" in capsys.readouterr().out


# ---- all_reduce


def test_bus_bandwidth() -> None:
    """4 GB in 20 ms on 8 ranks: 200 GB/s, of which each link carries 2 x 7/8 times as much."""
    assert all_reduce_bench.bandwidths(4_000_000_000, 0.02, 8) == pytest.approx((200e9, 350e9))
    row = all_reduce_bench.line(4_000_000_000, 0.02, 8, advertised=450).split()
    assert row == ["4,000,000,000", "20.000", "200.00", "1600.0", "350.00", "2800.0", "77.8%"]


@pytest.mark.parametrize(("text", "expected"), [("4GB", 4 * 10**9), ("1.5KiB", 1536), (" 7 ", 7), ("2MB", 2 * 10**6)])
def test_sizes(text: str, expected: int) -> None:
    assert all_reduce_bench.num_bytes(text) == expected


def test_a_size_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        all_reduce_bench.main(["--sizes", "4TB"])
    assert "'4TB' is no size" in capsys.readouterr().err


def test_all_ranks_measure_the_time_of_the_slowest() -> None:
    first, second = run_ranks(all_reduce_bench.measure_all_reduce, 2, 4096, 1, "cpu", 1, 3)
    assert first == second and 0 < first < 10


def count_collectives(size: int, parts: int) -> list[int]:
    """The bytes of each all_reduce of one repetition; the last is that of its time."""
    import torch.distributed as dist

    sent, real = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        all_reduce_bench.measure_all_reduce(size, parts, "cpu", 0, 1)
    finally:
        dist.all_reduce = real
    return sent


def test_parts_send_the_same_bytes_one_after_the_other() -> None:
    assert run_ranks(count_collectives, 2, 4096, 1)[0] == [4096, 8]
    assert run_ranks(count_collectives, 2, 4096, 4)[0] == [1024] * 4 + [8]


def table(*words: str) -> list[str]:
    """What a rank of the pool prints."""
    import torch.distributed as dist

    real = all_reduce_bench.join, dist.destroy_process_group
    all_reduce_bench.join = lambda *_, **__: (dist.get_rank(), dist.get_world_size(), "cpu")
    dist.destroy_process_group = lambda: None
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            assert all_reduce_bench.main(list(words)) == 0
    finally:
        all_reduce_bench.join, dist.destroy_process_group = real
    return printed.getvalue().splitlines()


def test_the_options_of_a_run_show_in_its_table() -> None:
    words = ["--sizes", "1KB,4KB", "--parts", "10", "--flags", "--warmup", "0", "--repeat", "1"]
    lines, of_the_other = run_ranks(table, 2, *words)
    assert lines[0].startswith("all_reduce, 2 ranks, gloo on cpu") and of_the_other == []
    assert [line.split()[0] for line in lines[3:7]] == ["1,000", "1,000", "4,000", "4,000"]
    assert "in 10 parts: " in lines[4] and "x slower" in lines[6] and "parts" not in lines[5]
    assert lines[7].startswith("a flag: all_reduce ") and "all_gather_object" in lines[7]


# ---- who is blamed


def cluster(sick: set[str] = frozenset(), cut_off: set[str] = frozenset(), calls: list | None = None):
    """An srun on which some nodes find themselves unfit, and some are reached by nobody."""

    def run(command: Sequence[str], env: dict[str, str]) -> tuple[bool, str]:
        hosts = next(word for word in command if word.startswith("--nodelist=")).partition("=")[2].split(",")
        if calls is not None:
            calls.append((hosts, list(command), env))
        if "--ranks" in command:
            return not cut_off & set(hosts), ""
        return not sick & set(hosts), f"starting\n{hosts[0]} is BAD: Xid 79"

    return run


@pytest.mark.parametrize(
    ("sick", "cut_off", "expected"),
    [
        (set(), set(), "all 5 nodes are well"),
        ({"n2"}, set(), "--exclude=n2"),
        (set(), {"n3"}, "--exclude=n3"),
        ({"n1"}, {"n5"}, "--exclude=n1,n5"),
        (set(), {"n1"}, "--exclude=n1"),
    ],
)
def test_the_bad_nodes_are_named_and_no_others(capsys, sick: set[str], cut_off: set[str], expected: str) -> None:
    code = find_bad_nodes.main(["--hosts", "n[1-5]"], cluster(sick, cut_off))
    assert capsys.readouterr().out.splitlines()[-1] == expected
    assert code == int(bool(sick or cut_off))


def test_a_network_that_is_down_blames_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_bad_nodes.main(["--hosts", "n[1-4]"], cluster(cut_off={"n1", "n2", "n3", "n4"})) == 2
    assert "no pair of nodes reaches each other" in capsys.readouterr().err


def test_what_srun_is_asked() -> None:
    calls: list = []
    find_bad_nodes.main(["--hosts", "n[1-2]", "--gpus", "8", "--", "--cpus-per-task=4"], cluster(calls=calls))
    hosts, command, _ = calls[0]
    assert command[:5] == ["srun", "--overlap", f"--nodelist={hosts[0]}", "--nodes=1", "--ntasks=1"]
    assert "--cpus-per-task=4" in command and command[-2:] == ["--gpus", "8"]
    assert calls[-1][2] == {"MASTER_ADDR": "n1", "MASTER_PORT": "29600"}
