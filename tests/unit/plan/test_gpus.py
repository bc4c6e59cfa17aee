"""The shipped descriptions of GPUs are complete, and mistakes are explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchtitan_like.monitor.throughput import PEAK_FLOPS
from torchtitan_like.plan.descriptions import names_in
from torchtitan_like.plan.gpus import FOLDER, load_gpu


@pytest.mark.parametrize("name", names_in(FOLDER))
def test_each_gpu_has_plausible_sizes_and_the_peak_of_mfu(name: str) -> None:
    gpu = load_gpu(name)
    model, _, memory = name.partition("-")
    assert 0.9 < gpu.memory_gib * 2**30 / (float(memory.rstrip("g")) * 1e9) < 1.08
    assert gpu.peak_tflops["bfloat16"] * 1e12 == pytest.approx(PEAK_FLOPS[model.upper()], rel=0.006)
    assert (FOLDER / f"{name}.toml").read_text().startswith("# ")  # its sources


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="there is no GPU 'h100-80'.*a100-80g.*mean h100-80g"):
        load_gpu("h100-80")


def test_a_file_without_a_field_names_it(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('name = "own"\nmemory_gib = 16\n')
    with pytest.raises(ValueError, match="hbm_tb_s.*correct the file"):
        load_gpu(str(path))
    path.write_text((FOLDER / "a100-80g.toml").read_text())
    assert load_gpu(str(path)).memory_gib == load_gpu("a100-80g").memory_gib


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('device_type = "tpu"', "device_type = 'tpu'. Expected one of cuda, cpu"),
        ("attention = {1 = {forward = [0.6, 1, 1]}}", "attention.*table of forward, backward"),
        ("attention = {forward = [0.6, 1, 1]}", "attention.*Expected sizes of heads"),
        (
            "attention = {64 = {forward = [0.6, 1, 1], backward = [0.5]}}",
            r"attention\] 64 backward = \[0.5\]. Expected 3 numbers",
        ),
        ("collectives = {all_gather = [1, 2]}", "collectives.*table of all_gather, all_reduce"),
    ],
)
def test_malformed_fields_of_a_device_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f"{line}\n" + (FOLDER / "a100-80g.toml").read_text())
    with pytest.raises(ValueError, match=message) as error:
        load_gpu(str(path))
    assert "correct" in str(error.value)


@pytest.mark.parametrize(
    ("line", "wrong", "message"),
    [
        (r"(?<=share\]\n)bfloat16 = .*", "bfloat16 = 1.2", "matmul_share bfloat16 = 1.2. Expected"),
        ("memory_share = .*", 'memory_share = "half"', "memory_share = 'half'. Expected a share"),
    ],
)
def test_shares_are_at_most_1(line: str, wrong: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    text, number = re.subn(line, wrong, (FOLDER / "a100-80g.toml").read_text())
    assert number == 1
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_gpu(str(path))
