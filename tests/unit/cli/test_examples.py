"""Run the examples in the help of `titan` commands."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pytest
import torch
from safetensors import safe_open

from tests.harness.examples import example_of, example_words
from tests.harness.hub import local_hub
from tests.harness.outputs import closed_pipe, full_disk
from tests.harness.runner import ROOT
from torchtitan_like import cli
from torchtitan_like.config.dataset_names import DATASETS
from torchtitan_like.util.bundle import TOKENIZER, TRAIN_CONFIGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TINY_RUN = (
    "titan train debug_model.toml --training.steps 100 --checkpoint.interval 50 "
    "--job.show_results false "
    "--training.dataset shakespeare_validation --training.seq_len 32 --validation.enable false "
    "--model.args.dim 32 --model.args.n_layers 2 --model.args.n_heads 4"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 100 steps in outputs/, a corpus and a tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    run_titan(TINY_RUN, folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with a corpus and a tokenizer."""
    shutil.copy(DATASETS["shakespeare_validation"].file, tmp_path / "corpus.jsonl")
    assets = tmp_path / "assets/hf/Llama-3.1-8B"
    shutil.copytree(TOKENIZER, assets)
    return tmp_path


def run_example(name: str, folder: Path, **env: str) -> str:
    """Run the example of a command in `folder`, in a new process. Returns its stdout."""
    return run_titan(example_of(name), folder, **env)


def run_titan(command: str, folder: Path, **env: str) -> str:
    """Run a command in `folder`, in a new process. Returns its stdout."""
    words = shlex.split(command)
    assert words[0] == "titan"
    return run_python(["-m", "torchtitan_like", *words[1:]], folder, **env)


def run_python(words: list[str], folder: Path, **env: str) -> str:
    """Run Python in `folder`. Returns its stdout."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Examples that other files run.
TESTED_ELSEWHERE = (
    "bench",  # tests/integration/test_bench.py
    "run ls",
    "run watch",
    "plan search",  # tests/integration/test_plan_search.py
    "run report",
    "run compare",
    "run save",
    "run stop",  # tests/unit/cli/test_run.py
    "run replay",  # tests/distributed/test_replay.py
    "eval",  # tests/integration/test_evaluation.py
    "node check",
    "node bench",  # tests/unit/node/test_node.py
    "slurm init",  # tests/unit/slurm/test_commands.py
)


def test_every_example_has_a_test() -> None:
    """Each test in this file is named after its command."""
    for name in {command.name for command in cli.executable_commands()} - {*TESTED_ELSEWHERE}:
        test = "test_" + name.replace(" ", "_").replace("-", "_")
        assert callable(globals().get(test)), test


class Example(Protocol):
    """Run the example of a command in `folder`, in this process. Returns its stdout."""

    def __call__(self, name: str, folder: Path, code: int = 0) -> str: ...


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """Run examples in this process, which has already imported torch."""

    def run(name: str, folder: Path, code: int = 0) -> str:
        monkeypatch.chdir(folder)
        assert cli.main(example_words(name)) == code
        return capsys.readouterr().out

    return run


# ---- an output that cannot be written

# Commands that print a result and change no file.
PRINTING = (
    *("config ls", "config show"),
    *("check", "help", "plan", "ckpt ls", "ckpt show", "ckpt verify", "ckpt diff"),
    *("data show", "run ls", "run watch", "run compare", "node check"),
    "generate",
)
# Commands that write files, or train.
WRITING = (
    *("train", "bench", "ladder", "config copy", "download", "ckpt export"),
    *("data tokenize", "data train-tokenizer", "data tiny", "run replay", "run report", "run save"),
    *("run stop", "eval", "node bench", "slurm init", "plan search"),
)
FULL_DISK = (
    "Cannot write to stdout: No space left on device. Expected a pipe with a reader, or a disk with "
    "free space. Send the output elsewhere.\n"
)
WITH_JSON = {
    *("ckpt ls", "ckpt show", "ckpt verify", "data show", "generate", "run ls", "run compare"),
}


def printing_words() -> list[str]:
    """Return the words after `titan` of every printing command, and of every --help."""
    examples = [example_of(name).removeprefix("titan ") for name in PRINTING]
    of_json = [f"{example_of(name).removeprefix('titan ')} --json" for name in sorted(WITH_JSON)]
    names = [command.name for command in cli.executable_commands()]
    return [
        "--help",
        "--version",
        "ckpt --help",
        *examples,
        *of_json,
        *(f"{n} --help" for n in names),
    ]


def test_every_command_prints_or_writes() -> None:
    names = [command.name for command in cli.executable_commands()]
    assert sorted([*PRINTING, *WRITING]) == sorted(names)


@pytest.mark.parametrize(
    ("output", "code", "num_messages"),
    [
        pytest.param(
            closed_pipe, 128 + signal.SIGPIPE, 0, id="closed pipe", marks=pytest.mark.nightly
        ),
        pytest.param(full_disk, 74, 1, id="full disk"),
    ],
)
def test_a_command_ends_if_its_output_cannot_be_written(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: Callable[[], AbstractContextManager[int]],
    code: int,
    num_messages: int,
) -> None:
    monkeypatch.chdir(trained)
    for name in ("outputs_a", "outputs_b"):
        if not Path(name).exists():
            Path(name).symlink_to("outputs")
    for words in printing_words():
        words, _, source = words.partition(" < ")
        capsys.readouterr()
        with (
            open(source or os.devnull) as stdin,
            output() as number,
            open(number, "w", closefd=False) as stdout,
            monkeypatch.context() as streams,
        ):
            streams.setattr(sys, "stdin", stdin)
            streams.setattr(sys, "stdout", stdout)
            assert cli.main(shlex.split(words)) == code, words
        messages = capsys.readouterr().err
        assert messages.count(FULL_DISK) == num_messages, words
        assert "Traceback" not in messages and "Errno" not in messages, words


# ---- titan train, check, generate


@pytest.mark.nightly
def test_train(tmp_path: Path) -> None:
    tiny = ["training.seq_len 32", "model.args.dim 32", "model.args.n_heads 4"]
    tiny += ["model.args.n_layers 1", "validation.enable false"]
    settings = " ".join(f"--{setting}" for setting in tiny)
    run_titan(f"{example_of('train')} {settings}", tmp_path)
    assert (tmp_path / "outputs/checkpoint/step-2/manifest.json").exists()


def test_ladder(tmp_path: Path, example: Example) -> None:
    names = [f"rung-{number}" for number in (1, 2, 3, 4)] + ["target"]
    assert [row.split()[0] for row in example("ladder", tmp_path).splitlines()[-5:]] == names
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {f"{n}.toml" for n in names}


def test_check(tmp_path: Path, example: Example) -> None:
    output = example("check", tmp_path)
    assert tomllib.loads(output)["training"]["steps"] == 100


def test_config_ls(tmp_path: Path, example: Example) -> None:
    rows = example("config ls", tmp_path).splitlines()
    names = [row.split()[0] for row in rows]
    files = TRAIN_CONFIGS.rglob("*.toml")
    assert names == sorted(file.relative_to(TRAIN_CONFIGS).as_posix() for file in files)
    assert max(map(len, rows)) <= 100 and all(len(row) > 72 for row in rows)


def test_config_show(tmp_path: Path, example: Example) -> None:
    assert example("config show", tmp_path) == (TRAIN_CONFIGS / "llama3_8b.toml").read_text()


def test_config_copy(tmp_path: Path, example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    assert "titan train my.toml" in example("config copy", tmp_path)
    copied = (tmp_path / "my.toml").read_text()
    assert copied == (TRAIN_CONFIGS / "llama3_8b.toml").read_text()
    assert cli.main(["config", "copy", "debug_model.toml", "my.toml"]) == 2
    assert "my.toml" in capsys.readouterr().err
    assert cli.main(["config", "copy", "lama3_8b", "other.toml"]) == 2
    assert 'did you mean "llama3_8b.toml"?' in capsys.readouterr().err
    assert (tmp_path / "my.toml").read_text() == copied and not Path("other.toml").exists()


def test_a_copy_of_a_file_that_extends_another_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "copy", "qwen3_1.7b", "my.toml"]) == 0
    assert cli.main(["check", "my.toml"]) == 0


def test_help(tmp_path: Path, example: Example) -> None:
    output = example("help", tmp_path)
    assert "--optimizer.lr" in output and "--compile.components" in output


def test_generate(trained: Path, example: Example) -> None:
    assert example("generate", trained).startswith("To be")


# ---- titan ckpt


def test_ckpt_ls(trained: Path, example: Example) -> None:
    names = [line.split()[0] for line in example("ckpt ls", trained).splitlines()]
    assert {"step-50", "step-100"} <= {*names}


def test_ckpt_show(trained: Path, example: Example) -> None:
    assert "step: 100" in example("ckpt show", trained).splitlines()


def test_ckpt_verify(trained: Path, example: Example) -> None:
    output = example("ckpt verify", trained)
    assert "step-50" in output and "step-100" in output


def test_ckpt_diff(trained: Path, example: Example) -> None:
    output = example("ckpt diff", trained, code=1)
    assert "model.tok_embeddings.weight" in output


def test_ckpt_export(trained: Path, example: Example) -> None:
    example("ckpt export", trained)
    with safe_open(trained / "outputs/model/model.safetensors", "pt") as file:
        assert file.get_tensor("model.norm.weight").dtype == torch.bfloat16


# ---- titan data


def test_data_tokenize(folder: Path) -> None:
    output = run_example("data tokenize", folder)
    assert "tokens is complete: 33 documents" in output
    assert (folder / "tokens/meta.json").exists()


def test_data_show(trained: Path) -> None:
    output = run_example("data show", trained)
    assert "step 3: " in output
    assert output.endswith(", the same\n")


@pytest.mark.parametrize(("step", "code"), [(10**12, 0), (10**12 + 1, 2), (10**18, 2)])
def test_a_distant_step_is_shown_at_once(
    step: int, code: int, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    words = ["data", "show", "outputs/checkpoint/step-100", "--step", str(step)]
    assert cli.main(words) == code


def test_data_tiny(folder: Path) -> None:
    assert "tiny/tokenizer: 400 of 2,048 entries" in run_example("data tiny", folder)
    assert (folder / "tiny/tokenizer/tokenizer.json").exists()


def test_data_train_tokenizer(folder: Path) -> None:
    assert "1,000" in run_example("data train-tokenizer", folder)
    names = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    assert sorted(path.name for path in (folder / "tokenizer").iterdir()) == names


def test_plan(tmp_path: Path) -> None:
    output = run_example("plan", tmp_path)
    assert "= reserved by the allocator" in output and ": fits\n" in output
    assert "a step, " in output and "tokens/s of each GPU" in output


# ---- titan download

HUB_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": b"not to be downloaded",
}


def test_download(tmp_path: Path) -> None:
    check_download(["-m", "torchtitan_like", *example_words("download")], tmp_path)


def test_download_accepts_the_option_of_torchtitan(tmp_path: Path) -> None:
    words = "download --repo_id meta-llama/Llama-3.1-8B --assets tokenizer config"
    check_download(["-m", "torchtitan_like", *words.split()], tmp_path)


def check_download(words: list[str], tmp_path: Path) -> None:
    """Run Python with `words`, next to a local Hub. Check the downloaded files."""
    with local_hub("meta-llama/Llama-3.1-8B", HUB_FILES) as hub:
        env = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        output = run_python(words, tmp_path, **env)
    folder = tmp_path / "assets/hf/Llama-3.1-8B"
    downloaded = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    expected = {name: HUB_FILES[name] for name in ("config.json", "tokenizer.json")}
    assert downloaded == expected
    assert output.splitlines()[-1] == "Use it with: --model.hf_assets_path assets/hf/Llama-3.1-8B"
