"""Texts of the Hugging Face Hub, named as its other tools name them: hf://datasets/OWNER/NAME@REVISION/PATTERN.

PATTERN are the files, as in `en/*.parquet`. REVISION, a tag or better a commit, has to be there: a run that is resumed must
find the text that it began with.

`local_path` downloads them all, into the Hub's own cache (HF_HOME), once for all processes that share it: one downloads, the
others wait. When all is there a file beside it says so, and later starts need no network. `list_files` asks only for their
names and sizes, once, and `Listing.fetch` downloads one of them, into a folder of ours, in which a few are kept: gzip files
unpacked, so that any place in them is reached at once.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import xxhash

from torchtitan_like.data.errors import DataError
from torchtitan_like.data.text.formats import GZIP_ERRORS
from torchtitan_like.util.file_lock import file_lock
from torchtitan_like.util.files import write_atomically

logger = logging.getLogger()

PREFIX = "hf://"
ATTEMPTS, FIRST_PAUSE = 6, 5.0  # seconds; each further pause is twice as long
NUM_KEPT = 8  # files of a listing that stay on disk: more than the windows that are made at once
_PARTS = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)@(?P<revision>[^/]+)/(?P<pattern>.+)")

T = TypeVar("T")


@dataclass(frozen=True)
class Listing:
    """Files of one state of a data set of the Hub, which are downloaded one by one.

    path: as it was given. revision: the commit. folder: where the files lie once they are here. sizes: of each, in bytes, as it
    is on the Hub.
    """

    path: str
    repo: str
    revision: str
    folder: Path
    sizes: dict[Path, int] = field(repr=False)

    def fetch(self, file: Path) -> None:
        """Make sure that ``file`` is here: once for all processes that share the folder; the others wait.

        Goes when it is none of the ``NUM_KEPT`` that were asked for last. Raises DataError where it cannot be downloaded, and
        ends a thread that asks while the process is ending.
        """
        lock = file.with_name(f".{file.name}.lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        with _locked(lock):
            if not file.exists():
                self._make_room()
                name = self._name(file)
                _unless_ending(lambda: _persist(f"{name} of {self.path}", lambda: self._download(name, file)))
            os.utime(file)  # the latest that was asked for

    def is_gzip(self, file: Path) -> bool:
        """Whether ``file`` was unpacked when it came."""
        return self._name(file).endswith(".gz")

    def _name(self, file: Path) -> str:
        """On the Hub."""
        name = file.relative_to(self.folder)
        return str(name.with_suffix("") if name.stem.endswith(".gz") else name)

    def _make_room(self) -> None:
        here = sorted((one for one in self.sizes if one.exists()), key=lambda one: one.stat().st_mtime)
        for old in here[: max(0, len(here) - NUM_KEPT + 1)]:
            old.unlink(missing_ok=True)  # who has it open reads on
            old.with_name(f".{old.name}.lock").unlink(missing_ok=True)

    def _download(self, name: str, file: Path) -> None:
        import huggingface_hub
        from huggingface_hub import constants, errors

        if constants.HF_HUB_OFFLINE:
            raise errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        # Of each node one, where locks do not reach from one to another.
        incoming = self.folder / f".incoming-{socket.gethostname()}"
        found = Path(
            huggingface_hub.hf_hub_download(
                self.repo, name, repo_type="dataset", revision=self.revision, local_dir=incoming
            )
        )
        size = found.stat().st_size
        if size != self.sizes[file]:
            found.unlink()
            raise OSError(f"{name} has {size:,} bytes, expected {self.sizes[file]:,}")
        if self.is_gzip(file):
            found = _unpacked(found, f"{name} of {self.path}")
        found.replace(file)


def list_files(path: str, folder: Path) -> Listing:
    """The files that ``path`` names, in the order of their names; they are to lie in a folder of ``folder``.

    The list is asked for once and kept there. Safe to call from any number of processes at once. Raises DataError for a path of
    another form, one that names nothing, and for what cannot be asked.
    """
    repo, revision, pattern = _parts(path)
    into = folder.expanduser().absolute() / f"hub-{xxhash.xxh3_64_hexdigest(path.encode())}"
    into.mkdir(parents=True, exist_ok=True)
    kept = into / "files.json"
    with _locked(into / ".lock"):
        if not kept.exists():
            found = _persist(path, lambda: _ask(repo, revision, pattern))
            unfinished = kept.with_name(f".{kept.name}.{socket.gethostname()}")
            write_atomically(kept, json.dumps(found), unfinished)
        commit, sizes = json.loads(kept.read_text(encoding="utf-8"))
    if not sizes:
        kept.unlink()
        raise DataError(f"{path} names no file of the data set {repo}: expected a pattern such as en/*.parquet")
    return Listing(path, repo, commit, into, {into / _name_here(name): size for name, size in sorted(sizes.items())})


def _name_here(name: str) -> str:
    """``a.json.gz`` is unpacked as ``a.json.gz.json``."""
    return name + (PurePosixPath(name[:-3]).suffix or ".unpacked") if name.endswith(".gz") else name


def _unpacked(file: Path, what: str) -> Path:
    """A gzip file's content, in its place. Raises DataError for one that is damaged: it is so on the Hub."""
    whole = file.with_name(f"{file.name}.unpacked")
    try:
        with gzip.open(file) as packed, whole.open("wb") as out:
            shutil.copyfileobj(packed, out, 2**20)
    except GZIP_ERRORS as error:
        raise DataError(f"{what} cannot be unpacked ({error}): the gzip file is damaged; leave it out") from error
    file.unlink()
    return whole


def _ask(repo: str, revision: str, pattern: str) -> tuple[str, dict[str, int]]:
    """The commit, and the names and sizes of its files."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    commit = str(api.dataset_info(repo, revision=revision, expand=["sha"]).sha)
    fixed = PurePosixPath(pattern).parent.parts
    depth = next((index for index, part in enumerate(fixed) if re.search(r"[*?\[]", part)), len(fixed))
    tree = api.list_repo_tree(
        repo, "/".join(fixed[:depth]) or None, recursive=depth < len(fixed), revision=commit, repo_type="dataset"
    )
    files = {entry.path: int(entry.size) for entry in tree if hasattr(entry, "size")}
    return commit, {name: size for name, size in files.items() if _matches(name, pattern)}


def _matches(name: str, pattern: str) -> bool:
    """As a glob: `*` is within a folder, `**` any number of folders."""
    if "**/" in pattern:
        return fnmatch(name, pattern) or fnmatch(name, pattern.replace("**/", ""))
    return fnmatch(name, pattern) and name.count("/") == pattern.count("/")


def local_path(path: str) -> str:
    """``path`` itself, or where the files lie that it names on the Hub, after they were downloaded: a glob.

    Safe to call from any number of processes at once. Raises DataError for a path of another form, and for what cannot be
    downloaded.
    """
    if not path.startswith(PREFIX):
        return path
    repo, revision, pattern = _parts(path)
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE, "torchtitan_like")
    folder.mkdir(parents=True, exist_ok=True)
    complete = folder / xxhash.xxh3_64_hexdigest(path.encode())
    with _locked(complete.with_suffix(".lock")):
        if not complete.exists():
            snapshot = _persist(path, lambda: _download(repo, revision, pattern))
            complete.write_text(snapshot, encoding="utf-8")
        return f"{complete.read_text(encoding='utf-8')}/{pattern}"


def check_name(path: str) -> re.Match[str]:
    """The parts of a name of files of the Hub. Raises DataError where it is none; asks nobody."""
    parts = _PARTS.fullmatch(path)
    if parts is None:
        raise DataError(
            f"{path!r} names no text of the Hub: expected hf://datasets/OWNER/NAME@REVISION/PATTERN, say "
            "hf://datasets/roneneldan/TinyStories@f54c09f/data/*.parquet; REVISION is a tag or a commit"
        )
    return parts


def _parts(path: str) -> tuple[str, str, str]:
    """Repository, revision, pattern."""
    parts = check_name(path)
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise DataError(f"{path!r} is on the Hub, and huggingface_hub is not installed: pip install it") from error
    return parts["repo"], parts["revision"], parts["pattern"]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock, file_lock(lock):
        yield


def _download(repo: str, revision: str, pattern: str) -> str:
    """The folder of the snapshot."""
    import huggingface_hub

    info = huggingface_hub.HfApi().dataset_info(repo, revision=revision)
    snapshot = huggingface_hub.snapshot_download(repo, repo_type="dataset", revision=info.sha, allow_patterns=[pattern])
    # Without a network the client may return what it has of a snapshot.
    names = [file.rfilename for file in info.siblings or [] if fnmatch(file.rfilename, pattern)]
    missing = [name for name in names if not Path(snapshot, name).exists()]
    if missing:
        raise OSError(f"{len(missing)} of {len(names)} files are missing, {missing[0]} for one")
    return snapshot


def _persist(what: str, download: Callable[[], T]) -> T:
    """What ``download`` returns. Network faults are waited out for minutes; others are told at once."""
    from huggingface_hub import errors

    final = (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.EntryNotFoundError,
        errors.OfflineModeIsEnabled,
    )
    for attempt in range(ATTEMPTS):
        try:
            logger.info(f"downloading {what} (what is there already is not fetched again)")
            return download()
        except Exception as error:  # the client's classes of network faults differ between its releases
            if isinstance(error, DataError):
                raise
            if isinstance(error, final) and not isinstance(error, errors.LocalEntryNotFoundError):
                raise DataError(
                    f"{what} cannot be downloaded: {error}; check the name, your token (HF_TOKEN) and that its licence is "
                    "accepted; HF_HUB_OFFLINE must not be set"
                ) from error
            if attempt == ATTEMPTS - 1:
                raise DataError(
                    f"{what} was not downloaded in {ATTEMPTS} attempts: {type(error).__name__}: {error}; without access to the "
                    "Hub, download it where there is one and name the files by their path"
                ) from error
            pause = FIRST_PAUSE * 2**attempt
            logger.warning(f"{what}: {type(error).__name__}: {error}; trying again in {pause:.0f} s")
            time.sleep(pause)
    raise AssertionError


def _unless_ending(action: Callable[[], T]) -> T:
    """``action()``, in a thread for which an ending process does not wait, as it does for one that asks for it here."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append((action(), None))
        except Exception as error:
            done.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        if not threading.main_thread().is_alive():
            sys.exit()
    result, error = done[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]
