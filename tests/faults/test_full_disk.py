"""A full disk outside the checkpoint folder: all ranks stop with code 74 without loss."""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.kills import STEPS as STREAMED_STEPS
from tests.faults.kills import Chain, make_reference
from tests.faults.shim import Faults, Rule
from tests.faults.trainer import ASSETS, FinishedRun, Starter
from tests.harness.runner import ROOT, trainer_environment
from torchtitan_like.util.jsonl import read_rows

STEPS = 6
BASE = {"training__steps": STEPS, "checkpoint__interval": 2, "checkpoint__keep_latest_k": 0}
VALIDATION = {
    "validation__enable": "true",
    "validation__dataset_path": ASSETS / "text.jsonl",
    "validation__seq_len": 16,
    "validation__local_batch_size": 1,
    "validation__steps": 2,
    "validation__freq": 2,
}
PROFILE = {
    "profiling__enable_profiling": "true",
    "profiling__profile_freq": 2,
    "profiling__profiler_warmup": 0,
    "profiling__profiler_active": 1,
}
ERRORS = ("ENOSPC", "EIO", "EROFS", "EDQUOT")
OFTEN = {"torchtitan_like.resilience.heartbeat:INTERVAL": 0.05}


class Writer(NamedTuple):
    """A file that one rank writes, and the call that fails from its `first` occurrence on."""

    call: str
    pattern: str
    rank: int | str = 0
    first: int = 1
    overrides: Mapping[str, Any] = {}


WRITERS = {
    "metrics.jsonl": Writer("write", "*/metrics.jsonl", first=3),
    "metrics.jsonl, fsync": Writer("fsync", "*/metrics.jsonl", first=2),
    "metrics.jsonl, first row": Writer("open", "*/metrics.jsonl"),
    "validation.jsonl": Writer("write", "*/validation.jsonl", overrides=VALIDATION),
    "events.jsonl": Writer("write", "*/events.jsonl", first=2),
    "log of rank 1": Writer("write", "*/logs/rank1.log", rank=1, first=20),
    "log of rank 0, at the start": Writer("open", "*/logs/rank0.log"),
    "heartbeat of rank 1": Writer("open", "*/heartbeat/.rank-1", rank=1, first=2),
    "TensorBoard": Writer("write", "*/tb/*", overrides={"metrics__enable_tensorboard": "true"}),
    "TensorBoard's folder": Writer(
        "mkdir", "*/tb*", overrides={"metrics__enable_tensorboard": "true"}
    ),
    "environment": Writer("open", "*/environment/variables.txt"),
    # On all ranks: if another rank creates the folder, a rank's own call may fail.
    "traces": Writer("mkdir", "*/profile_traces*", rank="*", overrides=PROFILE),
    "attempt's folder": Writer("mkdir", "*/attempts/[0-9]"),
    "config.toml": Writer("write", "*/attempts/*/config.toml*"),
    "exit.json": Writer("open", "*/exit.json*"),
}
# ./run_tests.sh --nightly tries each writer with each error.
IN_CI = {
    ("metrics.jsonl, fsync", "EIO"),
    ("log of rank 1", "EDQUOT"),
    ("attempt's folder", "EROFS"),
    ("exit.json", "ENOSPC"),
}
CASES = [
    pytest.param(*case, marks=() if case in IN_CI else pytest.mark.nightly)
    for case in product(WRITERS, ERRORS)
]


@pytest.mark.parametrize(("name", "error"), CASES)
def test_failed_write_stops_all_ranks_without_loss(chain: Chain, name: str, error: str) -> None:
    writer = WRITERS[name]
    chain.overrides.update({**BASE, **writer.overrides})
    rule = Rule(writer.call, writer.pattern, error, rank=writer.rank, first=writer.first, hits=0)
    run = chain.run([rule], name, settings=OFTEN)
    assert chain.faults.hits, f"no call was hit: {run.tail}"
    check_stop(run, writer)
    run = chain.run(description=f"after {name}")
    assert run.exit == {"reason": "done", "code": 0, "step": STEPS}, run.tail
    assert len(chain.check_rows(name)) == STEPS
    if writer.overrides is VALIDATION:
        assert [row["step"] for row in read_rows(chain.folder / "validation.jsonl")] == [1, 2, 4, 6]


def check_stop(run: FinishedRun, writer: Writer) -> None:
    """Check that all ranks ended with code 74, and that the log names the file and the reason."""
    assert "Traceback" not in run.output and "Logging error" not in run.output, run.tail
    assert "annot write" in run.output or "annot be written" in run.output, run.tail
    # Training is complete, and only the exit code of the process can report the error.
    if "exit.json" in writer.pattern:
        assert run.exit is None and run.codes == [74, 0], run.codes
        return
    assert run.exit is not None and (run.exit["reason"], run.exit["code"]) == (
        "storage",
        74,
    ), run.tail
    assert run.codes == [74, 74], run.codes


WRITTEN_DURING_TRAINING = [
    "metrics.jsonl",
    pytest.param("validation.jsonl", marks=pytest.mark.nightly),
    pytest.param("events.jsonl", marks=pytest.mark.nightly),
    pytest.param("log of rank 1", marks=pytest.mark.nightly),
    "heartbeat of rank 1",
    pytest.param("TensorBoard", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("name", WRITTEN_DURING_TRAINING)
def test_training_continues_after_temporary_write_errors(chain: Chain, name: str) -> None:
    writer = WRITERS[name]
    chain.overrides.update({**BASE, **writer.overrides, "checkpoint__on_save_error": "continue"})
    rule = Rule(writer.call, writer.pattern, "ENOSPC", rank=writer.rank, first=writer.first, hits=2)
    run = chain.run([rule], name, settings=OFTEN)
    assert chain.faults.hits, f"no call was hit: {run.tail}"
    assert run.exit == {"reason": "done", "code": 0, "step": STEPS}, run.tail
    assert run.output.count("Training continues without it") >= 1, run.tail
    assert "Failed writes of rank" in run.output
    assert len(chain.check_rows(name)) == STEPS
    if writer.overrides is VALIDATION:
        assert [row["step"] for row in read_rows(chain.folder / "validation.jsonl")] == [1, 2, 4, 6]


CACHE_WRITERS = {
    "tokens": Writer("write", "*/own-cache/*/tokens.bin"),
    "hash table": Writer("fsync", "*/own-cache/*/offsets.bin.xxh3"),
    "meta.json": Writer("open", "*/own-cache/*/.meta.json.building"),
}
# ./run_tests.sh --nightly tries each writer with each error.
CACHE_IN_CI = {("tokens", "ENOSPC")}
CACHE_CASES = [
    pytest.param(*case, marks=() if case in CACHE_IN_CI else pytest.mark.nightly)
    for case in product(CACHE_WRITERS, ERRORS)
]


@pytest.mark.parametrize(("name", "error"), CACHE_CASES)
def test_failed_write_of_a_token_cache_stops_all_ranks(chain: Chain, name: str, error: str) -> None:
    writer, cache = CACHE_WRITERS[name], chain.folder.parent / "own-cache"
    chain.overrides.update({**BASE, "data__cache_folder": cache})
    # On all ranks: any rank may build first.
    run = chain.run([Rule(writer.call, writer.pattern, error, hits=0)], name)
    assert chain.faults.hits, f"no call was hit: {run.tail}"
    check_stop(run, writer)
    run = chain.run(description=f"after {name}")
    assert run.exit == {"reason": "done", "code": 0, "step": STEPS}, run.tail
    assert len(chain.check_rows(name)) == STEPS


STREAM = {
    "data__sources__text__path": ASSETS / "text.jsonl",
    "data__sources__text__streaming": "true",
    "training__steps": STREAMED_STEPS,
}
WINDOW_WRITERS = {
    "tokens": Writer("write", "*/own-cache/.*/tokens.bin", first=3),
    "folder": Writer("mkdir", "*/own-cache/.*", first=3),
    "name": Writer("rename", "*/own-cache/window-*", first=3),
}


@pytest.fixture(scope="module")
def streamed(
    fork_server: Starter, faults: Faults, tmp_path_factory: pytest.TempPathFactory
) -> Chain:
    """Return a chain with the metrics of a streaming run without faults."""
    return make_reference(fork_server, faults, tmp_path_factory.mktemp("streamed"), **STREAM)


@pytest.mark.nightly
@pytest.mark.parametrize("name", WINDOW_WRITERS)
def test_failed_write_of_a_stream_window_stops_all_ranks(
    streamed: Chain, tmp_path: Path, name: str
) -> None:
    writer = WINDOW_WRITERS[name]
    chain = Chain(streamed.starter, streamed.faults, tmp_path / "outputs", streamed.reference)
    chain.overrides.update({**STREAM, "data__cache_folder": tmp_path / "own-cache"})
    # On all ranks: any rank may write a window. Each window is one pass over the corpus.
    run = chain.run([Rule(writer.call, writer.pattern, "ENOSPC", first=writer.first, hits=0)], name)
    assert chain.faults.hits, f"no call was hit: {run.tail}"
    check_stop(run, writer)
    assert run.exit is not None and 0 < run.exit["step"] < STREAMED_STEPS, run.exit
    run = chain.run(description=f"after {name}")
    assert run.exit == {"reason": "done", "code": 0, "step": STREAMED_STEPS}, run.tail
    assert len(chain.check_rows(name)) == STREAMED_STEPS


# ---- a full file system


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[None]:
    """Mount a file system of this size at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    mount = subprocess.run(command, capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mount.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(file: Path, free_bytes: int) -> None:
    """Fill the disk except for `free_bytes`."""
    with open(file, "wb", buffering=0) as stream:
        with contextlib.suppress(OSError):
            while True:
                stream.write(bytes(65536))
        stream.truncate(max(0, stream.tell() - free_bytes))


DRILLS = [pytest.param(seed, marks=() if seed < 1 else pytest.mark.nightly) for seed in range(30)]


@pytest.mark.parametrize("seed", DRILLS)
def test_disk_that_fills_up_at_a_random_time(chain: Chain, seed: int) -> None:
    draw = random.Random(seed)
    chain.overrides.update({
        **BASE, "training__steps": 20, **VALIDATION, "metrics__enable_tensorboard": "true",
        "checkpoint__async_mode": draw.choice(["disabled", "async"]),
        "checkpoint__on_save_error": draw.choice(["stop", "continue"]),
    })  # fmt: skip
    free_bytes, delay = (
        draw.choice([0, draw.randrange(1 << 16), draw.randrange(1 << 26)]),
        draw.uniform(0.0, 2.0),
    )
    other_file = chain.folder / "other-file"
    with small_disk(chain.folder, 96):  # a checkpoint requires 64 MiB of free space
        timer = threading.Timer(delay, fill, (other_file, free_bytes))
        run = chain.run(
            description=f"seed {seed}", settings=OFTEN, callback=lambda run: timer.start()
        )
        timer.cancel()
        timer.join()
        assert "Traceback" not in run.output, run.tail
        assert {74, 0} >= set(run.codes), (run.codes, run.tail)
        if run.exit is None:  # the disk had no space for exit.json
            assert run.codes[0] == 74, (run.codes, run.tail)
        other_file.unlink(missing_ok=True)
        run = chain.run(description=f"after seed {seed}")
        assert run.exit == {"reason": "done", "code": 0, "step": 20}, run.tail
        assert not list(chain.folder.glob("**/*.tmp-*"))
        if chain.overrides["checkpoint__on_save_error"] == "stop":
            assert len(chain.check_rows(f"seed {seed}")) == 20


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_run_train_returns_the_storage_code_without_exit_json(chain: Chain, num_ranks: int) -> None:
    chain.faults.set(Rule("open", "*/outputs/exit.json*", "ENOSPC", rank=0, hits=0))
    env = trainer_environment({**chain.faults.env, "NGPU": str(num_ranks)})
    result = subprocess.run(
        [str(ROOT / "run_train.sh"), *chain.argv(training__steps=2)],
        env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert chain.faults.hits
    assert result.returncode == 74, (result.stdout + result.stderr)[-3000:]
    assert f"Cannot write {chain.folder}/exit.json: " in result.stdout
    assert "stopped: storage (code 74) at step 2" in result.stderr
