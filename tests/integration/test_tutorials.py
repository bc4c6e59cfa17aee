"""Run the commands of docs/tutorials in one folder in page order, with small models."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runner import ROOT

TUTORIALS = ROOT / "docs/tutorials"
SMALL = (
    "--model.args.dim 32 --model.args.n_layers 2 --model.args.n_heads 4 --training.seq_len 32 "
    "--lr_scheduler.total_steps 8 --lr_scheduler.warmup_steps 2 --validation.seq_len 32 "
    "--job.show_results false"
)
# Text of a page -> text in the tested command. Numbers are smaller; big models are replaced or only
# checked.
REPLACED = {
    "titan train debug_model.toml": f"titan train debug_model.toml {SMALL} --training.steps 4",
    "titan train mixture.toml": f"titan train mixture.toml {SMALL} --training.steps 4",
    "--training.steps 4 --training.steps 400": "--training.steps 8",
    "step-200": "step-4",
    "step-500": "step-4",
    "step-1000": "step-4",
    "--vocab-size 2048": "--vocab-size 300",
    "titan download ": "titan download --dry-run ",
    "titan train llama3_1b.toml --nproc 8": "titan check llama3_1b.toml --world-size 8",
    "--world-size 64 --training": "--world-size 64",  # the tokenizer is on the Hub
    "/shared/run1": "outputs",
    "/shared/text": "my_text.jsonl",
    "/data/my_text.jsonl": "my_text.jsonl",
}
# These commands need the Hub, lm-eval, a cluster or a failed run. Other tests cover them.
SKIPPED_COMMANDS = ("titan download", "titan eval", "sbatch", "titan run replay")


def blocks(page: str, language: str) -> list[str]:
    text = (TUTORIALS / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[str]:
    """Return the commands of a page after the replacements."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    replaced = []
    for line in filter(None, lines):
        command = re.sub(r" +", " ", line)
        for original, replacement in REPLACED.items():
            command = command.replace(original, replacement)
        replaced.append(command)
    return replaced


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tutorials")
    programs = folder / "programs"
    programs.mkdir()
    titan = programs / "titan"
    titan.write_text(
        f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} "
        f'exec {sys.executable} -m torchtitan_like "$@"\n'
    )
    titan.chmod(0o755)
    corpus = ROOT / "torchtitan_like/data/corpus/shakespeare_validation.jsonl"
    texts = corpus.read_text().splitlines(keepends=True)
    (folder / "my_text.jsonl").write_text("".join(texts))
    for source in ("books", "web"):
        (folder / source).mkdir()
        (folder / source / "part.jsonl").write_text("".join(texts[:4]))
    (folder / "held_out.jsonl").write_text("".join(texts[4:6]))
    (folder / "mixture.toml").write_text(blocks("2_your_data.md", "toml")[0])
    return folder


# Exit codes of commands, if not 0.
CODES = {"titan run compare": 1}


def run_commands(folder: Path, page: str) -> str:
    """Run the commands of a page and return their output."""
    dropped = ("NGPU", "NNODES", "CONFIG_FILE", "LOG_RANK", "LOG_PREFIX", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env |= {
        "PATH": f"{folder / 'programs'}:{env['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    output = []
    for command in commands(page):
        if command.startswith(SKIPPED_COMMANDS):
            continue
        process = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
        )
        code = next((code for start, code in CODES.items() if command.startswith(start)), 0)
        assert process.returncode == code, (
            f"{command}\n{process.stdout[-2000:]}{process.stderr[-3000:]}"
        )
        output.append(process.stdout)
    return "".join(output)


def test_all_pages_are_tested() -> None:
    assert sorted(path.name for path in TUTORIALS.iterdir()) == [
        "1_laptop.md",
        "2_your_data.md",
        "3_hugging_face.md",
        "4_slurm.md",
        "5_when_a_run_breaks.md",
    ]


@pytest.mark.nightly
def test_tutorial_laptop(folder: Path) -> None:
    output = run_commands(folder, "1_laptop.md")
    assert "Training starts at step 5" in output and "Resume: bit-exact" in output
    assert (folder / "outputs/checkpoint/step-8/manifest.json").exists()
    assert (folder / "two_ranks/checkpoint/step-4/manifest.json").exists()


@pytest.mark.nightly
def test_tutorial_your_data(folder: Path) -> None:
    run_commands(folder, "2_your_data.md")
    assert "held_out.jsonl" in (folder / "mixture/config.toml").read_text()
    assert (folder / "mixture/validation.jsonl").exists()
    assert (folder / "my_tokenizer/tokenizer.json").exists()


@pytest.mark.nightly
def test_tutorial_hugging_face(folder: Path) -> None:
    run_commands(folder, "3_hugging_face.md")
    assert {"config.json", "tokenizer.json"} <= {
        path.name for path in (folder / "exported").iterdir()
    }


@pytest.mark.nightly
def test_tutorial_slurm(folder: Path) -> None:
    run_commands(folder, "4_slurm.md")
    assert (folder / "jobs/train.slurm").exists()


@pytest.mark.nightly
def test_tutorial_when_a_run_breaks(folder: Path) -> None:
    output = run_commands(folder, "5_when_a_run_breaks.md")
    assert '"reason": "done"' in output
    assert re.search(r"data_digest +equal", output) and re.search(
        r"relative difference \d\.\d+e-0[5-9]", output
    )
