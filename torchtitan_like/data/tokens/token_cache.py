"""Token cache: tokenize a corpus once, when a run first needs it, for all later runs.

A cache entry is a token file (see `token_file`) in one of these folders:

- ``data.cache_folder``, if it is set;
- `.token_cache/` next to the data;
- the user's cache folder, if the data are read-only;
- the run's folder, if nothing else is writable.

The name of an entry ends with a hash of everything that its tokens depend on: names, sizes and
modification times of the files, the text field, the tokenizer, BOS and EOS. The hash covers times
instead of contents, because a start cannot read a terabyte to detect changes. Copies with other
times are tokenized again; their `TokenMeta.text_digest` is the same.

One process builds under a file lock and the others wait. The kernel releases the lock when its
holder ends, so no torch.distributed is needed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from torchtitan_like.data.data_errors import BuildStopped, CacheWriteError, DataError
from torchtitan_like.data.text.documents import Corpus
from torchtitan_like.data.text.file_lists import CACHE_FOLDER_NAME, VISIBLE_CACHE_FOLDER_NAME
from torchtitan_like.data.tokens.encoding import TokenPolicy
from torchtitan_like.data.tokens.token_file import (
    FREE_SPACE,
    META,
    PROCESSOR,
    TokenFile,
    open_token_file,
)
from torchtitan_like.util.locks import LockWaitStopped, file_lock

logger = logging.getLogger()

# Increase it with any change of the files. Caches of another version are built again.
FORMAT_VERSION = 1

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """The token file of a corpus: its name, the folder of the text, and its key."""

    name: str
    data_folder: Path
    key: dict[str, Any]

    def open(self, folder: Path) -> TokenFile | None:
        """Open the token file at ``folder``; None if there is none."""
        file = open_token_file(folder, self.key)
        if file is None and os.path.lexists(folder):  # `publish` could not replace it
            raise FileNotFoundError(errno.ENOENT, f"it has no {META}", str(folder))
        return file


def entry_of(corpus: Corpus, name: str, policy: TokenPolicy) -> Entry:
    """Return the entry of ``corpus``. Calls stat for every file: seconds for a million files."""
    key = cache_key(corpus, policy)
    digest = xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())
    return Entry(f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{digest}", corpus.folder, key)


def cache_key(corpus: Corpus, policy: TokenPolicy) -> dict[str, Any]:
    """Return everything that the token file of ``corpus`` depends on, as stored in meta.json."""
    key = {
        "format_version": FORMAT_VERSION,
        "files": file_identities(corpus),
        "text_format": corpus.format,
        "text_field": None if corpus.format == "text" else corpus.text_field,
        "tokenizer": policy.tokenizer.fingerprint,
        "bos": policy.bos_id,
        "eos": policy.eos_id,
    }
    if corpus.documents is not None:
        key["fingerprint"] = corpus.documents.fingerprint
    if corpus.processor is not None:
        key[PROCESSOR] = corpus.processor.identity
    # Omitted at its default, so that most caches do not depend on it.
    if corpus.on_bad_record != "error":
        key["on_bad_record"] = corpus.on_bad_record
    return key


def file_identities(corpus: Corpus) -> dict[str, Any]:
    """Return the number of files, and a hash of their relative names, sizes and times.

    Names are relative because a folder may be moved together with its cache.
    """
    state = xxhash.xxh3_128()
    for name, file in zip(corpus.relative_names(), corpus.files, strict=True):
        size, time_ns = corpus.size_and_time(file)
        state.update(f"{name}\0{size}\0{time_ns}\0".encode(errors="surrogateescape"))
    return {"count": len(corpus.files), "hash": state.hexdigest()}


@dataclass(frozen=True)
class CacheFolders:
    """The folders that may have the entries of a run: token files, and files about them.

    cache_folder: `data.cache_folder`; None: the folders in this module's docstring.
    dump_folder: the run's folder.

    An entry has a name, and a folder with the text that it belongs to.
    """

    cache_folder: str | None
    dump_folder: str

    def find(self, name: str, find: Callable[[Path], T | None], data_folder: Path) -> T | None:
        """Return the result of ``find`` in the first folder that has the entry ``name``.

        An entry that this user may not read is missing: another user may have built it.
        """
        for folder in self._in_order(data_folder):
            with _read_errors(folder / name), suppress(PermissionError):
                if (entry := _find(find, folder / name)) is not None:
                    return entry
        return None

    def find_or_build(
        self,
        name: str,
        find: Callable[[Path], T | None],
        build: Callable[[Path], T],
        data_folder: Path,
        *,
        wait: bool = True,
        stop: threading.Event | None = None,
    ) -> T:
        """Return the result of ``find`` for the entry ``name``. Build a missing entry.

        The entry is built in the first writable folder. One process builds at a time. The others
        wait, or raise BlockingIOError if ``wait`` is false. Raises CacheWriteError if no folder is
        writable.
        """
        entry = self.find(name, find, data_folder)
        if entry is not None:
            return entry
        folder, problems = self._first_writable(data_folder)
        if problems:
            logger.info(f"the token cache of {data_folder} goes to {folder}: {'; '.join(problems)}")
        path = folder / name
        with _locked(folder / f".{name}.lock", path, wait, stop):
            with _read_errors(path):
                entry = _find(find, path)  # another process may have built it while this one waited
            return build(path) if entry is None else entry

    def writable(self, data_folder: Path) -> Path:
        """Return the first writable folder. Raises CacheWriteError if none is."""
        return self._first_writable(data_folder)[0]

    def _first_writable(self, data_folder: Path) -> tuple[Path, list[str]]:
        """Return the first writable folder, and why each folder before it is not writable."""
        problems: list[str] = []
        for folder in self._in_order(data_folder):
            problem = _write_problem(folder)
            if problem is None:
                return folder, problems
            problems.append(problem)
        raise CacheWriteError(
            f"the token cache of {data_folder} cannot be written: {'; '.join(problems)}; "
            "set data.cache_folder to a writable folder"
        )

    def _in_order(self, data_folder: Path) -> list[Path]:
        if self.cache_folder:
            return [Path(self.cache_folder).absolute()]
        cache = user_cache(os.environ)
        folders = [data_folder / CACHE_FOLDER_NAME]
        if cache.is_absolute():  # it is relative for a user without a home folder
            folders.append(cache / "token_cache")
        return [*folders, Path(self.dump_folder).absolute() / VISIBLE_CACHE_FOLDER_NAME]


def _find(find: Callable[[Path], T | None], path: Path) -> T | None:
    if path.is_fifo():  # opening it would wait for a writer
        raise OSError(errno.EINVAL, "it is a pipe", str(path))
    return find(path)


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Convert an OSError into a DataError that names the entry ``path``."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the token cache {path} cannot be read: {error.strerror or error}. Expected an entry that "
            "this program wrote: delete it, and it is made again, or set another data.cache_folder"
        ) from error


def _write_problem(folder: Path) -> str | None:
    """Return the error of creating and locking a file in ``folder``; None if it works.

    Permissions alone do not reveal read-only file systems.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file, file_lock(file):
            return None
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"


@contextmanager
def _locked(
    lock: Path, entry: Path, wait: bool, stop: threading.Event | None = None
) -> Iterator[None]:
    """Hold ``lock``. Logs a line before waiting; raises BlockingIOError instead if not ``wait``.

    Raises BuildStopped if ``stop`` is set during the wait.
    """
    with write_errors(entry):
        stream = lock.open("w")
    try:
        with (
            stream,
            file_lock(
                stream,
                wait=wait,
                stop=stop,
                on_wait=lambda: logger.info(f"waiting for another process to build {entry}"),
            ),
        ):
            yield
    except LockWaitStopped:
        raise BuildStopped from None


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Convert an OSError into a CacheWriteError that names the token cache ``folder``."""
    try:
        yield
    except OSError as error:
        raise CacheWriteError(
            f"cannot write the token cache {folder}: {error}. The finished part is kept: "
            f"{FREE_SPACE} to continue"
        ) from error


def user_cache(variables: Mapping[str, str]) -> Path:
    """Return the cache folder of this package: below $XDG_CACHE_HOME, else below ~/.cache.

    The path is relative for a user without a home folder.
    """
    home = variables.get("HOME") or os.path.expanduser("~")
    return Path(variables.get("XDG_CACHE_HOME") or f"{home}/.cache") / "torchtitan_like"
