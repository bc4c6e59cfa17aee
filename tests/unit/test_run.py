"""Configuration and device of a process before its run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from torchtitan_like import run
from torchtitan_like.check import context, model_checks
from torchtitan_like.run import full_key, resolve_run


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
    resolve_run(["--training.steps=1000", option], 1)
    assert values == [expected]


@pytest.mark.parametrize(("num_cores", "is_warned"), [(1, True), (64, False)])
def test_a_run_on_one_core_logs_a_warning(
    num_cores: int,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(run, "num_cores", lambda: num_cores)
    resolve_run(["--training.dataloader.num_workers", "0"], 1)
    assert ("Only 1 CPU core is available" in caplog.text) == is_warned


def test_a_rank_resolves_its_model_and_its_layout_once(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = Mock()
    for module, name in (
        (model_checks, "resolve_args"),
        (context, "resolve_degrees"),
        (context, "plan_stages"),
    ):
        monkeypatch.setattr(module, name, Mock(wraps=getattr(module, name)))
        functions.attach_mock(getattr(module, name), name)
    resolve_run(["--parallelism.pipeline_parallel_degree", "2"], 2)
    names = [call[0] for call in functions.mock_calls]
    assert names == ["resolve_args", "resolve_degrees", "plan_stages"]


# Logs each parsed command line and each TOML file that is read, with the program that does it.
COUNT = """
import os, sys
from importlib.machinery import PathFinder

def log(work):
    options = ("-u", "-m")
    program = next(word for word in sys.orig_argv[1:] if word not in options)
    with open(os.environ["COUNTS"], "a") as file:
        file.write(f"{program} {work}\\n")

def log_reading(event, arguments):
    # An opener of `open` repeats the event without a mode.
    if event == "open" and str(arguments[0]).endswith(".toml") and arguments[1] in ("r", "rb"):
        log(os.path.basename(arguments[0]))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torchtitan_like.config.loader":
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def execute_and_wrap(module):
            execute(module)
            parse = module.parse_arguments
            module.parse_arguments = lambda argv: log("argv") or parse(argv)
        spec.loader.exec_module = execute_and_wrap
        return spec

sys.addaudithook(log_reading)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("command", "reader"),
    [
        (["torchtitan_like", "train", "mine.toml", "--nproc", "2"], "torchtitan_like"),
        (["torchtitan_like.train", "--job.config_file=mine.toml"], "torchtitan_like.train"),
    ],
    ids=["titan train", "a rank alone"],
)
def test_only_one_process_reads_the_configuration_and_only_once(
    command: list[str], reader: str, tmp_path: Path, repo_root: Path
) -> None:
    """The launcher hands it to its ranks, which read no file and parse no argument."""
    (tmp_path / "mine.toml").write_text(
        'extends = "debug_model.toml"\n[training]\nsteps = 1\nlocal_batch_size = 1\n'
        "[job]\nshow_results = false\n[validation]\nenable = false\n[checkpoint]\nenable = false\n"
    )
    (tmp_path / "sitecustomize.py").write_text(COUNT)
    environ = os.environ | {
        "COUNTS": str(tmp_path / "counts"),
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{repo_root}",
    }
    words = [sys.executable, "-m", *command, "--job.dump_folder", "run"]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "counts").read_text().splitlines()) == [
        f"{reader} argv",
        f"{reader} debug_model.toml",
        f"{reader} mine.toml",
    ]


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
