"""`titan check` checks a configuration, as every run does before it starts ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_like.cli import main
from torchtitan_like.config import ConfigError, load_config
from torchtitan_like.config.layers import parse_toml
from torchtitan_like.util.bundle import TRAIN_CONFIGS


def check(arguments: list[str]) -> int:
    return main(["check", *arguments])


@pytest.fixture(autouse=True)
def _in_the_repository(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)


def test_prints_toml_that_can_be_run_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert (
        check(["train_configs/debug_model.toml", "--training.steps", "7", "--world-size", "2"]) == 0
    )
    captured = capsys.readouterr()
    assert parse_toml(captured.out)["training"]["steps"] == 7
    assert "Warmup steps (20) exceed total training steps (7)" in captured.err
    (tmp_path / "again.toml").write_text(captured.out)
    assert check([str(tmp_path / "again.toml"), "--world-size=2", "--training"]) == 0
    assert capsys.readouterr().out == captured.out


def test_a_terminal_shows_warnings_and_no_toml(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert check(["debug_model.toml", "--training.steps", "7"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1 and "has no errors" in captured.out
    assert "Warmup steps (20) exceed" in captured.err


def test_training_checks_find_what_a_start_would_find(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = ["--model.hf_assets_path", f"{tmp_path}/model", "--data.sources.mine.path", "no.txt"]
    assert check(["llama3_8b.toml", "--world-size", "8", "--training", *missing]) == 78
    problems = capsys.readouterr().err
    assert "model.hf_assets_path" in problems and "data.sources.mine.path" in problems


def test_a_bundled_config_needs_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun and Python read it without `titan`. An unknown base does not suggest its own file."""
    monkeypatch.chdir(tmp_path)
    assert load_config(["--job.config_file", "debug_model.toml"]).model.flavor == "debugmodel"
    (tmp_path / "ext.toml").write_text('extends = "exd.toml"\n')
    with pytest.raises(ConfigError) as error:
        load_config(["--job.config_file", "ext.toml"])
    assert "did you mean" not in str(error.value)


def test_a_misspelled_bundled_config_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(["debug_modle.toml"]) == 78
    assert 'an existing file -> did you mean "debug_model.toml"?' in capsys.readouterr().err
    assert check(["folder/debug_modle.toml"]) == 78
    assert "there is no TOML file in folder/" in capsys.readouterr().err


def test_output_of_an_imported_module_goes_to_stderr(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "printing.py").write_text("print('hello')")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        check(["train_configs/debug_model.toml", "--experimental.custom_import", "printing"]) == 0
    )
    captured = capsys.readouterr()
    assert (
        parse_toml(captured.out)["experimental"]["custom_import"] == "printing"
        and "hello" in captured.err
    )


def test_the_search_path_of_modules_is_restored() -> None:
    before = list(sys.path)
    assert check(["train_configs/debug_model.toml"]) == 0
    assert check(["train_configs/debug_model.toml", "--training.stepz", "7"]) == 78
    assert sys.path == before


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train_configs/debug_model.toml", "--training.stepz", "7"], "training.stepz"),
        (["train_configs/nowhere.toml"], "debug_model.toml"),
        (
            ["--job.config_file", "train_configs/llama3_8b.toml", "--training"],
            "model.hf_assets_path",
        ),
    ],
)
def test_problems_go_to_stderr(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(arguments) == 78
    captured = capsys.readouterr()
    assert captured.out == "" and part in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--world-size", "0"],
        ["--device-type", "tpu"],
        ["--plan", "h100-80g"],
        ["--plan", "no-gpu", "--world-size", "1"],
    ],
)
def test_a_wrong_option_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        raise SystemExit(check(["debug_model.toml", *arguments]))
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (2, "") and arguments[0] in captured.err


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["training.steps=5"], "write --training.steps 5"),
        (["warmup_steps=5"], "write --lr_scheduler.warmup_steps 5"),
        (["data.sources.mine.path=a b"], "write --data.sources.mine.path 'a b'"),
    ],
)
def test_a_setting_that_is_written_wrongly_is_shown_correctly(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(arguments) == 78
    problems = capsys.readouterr().err.splitlines()
    assert any(problem.endswith(f"-> {remedy}") for problem in problems)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("--steps", "write --training.steps VALUE or --validation.steps VALUE"),
        ("--lr", "write --optimizer.lr VALUE"),
        ("--worldsize", 'did you mean "--world-size"?'),
        ("--xyzzy", "--help lists the options"),
    ],
)
def test_the_remedy_for_an_unknown_option_is_shown(
    option: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        check(["debug_model.toml", option, "5"])
    assert capsys.readouterr().err.endswith(f"there is no option {option}: {remedy}\n")


def test_the_check_is_fast_and_imports_no_torch(repo_root: Path) -> None:
    """The check runs before every launch: 0.2 s, without torch or other slow imports."""
    code = (
        "import sys, runpy; sys.argv[1:] = ['check', 'train_configs/debug_model.toml', '--world-size', '2', '--training']\n"
        "try: runpy.run_module('torchtitan_like', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'datasets', 'transformers', 'pandas', 'pyarrow', 'tensorboard'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    start = os.times().children_user
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert os.times().children_user - start < 5  # seconds of CPU


def test_broken_config_ends_a_process_with_78(repo_root: Path) -> None:
    command = [sys.executable, "-m", "torchtitan_like", "check", "train_configs/debug_model.toml", "--world-size", "3",
               "--training.local_batch_size", "8", "--training.global_batch_size", "100", "--model.flavor", "9B"]  # fmt: skip
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78
    assert (
        "2 problems" in done.stderr
        and "model.flavor" in done.stderr
        and "8 x 3 = 24" in done.stderr
    )


@pytest.mark.parametrize("words", [["debug_model.toml"], ["--job.config_file=debug_model.toml"]])
def test_a_configuration_of_the_package_is_named(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    note = f"Using the configuration {TRAIN_CONFIGS / 'debug_model.toml'} of the package"
    assert check(words) == 0
    assert note in capsys.readouterr().err
    (tmp_path / "debug_model.toml").write_text("")
    assert check(words) == 0
    assert note not in capsys.readouterr().err
