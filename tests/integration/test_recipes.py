"""Recipes on FineWeb-Edu, with a local stand-in of the Hub that has the layout of the dataset."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet

from tests.harness.hub import local_hub
from tests.harness.runner import ROOT
from torchtitan_like.config import load_config
from torchtitan_like.config.dataset_names import DATASETS
from torchtitan_like.util.bundle import TRAIN_CONFIGS, config_names
from torchtitan_like.util.jsonl import read_rows

# A recipe as in train_configs/recipes, with a small model.
RECIPE = """
extends = "debug_model.toml"

[job]
show_results = false

[model.args]
dim = 32
n_layers = 1
n_heads = 2

[data.sources.corpus]
path = "corpus/train.jsonl"

[training]
seq_len = 32
steps = 4

[lr_scheduler]
warmup_steps = 1

[validation]
enable = true
seq_len = 32
reference_curve = "corpus/curve.csv"

[validation.sources.heldout]
path = "corpus/heldout.jsonl"
"""
TRAINING, HELD_OUT = "sample/10BT/{:03}_00000.parquet", "sample/10BT/013_00000.parquet"


def documented_settings() -> list[str]:
    """Return the settings of the command in docs/recipes/index.md."""
    section = (ROOT / "docs/recipes/index.md").read_text().partition("## Train on FineWeb-Edu\n")[2]
    command = section.partition("```bash\n")[2].partition("```")[0]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["titan", "train", "recipes/dense_125m.toml"]
    return words[3:]


def parquet(texts: list[str]) -> bytes:
    """Return a file with columns of FineWeb-Edu."""
    count = range(len(texts))
    table = pyarrow.table(
        {
            "text": texts,
            "id": [f"<urn:uuid:{number}>" for number in count],
            "language_score": [0.97 for _ in count],
            "token_count": [len(text) for text in texts],
            "int_score": [3 for _ in count],
        }
    )
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def test_a_recipe_trains_and_validates_on_different_files_of_fineweb_edu(tmp_path: Path) -> None:
    lines = DATASETS["shakespeare_validation"].file.read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    files = {TRAINING.format(number): parquet(texts[number::8]) for number in range(3)}
    files |= {HELD_OUT: parquet(texts[7:8]), TRAINING.format(12): b"not asked for"}
    files |= {"README.md": b"# FineWeb-Edu", "data/CC-MAIN-2024-51/train.parquet": b"not asked for"}
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ["train", "recipe.toml", *documented_settings(), "--nproc", "1"]
    with local_hub("datasets/HuggingFaceFW/fineweb-edu", files) as hub:
        done = subprocess.run(
            [sys.executable, "-m", "torchtitan_like", *words],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "CUDA_VISIBLE_DEVICES": "",
                "HF_ENDPOINT": hub.address,
                "HF_HOME": str(tmp_path / "hub"),
                "HF_HUB_OFFLINE": "0",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "fineweb_edu"
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3, 4]
    validations = read_rows(run / "validation.jsonl")
    assert [row["step"] for row in validations] == [1, 4]
    assert all(row["bits_per_byte"] > 0 for row in validations)
    assert "recipe:" not in done.stdout
    for_training = {TRAINING.format(number) for number in range(3)}
    assert HELD_OUT in hub.downloads
    assert {HELD_OUT} < {*hub.downloads} <= {HELD_OUT, *for_training}


def test_every_recipe_names_the_corpus_of_the_hub_and_accepts_its_settings(tmp_path: Path) -> None:
    """The settings replace the text of a recipe, for training and for validation."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipes = [str(TRAIN_CONFIGS / name) for name in config_names() if "recipes/" in name]
    settings = documented_settings()
    paths = [word for word in settings if word.startswith("hf://")]
    for file in (str(tmp_path / "recipe.toml"), *recipes):
        config = load_config(["--job.config_file", file, *settings])
        sources = (config.data.sources["corpus"], config.validation.sources["heldout"])
        assert [source.path for source in sources] == paths, file
        assert config.validation.reference_curve is None
    base = (TRAIN_CONFIGS / "recipes/dense_1m.toml").read_text()  # which the others extend
    assert re.findall(r"hf://\S+?\.parquet", base) == paths
