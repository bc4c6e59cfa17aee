"""The wheel, built from the source distribution, works in an environment without the repository.

tests/integration/test_release.py installs it with all of its requirements.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness.runner import ROOT
from torchtitan_like import __version__
from torchtitan_like.util.version import torch_version

CORPUS = ROOT / "torchtitan_like/data/corpus/shakespeare_validation.jsonl"
TINY = (
    "--model.args.dim 32 --model.args.n_layers 1 --model.args.n_heads 2 --training.seq_len 32 "
    "--training.steps 1 --lr_scheduler.warmup_steps 0 --validation.no_enable"
)
# Files outside the package that a distribution is built from.
BUILD_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")


class Release(NamedTuple):
    """A source distribution and its wheel, which is installed into an environment."""

    commit: str
    package_files: set[str]
    sdist: Path
    wheel: Path
    programs: Path  # the environment's folder of `titan` and `python`
    site_packages: Path


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Build from a copy, because setuptools writes build/ and *.egg-info into the source."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    listed = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    package_files = {name for name in listed if name.startswith("torchtitan_like/")}
    for name in (*package_files, *BUILD_FILES):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    git = ("git", "-C", source, "-c", "user.name=T", "-c", "user.email=t@example.org")
    run(*git, "init", "--quiet")
    run(*git, "add", "--all")
    run(*git, "commit", "--quiet", "--message", "All files")
    commit = run(*git, "rev-parse", "HEAD").strip()
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=source)
    [sdist] = folder.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    run(*pip, "wheel", *options, sdist)
    [wheel] = folder.glob("*.whl")
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin/python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", code).strip())
    # The requirements are those of this Python: installing torch would take minutes.
    (site_packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # PYTHONPATH names this checkout. pip may find the package there, and would install nothing.
    options = ("--quiet", "--no-deps", "--no-index", "--ignore-installed")
    run(*pip, "--python", python, "install", *options, wheel)
    return Release(commit, package_files, sdist, wheel, environment / "bin", site_packages)


def titan(release: Release, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [release.programs / "titan", *words],
        cwd=folder,
        env={**env, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


def metadata(release: Release) -> Message:
    [file] = release.site_packages.glob("torchtitan_like-*.dist-info/METADATA")
    return Parser().parsestr(file.read_text(encoding="utf-8"))


def test_distributions_have_every_file_of_the_package(release: Release) -> None:
    built = release.package_files | {"torchtitan_like/COMMIT"}
    with zipfile.ZipFile(release.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == built
    with tarfile.open(release.sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert members >= built | set(BUILD_FILES)
    assert not [name for name in members if name.startswith(("tests/", "docs/"))]


def test_the_version_has_the_commit_of_the_build_and_torch(
    release: Release, tmp_path: Path
) -> None:
    done = titan(release, tmp_path, "--version")
    expected = f"torchtitan_like {__version__} (commit {release.commit}, torch {torch_version()})\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_metadata_describes_the_package(release: Release) -> None:
    values = metadata(release)
    assert (values["Name"], values["Version"]) == ("torchtitan_like", __version__)
    assert values["License-Expression"] == "BSD-3-Clause" and values["License-File"] == "LICENSE"
    assert values["Requires-Python"] == ">=3.10"
    assert values["Description-Content-Type"] == "text/markdown"
    assert values.get_payload().startswith("# torchtitan_like\n")
    pythons = [f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)]
    assert {*pythons, "Typing :: Typed"} <= set(values.get_all("Classifier"))
    extras = {"dev", "docs", "eval", "float8", "interop", "report", "wandb"}
    assert extras <= set(values.get_all("Provides-Extra"))
    plain = [line for line in values.get_all("Requires-Dist") if "extra ==" not in line]
    assert "torch>=2.11" in plain and "pydantic>=2.7" in plain
    wandb = [line for line in values.get_all("Requires-Dist") if line.startswith("wandb")]
    assert wandb == ['wandb>=0.18; extra == "wandb"']


def test_metadata_names_only_public_hosts(release: Release) -> None:
    """Links of the README and the project may lead to pages that every reader can open."""
    text = metadata(release).as_string()
    hosts = set(re.findall(r"https?://([^/\s)>\"']+)", text))
    assert hosts <= {"github.com", "huggingface.co", "arxiv.org", "pypi.org", "pytorch.org"}


def test_titan_works_from_a_wheel(release: Release, tmp_path: Path) -> None:
    words = ("check", "debug_model.toml", "--world-size", "1", "--training")
    checked = titan(release, tmp_path, *words)
    assert checked.returncode == 0, checked.stderr
    assert f"Using the configuration {release.site_packages}" in checked.stderr
    written = titan(release, tmp_path, "slurm", "init", "slurm")
    assert written.returncode == 0 and (tmp_path / "slurm/train.slurm").exists(), written.stderr


def test_own_text_as_the_readme_shows(release: Release, tmp_path: Path) -> None:
    """The commands of the README after `pip install`, with a smaller model and one step."""
    section = (ROOT / "README.md").read_text().partition("## Your own text\n")[2]
    install, *commands = section.partition("```bash\n")[2].partition("```")[0].splitlines()
    assert install.startswith("pip install .") and len(commands) == 3
    texts = [json.loads(line)["text"] for line in CORPUS.read_text().splitlines()]
    (tmp_path / "my.txt").write_text("\n".join(texts))
    outputs = []
    for command in commands:
        words = shlex.split(command.replace("step-200", "step-1"))[1:]
        done = titan(release, tmp_path, *words, *(TINY.split() if words[0] == "train" else []))
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    assert "training data mine" in outputs[0]
    assert "\nResume (the same command, more steps): " in outputs[0]
    assert "\nPage: mine/report.html\nText from step-1:\nThe" in outputs[0]
    assert "<html" in (tmp_path / "mine/report.html").read_text()
    exported = {path.name for path in (tmp_path / "my_model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= exported
    assert outputs[2].startswith("The") and len(outputs[2].strip()) > len("The")
