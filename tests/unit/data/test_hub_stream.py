"""Streaming from the Hub downloads each file on demand, keeps few, and yields stable samples."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import xxhash
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError

from tests.unit.data.conftest import ASSETS, TEXTS, write_jsonl
from tests.unit.data.test_documents import write_table
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.samples import streaming
from torchtitan_like.data.samples.order import shuffled
from torchtitan_like.data.text import documents, formats, hub

ROOT = Path(__file__).parents[3]
PATH = "hf://datasets/own/tales@v1/en/part-*"
NUM_FILES = 6
Build = Callable[..., TrainBatches]


class Hub:
    """A fake Hub that serves the files of a folder.

    log: a file with one line for each request. errors: exceptions that the next requests raise.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder.with_name("log")
        self.errors: list[Exception] = []
        self.log.touch()

    def dataset_info(self, repo: str, *, revision: str, expand: list[str]) -> Any:
        assert (repo, revision, expand) == ("own/tales", "v1", ["sha"])
        return SimpleNamespace(sha="c0ffee")

    def list_repo_tree(self, repo: str, path_in_repo: str | None, **options: Any) -> Iterator[Any]:
        assert (
            options == {"recursive": False, "revision": "c0ffee", "repo_type": "dataset"}
            and path_in_repo == "en"
        )
        self._log_request("list")
        yield SimpleNamespace(path="en/deeper")  # a folder has no size
        for file in sorted((self.folder / path_in_repo).iterdir(), reverse=True):
            yield SimpleNamespace(path=f"{path_in_repo}/{file.name}", size=file.stat().st_size)

    def hf_hub_download(
        self, repo: str, name: str, *, repo_type: str, revision: str, local_dir: Path
    ) -> str:
        assert (repo, repo_type, revision) == ("own/tales", "dataset", "c0ffee")
        self._log_request(Path(name).name)
        time.sleep(0.01)
        target = local_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.folder / name, target)
        return str(target)

    def _log_request(self, name: str) -> None:
        with self.log.open("a") as out:
            out.write(name + "\n")
        if self.errors:
            raise self.errors.pop(0)

    @property
    def requests(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A Hub with compressed JSON-lines files of a few blocks each; a window is one block."""
    fake = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(hub, "NUM_KEPT", 2)
    monkeypatch.setattr(formats, "COMPRESSED_BYTES", 300)
    monkeypatch.setattr(documents, "TABLE_BYTES", 1500)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 900)
    monkeypatch.setattr(streaming, "WINDOW_BYTES", 300)
    monkeypatch.setattr(streaming, "MIN_SAMPLES", 1)
    monkeypatch.setattr(streaming, "NUM_AHEAD", 0)
    write_files(fake.folder / "en", ".json.gz")
    write_jsonl(fake.folder / "en/other.jsonl", ["not asked for"])
    return fake


def texts_of(number: int) -> list[str]:
    return [f"{number} {row} {text}" for row in range(6 + number) for text in TEXTS]


def write_files(folder: Path, suffix: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number in range(NUM_FILES):
        file = folder / f"part-{number}{suffix}"
        if suffix == ".parquet":
            write_table(file, list(texts_of(number)), rows=5)
        elif suffix == ".txt":
            file.write_text("\n".join(texts_of(number)))
        else:
            write_jsonl(file, texts_of(number))
        if suffix == ".json.gz":
            file.write_bytes(gzip.compress(file.read_bytes(), mtime=0))


def labels_of(batches: TrainBatches) -> Counter[int]:
    counts = Counter(label for batch in batches for label in batch.labels.flatten().tolist())
    del counts[-100]
    return counts


@pytest.mark.parametrize(
    "suffix",
    [
        pytest.param(".json.gz", marks=pytest.mark.nightly),
        ".jsonl",
        ".parquet",
        pytest.param(".txt", marks=pytest.mark.nightly),
    ],
)
def test_an_epoch_reads_every_file_in_shuffled_order(
    build: Build, the_hub: Hub, tmp_path: Path, suffix: str
) -> None:
    write_files(the_hub.folder / "en", suffix)
    expected = labels_of(build(the_hub.folder / "en" / f"part-*{suffix}", max_epochs=1))
    batches = build(PATH, streaming=True, max_epochs=1)  # type: ignore[arg-type]
    assert the_hub.requests == ["list"]
    (part,) = batches._streams.values()
    assert part.windows_per_epoch > (NUM_FILES if suffix != ".txt" else 2)
    label_counts, max_kept = Counter[int](), 0
    for batch in batches:
        label_counts.update(batch.labels.flatten().tolist())
        max_kept = max(max_kept, len(list((tmp_path / "run").rglob(f"part-*{suffix}"))))
    del label_counts[-100]
    # The first token of a window is not a label: at most one token per window is missing.
    assert not label_counts - expected
    assert (expected - label_counts).total() < part.windows_per_epoch
    seed = xxhash.xxh3_64_intdigest(b"blocks", xxhash.xxh3_64_intdigest(b"own", 7))
    order = shuffled(np.arange(NUM_FILES), NUM_FILES, seed, 0).tolist()
    assert order != sorted(order)
    downloads = the_hub.requests[1:]
    if suffix == ".txt":  # a window of several files reads them in name order
        assert sorted(downloads) == sorted(f"part-{number}{suffix}" for number in order)
    else:
        assert downloads == [f"part-{number}{suffix}" for number in order]
    assert max_kept <= hub.NUM_KEPT


def digests(ranks: list[TrainBatches], num_steps: int) -> list[int]:
    return [sum(next(rank).digest for rank in ranks) % 2**64 for _ in range(num_steps)]


def test_layouts_restarts_and_lost_files_do_not_change_the_stream(
    build: Build, the_hub: Hub, tmp_path: Path
) -> None:
    def ranks(size: int) -> list[TrainBatches]:
        layout: dict[str, Any] = {"local_batch_size": 8 // size, "streaming": True}
        return [build(PATH, dp=(rank, size), **layout) for rank in range(size)]  # type: ignore[arg-type]

    expected = digests(ranks(1), 300)  # several epochs
    assert the_hub.requests.count("part-5.json.gz") > 1
    first = ranks(2)
    assert digests(first, 40) == expected[:40]
    state = json.loads(json.dumps(first[0].state_dict()))
    assert the_hub.requests.count("list") == 1
    shutil.rmtree(tmp_path / "run")
    num_requests = len(the_hub.requests)
    resumed = ranks(4)
    for rank in resumed:
        rank.load_state_dict(state)
    assert digests(resumed, 1) == expected[40:41]
    assert [name == "list" for name in the_hub.requests[num_requests:]] in (
        [True, False],
        [True, False, False],
    )
    assert digests(resumed, 30) == expected[41:71]


def test_the_revision_changes_the_fingerprint(build: Build, the_hub: Hub, tmp_path: Path) -> None:
    first = build(PATH, streaming=True)  # type: ignore[arg-type]
    (listing_file,) = (tmp_path / "run").rglob("files.json")
    listing_file.write_text(listing_file.read_text().replace("c0ffee", "decade"))
    other = build(PATH, streaming=True)  # type: ignore[arg-type]
    differing = [
        key for key in first.fingerprint if first.fingerprint[key] != other.fingerprint[key]
    ]
    assert differing == ["sources.own.files"]


def test_one_process_downloads_and_the_others_wait(the_hub: Hub, tmp_path: Path) -> None:
    listing = hub.list_files(PATH, tmp_path)
    file = next(iter(listing.sizes))
    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=listing.fetch, args=(file,)) for _ in range(3)]
    for process in others:
        process.start()
    listing.fetch(file)
    for process in others:
        process.join()
    assert [process.exitcode for process in others] == [0] * 3
    assert the_hub.requests == ["list", "part-0.json.gz"]
    assert file.read_bytes() == gzip.decompress((the_hub.folder / "en/part-0.json.gz").read_bytes())
    assert not list(listing.folder.rglob("*.gz"))


def test_network_errors_and_truncated_files_are_retried(the_hub: Hub, tmp_path: Path) -> None:
    the_hub.errors = [ConnectionError("reset by peer")] * (hub.ATTEMPTS - 1)
    listing = hub.list_files(PATH, tmp_path)
    file = next(iter(listing.sizes))
    source = the_hub.folder / "en/part-0.json.gz"
    raw = source.read_bytes()
    source.write_bytes(raw[:-9])
    with pytest.raises(
        DataError,
        match=rf"part-0.json.gz of {PATH[:30]}.* not downloaded in 6 .*expected {len(raw):,}",
    ):
        listing.fetch(file)
    assert not file.exists()
    source.write_bytes(raw)
    the_hub.errors = [ConnectionError("reset by peer")] * (hub.ATTEMPTS - 1)
    listing.fetch(file)
    assert file.read_bytes() == gzip.decompress(raw)


def test_a_file_damaged_on_the_hub_is_reported_without_a_retry(
    the_hub: Hub, tmp_path: Path
) -> None:
    source = the_hub.folder / "en/part-0.json.gz"
    source.write_bytes(source.read_bytes()[:-9])
    listing = hub.list_files(PATH, tmp_path)
    file = next(iter(listing.sizes))
    with pytest.raises(
        DataError,
        match=r"en/part-0.json.gz of hf://.* cannot be decompressed \(Compressed file ended before",
    ):
        listing.fetch(file)
    assert the_hub.requests == ["list", "part-0.json.gz"] and not file.exists()


@pytest.mark.parametrize(
    ("name", "local_name"),
    [
        ("a.json.gz", "a.json.gz.json"),
        ("x/a.txt.gz", "x/a.txt.gz.txt"),
        ("a.gz", "a.gz.unpacked"),
        ("a.jsonl.zst", "a.jsonl.zst.jsonl"),
        ("a.parquet",) * 2,
    ],
)
def test_a_decompressed_file_has_its_own_name(tmp_path: Path, name: str, local_name: str) -> None:
    listing = hub.Listing("", "", "", tmp_path, {})
    assert hub._local_name(name) == local_name
    assert listing.name_of(tmp_path / local_name) == name


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        (
            PATH,
            EntryNotFoundError("404"),
            f"{PATH[:-1]}. cannot be downloaded: 404.*check the name",
        ),
        (
            "hf://datasets/own/tales@v1/en/*.arrow",
            None,
            "en/.*arrow matches no file of the dataset own/tales",
        ),
        (
            "hf://datasets/own/tales/en/*.jsonl",
            None,
            "Expected hf://datasets/OWNER/NAME@REVISION/PATTERN",
        ),
    ],
)
def test_a_failed_listing_is_reported(
    the_hub: Hub, tmp_path: Path, path: str, error: Exception | None, message: str
) -> None:
    the_hub.errors = [error] if error else []
    with pytest.raises(DataError, match=message):
        hub.list_files(path, tmp_path)


def test_offline_mode_is_reported_without_a_retry(
    build: Build, the_hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = build(PATH, streaming=True)  # type: ignore[arg-type]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError,
        match=r"part-\d.json.gz of hf://datasets/own/tales.*HF_HUB_OFFLINE must not be set",
    ):
        next(batches)
    assert the_hub.requests == ["list"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("en/*.gz", {"en/a.gz"}),
        ("**/*.gz", {"a.gz", "en/a.gz", "en/x/b.gz"}),
        ("en/**/*.gz", {"en/a.gz", "en/x/b.gz"}),
        ("*/[ab].gz", {"en/a.gz"}),
    ],
)
def test_patterns_are_globs(tmp_path: Path, pattern: str, names: set[str]) -> None:
    all_names = ["a.gz", "en/a.gz", "en/x/b.gz", "en/c.txt"]
    for name in all_names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert {name for name in all_names if hub._matches(name, pattern)} == names
    assert {file.relative_to(tmp_path).as_posix() for file in tmp_path.glob(pattern)} == names


def test_a_process_can_end_while_a_file_is_downloaded(the_hub: Hub, tmp_path: Path) -> None:
    """The process does not wait for a prefetch and ends without an error."""
    code = """if 1:
        import os, sys, threading, time
        os.environ["HF_HUB_OFFLINE"] = "0"
        from pathlib import Path
        import huggingface_hub
        from tests.unit.data.test_hub_stream import PATH, Hub
        from torchtitan_like.config.sections_training import Data, Training
        from torchtitan_like.data.builder import DataBuilder
        from torchtitan_like.data.samples import streaming
        from torchtitan_like.data.text import formats, tokenizer
        formats.COMPRESSED_BYTES, streaming.WINDOW_BYTES, streaming.MIN_SAMPLES = 10**6, 500, 1
        hub, started, calls = Hub(Path(sys.argv[1])), threading.Event(), []
        def slow(*args, **options):
            if calls:
                started.set()
                time.sleep(60)
            calls.append(args)
            return hub.hf_hub_download(*args, **options)
        huggingface_hub.HfApi, huggingface_hub.hf_hub_download = lambda: hub, slow
        builder = DataBuilder(
            Data(sources={"own": {"path": PATH, "streaming": True}}),
            tokenizer.load_tokenizer(sys.argv[3]), sys.argv[2])
        batches = builder.train_batches(Training(seq_len=16), seed=1, global_batch_size=8)
        next(batches)
        started.wait()
        print("downloading", flush=True)
    """
    command = [sys.executable, "-c", code, str(the_hub.folder), str(tmp_path / "run"), str(ASSETS)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=40)
    assert (result.returncode, result.stdout, result.stderr) == (0, "downloading\n", "")
