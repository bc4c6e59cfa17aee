"""Run the example and the commands of docs/guides/extensions.md in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runner import ROOT
from torchtitan_like.extensions.user_code import PARAMETERS

GUIDE = ROOT / "docs/guides/extensions.md"
SMALL = (
    "--training.steps 4 --model.args.dim 32 --model.args.n_layers 2 --model.args.n_heads 4 "
    "--training.seq_len 32 --metrics.enable_tensorboard=false --checkpoint.interval 4"
)


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    return str(text)


def titan(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    assert words[0] == "titan"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "torchtitan_like", *words[1:]],
        cwd=folder, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.nightly
def test_the_example_trains_and_generates(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(block("toml"))
    (tmp_path / "my_extensions.py").write_text(block("python"))
    bash = re.findall(r"^```bash\n(.*?)\n```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    train, generate = bash
    process = titan(f"{train} {SMALL}", tmp_path)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]

    steps = [line.split(",")[0] for line in (tmp_path / "outputs/loss.csv").read_text().split()]
    assert steps == ["1", "2", "3", "4"]
    rows = (tmp_path / "outputs/metrics.jsonl").read_text().splitlines()
    rates = [json.loads(row)["lr"] / 2e-4 for row in rows]
    assert [round(rate * 3, 9) for rate in rates] == [1, 2, 2, 1]  # of the triangle

    help_command = re.findall(r"`(titan help .*)` lists", GUIDE.read_text())[0]
    assert "--my_section.momentum" in titan(help_command, tmp_path).stdout

    generate = generate.removeprefix("PYTHONPATH=. ").replace("step-200", "step-4")
    process = titan(f"{generate} --num-tokens 2", tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    command = generate[: generate.index(" --experimental")]
    process = titan(f"{command} --num-tokens 2", tmp_path)
    assert (
        process.returncode == 2 and "--experimental.custom_import my_extensions" in process.stderr
    )


def test_the_guide_names_every_kind() -> None:
    page = GUIDE.read_text()
    assert all(f"| {kind} |" in page for kind in PARAMETERS)
