"""`titan completion`: the printed script completes commands, options, settings and files."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from torchtitan_like.cli import COMMANDS, main


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the completion script for bash. Return its path."""
    file = tmp_path_factory.mktemp("completion") / "titan.bash"
    with file.open("w") as stream, contextlib.redirect_stdout(stream):
        assert main(["completion", "bash"]) == 0
    return file


def complete(script: Path, *words: str) -> set[str]:
    """Return bash's completions of the last word."""
    line = " ".join(map(shlex.quote, words))
    commands = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _titan; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", commands], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_commands_and_verbs_are_completed(script: Path) -> None:
    assert complete(script, "titan", "") == {command.name for command in COMMANDS}
    assert complete(script, "titan", "che") == {"check"}
    assert complete(script, "titan", "ckpt", "ver") == {"verify"}
    assert complete(script, "titan", "data", "t") == {"tokenize", "tiny", "train-tokenizer"}
    assert complete(script, "titan", "completion", "") == {"bash", "zsh"}
    assert complete(script, "titan", "data", "tiny", "m") == {"model"}
    assert complete(script, "titan", "plan", "") == {"calibrate", "compare", "search"}
    assert "--rank-of-stage" in complete(script, "titan", "plan", "X.toml", "--ra")
    assert "--max-memory" in complete(script, "titan", "plan", "search", "X.toml", "--max")
    assert complete(script, "titan", "plan", "X.toml", "--max") == set()


def test_options_and_settings_are_completed(script: Path) -> None:
    assert complete(script, "titan", "ckpt", "ls", "--") == {"--json", "--help"}
    assert "--repo-id" in complete(script, "titan", "download", "--repo")
    assert complete(script, "titan", "download", "--repo_") == set()
    assert "--keep" in complete(script, "titan", "data", "tiny", "tokenizer", "--")
    settings = complete(script, "titan", "train", "X.toml", "--training.st")
    assert settings == {"--training.steps"}
    assert complete(script, "titan", "node", "check", "--training.st") == set()


def test_files_are_left_to_the_shell(script: Path) -> None:
    """`-o default` makes bash complete files if the function returns nothing."""
    assert complete(script, "titan", "train", "debug") == set()
    assert complete(script, "titan", "ckpt", "verify", "") == set()
    assert "complete -o default -F _titan titan" in script.read_text()


def test_zsh_accepts_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("autoload -Uz compinit bashcompinit\n") and "-F _titan titan" in text
    if shutil.which("zsh"):
        (tmp_path / "titan.zsh").write_text(text)
        subprocess.run(["zsh", "-n", tmp_path / "titan.zsh"], check=True)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["completion", "fish"])
    assert end.value.code == 2
    assert "fish" in capsys.readouterr().err
