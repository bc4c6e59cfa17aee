"""The wheel works without the repository, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness.runner import ROOT

TINY = (
    "--model.args.dim 32 --model.args.n_layers 1 --model.args.n_heads 2 --training.seq_len 32 "
    "--training.steps 1 --lr_scheduler.warmup_steps 0 --validation.no_enable"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the unpacked wheel, like site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # Build from a copy, because setuptools writes build/ and *.egg-info into the source.
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listing.stdout.split("\0")):
        if name.startswith("torchtitan_like/") or name in (
            "pyproject.toml",
            "README.md",
            "LICENSE",
        ):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(source)], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def titan(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.argv[0] = 'titan'; from torchtitan_like.cli import main; sys.exit(main())"
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONSAFEPATH": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_titan_works_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    assert (
        "titan = torchtitan_like.cli:main"
        in next(installed.glob("*.dist-info/entry_points.txt")).read_text()
    )
    checked = titan(
        installed, tmp_path, "check", "debug_model.toml", "--world-size", "1", "--training"
    )
    assert checked.returncode == 0, checked.stderr
    assert f"Using the bundled configuration {installed}" in checked.stderr
    caches = ["--data.cache_folder", str(tmp_path / "cache")]
    trained = titan(
        installed, tmp_path, "train", "debug_model.toml", "--nproc", "1", *TINY.split(), *caches
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert (tmp_path / "outputs/checkpoint/step-1/manifest.json").exists()
    step = "outputs/checkpoint/step-1"
    exported = titan(installed, tmp_path, "ckpt", "export", step, "exported")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "exported/tokenizer.json").exists()
    generated = titan(
        installed, tmp_path, "generate", step, "--prompt", "ROMEO:", "--num-tokens", "2"
    )
    assert generated.returncode == 0 and generated.stdout.startswith("ROMEO:"), generated.stderr
    written = titan(installed, tmp_path, "slurm", "init", "slurm")
    assert written.returncode == 0 and (tmp_path / "slurm/train.slurm").exists(), written.stderr
    assert trained.stdout.splitlines()[-2].startswith("Resume (the same command, more steps): ")
