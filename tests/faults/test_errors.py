"""Checkpoints on a full, failing, read-only or slow disk.

All ranks end together, the log names file and reason, and no published step is lost.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from typing import NamedTuple

import pytest

from tests.faults.kills import STAGED, STEPS, Chain, published
from tests.faults.shim import Rule
from tests.faults.trainer import FinishedRun, Run

ERRNO = {
    "ENOSPC": "No space left on device",
    "EIO": "Input/output error",
    "EROFS": "Read-only file system",
}


class Case(NamedTuple):
    """A failing call of one rank, and the text that the log must contain."""

    call: str
    pattern: str
    error: str
    rank: int
    text: str
    overrides: dict[str, str] = {}


ASYNC = {"checkpoint__async_mode": "async"}
EXPORT = {"checkpoint__hf_interval": "1", "checkpoint__hf_shard_gb": "2e-5"}
LAST = {
    "training__steps": "{step}",
    "checkpoint__last_save_model_only": "true",
    "checkpoint__last_save_in_hf": "true",
    "checkpoint__hf_shard_gb": "2e-5",
}
LAST_WEIGHTS = f"{STAGED}/model*.safetensors"
SAFETENSORS = "*/hf/step-{step}.tmp-*/model*.safetensors"
CASES = {
    "full disk in a shard": Case(
        "write", f"{STAGED}/shard-00001.bin", "ENOSPC", 1, r"shard-00001\.bin"
    ),
    "I/O error in a shard": Case(
        "write", f"{STAGED}/shard-00000.bin", "EIO", 0, r"shard-00000\.bin"
    ),
    "I/O error at an fsync": Case(
        "fsync", f"{STAGED}/shard-00001.bin", "EIO", 1, r"shard-00001\.bin"
    ),
    "read-only shard": Case("open", f"{STAGED}/shard-00001.bin", "EROFS", 1, r"shard-00001\.bin"),
    "read-only folder": Case("mkdir", STAGED, "EROFS", 0, "step-{step}.tmp-"),
    "full disk in config.toml": Case(
        "write", f"{STAGED}/config.toml", "ENOSPC", 0, r"config\.toml"
    ),
    "full disk in .metadata": Case("write", f"{STAGED}/.metadata.tmp", "ENOSPC", 0, r"\.metadata"),
    "full disk in the manifest": Case(
        "write", f"{STAGED}/manifest.json.tmp", "ENOSPC", 0, r"manifest\.json"
    ),
    "I/O error at the rename": Case("rename", "*/checkpoint/step-{step}", "EIO", 0, "step-{step}"),
    "async: full disk": Case(
        "write", f"{STAGED}/shard-00001.bin", "ENOSPC", 1, r"shard-00001\.bin", ASYNC
    ),
    "async: I/O error": Case(
        "fsync", f"{STAGED}/shard-00000.bin", "EIO", 0, r"shard-00000\.bin", ASYNC
    ),
    "async: manifest": Case(
        "open", f"{STAGED}/manifest.json.tmp", "EROFS", 0, r"manifest\.json", ASYNC
    ),
    "export: full disk": Case("write", SAFETENSORS, "ENOSPC", 1, r"\.safetensors", EXPORT),
    "export: I/O error": Case("fsync", SAFETENSORS, "EIO", 0, r"\.safetensors", EXPORT),
    "last checkpoint as an export": Case(
        "write", LAST_WEIGHTS, "ENOSPC", 0, r"\.safetensors", LAST
    ),
    "async export": Case("write", SAFETENSORS, "ENOSPC", 0, r"\.safetensors", {**ASYNC, **EXPORT}),
}


IN_CI = (
    "full disk in a shard",
    "I/O error at an fsync",
    "full disk in the manifest",
    "I/O error at the rename",
    "async: full disk",
    "export: full disk",
    "last checkpoint as an export",
)


@pytest.fixture(scope="module")
def shared_chain(reference: Chain, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Return one run folder for all errors: each test resumes after the previous failure."""
    folder = tmp_path_factory.mktemp("errors") / "outputs"
    return Chain(reference.starter, reference.faults, folder, reference.reference)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.nightly) for name in CASES],
)
def test_write_error_ends_the_run_without_loss(shared_chain: Chain, name: str) -> None:
    case, chain = CASES[name], shared_chain
    if chain.newest > STEPS - 4:
        chain.reset()
    start = chain.newest
    rule = Rule(case.call, case.pattern.format(step=start + 2), case.error, rank=case.rank, hits=0)
    run = chain.run(
        [rule], name, **{key: value.format(step=start + 2) for key, value in case.overrides.items()}
    )
    assert chain.faults.hits, f"no call was hit: {run.tail}"
    assert_storage(run)
    assert start + 1 <= chain.newest <= start + 2
    assert not list(chain.folder.glob("checkpoint/**/*.tmp-*")), "unfinished steps must be removed"
    assert_error_logged(run, case, start + 2)


def assert_storage(run: FinishedRun) -> None:
    """Check that all ranks ended by agreement: code 0 from torchrun, else the reason's code."""
    assert run.exit is not None and (run.exit["reason"], run.exit["code"]) == (
        "storage",
        74,
    ), run.tail
    assert run.codes in ([0], [74, 74]), run.codes


def assert_error_logged(run: FinishedRun, case: Case, step: int) -> None:
    """Check that the error line names the rank, the file and the system's message."""
    lines = [
        line for line in run.output.splitlines() if "ERROR" in line and ERRNO[case.error] in line
    ]
    assert lines, run.tail
    for part in (f"rank {case.rank}: ", case.text.format(step=step)):
        assert re.search(part, lines[0]), f"{part!r} is not in {lines[0]!r}"


def test_run_finishes_after_all_errors(shared_chain: Chain) -> None:
    shared_chain.finish()


MODES = ["disabled", pytest.param("async", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("mode", MODES)
def test_training_can_continue_after_a_failed_checkpoint(chain: Chain, mode: str) -> None:
    rule = Rule("write", STAGED.format(step=4) + "/shard-00001.bin", "ENOSPC", rank=1, hits=1)
    run = chain.run(
        [rule],
        "continue",
        checkpoint__on_save_error="continue",
        checkpoint__async_mode=mode,
        checkpoint__interval=4,
        checkpoint__keep_latest_k=0,
        training__steps=12,
    )
    assert run.exit == {"reason": "done", "code": 0, "step": 12}, run.tail
    assert (
        not (chain.folder / "checkpoint/step-4").exists()
        and (chain.folder / "checkpoint/step-8").exists()
    )
    errors = [
        line for line in run.output.splitlines() if "ERROR" in line and "shard-00001.bin" in line
    ]
    assert errors and ERRNO["ENOSPC"] in errors[0], run.tail


@pytest.mark.parametrize("mode", MODES)
def test_slow_disk_only_delays_a_checkpoint(chain: Chain, mode: str) -> None:
    rule = Rule("write", STAGED.format(step=4) + "/shard-00001.bin", "stall", rank=1, seconds=1.5)
    run = chain.run(
        [rule], "slow", checkpoint__async_mode=mode, checkpoint__interval=4, training__steps=8
    )
    assert run.exit == {"reason": "done", "code": 0, "step": 8}, run.tail
    assert chain.faults.hits
    assert chain.newest == 8


def test_failed_deletion_does_not_stop_training(chain: Chain) -> None:
    rule = Rule("unlink", "*/checkpoint/.trash-1/*", "EIO", rank=0, hits=0)
    run = chain.run([rule], "no deletion", checkpoint__keep_latest_k=2, training__steps=5)
    assert run.exit == {"reason": "done", "code": 0, "step": 5}, run.tail
    assert chain.faults.hits
    assert any("WARNING" in line and ".trash-1" in line for line in run.output.splitlines()), (
        run.tail
    )
    assert published(chain.folder) == [4, 5]


def test_run_on_a_full_file_system(chain: Chain) -> None:
    """Another process fills a tmpfs just before rank 1 writes its shard."""
    folder = chain.folder / "checkpoint"
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(folder)]
    mount = subprocess.run(command, capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mount.stderr.strip()}")

    def fill(run: Run) -> None:
        assert chain.faults.wait_for_parked(1, run.is_over), "rank 1 wrote no shard"
        with (
            open(folder / "other-file", "wb", buffering=0) as file,
            contextlib.suppress(OSError),
        ):
            while file.write(bytes(2**20)):
                pass
        chain.faults.release()

    try:
        rule = Rule("write", STAGED.format(step=4) + "/shard-00001.bin", "park", rank=1)
        run = chain.run([rule], "full", fill, checkpoint__interval=2)
        assert_storage(run)
        assert run.has_output(f"shard-00001.bin: {ERRNO['ENOSPC']}. Expected free space."), run.tail
        assert chain.newest == 2

        next_run = chain.run([], "still full", checkpoint__interval=2)
        assert_storage(next_run)
        assert next_run.has_output("GiB free"), next_run.tail
        assert chain.newest == 2

        (folder / "other-file").unlink()
        chain.finish()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
