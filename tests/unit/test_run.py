"""Configuration and device of a process before its run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchtitan_like import run
from torchtitan_like.check import load_checked
from torchtitan_like.run import full_key, look_for_device, read_run


@pytest.mark.parametrize(
    ("option", "expected"), [("--debug.launch_blocking", "1"), ("--debug.no_launch_blocking", "0")]
)
def test_launch_blocking_is_set_before_the_first_use_of_a_gpu(
    option: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA driver reads the variable only once."""
    values = []
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: values.append(os.environ["CUDA_LAUNCH_BLOCKING"])
    )
    load_checked(["--training.steps=1000", option], 1, training=True, device_type=look_for_device)
    assert values == [expected]


@pytest.mark.parametrize(("num_cores", "is_warned"), [(1, True), (64, False)])
def test_a_run_on_one_core_logs_a_warning(
    num_cores: int,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(run, "num_cores", lambda: num_cores)
    read_run(["--training.dataloader.num_workers", "0"], 1)
    assert ("Only 1 CPU core is available" in caplog.text) == is_warned


COUNT_WORK_OF_A_RANK = """
import os, runpy, sys

counts = open(sys.argv.pop(1), "wb", buffering=0)

def record(event, arguments):
    # An opener of `open` repeats the event without a mode.
    if event == "open" and str(arguments[0]).endswith("mine.toml") and arguments[1]:
        counts.write(b"read\\n")

sys.addaudithook(record)
from torchtitan_like.config import loader

parse = loader.parse_arguments
loader.parse_arguments = lambda argv: counts.write(b"parsed\\n") and parse(argv)
runpy.run_module("torchtitan_like.train", run_name="__main__")
"""


def test_a_rank_parses_its_arguments_and_reads_its_file_once(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'extends = "debug_model.toml"\n[training]\nsteps = 1\nlocal_batch_size = 1\n'
        "[validation]\nenable = false\n[checkpoint]\nenable = false\n"
    )
    command = [sys.executable, "-c", COUNT_WORK_OF_A_RANK, "counts"]
    command += ["--job.config_file", "mine.toml", "--job.dump_folder", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "counts").read_text().split()) == ["parsed", "read"]


USE_THE_LIBRARY = """
import logging
import sys
import torchtitan_like

assert "torch" not in sys.modules

class Facts(logging.Handler):
    def emit(self, record):
        print("screen:", getattr(record, "screen_text", ""))

logging.getLogger().addHandler(Facts())
for folder in ("first", "second"):
    with torchtitan_like.open_run(
        "debug_model.toml", "validation.enable=false", "checkpoint.enable=false",
        f"data.sources.mine.path={sys.argv[1]}",
        steps=2, local_batch_size=1, seq_len=32, dump_folder=folder,
    ) as trainer:
        assert isinstance(trainer, torchtitan_like.Trainer)
        trainer.train()
        assert trainer.progress.step == 2
"""


def test_two_runs_train_in_one_process(tmp_path: Path, repo_root: Path) -> None:
    corpus = repo_root / "torchtitan_like/data/corpus/shakespeare_validation.jsonl"
    command = [sys.executable, "-c", USE_THE_LIBRARY, str(corpus)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("first", "second")]
    losses = [[json.loads(line)["loss"] for line in text.splitlines()] for text in rows]
    assert losses[0] == losses[1] != []
    facts = done.stdout.partition("screen: model   ")[2].splitlines()[:6]
    assert facts == [
        "llama3 debugmodel, 6,163,712 total parameters",
        "         layout  1 x cpu: dp_shard 1",
        "         data    mine",
        "         batch   1 x 32 = 32 tokens",
        "         steps   1 to 2, no checkpoints",
        "         log     first/attempts/1/logs/rank0.log",
    ]


def test_a_keyword_is_a_key_of_training_or_of_one_section() -> None:
    assert full_key("steps") == "training.steps"
    assert full_key("dump_folder") == "job.dump_folder"
    with pytest.raises(ValueError, match=r'Several sections have the key "enable"'):
        full_key("enable")
