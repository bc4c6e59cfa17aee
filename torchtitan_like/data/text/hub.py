"""Download datasets of the Hugging Face Hub: hf://datasets/OWNER/NAME@REVISION/PATTERN.

PATTERN selects files, such as `en/*.parquet`. REVISION is required, a tag or preferably a commit: a
resumed run must read the data with which it started.

- `local_path` downloads all files into the Hub's cache (HF_HOME). One process downloads, and the
  others wait. A marker file then records that the download is complete, so that later starts need
  no network.
- `list_files` requests only names and sizes, once. `Listing.fetch` downloads one file into a folder
  that keeps a few files. It decompresses files, so that any offset can be read directly.
"""

from __future__ import annotations

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

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.formats import DAMAGE_ERRORS, is_compressed, open_bytes
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.locks import file_lock

logger = logging.getLogger()

PREFIX = "hf://"
ATTEMPTS = 6
FIRST_PAUSE = 5.0  # seconds; each further pause is twice as long
NUM_KEPT = 8  # files of a listing that stay on disk: more than the windows made at the same time
_PARTS = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)@(?P<revision>[^/]+)/(?P<pattern>.+)")

T = TypeVar("T")


@dataclass(frozen=True)
class Listing:
    """The files of one revision of a dataset on the Hub, which are downloaded one by one.

    path: the path in the config.
    revision: the commit.
    folder: the folder of the downloaded files.
    sizes: local path -> bytes on the Hub.
    """

    path: str
    repo: str
    revision: str
    folder: Path
    sizes: dict[Path, int] = field(repr=False)

    def fetch(self, file: Path) -> None:
        """Download ``file`` unless it exists. Other processes that share the folder wait.

        It is deleted when ``NUM_KEPT`` other files were requested after it. Raises DataError if the
        download fails. Raises SystemExit in a thread of a process that is ending.
        """
        lock = file.with_name(f".{file.name}.lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        with _locked(lock):
            if not file.exists():
                self._delete_oldest()
                name = self.name_of(file)
                _unless_ending(
                    lambda: _retry(f"{name} of {self.path}", lambda: self._download(name, file))
                )
            os.utime(file)  # mark it as the most recent request

    def name_of(self, file: Path) -> str:
        """Return the name on the Hub, where ``file`` may be compressed."""
        name = file.relative_to(self.folder)
        return str(name.with_suffix("") if is_compressed(name.stem) else name)

    def _delete_oldest(self) -> None:
        files = [file for file in self.sizes if file.exists()]
        files.sort(key=lambda file: file.stat().st_mtime)
        for old in files[: max(0, len(files) - NUM_KEPT + 1)]:
            old.unlink(missing_ok=True)  # a process that has opened it can still read it
            old.with_name(f".{old.name}.lock").unlink(missing_ok=True)

    def _download(self, name: str, file: Path) -> None:
        import huggingface_hub
        from huggingface_hub import constants, errors

        if constants.HF_HUB_OFFLINE:
            raise errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        # One folder for each node: file locks may not work between nodes.
        incoming = self.folder / f".incoming-{socket.gethostname()}"
        download = Path(
            huggingface_hub.hf_hub_download(
                self.repo, name, repo_type="dataset", revision=self.revision, local_dir=incoming
            )
        )
        size = download.stat().st_size
        if size != self.sizes[file]:
            download.unlink()
            raise OSError(f"{name} has {size:,} bytes, expected {self.sizes[file]:,}")
        if is_compressed(name):
            download = _decompress(download, f"{name} of {self.path}")
        download.replace(file)


def list_files(path: str, folder: Path) -> Listing:
    """Return the files of ``path`` in the order of their names, with paths below ``folder``.

    The list is requested once and stored there. Any number of processes may call it at once. Raises
    DataError if the path is malformed or matches no file, or if the request fails.
    """
    repo, revision, pattern = _parts(path)
    files_folder = folder.expanduser().absolute() / f"hub-{xxhash.xxh3_64_hexdigest(path.encode())}"
    files_folder.mkdir(parents=True, exist_ok=True)
    stored_list = files_folder / "files.json"
    with _locked(files_folder / ".lock"):
        if not stored_list.exists():
            content = _retry(path, lambda: _request_list(repo, revision, pattern))
            unfinished = stored_list.with_name(f".{stored_list.name}.{socket.gethostname()}")
            write_atomically(stored_list, json.dumps(content), unfinished)
        commit, sizes = json.loads(stored_list.read_text(encoding="utf-8"))
    if not sizes:
        stored_list.unlink()
        raise DataError(
            f"{path} matches no file of the dataset {repo}. Expected a pattern such as "
            "en/*.parquet: correct it"
        )
    local_sizes = {files_folder / _local_name(name): size for name, size in sorted(sizes.items())}
    return Listing(path, repo, commit, files_folder, local_sizes)


def _local_name(name: str) -> str:
    """Return the local name of a file: ``a.json.gz`` is decompressed to ``a.json.gz.json``."""
    if not is_compressed(name):
        return name
    return name + (PurePosixPath(name).with_suffix("").suffix or ".unpacked")


def _decompress(file: Path, subject: str) -> Path:
    """Replace a compressed file by its content. Raises DataError if it is damaged."""
    target = file.with_name(f"{file.name}.unpacked")
    try:
        with open_bytes(str(file)) as stream, target.open("wb") as out:
            shutil.copyfileobj(stream, out, 2**20)
    except DAMAGE_ERRORS as error:
        raise DataError(
            f"{subject} cannot be decompressed ({error}). Expected a compressed file, but it is damaged "
            "on the Hub: exclude it with another pattern"
        ) from error
    file.unlink()
    return target


def _request_list(repo: str, revision: str, pattern: str) -> tuple[str, dict[str, int]]:
    """Return the commit, and the names and sizes of the files that match."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    commit = str(api.dataset_info(repo, revision=revision, expand=["sha"]).sha)
    folders = PurePosixPath(pattern).parent.parts
    wildcards = [index for index, part in enumerate(folders) if re.search(r"[*?\[]", part)]
    num_fixed = wildcards[0] if wildcards else len(folders)
    tree = api.list_repo_tree(
        repo,
        "/".join(folders[:num_fixed]) or None,
        recursive=num_fixed < len(folders),
        revision=commit,
        repo_type="dataset",
    )
    files = {entry.path: int(entry.size) for entry in tree if hasattr(entry, "size")}
    return commit, {name: size for name, size in files.items() if _matches(name, pattern)}


def _matches(name: str, pattern: str) -> bool:
    """Return True if a glob matches: `*` stays within a folder, `**` is any number of folders."""
    if "**/" in pattern:
        return fnmatch(name, pattern) or fnmatch(name, pattern.replace("**/", ""))
    return fnmatch(name, pattern) and name.count("/") == pattern.count("/")


def local_path(path: str) -> str:
    """Return a local path unchanged. For a path on the Hub, download it and return a glob of it.

    Any number of processes may call it at once. Raises DataError if the path is malformed or the
    download fails.
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
            snapshot = _retry(path, lambda: _download(repo, revision, pattern))
            complete.write_text(snapshot, encoding="utf-8")
        return f"{complete.read_text(encoding='utf-8')}/{pattern}"


def check_name(path: str) -> re.Match[str]:
    """Return the parts of a path on the Hub, without network. Raises DataError if malformed."""
    parts = _PARTS.fullmatch(path)
    if parts is None:
        raise DataError(
            f"{path!r} is not a path on the Hub. Expected "
            "hf://datasets/OWNER/NAME@REVISION/PATTERN with a tag or commit: write it like "
            "hf://datasets/roneneldan/TinyStories@f54c09f/data/*.parquet"
        )
    return parts


def _parts(path: str) -> tuple[str, str, str]:
    """Return repository, revision and pattern."""
    parts = check_name(path)
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"{path!r} is on the Hub, but huggingface_hub is not installed. Run: pip install "
            "huggingface_hub"
        ) from error
    return parts["repo"], parts["revision"], parts["pattern"]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock, file_lock(lock):
        yield


def _download(repo: str, revision: str, pattern: str) -> str:
    """Download the files and return the folder of the snapshot."""
    import huggingface_hub

    info = huggingface_hub.HfApi().dataset_info(repo, revision=revision)
    snapshot = huggingface_hub.snapshot_download(
        repo, repo_type="dataset", revision=info.sha, allow_patterns=[pattern]
    )
    # Without a network the client may return an incomplete snapshot.
    names = [file.rfilename for file in info.siblings or [] if fnmatch(file.rfilename, pattern)]
    missing = [name for name in names if not Path(snapshot, name).exists()]
    if missing:
        raise OSError(f"{len(missing)} of {len(names)} files are missing, such as {missing[0]}")
    return snapshot


def _retry(subject: str, download: Callable[[], T]) -> T:
    """Return the result of ``download``. Retries after network errors, for minutes."""
    from huggingface_hub import errors

    final = (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.EntryNotFoundError,
        errors.OfflineModeIsEnabled,
    )
    for attempt in range(ATTEMPTS):
        try:
            logger.info(f"downloading {subject} (existing files are not downloaded again)")
            return download()
        except Exception as error:  # the client's network errors differ between its releases
            if isinstance(error, DataError):
                raise
            if isinstance(error, final) and not isinstance(error, errors.LocalEntryNotFoundError):
                raise DataError(
                    f"{subject} cannot be downloaded: {error}. Expected an accessible dataset: "
                    "check the name, your token (HF_TOKEN), and that you accepted its license; "
                    "HF_HUB_OFFLINE must not be set"
                ) from error
            if attempt == ATTEMPTS - 1:
                raise DataError(
                    f"{subject} was not downloaded in {ATTEMPTS} attempts: {type(error).__name__}: "
                    f"{error}. Expected access to the Hub: without it, copy the files to this "
                    "machine and give their path"
                ) from error
            pause = FIRST_PAUSE * 2**attempt
            logger.warning(
                f"{subject}: {type(error).__name__}: {error}. Trying again in {pause:.0f} s"
            )
            time.sleep(pause)
    raise AssertionError


def _unless_ending(action: Callable[[], T]) -> T:
    """Return ``action()``. Raise SystemExit instead if the process ends before the action does.

    The action runs in a daemon thread: an ending process waits for all other threads.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((action(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        if not threading.main_thread().is_alive():
            sys.exit()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]
