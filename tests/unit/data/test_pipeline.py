"""The configuration selects the right dataset; the shipped corpus matches its description."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.config.dataset_names import DATASETS
from torchtitan_like.config.sections_training import DataSource, Training, Validation
from torchtitan_like.data.builder import resolve_sources
from torchtitan_like.data.data_errors import DataError


def resolve(
    dataset: str = "shakespeare", path: str | None = None, **sources: str
) -> tuple[str, str]:
    tables = {name: DataSource(path=source) for name, source in sources.items()}
    (named,) = resolve_sources("training", Training(dataset=dataset, dataset_path=path), tables)
    return named.name, named.source.path


def test_sources_override_dataset_path_which_overrides_the_name() -> None:
    shipped = str(DATASETS["shakespeare"].file)
    assert resolve() == ("shakespeare", shipped)
    assert resolve(path="/own/*.jsonl") == ("shakespeare", "/own/*.jsonl")
    assert resolve("no name", path="/own") == ("no name", "/own")
    assert resolve("no name", path="/own", web="/web") == ("web", "/web")


def test_c4_test_reads_the_shipped_corpus_and_logs_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert resolve("c4_test") == ("c4_test", str(DATASETS["shakespeare"].file))
    (message,) = caplog.messages
    assert "shakespeare" in message and "c4_test" in message


@pytest.mark.parametrize(
    ("name", "section", "files", "streaming"),
    [
        ("training", Training(dataset="c4"), "train", True),
        ("validation", Validation(dataset="c4_validation"), "validation", False),
    ],
)
def test_c4_is_read_from_a_fixed_commit_of_the_hub(
    name: Any, section: Any, files: str, streaming: bool
) -> None:
    (named,) = resolve_sources(name, section, {})
    commit = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"
    assert named.source == DataSource(
        path=f"hf://datasets/allenai/c4@{commit}/en/c4-{files}.*.json.gz", streaming=streaming
    )


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        (
            "training",
            Training(dataset="shakespear"),
            r"training.dataset is 'shakespear': .*did you mean \"shakespeare\".*dataset_path or in \[data.sources",
        ),
        ("validation", Validation(dataset="c4"), "validation.dataset is 'c4': .* c4_validation"),
    ],
)
def test_an_unreadable_source_is_refused(name: Any, section: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve_sources(name, section, {})


def test_the_shipped_corpus_matches_its_readme(repo_root: Path) -> None:
    readme = (repo_root / "torchtitan_like/data/corpus/README.md").read_text(encoding="utf-8")
    for name in ("shakespeare", "shakespeare_validation"):
        file = DATASETS[name].file
        titles = [
            json.loads(line)["title"] for line in file.read_text(encoding="utf-8").splitlines()
        ]
        assert re.search(
            rf"`{file.name}`.*\b{len(titles)} documents, {file.stat().st_size / 1e6:.1f} MB", readme
        )
    assert "public domain" in readme


def test_the_data_package_imports_no_heavy_libraries(repo_root: Path) -> None:
    heavy = (
        "datasets",
        "pyarrow",
        "pandas",
        "torch.distributed.tensor",
        "transformers",
        "tokenizers",
        "tiktoken",
    )
    script = f"import sys, torchtitan_like.data.builder; print([name for name in {heavy} if name in sys.modules])"
    command = [sys.executable, "-c", script]
    assert (
        subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
