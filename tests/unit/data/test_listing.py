"""One rank lists the files for all ranks, and few files are open at a time."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchtitan_like.config.sections_training import Data, DataSource
from torchtitan_like.data import builder as data_build
from torchtitan_like.data.builder import DataBuilder, NamedSource
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text import documents
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens import checked_file, token_sources
from torchtitan_like.data.tokens.token_file import TokenFile
from torchtitan_like.distributed.world import HostGroup

from .conftest import write_jsonl
from .token_writers import open_source, write_megatron, write_npy

NUM_FILES = 5


class Ranks(HostGroup):
    """Simulates two ranks in turn: the first lists the files, the second receives the list."""

    def __init__(self) -> None:
        super().__init__([0], timedelta(0))
        self._answers: list[bytes] = []
        self.restart()

    def restart(self) -> Ranks:
        """Switch to the next rank."""
        self._next = iter([*self._answers])
        return self

    def run_on_leader(self, action: Callable[[], Any]) -> Any:
        answer = next(self._next, None)
        if answer is None:
            answer = pickle.dumps(action())
            self._answers.append(answer)
        return pickle.loads(answer)


def write_text(folder: Path) -> Path:
    for number in range(NUM_FILES):
        write_jsonl(folder / f"{number}.jsonl", [f"document {number}.{line}" for line in range(4)])
    return folder


def write_npy_files(folder: Path) -> Path:
    folder.mkdir()
    for number in range(NUM_FILES):
        write_npy(folder / f"{number}.npy", [number, 2, 3, 4])
    return folder


def write_megatron_files(folder: Path) -> Path:
    folder.mkdir()
    for number in range(NUM_FILES):
        write_megatron(folder / str(number), [[[number, 2]], [[3, 4], [5]]])
    return folder


WRITERS = {"text": write_text, "npy": write_npy_files, "megatron": write_megatron_files}


@pytest.fixture(params=WRITERS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> DataSource:
    return DataSource(
        path=str(WRITERS[request.param](tmp_path / "data")),
        format="auto" if request.param == "text" else "tokens",
    )


def open_tokens(
    source: DataSource, tokenizer: Tokenizer, tmp_path: Path, group: HostGroup | None = None
) -> TokenFile:
    named, folder = NamedSource("own", source), str(tmp_path / "run")
    return DataBuilder(
        Data(), tokenizer, folder, with_positions=True, group=group or HostGroup.alone()
    )._tokens(named)


def forbid_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (data_build, "find_corpus"),
        (token_sources, "open_part"),
        (token_sources, "find_token_files"),
    ):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("the rank listed the files"))


def test_only_one_rank_lists_the_files(
    source: DataSource, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    first = open_tokens(source, tokenizer, tmp_path, ranks.restart())
    forbid_listing(monkeypatch)
    second = open_tokens(source, tokenizer, tmp_path, ranks.restart())
    assert first.meta == second.meta and first.folder == second.folder
    assert np.array_equal(
        first.tokens[0 : len(first.tokens)], second.tokens[0 : len(second.tokens)]
    )
    assert np.array_equal(first.offsets, second.offsets)


def test_a_rank_lists_its_files_if_they_have_other_paths(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Paths may differ between nodes; the contents are compared afterwards."""
    for name, write in WRITERS.items():
        ranks, kind = Ranks(), "auto" if name == "text" else "tokens"
        first = DataSource(path=str(write(tmp_path / f"{name}-first")), format=kind)
        second = DataSource(path=str(write(tmp_path / f"{name}-second")), format=kind)
        open_tokens(first, tokenizer, tmp_path, ranks.restart())
        assert open_tokens(second, tokenizer, tmp_path, ranks.restart()).folder.is_relative_to(
            tmp_path / f"{name}-second"
        )


@pytest.mark.parametrize("name", ["npy", "megatron"])
def test_a_rank_lists_different_files_at_the_same_path(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A node may have its own, older copy."""
    ranks, source = Ranks(), DataSource(path=str(WRITERS[name](tmp_path / "data")), format="tokens")
    first = open_tokens(source, tokenizer, tmp_path, ranks.restart())
    last = max((tmp_path / "data").glob("*.bin" if name == "megatron" else "*.npy"))
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.unlink()
    last.write_bytes(content)
    assert (
        open_tokens(source, tokenizer, tmp_path, ranks.restart()).meta.text_digest
        != first.meta.text_digest
    )


def test_a_file_that_changes_after_the_listing_is_not_read(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run would continue with other data. A restart may read the changed file."""
    source = DataSource(path=str(write_npy_files(tmp_path / "data")), format="tokens")
    run = open_tokens(source, tokenizer, tmp_path)
    assert run.tokens[0:4].tolist() == [0, 2, 3, 4]
    changed = tmp_path / "data/0.npy"
    write_npy(changed, [5, 6, 7, 8])
    os.utime(changed, ns=(0, 0))  # the two writes may be within one clock tick
    checked_file._opened.cache_clear()
    with pytest.raises(DataError, match=r"0\.npy has changed since"):
        run.tokens[0:4]
    assert open_tokens(source, tokenizer, tmp_path).tokens[0:4].tolist() == [5, 6, 7, 8]


def test_all_ranks_raise_an_error_of_the_listing_rank(tokenizer: Tokenizer, tmp_path: Path) -> None:
    class Failing(Ranks):
        def run_on_leader(self, action: Callable[[], Any]) -> Any:
            raise DataError("no data")

    with pytest.raises(DataError, match="no data"):
        open_tokens(
            DataSource(path=str(write_text(tmp_path / "data"))), tokenizer, tmp_path, Failing()
        )


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "[0-9]*.jsonl"])
def test_listing_a_folder_does_not_examine_each_file(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of a run lists the files before it joins the others."""
    folder, paths, stat = write_text(tmp_path / "data"), [], os.stat

    def recording_stat(path: Any, *args: Any, **keywords: Any) -> os.stat_result:
        paths.append(str(path))
        return stat(path, *args, **keywords)

    monkeypatch.setattr(os, "stat", recording_stat)
    assert len(documents.find_corpus(str(folder / pattern)).files) == NUM_FILES
    assert not [path for path in paths if path.endswith(("0.jsonl", "4.jsonl"))]


def test_a_rank_that_builds_the_cache_lists_the_files_once(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing two million files takes seconds, and so does each query of their sizes."""
    source = DataSource(path=str(write_text(tmp_path / "data")))
    listings, stats, find, stat = [], [], data_build.find_corpus, os.stat

    def counted_find(*args: Any) -> Any:
        listings.append(args)
        return find(*args)

    def counted_stat(path: Any, *args: Any, **keywords: Any) -> os.stat_result:
        stats.append(str(path))
        return stat(path, *args, **keywords)

    monkeypatch.setattr(data_build, "find_corpus", counted_find)
    monkeypatch.setattr(os, "stat", counted_stat)
    open_tokens(source, tokenizer, tmp_path)
    assert len(listings) == 1
    # For the name of the cache, for the plan, and to check that no file changed in between.
    assert len([path for path in stats if path.endswith("3.jsonl")]) == 3


def test_files_are_sorted_by_path_components(tmp_path: Path) -> None:
    names = [
        "a-1/x.txt",
        "a.txt",
        "a/b.txt",
        "a/b/c.txt",
        "a/b-1.txt",
        "a0.txt",
        "\u00e9.txt",
        "B.txt",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    corpus = documents.find_corpus(str(tmp_path))
    by_parts = sorted(names, key=lambda name: Path(name).parts)
    assert list(corpus.relative_names()) == by_parts
    assert corpus.files == tuple(str(tmp_path / name) for name in by_parts)


def test_a_source_may_have_more_files_than_descriptors(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The default limit is 1,024 open files; a terabyte of text may be 50,000 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open, limit = len(os.listdir("/proc/self/fd")), checked_file.MAX_OPEN_FILES + 100
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(limit):
        write_megatron(folder / f"{number:04}", [[[number % 100, 7]]])
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + limit, hard))
    try:
        opened = open_source(folder, tokenizer, with_documents=True)
        assert opened.tokens[0 : len(opened.tokens)].tolist() == [
            x for n in range(limit) for x in (n % 100, 7)
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
