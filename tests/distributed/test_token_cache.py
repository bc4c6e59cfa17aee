"""One rank builds a token cache for all ranks, and all ranks raise its errors."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch.distributed as dist

from tests.distributed.parity import options
from tests.harness.rank_pool import run_ranks
from torchtitan_like.config.sections_training import Data, Training
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.data_errors import CacheWriteError, DataError, WorkerKilled
from torchtitan_like.data.text import documents
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.data.tokens import build_once, tokenizing
from torchtitan_like.data.tokens.token_file import Staging
from torchtitan_like.distributed.world import HostGroup, launched_as
from torchtitan_like.resilience.agreement import Requests
from torchtitan_like.resilience.heartbeat import RankPosition
from torchtitan_like.run import resolve_run, run_job
from torchtitan_like.util.exit_codes import ExitCode

ASSETS = Path(__file__).parents[1] / "assets" / "tokenizer"
RANKS = 3


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for part in range(4):
        lines = [
            json.dumps({"text": f"{part}.{number} to be or not to be"}) for number in range(50)
        ]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{part}.jsonl").write_text("\n".join(lines))
    return tmp_path / "data"


class Lines(logging.Handler):
    """Collects the log lines of a rank."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def build_batches(corpus: Path, run: Path) -> tuple[str, str, list[str]]:
    """Return (error class or "", message or cache folder, log lines) of this rank."""
    handler, logger = Lines(), logging.getLogger()
    logger.addHandler(handler)
    level, sizes = logger.level, (documents.PIECE_BYTES, documents.BLOCK_BYTES)
    logger.setLevel(logging.INFO)
    documents.PIECE_BYTES = documents.BLOCK_BYTES = 300
    group = HostGroup(list(range(dist.get_world_size())), timedelta(seconds=60))
    try:
        batches = DataBuilder(
            Data(),
            tokenizer=load_tokenizer(ASSETS),
            dump_folder=str(run),
            dp_rank=dist.get_rank(),
            dp_size=dist.get_world_size(),
            group=group,
        ).train_batches(
            Training(dataset_path=str(corpus), seq_len=16),
            seed=1,
            global_batch_size=8 * dist.get_world_size(),
        )
        next(batches)
        return "", str(batches._batches._samples.parts[0].file.folder), handler.lines
    except DataError as error:
        return type(error).__name__, str(error), handler.lines
    finally:
        group.destroy()
        logger.removeHandler(handler)
        logger.setLevel(level)
        documents.PIECE_BYTES, documents.BLOCK_BYTES = sizes


def build_with_killed_worker(corpus: Path, run: Path) -> tuple[str, str, list[str]]:
    """Kill a worker process, like the kernel's OOM killer."""
    append, num_cores = Staging.append, tokenizing.num_cores

    def append_and_kill(self: Staging, piece: object) -> None:
        append(self, piece)  # type: ignore[arg-type]
        if self.num_pieces == 2:
            for child in psutil.Process().children(recursive=True):
                if any("spawn_main" in word for word in child.cmdline()):
                    os.kill(child.pid, signal.SIGKILL)
                    return

    Staging.append, tokenizing.num_cores = append_and_kill, lambda: 2  # type: ignore[method-assign]
    try:
        return build_batches(corpus, run)
    finally:
        Staging.append, tokenizing.num_cores = append, num_cores  # type: ignore[method-assign]


def test_one_rank_builds_and_all_read(corpus: Path, tmp_path: Path) -> None:
    results = run_ranks(build_batches, RANKS, corpus, tmp_path / "run")
    assert {error for error, _, _ in results} == {""}
    assert len({folder for _, folder, _ in results}) == 1
    assert sum(any("tokenizing" in line for line in lines) for _, _, lines in results) == 1


def test_killed_worker_ends_all_ranks(corpus: Path, tmp_path: Path) -> None:
    results = run_ranks(build_with_killed_worker, RANKS, corpus, tmp_path / "run")
    assert {error for error, _, _ in results} == {"WorkerKilled"}
    assert len({message for _, message, _ in results}) == 1 and "memory ran low" in results[0][1]
    assert sum(any("tokenizing" in line for line in lines) for _, _, lines in results) == 1, (
        "no other rank may continue the build"
    )
    assert WorkerKilled.exit_code is ExitCode.REQUEUE
    resumed = run_ranks(build_batches, RANKS, corpus, tmp_path / "run")
    assert {error for error, _, _ in resumed} == {""}
    assert any("continuing after" in line for _, _, lines in resumed for line in lines)


def test_malformed_data_ends_all_ranks(corpus: Path, tmp_path: Path) -> None:
    (corpus / "3.jsonl").write_text("{oops")
    results = run_ranks(build_batches, RANKS, corpus, tmp_path / "run")
    assert {(error, message) for error, message, _ in results} == {("DataError", results[0][1])}
    assert "3.jsonl, line 1: malformed JSON" in results[0][1]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def build_with_fault(
    ranks: set[int], function: str, error: Exception, corpus: Path, run: Path
) -> tuple[str, str, list[str]]:
    """Call `build_batches` while `function` raises an error on some ranks."""

    def fail(*_: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() in ranks:
            patched.setattr(f"torchtitan_like.data.{function}", fail)
        return build_batches(corpus, run)


FULL_DISKS = {
    "append": "tokens.token_file.Staging.append",
    "publish": "tokens.token_file.Staging.publish",
    "create": "tokens.token_file.Staging.__init__",
}


@pytest.mark.parametrize("name", FULL_DISKS)
def test_full_disk_ends_all_ranks(name: str, corpus: Path, tmp_path: Path) -> None:
    results = run_ranks(build_with_fault, 2, {0}, FULL_DISKS[name], FULL, corpus, tmp_path / "run")
    assert {(error, message) for error, message, _ in results} == {
        ("CacheWriteError", results[0][1])
    }
    assert "No space left on device. The finished part is kept: free space" in results[0][1]
    assert {error for error, _, _ in run_ranks(build_batches, 2, corpus, tmp_path / "run")} == {""}
    assert CacheWriteError.exit_code is ExitCode.STORAGE


# Actions that each rank performs without a build.
LOCAL = {"open the cache": "tokens.token_cache.Entry.open", "plan the samples": "builder.pack"}


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("name", LOCAL)
def test_error_on_one_rank_is_raised_on_all_ranks(
    name: str, is_built: bool, corpus: Path, tmp_path: Path
) -> None:
    if is_built:
        run_ranks(build_batches, 2, corpus, tmp_path / "run")
    error = DataError("the copy of this node is damaged")
    results = run_ranks(build_with_fault, 2, {1}, LOCAL[name], error, corpus, tmp_path / "run")
    assert {(error, message) for error, message, _ in results} == {("DataError", str(error))}


def build_from_copy(corpus: Path, run: Path) -> str:
    return build_batches(corpus.with_name(f"copy-{dist.get_rank()}"), run)[1]


def test_each_copy_of_a_dataset_gets_its_own_cache(corpus: Path, tmp_path: Path) -> None:
    """No rank waits for a cache that no other rank builds."""
    for rank in range(2):
        shutil.copytree(corpus, tmp_path / f"copy-{rank}")
    folders = run_ranks(build_from_copy, 2, corpus, tmp_path / "run", timeout=40)
    assert [Path(folder).parents[1].name for folder in folders] == ["copy-0", "copy-1"]


def build_from_node_copy(corpus: Path, run: Path) -> tuple[str, str, list[str]]:
    return build_batches(corpus / str(dist.get_rank()), run)


def test_missing_dataset_on_one_node_ends_all_ranks(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "copies/1").mkdir(parents=True)
    (tmp_path / "copies/0").symlink_to(corpus)
    results = run_ranks(build_from_node_copy, 2, tmp_path / "copies", tmp_path / "run")
    assert {(error, message) for error, message, _ in results} == {("DataError", results[1][1])}
    assert str(tmp_path / "copies/1") in results[0][1]


def build_on_local_disks(folder: Path) -> list[int]:
    """Build on two hosts with two ranks and separate disks. Return this rank's own number if it
    built the entry."""
    rank = dist.get_rank()
    host = rank // 2
    disk = folder / str(host)
    disk.mkdir(exist_ok=True)
    entry, built = disk / "entry", []
    build_once.socket = type("Host", (), {"gethostname": staticmethod(lambda: f"host-{host}")})  # type: ignore[assignment]
    is_visible, build_once._is_visible = build_once._is_visible, lambda path: host == 0
    group = HostGroup(list(range(dist.get_world_size())), timedelta(seconds=60))

    def build(stop: threading.Event) -> str:
        built.append(rank)
        time.sleep(0.3 * host)  # one host is slower
        entry.touch()
        return str(entry)

    def find() -> str | None:
        return str(entry) if entry.exists() else None

    try:
        built_entry = build_once.build_once(group, find, build, lambda: disk, "entry", "the entry")
        assert built_entry == str(entry)
    finally:
        group.destroy()
        build_once.socket, build_once._is_visible = socket, is_visible
    return built


def test_one_rank_per_disk_builds(tmp_path: Path) -> None:
    assert run_ranks(build_on_local_disks, 4, tmp_path) == [[0], [], [2], []]


def train(argv: list[str]) -> tuple[int, str]:
    """Run on this rank of a pool; return the exit code and the logged errors."""
    handler = Lines()
    handler.setLevel(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        launched = launched_as()
        code = run_job(resolve_run(argv, launched.world_size), launched, Requests(), RankPosition())
        return int(code), "\n".join(handler.lines)
    finally:
        logging.getLogger().removeHandler(handler)


def write_text(folder: Path) -> dict[str, str]:
    folder.mkdir()
    lines = [json.dumps({"text": f"hamlet {number} " * 6}) + "\n" for number in range(200)]
    (folder / "own.jsonl").write_text("".join(lines))
    return {"data.sources.own.path": str(folder / "own.jsonl")}


def write_tokens(folder: Path) -> dict[str, str]:
    folder.mkdir()
    np.tile(np.arange(3, 30, dtype="<u2"), 10_000).tofile(folder / "own.bin")
    return {"data.sources.own.path": str(folder / "own.bin"), "data.sources.own.format": "tokens"}


EVERY_TENTH = slice(5, None, 10)
# The source's fingerprint does not cover this byte: it reads 16 KiB at the start, at 75 KiB, ...
ONE_TOKEN = slice(8500, 8501)


def flip_low_bits(file: Path, token_slice: slice) -> None:
    """Flip bits like a faulty disk: size and modification time stay the same."""
    status, tokens = file.stat(), np.fromfile(file, "<u2")
    tokens[token_slice] ^= 1
    tokens.tofile(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("write", "damaged", "token_slice"),
    [(write_text, "tokens/*/tokens.bin", EVERY_TENTH), (write_tokens, "data/own.bin", ONE_TOKEN)],
)
def test_resume_with_changed_tokens_is_rejected(
    write: Callable[[Path], dict[str, str]], damaged: str, token_slice: slice, tmp_path: Path
) -> None:
    source = {**write(tmp_path / "data"), "data.shuffle": "false", "checkpoint.enable": "true"}
    source["checkpoint.last_save_model_only"] = "false"

    def start(steps: int) -> tuple[int, str]:
        argv = options(str(tmp_path / "run"), "float32", **source, **{"training.steps": steps})
        index = argv.index("--training.dataset_path")
        return run_ranks(train, 1, argv[:index] + argv[index + 2 :])[0]

    assert start(2)[0] == ExitCode.DONE
    (file,) = tmp_path.glob(damaged)
    flip_low_bits(file, token_slice)
    code, error = start(4)
    assert (
        code == ExitCode.BAD_DATA == json.loads((tmp_path / "run/exit.json").read_text())["code"]
    ), error
    assert f"{file} is damaged: bytes 0 to" in error
    flip_low_bits(file, token_slice)
    assert start(4)[0] == ExitCode.DONE
