"""Hub datasets are downloaded once, at one commit, with retries after network errors."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from tests.unit.data.conftest import write_jsonl
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text import hub
from torchtitan_like.data.text.documents import find_corpus

PATH = "hf://datasets/own/tales@v1/en/*.jsonl"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return ``downloads(*errors)``, which installs a fake Hub.

    The Hub raises the errors first. The call returns a log file with one line for each download.
    """

    def make(*errors: Exception, listed: Sequence[str] = ("en/a.jsonl",)) -> Path:
        log, pending_errors = tmp_path / "log", list(errors)
        log.touch()

        def download(repo: str, **options: Any) -> str:
            assert (repo, options) == (
                "own/tales", {"repo_type": "dataset", "revision": "c0ffee", "allow_patterns": ["en/*.jsonl"]},
            )  # fmt: skip
            if pending_errors:
                raise pending_errors.pop(0)
            time.sleep(0.1)
            write_jsonl(tmp_path / "snapshot/en/a.jsonl", ["one", "two"])
            with log.open("a") as out:
                out.write("downloaded\n")
            return str(tmp_path / "snapshot")

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        siblings = [SimpleNamespace(rfilename=name) for name in ("README.md", *listed)]
        info = SimpleNamespace(sha="c0ffee", siblings=siblings)
        api = SimpleNamespace(dataset_info=lambda repo, revision: info)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
        monkeypatch.setattr(hub, "FIRST_PAUSE", 0.001)
        return log

    return make


def test_one_process_downloads_and_the_others_wait(
    downloads: Callable[..., Path], tmp_path: Path
) -> None:
    log = downloads()
    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=find_corpus, args=(PATH,)) for _ in range(3)]
    for process in others:
        process.start()
    assert find_corpus(PATH).files == (str(tmp_path / "snapshot/en/a.jsonl"),)
    for process in others:
        process.join()
    assert [process.exitcode for process in others] == [0] * 3
    assert log.read_text().splitlines() == ["downloaded"]


def test_later_starts_need_no_network(
    downloads: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads()
    first = find_corpus(PATH)
    monkeypatch.delattr(huggingface_hub, "snapshot_download")
    assert find_corpus(PATH) == first


def test_downloads_are_retried_after_network_errors(
    downloads: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    downloads(*[ConnectionError("reset by peer")] * (hub.ATTEMPTS - 1))
    assert find_corpus(PATH).format == "jsonl"
    assert caplog.text.count("reset by peer. Trying again") == hub.ATTEMPTS - 1


@pytest.mark.parametrize(
    ("path", "errors", "message"),
    [
        (
            PATH,
            [ConnectionError("no route")] * hub.ATTEMPTS,
            "not downloaded in 6 attempts: ConnectionError: no route",
        ),
        (PATH, [OfflineModeIsEnabled("offline")], "cannot be downloaded: offline.*HF_HUB_OFFLINE"),
        (
            "hf://datasets/own/tales/en/*.jsonl",
            [],
            "Expected hf://datasets/OWNER/NAME@REVISION/PATTERN",
        ),
    ],
)
def test_a_failed_download_is_reported(
    downloads: Callable[..., Path], path: str, errors: list[Exception], message: str
) -> None:
    downloads(*errors)
    with pytest.raises(DataError, match=message):
        find_corpus(path)


def test_listed_files_that_were_not_downloaded_are_reported(downloads: Callable[..., Path]) -> None:
    downloads(listed=("en/a.jsonl", "en/b.jsonl"))
    with pytest.raises(DataError, match=r"1 of 2 files are missing, such as en/b.jsonl"):
        find_corpus(PATH)
