"""A full, failing, read-only or slow disk: all ranks end together, the log names file and reason, and nothing is lost."""

from __future__ import annotations

import contextlib
import re
import subprocess
from typing import NamedTuple

import pytest

from tests.faults.kills import STAGED, STEPS, Chain, published
from tests.faults.shim import Rule
from tests.faults.trainer import Ended, Run, Starter

ERRNO = {"ENOSPC": "No space left on device", "EIO": "Input/output error", "EROFS": "Read-only file system"}


class Case(NamedTuple):
    """A call of one rank that fails, and what must be said of it."""

    call: str
    pattern: str
    error: str
    rank: int
    says: str
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
    "full disk in a shard": Case("write", f"{STAGED}/shard-00001.bin", "ENOSPC", 1, r"shard-00001\.bin"),
    "I/O error in a shard": Case("write", f"{STAGED}/shard-00000.bin", "EIO", 0, r"shard-00000\.bin"),
    "I/O error at an fsync": Case("fsync", f"{STAGED}/shard-00001.bin", "EIO", 1, r"shard-00001\.bin"),
    "read-only shard": Case("open", f"{STAGED}/shard-00001.bin", "EROFS", 1, r"shard-00001\.bin"),
    "read-only folder": Case("mkdir", STAGED, "EROFS", 0, "step-{step}.tmp-"),
    "full disk in config.toml": Case("write", f"{STAGED}/config.toml", "ENOSPC", 0, r"config\.toml"),
    "full disk in .metadata": Case("write", f"{STAGED}/.metadata.tmp", "ENOSPC", 0, r"\.metadata"),
    "full disk in the manifest": Case("write", f"{STAGED}/manifest.json.tmp", "ENOSPC", 0, r"manifest\.json"),
    "I/O error at the rename": Case("rename", "*/checkpoint/step-{step}", "EIO", 0, "step-{step}"),
    "async: full disk": Case("write", f"{STAGED}/shard-00001.bin", "ENOSPC", 1, r"shard-00001\.bin", ASYNC),
    "async: I/O error": Case("fsync", f"{STAGED}/shard-00000.bin", "EIO", 0, r"shard-00000\.bin", ASYNC),
    "async: manifest": Case("open", f"{STAGED}/manifest.json.tmp", "EROFS", 0, r"manifest\.json", ASYNC),
    "export: full disk": Case("write", SAFETENSORS, "ENOSPC", 1, r"\.safetensors", EXPORT),
    "export: I/O error": Case("fsync", SAFETENSORS, "EIO", 0, r"\.safetensors", EXPORT),
    "last save as an export": Case("write", LAST_WEIGHTS, "ENOSPC", 0, r"\.safetensors", LAST),
    "async export": Case("write", SAFETENSORS, "ENOSPC", 0, r"\.safetensors", {**ASYNC, **EXPORT}),
}


@pytest.fixture(scope="module")
def shared_chain(reference: Chain, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """One run folder for all errors: each test is the start that follows the failure before it."""
    folder = tmp_path_factory.mktemp("errors") / "outputs"
    return Chain(reference.starter, reference.faults, folder, reference.reference)


@pytest.mark.parametrize("name", CASES)
def test_an_error_ends_the_run_and_loses_nothing(shared_chain: Chain, name: str) -> None:
    case, chain = CASES[name], shared_chain
    if chain.newest > STEPS - 4:
        chain.begin_anew()
    begin = chain.newest
    rule = Rule(case.call, case.pattern.format(step=begin + 2), case.error, rank=case.rank, hits=0)
    ended = chain.run([rule], name, **{key: value.format(step=begin + 2) for key, value in case.overrides.items()})
    assert chain.faults.hits, f"no call was hit: {ended.tail}"
    assert_storage(ended)
    assert begin + 1 <= chain.newest <= begin + 2
    assert not list(chain.folder.glob("checkpoint/**/*.tmp-*")), "what could not be finished is removed"
    assert_told(ended, case, begin + 2)


def assert_storage(ended: Ended) -> None:
    """All ranks have ended by agreement: under torchrun with 0, else with the reason's code."""
    assert ended.exit is not None and (ended.exit["reason"], ended.exit["code"]) == ("storage", 74), ended.tail
    assert ended.codes in ([0], [74, 74]), ended.codes


def assert_told(ended: Ended, case: Case, step: int) -> None:
    """The error's line names the rank, the file and what the system said."""
    lines = [line for line in ended.output.splitlines() if "ERROR" in line and ERRNO[case.error] in line]
    assert lines, ended.tail
    for part in (f"rank {case.rank}: ", case.says.format(step=step)):
        assert re.search(part, lines[0]), f"{part!r} is not in {lines[0]!r}"


def test_after_all_these_errors_the_run_finishes(shared_chain: Chain) -> None:
    shared_chain.finish()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_training_can_continue_after_a_failed_save(chain: Chain, mode: str) -> None:
    rule = Rule("write", STAGED.format(step=4) + "/shard-00001.bin", "ENOSPC", rank=1, hits=1)
    ended = chain.run([rule], "continue", checkpoint__on_save_error="continue", checkpoint__async_mode=mode,
                      checkpoint__interval=4, checkpoint__keep_latest_k=0, training__steps=12)  # fmt: skip
    assert ended.exit == {"reason": "done", "code": 0, "step": 12}, ended.tail
    assert not (chain.folder / "checkpoint/step-4").exists() and (chain.folder / "checkpoint/step-8").exists()
    loud = [line for line in ended.output.splitlines() if "ERROR" in line and "shard-00001.bin" in line]
    assert loud and ERRNO["ENOSPC"] in loud[0], ended.tail


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_slow_disk_only_delays_a_save(chain: Chain, mode: str) -> None:
    rule = Rule("write", STAGED.format(step=4) + "/shard-00001.bin", "stall", rank=1, seconds=1.5)
    ended = chain.run([rule], "slow", checkpoint__async_mode=mode, checkpoint__interval=4, training__steps=8)
    assert ended.exit == {"reason": "done", "code": 0, "step": 8}, ended.tail
    assert chain.faults.hits
    assert chain.newest == 8


def test_a_deletion_that_fails_stops_nothing(chain: Chain) -> None:
    rule = Rule("unlink", "*/checkpoint/.trash-1/*", "EIO", rank=0, hits=0)
    ended = chain.run([rule], "no deletion", checkpoint__keep_latest_k=2, training__steps=5)
    assert ended.exit == {"reason": "done", "code": 0, "step": 5}, ended.tail
    assert chain.faults.hits
    assert any("WARNING" in line and ".trash-1" in line for line in ended.output.splitlines()), ended.tail
    assert published(chain.folder) == [4, 5]


def test_a_disk_that_is_really_full(torchrun_chain: Chain, warm: Starter) -> None:
    """A tmpfs in which another process takes the last bytes just before rank 1 writes its shard."""
    chain = torchrun_chain
    folder = chain.folder / "checkpoint"
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(folder)]
    mount = subprocess.run(command, capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mount.stderr.strip()}")

    def fill(run: Run) -> None:
        assert chain.faults.wait_for_parked(1, run.is_over), "rank 1 came to no shard"
        with open(folder / "of-somebody-else", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(2**20)):
                pass
        chain.faults.release()

    try:
        rule = Rule("write", STAGED.format(step=4) + "/shard-00001.bin", "park", rank=1)
        ended = chain.run([rule], "full", fill, checkpoint__interval=2)
        assert_storage(ended)
        assert ended.says(f"rank 1: OSError: [Errno 28] {ERRNO['ENOSPC']}"), ended.tail
        assert chain.newest == 2

        chain.starter = warm
        again = chain.run([], "no room yet", checkpoint__interval=2)
        assert_storage(again)
        assert again.says("GiB free"), again.tail
        assert chain.newest == 2

        (folder / "of-somebody-else").unlink()
        chain.finish()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
