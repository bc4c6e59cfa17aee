"""The wheel works without the repository, in an empty folder."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness.runner import ROOT

CORPUS = ROOT / "torchtitan_like/data/corpus/shakespeare_validation.jsonl"
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
    written = titan(installed, tmp_path, "slurm", "init", "slurm")
    assert written.returncode == 0 and (tmp_path / "slurm/train.slurm").exists(), written.stderr


def test_own_text_as_the_readme_shows(installed: Path, tmp_path: Path) -> None:
    """The commands of the README after `pip install`, with a smaller model and one step."""
    section = (ROOT / "README.md").read_text().partition("## Your own text\n")[2]
    install, *commands = section.partition("```bash\n")[2].partition("```")[0].splitlines()
    assert install.startswith("pip install .") and len(commands) == 3
    texts = [json.loads(line)["text"] for line in CORPUS.read_text().splitlines()]
    (tmp_path / "my.txt").write_text("\n".join(texts))
    outputs = []
    for command in commands:
        words = shlex.split(command.replace("step-200", "step-1"))[1:]
        done = titan(installed, tmp_path, *words, *(TINY.split() if words[0] == "train" else []))
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    assert "training data mine" in outputs[0]
    assert outputs[0].splitlines()[-2].startswith("Resume (the same command, more steps): ")
    exported = {path.name for path in (tmp_path / "my_model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= exported
    assert outputs[2].startswith("The") and len(outputs[2].strip()) > len("The")
