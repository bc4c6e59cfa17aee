"""What is recorded of the environment, and what must not be."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch

from torchtitan_like.monitor.environment import MASKED, git_state, mask_value, packages, write_environment


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "abc", MASKED),
        ("WANDB_API_KEY", "abc", MASKED),
        ("AWS_SECRET_ACCESS_KEY", "abc", MASKED),
        ("MY_PASSWORD", "abc", MASKED),
        ("PGPASSWORD", "abc", MASKED),
        ("SERVICE_AUTH", "abc", MASKED),
        ("NOTE", "ghp_0123456789abcdefghij", MASKED),
        ("EMPTY_TOKEN", "", ""),
        ("HTTPS_PROXY", "http://me:pw@proxy:3128", f"http://{MASKED}@proxy:3128"),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("TIKTOKEN_CACHE_DIR", "/c", "/c"),
        ("DB_PWD", "abc", MASKED),
        ("PWD", "/home/me", "/home/me"),
        ("KEYBOARD", "de", "de"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so", "/usr/lib/libjemalloc.so"),
        ("OMP_NUM_THREADS", "1", "1"),
        ("HYDRA_KEY", "abc", MASKED),
    ],
)
def test_secrets_are_masked_by_name_or_look(name: str, value: str, shown: str) -> None:
    assert mask_value(name, value) == shown


SECRET = "/".join("xyzzy")  # not in one piece here, for the environment holds the difference to the last commit


def test_files_of_an_environment(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    write_environment(
        folder,
        variables={"Z": "last", "HF_TOKEN": SECRET, "A": "first"},
        argv=["train.py", "--job.config_file", "a.toml", "--wandb.api_key", SECRET, f"--x.secret={SECRET}", "--y=1"],
    )
    assert (folder / "variables.txt").read_text() == f"A=first\nHF_TOKEN={MASKED}\nZ=last\n"
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["argv"] == [
        "train.py", "--job.config_file", "a.toml", "--wandb.api_key", MASKED, f"--x.secret={MASKED}", "--y=1"
    ]  # fmt: skip
    assert facts["torch"] == torch.__version__
    assert facts["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert facts["num_threads"] == torch.get_num_threads()
    assert {"host", "system", "python", "cpu", "num_cpus", "host_memory_bytes"} <= set(facts)
    listed = (folder / "packages.txt").read_text().splitlines()
    assert f"torch=={metadata.version('torch')}" in listed and listed == sorted(listed)
    assert SECRET not in "".join(path.read_text() for path in folder.iterdir())


def test_packages_first_on_the_path_hides_and_editables_are_found(tmp_path: Path) -> None:
    for path, name in (("a", "pkg-1.0"), ("b", "pkg-2.0"), ("b", "mine-0.1+local")):
        (tmp_path / path / f"{name}.dist-info").mkdir(parents=True)
    url = {"url": "file:///home/me/mine", "dir_info": {"editable": True}}
    (tmp_path / "b" / "mine-0.1+local.dist-info" / "direct_url.json").write_text(json.dumps(url))
    names, editables = packages([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "missing")])
    assert names == ["mine==0.1+local", "pkg==1.0"]
    assert editables == [Path("/home/me/mine")]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a user's settings of git, and the only one."""
    if shutil.which("git") is None:
        pytest.skip("git is not there")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    return tmp_path / "gitconfig"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(settings: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "code.py").write_text("old = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.mark.parametrize("wanted", ["", "[color]\nui = always\n[diff]\nexternal = true\nnoprefix = true\n"])
def test_git_commit_and_uncommitted_changes(checkout: Path, settings: Path, wanted: str) -> None:
    """Whatever a user wants to see of a difference."""
    settings.write_text(wanted)
    (checkout / "package" / "code.py").write_text("new = 'https://me:pw@host/'\n")
    (checkout / "extra.txt").write_text("x")
    state = git_state(checkout / "package")
    assert state is not None
    facts, diff = state
    head = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert facts == [
        f"checkout {checkout}", f"commit {head}", "2 changed or untracked files", " M package/code.py", "?? extra.txt"
    ]  # fmt: skip
    changes = "--- a/package/code.py\n+++ b/package/code.py\n@@ -1 +1 @@\n-old = 1\n+new = "
    assert f"{changes}'https://{MASKED}@host/'\n" in diff


def test_git_of_a_clean_checkout_has_no_diff(checkout: Path) -> None:
    state = git_state(checkout / "package")
    assert state is not None and state[1] == "" and state[0][2] == "0 changed or untracked files"


def test_git_before_the_first_commit(settings: Path, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "a.py")
    state = git_state(tmp_path)
    assert state is not None and state[0][1] == "commit none yet"


@pytest.mark.parametrize("where", ["outside", "ignored"])
def test_no_checkout_of_its_own(where: str, checkout: Path, tmp_path: Path) -> None:
    """A package in a virtual environment inside somebody's project is none of that project's commits."""
    folder = tmp_path / "plain" if where == "outside" else checkout / ".venv" / "package"
    folder.mkdir(parents=True)
    (folder / "code.py").write_text("x")
    assert git_state(folder) is None
