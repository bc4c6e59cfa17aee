"""One process builds the token cache once; an unfinished cache is never visible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.harness.users import as_user_without_rights
from torchtitan_like.config.sections_training import Data
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.samples import best_fit
from torchtitan_like.data.text import documents
from torchtitan_like.data.text.documents import OnBadRecord, find_corpus
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer
from torchtitan_like.data.tokens import checked_file, encoding, token_file, tokenizing
from torchtitan_like.data.tokens.checked_file import CheckedArray, CheckedFile, RawFile
from torchtitan_like.data.tokens.encoding import Progress, TokenPolicy
from torchtitan_like.data.tokens.token_cache import CacheFolders, entry_of
from torchtitan_like.data.tokens.token_file import TokenFile
from torchtitan_like.data.tokens.tokenizing import cached_tokens, tokenize_corpus

from .conftest import ASSETS, flip_bit, write_jsonl

SMALL_PIECE = 500  # bytes: splits the test corpora into tens of pieces


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write 60 documents in three files."""
    for part in range(3):
        texts = [f"{part}.{number} to be or not to be" for number in range(20)]
        write_jsonl(tmp_path / "corpus" / f"{part}.jsonl", texts)
    return tmp_path / "corpus"


def cache(
    path: Path,
    tokenizer: Tokenizer | None = None,
    on_bad_record: OnBadRecord = "error",
    cache_folder: str | None = None,
    dump_folder: str = "",
) -> TokenFile:
    tokenizer = tokenizer or load_tokenizer(ASSETS)
    policy = TokenPolicy(tokenizer, tokenizer.bos_id, tokenizer.eos_id)
    folders = CacheFolders(cache_folder, dump_folder or str(path.parent / "run"))
    corpus = find_corpus(str(path), on_bad_record=on_bad_record)
    return cached_tokens(corpus, policy, entry_of(corpus, "own", policy), folders)


def contents(file: TokenFile) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in file.folder.iterdir()}


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_documents_are_stored_in_order(corpus: Path, tokenizer: Tokenizer) -> None:
    file = cache(corpus)
    assert file.folder.parent == corpus / ".token_cache"
    assert visible(corpus / ".token_cache") == [file.folder.name]
    names = ["meta.json", "offsets.bin", "offsets.bin.xxh3", "tokens.bin", "tokens.bin.xxh3"]
    assert sorted(path.name for path in file.folder.iterdir()) == names
    expected = [f"{part}.{number} to be or not to be" for part in range(3) for number in range(20)]
    assert file.tokens.dtype == np.uint16 and file.meta.max_id == tokenizer.eos_id
    assert (len(file.tokens), len(file.offsets)) == (
        file.meta.num_tokens,
        file.meta.num_documents + 1,
    )
    for text, start, stop in zip(expected, file.offsets[:-1], file.offsets[1:], strict=True):
        ids = file.tokens[start:stop].tolist()
        assert ids == [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]


def test_ids_beyond_16_bits_are_stored_in_32() -> None:
    assert [token_file.token_type(size).itemsize for size in (2**16, 2**16 + 1, 2**17)] == [2, 4, 4]


def test_pieces_and_workers_do_not_change_the_cache(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_piece = cache(corpus, cache_folder=str(tmp_path / "one_piece"))
    monkeypatch.setattr(documents, "PIECE_BYTES", SMALL_PIECE)
    monkeypatch.setattr(documents, "BLOCK_BYTES", SMALL_PIECE)
    with monkeypatch.context() as without_workers:
        without_workers.setattr(encoding, "MIN_PIECES_FOR_WORKERS", 1000)
        pieces = cache(corpus, cache_folder=str(tmp_path / "pieces"))
    workers = cache(corpus, cache_folder=str(tmp_path / "workers"))
    assert contents(one_piece) == contents(pieces) == contents(workers)


def test_a_cache_is_reused_without_reading_the_corpus(
    corpus: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cache(corpus)
    monkeypatch.setattr(tokenizing, "_build", lambda *_: pytest.fail("built again"))
    caplog.set_level(logging.INFO)
    tokenizer = load_tokenizer(ASSETS)
    started = time.process_time()
    second = cache(corpus, tokenizer)
    assert time.process_time() - started < 0.05  # measured: under 1 ms
    assert second.folder == first.folder and not caplog.messages


def test_a_cache_can_move_with_its_data(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = cache(corpus).folder.name
    shutil.move(corpus, tmp_path / "elsewhere")
    monkeypatch.setattr(tokenizing, "_build", lambda *_: pytest.fail("built again"))
    assert cache(tmp_path / "elsewhere").folder == tmp_path / "elsewhere" / ".token_cache" / name


def change_text(corpus: Path) -> None:
    write_jsonl(corpus / "1.jsonl", ["changed"])


def change_same_size(corpus: Path) -> None:
    file = corpus / "1.jsonl"
    file.write_text(file.read_text().replace("1.7 to", "1.7 do"))


def add_file(corpus: Path) -> None:
    write_jsonl(corpus / "9.jsonl", ["more"])


def rename_file(corpus: Path) -> None:
    (corpus / "0.jsonl").rename(corpus / "8.jsonl")


@pytest.mark.parametrize("change", [change_text, change_same_size, add_file, rename_file])
def test_a_changed_source_has_a_new_cache(corpus: Path, change: Any) -> None:
    before = cache(corpus)
    change(corpus)
    after = cache(corpus)
    assert after.folder != before.folder
    assert after.meta.text_digest != before.meta.text_digest


def test_a_new_modification_time_rebuilds_the_cache_but_not_the_digest(corpus: Path) -> None:
    before = cache(corpus)
    os.utime(corpus / "0.jsonl", (1, 1))
    after = cache(corpus)
    assert after.folder != before.folder and after.meta == before.meta


def test_each_token_policy_has_its_own_cache(corpus: Path, tokenizer: Tokenizer) -> None:
    policies = [TokenPolicy(tokenizer, bos, eos) for bos in (None, 2046) for eos in (None, 2047)]
    policies.append(TokenPolicy(load_tokenizer(ASSETS / "tokenizer.model"), 2046, 2047))
    text = find_corpus(str(corpus))
    files = [
        cached_tokens(text, policy, entry_of(text, "own", policy), CacheFolders(None, "unused"))
        for policy in policies
    ]
    assert len({file.folder for file in files}) == 5
    assert len({file.meta.text_digest for file in files}) == 1
    assert np.array_equal(files[3].tokens, files[4].tokens)


def test_documents_without_a_token_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = cache(write_jsonl(tmp_path / "a" / "a.jsonl", ["one", "", "two", ""]))
    assert (file.meta.num_documents, file.meta.num_empty, file.meta.text_bytes) == (2, 2, 6)
    assert "2 documents (2 empty ones skipped)" in caplog.text


@pytest.mark.parametrize(
    ("texts", "message"), [(["", ""], r"no text in .*a\.jsonl\."), ([], r"no text in .*a\.jsonl\.")]
)
def test_a_corpus_without_text_is_refused(tmp_path: Path, texts: list[str], message: str) -> None:
    file = write_jsonl(tmp_path / "a" / "a.jsonl", texts)
    with pytest.raises(DataError, match=message):
        cache(file)
    assert visible(file.parent / ".token_cache") == []


def test_a_corpus_with_errors_leaves_no_cache_until_it_is_repaired(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", SMALL_PIECE)
    monkeypatch.setattr(documents, "BLOCK_BYTES", SMALL_PIECE)
    lines = (corpus / "2.jsonl").read_text()
    (corpus / "2.jsonl").write_text(lines + "{oops\n")
    # A worker process raises the error.
    with pytest.raises(DataError, match=r"2\.jsonl, line 21: malformed JSON"):
        cache(corpus)
    assert [path.suffix for path in (corpus / ".token_cache").iterdir()] == [".lock"]
    (corpus / "2.jsonl").write_text(lines)
    assert cache(corpus).meta.num_documents == 60


def test_bad_records_are_skipped_and_counted_once_on_request(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = cache(corpus)
    lines = (corpus / "1.jsonl").read_text().splitlines(keepends=True)
    (corpus / "1.jsonl").write_text(
        "{oops\n" + "".join(lines[:9]) + '{"text": 5}\n' + "".join(lines[9:])
    )
    monkeypatch.setattr(documents, "PIECE_BYTES", SMALL_PIECE)  # starts workers
    monkeypatch.setattr(documents, "BLOCK_BYTES", SMALL_PIECE)
    file = cache(corpus, on_bad_record="skip")
    assert (file.meta.num_bad, file.meta.num_documents) == (2, 60)
    assert file.meta.text_digest == expected.meta.text_digest
    assert np.array_equal(file.tokens, expected.tokens)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "skipped 2 bad records, the first of them: " in warnings[0]
    assert f"{corpus / '1.jsonl'}, byte 0: malformed JSON" in warnings[0]
    # The default policy does not use that cache.
    with pytest.raises(DataError, match="1.jsonl, line 1: malformed JSON"):
        cache(corpus)


def test_files_that_change_while_they_are_read_are_refused(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = documents.plan_pieces
    monkeypatch.setattr(tokenizing, "plan_pieces", lambda text: [plan(text), add_line(corpus)][0])
    with pytest.raises(DataError, match="changed during tokenization"):
        cache(corpus)
    assert visible(corpus / ".token_cache") == []


def add_line(corpus: Path) -> None:
    with (corpus / "2.jsonl").open("a") as file:
        file.write('{"text": "late"}\n')


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_cache_is_refused(corpus: Path, name: str, damage: str) -> None:
    path = cache(corpus).folder / name
    path.unlink() if damage == "missing" else os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(DataError, match=rf"is damaged: {name}.*(d|D)elete the folder"):
        cache(corpus)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        (".", Path.touch, "Not a directory"),
        (".", os.mkfifo, "it is a pipe"),
        (".", Path.mkdir, "it has no meta.json"),
        (".", lambda path: path.symlink_to("nowhere"), "it has no meta.json"),
        (".", lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        ("meta.json", Path.mkdir, "Is a directory"),
        ("meta.json", os.mkfifo, "it is a device or a pipe"),
        ("meta.json", lambda path: path.write_bytes(b"\xff"), "is damaged: meta.json is not JSON"),
        ("tokens.bin", Path.mkdir, "is damaged: tokens.bin should have"),
        ("tokens.bin", os.mkfifo, "is damaged: tokens.bin should have"),
        ("offsets.bin.xxh3", Path.mkdir, "Is a directory"),
        ("offsets.bin.xxh3", os.mkfifo, "is damaged: it has 0 bytes"),
    ],
)
def test_an_entry_of_another_kind_is_refused(
    corpus: Path, name: str, make: Callable[[Path], object], message: str
) -> None:
    folder = cache(corpus).folder
    _replace(folder / name, make)
    with pytest.raises(DataError, match=rf"{folder}.*{message}.*(d|D)elete"):
        cache(corpus)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "O"}, "the dtype 'O'"),
        ({"meta": {"num_tokens": "5"}}, "a count that is not an integer"),
        ({"meta": {"num_tokens": -5}}, "a count that is not an integer"),
    ],
)
def test_values_of_another_type_in_a_sealed_entry_are_refused(
    corpus: Path, changes: dict[str, Any], message: str
) -> None:
    folder = cache(corpus).folder
    content = json.loads((folder / "meta.json").read_text()) | changes
    del content["digest"]
    token_file._write_content(folder, content)
    with pytest.raises(DataError, match=f"is damaged: .*{message}"):
        cache(corpus)


@pytest.mark.parametrize("offset", [0, 1, 500, -1])
@pytest.mark.parametrize(
    "name", ["tokens.bin", "offsets.bin", "tokens.bin.xxh3", "offsets.bin.xxh3"]
)
def test_reading_an_extent_detects_its_flipped_bit(corpus: Path, name: str, offset: int) -> None:
    path = cache(corpus).folder / name
    flip_bit(path, offset % path.stat().st_size)
    damaged = path.with_name(name.removesuffix(".xxh3"))
    with pytest.raises(
        DataError, match=rf"{damaged} is damaged: bytes 0 to .*\. Expected .*(d|D)elete the folder"
    ):
        cache(corpus).tokens[:]


def test_a_flipped_bit_in_meta_json_is_refused_or_has_no_effect(corpus: Path) -> None:
    file = cache(corpus)
    path, key = file.folder / "meta.json", token_file.key_of(file.folder)
    content = path.read_bytes()
    for offset in range(0, len(content), 3):
        changed = bytearray(content)
        changed[offset] ^= 1 << offset % 7
        path.write_bytes(changed)
        try:
            reopened = token_file.open_token_file(file.folder, key)
            # The flip changed white space between two values.
            assert reopened is not None and reopened.meta == file.meta
        except DataError as error:
            assert "is damaged: meta.json" in str(error)


def test_reads_verify_only_the_extents_that_they_touch(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_file, "EXTENT_BYTES", 64)
    file = cache(corpus)
    verified: list[int] = []
    verify = checked_file.CheckedFile.verify
    monkeypatch.setattr(
        checked_file.CheckedFile,
        "verify",
        lambda self, extent: [verified.append(extent), verify(self, extent)],
    )
    assert file.tokens[100:140].tolist() == file.tokens[100:140].tolist()
    assert verified == [3, 4]  # 32 tokens each
    flip_bit(file.folder / "tokens.bin", 64 * 5)
    reopened = cache(corpus)
    verified.clear()
    assert reopened.tokens[100:140].tolist() == file.tokens[100:140].tolist()
    with pytest.raises(DataError, match=r"tokens\.bin is damaged: bytes 320 to 383 have the hash"):
        reopened.tokens[150:170]


def test_a_file_that_is_truncated_or_written_to_during_the_run_is_refused(corpus: Path) -> None:
    file = cache(corpus)
    assert len(file.tokens[:]) == file.meta.num_tokens
    path = file.folder / "tokens.bin"
    os.truncate(path, 10)
    with pytest.raises(DataError, match=r"tokens\.bin ends at byte 10: it was truncated"):
        file.tokens[:]


def test_searching_a_long_list_of_documents_reads_few_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_file, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(checked_file, "BLOCKS_IN_MEMORY", 2)
    draw = np.random.default_rng(1)
    numbers = np.cumsum(draw.integers(0, 3, 50_000)).astype(np.uint64)
    numbers.tofile(tmp_path / "numbers")
    array = CheckedArray(CheckedFile(RawFile(tmp_path / "numbers")), numbers.dtype)
    for values in (
        draw.integers(0, int(numbers[-1]) + 2, 300).astype(np.uint64),
        numbers[::999],
        numbers[:1],
    ):
        for side in ("left", "right"):
            assert (
                array.searchsorted(values, side).tolist()
                == np.searchsorted(numbers, values, side).tolist()
            )
    indices = draw.integers(0, len(numbers), (3, 40))
    assert np.array_equal(array[indices], numbers[indices])
    assert (int(array[-1]), int(array[7])) == (int(numbers[-1]), int(numbers[7]))
    fresh = CheckedArray(CheckedFile(RawFile(tmp_path / "numbers")), numbers.dtype)
    reads = []
    monkeypatch.setattr(
        fresh,
        "fill",
        lambda out, first: reads.append(first) or CheckedArray.fill(fresh, out, first),
    )
    fresh.searchsorted(numbers[100:101])
    assert len(reads) <= 5  # a binary search over 13 blocks, then the block itself


@pytest.fixture
def read_only_corpus(corpus: Path) -> Iterator[tuple[Path, Path]]:
    """Create a corpus in a read-only folder, and a folder that every user can write to."""
    top = Path(tempfile.mkdtemp())
    shutil.copytree(corpus, top / "corpus")
    (top / "run").mkdir()
    os.chmod(top / "run", 0o777)
    os.chmod(top, 0o755)
    os.chmod(top / "corpus", 0o555)
    yield top / "corpus", top / "run"
    os.chmod(top / "corpus", 0o755)
    shutil.rmtree(top)


@pytest.mark.parametrize("has_home", [True, False])
def test_the_cache_of_read_only_data_is_in_the_users_cache_folder_or_the_run_folder(
    read_only_corpus: tuple[Path, Path],
    tokenizer: Tokenizer,
    has_home: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    corpus, run = read_only_corpus
    monkeypatch.setenv("XDG_CACHE_HOME", str(run / "home" if has_home else corpus / "home"))
    caplog.set_level(logging.INFO)
    with as_user_without_rights():
        file = cache(corpus, tokenizer, dump_folder=str(run))
        assert cache(corpus, tokenizer, dump_folder=str(run)).folder == file.folder
    expected = run / "home/torchtitan_like/token_cache" if has_home else run / "token_cache"
    assert file.folder.parent == expected
    (line,) = [line for line in caplog.messages if "cannot be written" in line]
    assert line.startswith(
        f"the token cache of {corpus} goes to {expected}: {corpus / '.token_cache'} cannot be written"
    )


def test_an_existing_cache_in_a_read_only_folder_is_used(
    read_only_corpus: tuple[Path, Path], tokenizer: Tokenizer
) -> None:
    corpus, run = read_only_corpus
    os.chmod(corpus, 0o755)
    built = cache(corpus, tokenizer)
    os.chmod(corpus / ".token_cache", 0o555)
    with as_user_without_rights():
        assert cache(corpus, tokenizer, dump_folder=str(run)).folder == built.folder
    assert not list(run.iterdir())
    os.chmod(corpus / ".token_cache", 0o755)


@pytest.mark.parametrize("private", ["folder", "files"])
def test_a_private_cache_of_another_user_is_built_again_elsewhere(
    read_only_corpus: tuple[Path, Path],
    tokenizer: Tokenizer,
    private: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus, run = read_only_corpus
    monkeypatch.setenv("XDG_CACHE_HOME", str(run / "home"))
    os.chmod(corpus, 0o755)
    folder = cache(corpus, tokenizer).folder
    for path in [folder.parent] if private == "folder" else list(folder.iterdir()):
        os.chmod(path, 0o700 if path.is_dir() else 0o600)
    with as_user_without_rights():
        file = cache(corpus, tokenizer, dump_folder=str(run))
    assert file.folder.is_relative_to(run / "home")


def test_a_cache_folder_without_file_locks_is_not_used(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus.parent / "home"))
    caplog.set_level(logging.INFO)
    flock = fcntl.flock

    def refuse(file: Any, operation: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(corpus)):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert cache(corpus).folder.is_relative_to(corpus.parent / "home")
    assert (
        f"{corpus / '.token_cache'} cannot be written (the file system has no file locks"
        in caplog.text
    )
    policy = TokenPolicy(load_tokenizer(ASSETS), None, None)
    with pytest.raises(DataError, match="has no file locks .* give a folder on a local disk"):
        tokenize_corpus(find_corpus(str(corpus)), policy, corpus / "output")
    assert not list(corpus.glob(".output*"))


def test_a_named_cache_folder_that_cannot_be_written_is_an_error(
    read_only_corpus: tuple[Path, Path], tokenizer: Tokenizer
) -> None:
    corpus, run = read_only_corpus
    with (
        as_user_without_rights(),
        pytest.raises(DataError, match=r"cannot be written.*set data\.cache_folder"),
    ):
        cache(corpus, tokenizer, cache_folder=str(corpus / "cache"), dump_folder=str(run))


# A process that builds a cache. After {commits} pieces it prints "paused" and waits for a line.
BUILDER = """
import logging, sys
from torchtitan_like.data.tokens import token_file
from torchtitan_like.data.text import documents
documents.PIECE_BYTES = documents.BLOCK_BYTES = {piece_bytes}
append = token_file.Staging.append
def append_and_pause(self, piece):
    append(self, piece)
    if self.num_pieces == {commits}:
        print("paused", flush=True)
        sys.stdin.readline()
token_file.Staging.append = append_and_pause
from torchtitan_like.data.tokens.encoding import TokenPolicy
from torchtitan_like.data.tokens.token_cache import CacheFolders, entry_of
from torchtitan_like.data.tokens.tokenizing import cached_tokens
from torchtitan_like.data.text.tokenizer import load_tokenizer
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    policy = TokenPolicy(load_tokenizer({assets!r}), 2046, 2047)
    corpus = documents.find_corpus({corpus!r})
    entry = entry_of(corpus, "own", policy)
    print(cached_tokens(corpus, policy, entry, CacheFolders(None, "unused")).folder, flush=True)
"""


@contextlib.contextmanager
def builder(
    corpus: Path, repo_root: Path, *, commits: int, piece_bytes: int = SMALL_PIECE
) -> Iterator[subprocess.Popen[str]]:
    script = corpus.parent / f"builder_{commits}.py"  # a file: spawned workers import it again
    script.write_text(
        BUILDER.format(
            commits=commits, piece_bytes=piece_bytes, assets=str(ASSETS), corpus=str(corpus)
        )
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Read the process's output until a line starts with ``text``."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(text):
            return
    pytest.fail(f"ended without {text!r}: {''.join(lines)}")


def test_a_killed_build_publishes_nothing_and_resumes(
    corpus: Path,
    tmp_path: Path,
    repo_root: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with builder(corpus, repo_root, commits=3) as process:
        wait_for(process, "paused")
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers, "expected worker processes"
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive, "workers outlived the build"
    folder = corpus / ".token_cache"
    assert visible(folder) == []
    (staging,) = [path for path in folder.iterdir() if path.is_dir()]
    # A kill during a write may leave uncommitted tokens and half a line of the journal.
    with (
        (staging / "tokens.bin").open("ab") as tokens,
        (staging / "journal.jsonl").open("ab") as journal,
    ):
        tokens.write(b"torn" * 10_000)
        journal.write(b'{"num_pieces": 9')

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(documents, "PIECE_BYTES", SMALL_PIECE)
    monkeypatch.setattr(documents, "BLOCK_BYTES", SMALL_PIECE)
    resumed = cache(corpus)
    assert "continuing after 3 of " in caplog.text
    assert contents(resumed) == contents(cache(corpus, cache_folder=str(tmp_path / "fresh")))


def test_one_process_builds_while_the_others_wait(corpus: Path, repo_root: Path) -> None:
    piece_bytes = documents.PIECE_BYTES
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(builder(corpus, repo_root, commits=1, piece_bytes=piece_bytes))
        wait_for(first, "paused")  # the process holds the lock
        others = [
            stack.enter_context(builder(corpus, repo_root, commits=2, piece_bytes=piece_bytes))
            for _ in range(2)
        ]
        for other in others:
            wait_for(other, "waiting for another process to build")
        printed = [process.communicate("go on\n", timeout=60)[0] for process in (first, *others)]
    (name,) = visible(corpus / ".token_cache")
    assert all(text.splitlines()[-1].endswith(name) for text in printed)
    assert "tokenized: 60 documents" in printed[0]
    assert not any("tokenized" in text for text in printed[1:])


def test_a_waiting_process_takes_over_from_a_killed_one(corpus: Path, repo_root: Path) -> None:
    piece_bytes = documents.PIECE_BYTES
    with builder(corpus, repo_root, commits=1, piece_bytes=piece_bytes) as first:
        wait_for(first, "paused")
        with builder(corpus, repo_root, commits=2, piece_bytes=piece_bytes) as second:
            wait_for(second, "waiting for another process")
            first.kill()
            printed, _ = second.communicate("", timeout=60)
    assert "continuing after 1 of 1 pieces" in printed
    assert cache(corpus).meta.num_documents == 60


def test_a_build_ends_if_another_node_takes_over_its_folder(corpus: Path, tmp_path: Path) -> None:
    tokens = np.arange(4, dtype=np.uint16)
    piece = token_file.EncodedPiece(
        tokens, np.array([4], np.uint64), np.array([9], np.uint64), 0, 5
    )
    first = token_file.Staging(tmp_path / "staging", tokens.dtype)
    first.append(piece)
    second = token_file.Staging(tmp_path / "staging", tokens.dtype)
    with pytest.raises(token_file.StagingTaken, match="another node also builds"):
        first.append(piece)
    second.append(piece)
    second.publish(tmp_path / "published", {"a": 1})
    file = token_file.open_token_file(tmp_path / "published", {"a": 1})
    assert (
        file is not None
        and file.tokens.tolist() == [*range(4)] * 2
        and file.offsets.tolist() == [0, 4, 8]
    )


def test_a_full_disk_is_reported_and_finished_work_is_kept(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", SMALL_PIECE)
    monkeypatch.setattr(documents, "BLOCK_BYTES", SMALL_PIECE)
    monkeypatch.setattr(encoding, "MIN_PIECES_FOR_WORKERS", 1000)
    sync, calls = os.fsync, iter(range(1000))

    def full_disk(descriptor: int) -> None:
        if next(calls) > 10:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", full_disk)
        message = (
            "cannot write the token cache .*No space left on device. The finished part is kept"
        )
        with pytest.raises(DataError, match=message):
            cache(corpus)
    assert visible(corpus / ".token_cache") == []
    assert cache(corpus).meta.num_documents == 60


def test_progress_shows_percentage_rates_and_remaining_time() -> None:
    now = 0.0
    progress = Progress(total=100 * 2**20, done=0, tokens=0, clock=lambda: now)
    now = 9.0
    assert progress.line(10 * 2**20, 1000) is None
    now = 20.0
    line = "20% of 100 MiB, 4,000 tokens, 1.0 MiB/s, 200 tokens/s, 80 s left"
    assert progress.line(10 * 2**20, 4000) == line
    now = 25.0
    assert progress.line(2**20, 5000) is None


def test_other_readers_see_an_unchanged_data_folder(corpus: Path) -> None:
    """Other programs that read the folder must not treat cache files as data."""
    datasets = pytest.importorskip("datasets")
    names = visible(corpus)
    tokens = cache(corpus)
    best_fit.pack(
        tokens, 8, Data(packing="best_fit"), CacheFolders(None, str(corpus.parent / "run"))
    )
    assert visible(corpus) == names
    # The tokens, a packing plan and its hashes.
    assert len(list((corpus / ".token_cache").glob("[!.]*"))) == 3
    dataset = datasets.load_dataset(
        str(corpus), split="train", cache_dir=str(corpus.parent / "datasets")
    )
    assert list(dataset["text"]) == [
        f"{part}.{number} to be or not to be" for part in range(3) for number in range(20)
    ]


def test_names_that_are_not_utf_8_are_part_of_the_identity(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folders = []
    for name in (b"\xff.jsonl", b"\xfe.jsonl"):
        folder = tmp_path / f"data-{len(folders)}"
        write_jsonl(folder / "a.jsonl", ["to be or not to be"])
        os.rename(folder / "a.jsonl", os.path.join(os.fsencode(folder), name))
        folders.append(cache(folder, tokenizer).folder.name)
    assert folders[0] != folders[1]
