"""The record of the environment is complete and contains no secrets."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.harness.secrets import SECRET_VARIABLES, new_secret, with_secret
from torchtitan_like.config.arguments import mask_arguments
from torchtitan_like.monitor import attempt
from torchtitan_like.monitor.attempt import (
    RECORDED,
    git_state,
    packages,
    recorded_variables,
    write_environment,
)
from torchtitan_like.util.credentials import MASK

SECRET = new_secret()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PATH", "/usr/bin"),
        ("PWD", "/home/me"),
        ("OMP_NUM_THREADS", "1"),
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TIKTOKEN_CACHE_DIR", "/c"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so"),
        ("SLURM_JOB_ID", "17"),
    ],
)
def test_values_of_listed_variables_are_recorded(name: str, value: str) -> None:
    assert recorded_variables({name: value}) == [f"{name}={value}"]


@pytest.mark.parametrize("name", SECRET_VARIABLES)
def test_no_secret_of_a_variable_is_recorded(name: str) -> None:
    value = with_secret(SECRET_VARIABLES[name], SECRET)
    [line] = recorded_variables({name: value})
    assert SECRET not in line and line.startswith(f"{name}=")


def test_other_variables_are_recorded_by_name_alone() -> None:
    lines = recorded_variables({"DB_PASS": "a", "EMPTY": ""})
    assert lines == ["DB_PASS=<not recorded>", "EMPTY=<not recorded>"]


def test_the_documented_variables_are_the_listed_ones() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/guides/security.md").read_text()
    rows = dict(
        re.findall(
            r"^\| ([^|]+) \| ([^|]+) \|$", text.split("## What a run records")[1], re.MULTILINE
        )
    )
    documented = {topic: tuple(re.findall(r"`([^`]+)`", rows[topic])) for topic in RECORDED}
    assert documented == RECORDED


@pytest.mark.parametrize(
    ("argv", "recorded"),
    [
        (
            ["--training.steps", "5", "--training.steps=5"],
            ["--training.steps", "5", "--training.steps=5"],
        ),
        (["--webhook=S", "--webhook", "S", "S"], [f"--webhook={MASK}", "--webhook", MASK, MASK]),
        (["-p", "S", "-pS", "S"], [MASK] * 4),
        (
            ["--model.args.api_key", "S", "--model.args.dim", "8"],
            ["--model.args.api_key", MASK, "--model.args.dim", "8"],
        ),
        (
            ["--job.description", "https://me:S@h/x?k=S"],
            ["--job.description", f"https://{MASK}@h/x?{MASK}"],
        ),
        (["--data.sources.a.path=me:S@h"], [f"--data.sources.a.path={MASK}@h"]),
        (["--training.dataset-path", "a.jsonl"], ["--training.dataset-path", "a.jsonl"]),
    ],
)
def test_arguments_of_the_schema_are_recorded_and_others_masked(
    argv: list[str], recorded: list[str]
) -> None:
    assert mask_arguments([argument.replace("S", SECRET) for argument in argv]) == recorded


def test_the_environment_files_have_facts_and_no_secrets(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    write_environment(
        folder,
        variables={"TZ": "last", "HF_TOKEN": SECRET, "LANG": "first"},
        argv=[
            "train.py",
            "--job.config_file",
            "a.toml",
            "--wandb.api_key",
            SECRET,
            f"--x.secret={SECRET}",
            "--y=1",
        ],
    )
    lines = (folder / "variables.txt").read_text().splitlines()
    assert lines == ["HF_TOKEN=<not recorded>", "LANG=first", "TZ=last"]
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["argv"] == [
        "train.py", "--job.config_file", "a.toml", "--wandb.api_key", MASK, f"--x.secret={MASK}", f"--y={MASK}"
    ]  # fmt: skip
    assert facts["torch"] == torch.__version__
    assert facts["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert facts["num_threads"] == torch.get_num_threads()
    assert {"host", "system", "python", "cpu", "num_cpus", "host_memory_bytes"} <= set(facts)
    listed = (folder / "packages.txt").read_text().splitlines()
    assert f"torch=={metadata.version('torch')}" in listed and listed == sorted(listed)
    assert SECRET not in "".join(path.read_text() for path in folder.iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_packages_lists_the_first_version_on_the_path_and_editable_installs(tmp_path: Path) -> None:
    for path, name in (("a", "pkg-1.0"), ("b", "pkg-2.0"), ("b", "own-0.1+local")):
        (tmp_path / path / f"{name}.dist-info").mkdir(parents=True)
    url = {"url": "file:///home/me/own", "dir_info": {"editable": True}}
    (tmp_path / "b" / "own-0.1+local.dist-info" / "direct_url.json").write_text(json.dumps(url))
    names, editables = packages(
        [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "missing")]
    )
    assert names == ["own==0.1+local", "pkg==1.0"]
    assert editables == [Path("/home/me/own")]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the only git configuration file that git reads."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    return tmp_path / "gitconfig"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True
    )


@pytest.fixture
def checkout(settings: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "code.py").write_text("old = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.mark.parametrize(
    "git_config", ["", "[color]\nui = always\n[diff]\nexternal = true\nnoprefix = true\n"]
)
def test_the_commit_and_uncommitted_changes_are_recorded(
    checkout: Path, settings: Path, git_config: str
) -> None:
    """The user's settings for diffs must not change the record."""
    settings.write_text(git_config)
    (checkout / "package" / "code.py").write_text("new = 'https://me:pw@host/'\n")
    (checkout / "extra.txt").write_text("x")
    state = git_state(checkout / "package")
    assert state is not None
    facts, diff = state
    head = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    assert facts == [
        f"checkout {checkout}", f"commit {head}", "2 changed or untracked files", " M package/code.py", "?? extra.txt"
    ]  # fmt: skip
    changes = "--- a/package/code.py\n+++ b/package/code.py\n@@ -1 +1 @@\n-old = 1\n+new = "
    assert f"{changes}'https://{MASK}@host/'\n" in diff


def test_a_clean_checkout_has_no_diff(checkout: Path) -> None:
    state = git_state(checkout / "package")
    assert state is not None and state[1] == "" and state[0][2] == "0 changed or untracked files"


def test_a_repository_without_commits_is_recorded(settings: Path, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "a.py")
    state = git_state(tmp_path)
    assert state is not None and state[0][1] == "commit none yet"


@pytest.mark.parametrize("location", ["outside", "ignored"])
def test_an_installed_package_has_no_git_state(
    location: str, checkout: Path, tmp_path: Path
) -> None:
    """A virtual environment inside another project does not belong to its repository."""
    folder = tmp_path / "plain" if location == "outside" else checkout / ".venv" / "package"
    folder.mkdir(parents=True)
    (folder / "code.py").write_text("x")
    assert git_state(folder) is None


def test_a_wheel_records_the_commit_it_was_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "git_state", lambda folder: None)
    for recorded, expected in (
        ("abc123", "commit abc123, recorded when the package was built\n"),
        (None, "the package is in no git checkout\n"),
    ):
        monkeypatch.setattr(attempt, "recorded_commit", lambda commit=recorded: commit)
        folder = tmp_path / str(recorded)
        write_environment(folder, {}, ["train.py"])
        assert (folder / "git.txt").read_text() == expected
