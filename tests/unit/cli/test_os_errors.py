"""Commands report missing paths and missing rights in three parts, without a traceback."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.harness.users import as_user_without_rights
from tests.unit.checkpoint.folders import make_steps
from tests.unit.checkpoint.steps import MODEL, make_step
from torchtitan_like.checkpoint.tools.listing import list_checkpoints
from torchtitan_like.cli import main
from torchtitan_like.config.dataset_names import DATASETS
from torchtitan_like.util.bundle import TOKENIZER
from torchtitan_like.util.files import describe_os_error

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
# Nobody may create a file there, not even root: "Permission denied" or "Read-only file system".
LOCKED = "/sys/kernel"
RIGHTS = rf"{LOCKED}\S*: (Permission denied|Operation not permitted|Read-only file system)\."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, a corpus, a tokenizer, a run and a file."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "checkpoint").mkdir()
    make_step(folder / "checkpoint/step-7", MODEL)
    shutil.copy(DATASETS["shakespeare_validation"].file, folder / "corpus.jsonl")
    shutil.copytree(TOKENIZER, folder / "tokenizer")
    (folder / "run/attempts").mkdir(parents=True)
    switch = f'[resilience]\nkill_switch_path = "{LOCKED}/KILL"\n'
    (folder / "run/config.toml").write_text(switch)
    (folder / "file").touch()
    return folder


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("run stop run", RIGHTS),
        (f"slurm init {LOCKED}/scripts", RIGHTS),
        ("slurm init file", r"file: File exists\."),
        (f"ckpt export checkpoint/step-7 {LOCKED}/model.pt --to pt", RIGHTS),
        (f"ckpt export checkpoint/step-7 {LOCKED}/model", RIGHTS),
        (f"data tokenize corpus.jsonl --tokenizer tokenizer --output {LOCKED}/tokens", RIGHTS),
        (f"data tiny tokenizer tokenizer {LOCKED}/tiny", RIGHTS),
        (f"data train-tokenizer --input corpus.jsonl --output {LOCKED}/tokenizer", RIGHTS),
        ("ckpt ls /nowhere", r"/nowhere: No such file or directory\."),
        ("ckpt ls file", r"file: Not a directory\."),
    ],
)
def test_the_message_names_path_reason_and_remedy(
    words: str,
    problem: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(words.split()) == 2
    error = capfd.readouterr().err
    message = rf"({re.escape('rank 0: ')})?{problem} Expected [^.]+\. [A-Z][^.]+\.\n"
    assert re.fullmatch(message, error.splitlines(keepends=True)[-1]), error
    assert "Errno" not in error and "Traceback" not in error


def test_an_unreadable_folder_is_named() -> None:
    """Not the folder of exports in it, which the command looks for next."""
    with tempfile.TemporaryDirectory() as parent:  # pytest's own folders are private
        os.chmod(parent, 0o755)
        folder = Path(parent) / "checkpoint"
        make_steps(folder, "10")
        folder.chmod(0)
        with as_user_without_rights(), pytest.raises(PermissionError) as caught:
            list_checkpoints(folder)
        folder.chmod(0o755)
    assert Path(caught.value.filename) == folder


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileExistsError("x exists. Expected y. Do z."), "x exists. Expected y. Do z."),
        (
            OSError(errno.ENOSPC, "full"),
            "full. Expected free space. Free some, or choose another disk.",
        ),
        (
            OSError(errno.EIO, os.strerror(errno.EIO), b"a/b"),
            "a/b: Input/output error. Expected a disk that works. Check the disk and its mount.",
        ),
    ],
)
def test_every_os_error_has_three_parts(error: OSError, message: str) -> None:
    assert describe_os_error(error) == message
