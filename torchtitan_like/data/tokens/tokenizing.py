"""Tokenize a corpus once: into the token cache of a run, or into a folder for any number of runs.

Both are token files (see `token_file`). Their content does not depend on the number of workers.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torchtitan_like.data.data_errors import BuildStopped, CacheWriteError, DataError, WorkerKilled
from torchtitan_like.data.text.documents import (
    PIECES_VERSION,
    Corpus,
    OnBadRecord,
    find_corpus,
    piece_size,
    plan_pieces,
)
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens.encoding import Progress, TokenPolicy, encode_all
from torchtitan_like.data.tokens.token_cache import (
    CacheFolders,
    Entry,
    cache_key,
    entry_of,
    file_identities,
    write_errors,
)
from torchtitan_like.data.tokens.token_file import (
    META,
    Staging,
    StagingTaken,
    TokenFile,
    open_token_file,
    token_type,
)
from torchtitan_like.util.files import publish
from torchtitan_like.util.host import num_cores
from torchtitan_like.util.locks import file_lock

logger = logging.getLogger()


def cached_tokens(
    corpus: Corpus,
    policy: TokenPolicy,
    entry: Entry,
    folders: CacheFolders,
    *,
    num_workers: int | None = None,
    stop: threading.Event | None = None,
) -> TokenFile:
    """Open or build the token file of ``corpus``. Any number of processes may call it at once.

    entry: `entry_of` the corpus. num_workers: processes that tokenize (None: one for each core);
    the result does not depend on it. stop: an event that ends the build with `BuildStopped`.

    Raises DataError for text that cannot be read, a corpus without text, and if no cache folder is
    writable.
    """
    return folders.find_or_build(
        entry.name,
        entry.open,
        lambda folder: _build(corpus, policy, folder, entry.key, num_workers or num_cores(), stop),
        corpus.folder,
        stop=stop,
    )


def _build(
    corpus: Corpus,
    policy: TokenPolicy,
    folder: Path,
    key: dict[str, Any],
    num_workers: int,
    stop: threading.Event | None,
) -> TokenFile:
    """Tokenize the corpus. Continues after the last committed piece of a build that was killed."""
    unfinished = folder.with_name(f".{folder.name}.building-{PIECES_VERSION}")
    vocab_size, has_masks = policy.tokenizer.vocab_size, corpus.processor is not None
    with write_errors(folder):
        staging = Staging(unfinished, token_type(vocab_size, has_masks=has_masks))
    try:
        _append_pieces(staging, corpus, policy, folder, num_workers, stop)
        _check(staging, corpus, key)
        with write_errors(folder):
            staging.publish(folder, key)
    except BrokenProcessPool as error:
        raise WorkerKilled(
            f"a process that tokenizes {corpus.folder} was killed, usually because memory ran low. "
            f"The token cache {folder} is not finished: start again to continue after "
            f"{staging.num_pieces:,} pieces, or build it with fewer processes "
            "(titan data tokenize --workers)"
        ) from error
    except OSError as error:
        raise DataError(
            f"the token cache {folder} is not finished: {error}; the finished part is kept"
        ) from error
    except (StagingTaken, BuildStopped, CacheWriteError):
        raise
    except DataError:
        staging.discard()  # useless: the files have to change
        raise
    finally:
        staging.close()
    built = open_token_file(folder, key)
    assert built is not None
    return built


def _append_pieces(
    staging: Staging,
    corpus: Corpus,
    policy: TokenPolicy,
    folder: Path,
    num_workers: int,
    stop: threading.Event | None,
) -> None:
    """Append the missing pieces and log progress."""
    pieces = plan_pieces(corpus)
    remaining = pieces[staging.num_pieces :]
    total = sum(map(piece_size, pieces))
    done = total - sum(map(piece_size, remaining))
    progress = Progress(total, done, staging.meta.num_tokens)
    resumed = (
        f", continuing after {staging.num_pieces} of {len(pieces)} pieces"
        if staging.num_pieces
        else ""
    )
    logger.info(
        f"tokenizing {corpus.folder}: {len(corpus.files)} files, {total / 2**20:,.1f} MiB, "
        f"into {folder}{resumed}"
    )
    first_bad = ""
    encoded_pieces = encode_all(corpus, remaining, policy, num_workers, stop)
    for piece, encoded in zip(remaining, encoded_pieces, strict=True):
        with write_errors(folder):
            staging.append(encoded)
        first_bad = first_bad or encoded.first_bad
        line = progress.line(piece_size(piece), staging.meta.num_tokens)
        if line:
            logger.info(f"tokenizing {corpus.folder}: {line}")
    meta = staging.meta
    if meta.num_bad:
        example = f", the first of them: {first_bad}" if first_bad else ""
        logger.warning(f"{corpus.folder}: skipped {meta.num_bad:,} bad records{example}")
    empty = f" ({meta.num_empty:,} empty ones skipped)" if meta.num_empty else ""
    logger.info(
        f"tokenized: {meta.num_documents:,} documents{empty}, {meta.num_tokens:,} tokens, "
        f"{progress.rates(meta.num_tokens)}"
    )


def _check(staging: Staging, corpus: Corpus, key: dict[str, Any]) -> None:
    """Raise DataError if the token file must not be published."""
    if file_identities(corpus) != key["files"]:
        raise DataError(
            f"files in {corpus.folder} changed during tokenization. Expected no change: start "
            "again when they are complete"
        )
    if staging.meta.num_documents == 0:
        raise DataError(f"no text in {corpus}. Expected documents: check the path")


# ---- a folder


def join_inputs(
    paths: Sequence[str],
    format_name: str,
    text_field: str,
    on_bad_record: OnBadRecord = "error",
) -> Corpus:
    """Return the files of all `paths` as one corpus, in the order given.

    Raises DataError if their formats differ, or if a file is given twice.
    """
    corpora = [find_corpus(path, format_name, text_field) for path in paths]
    formats = {corpus.format: path for corpus, path in zip(corpora, paths, strict=True)}
    if len(formats) > 1:
        examples = ", ".join(f"{name} ({path})" for name, path in formats.items())
        raise DataError(
            f"inputs of several formats: {examples}. Expected one format: tokenize each into a "
            "separate folder, or give --format"
        )
    files = [file for corpus in corpora for file in corpus.files]
    unique: set[str] = set()
    for file in files:
        if file in unique:
            raise DataError(
                f"{file} is given twice. Expected every file once: remove one (to repeat a source, "
                "set the max_epochs of a run)"
            )
        unique.add(file)
    folder = Path(os.path.commonpath([corpus.folder for corpus in corpora]))
    return Corpus(folder, tuple(files), corpora[0].format, text_field, on_bad_record)


def document_policy(tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool) -> TokenPolicy:
    """Return the policy that encodes documents. Raises DataError if the tokenizer lacks a token."""
    candidates = ((add_bos, tokenizer.bos_id, "bos"), (add_eos, tokenizer.eos_id, "eos"))
    for is_added, token_id, name in candidates:
        if is_added and token_id is None:
            raise DataError(
                f"the tokenizer {tokenizer.path} has no {name.upper()} token. Expected one: give "
                f"--no-{name}, or name one in tokenizer_config.json"
            )
    return TokenPolicy(
        tokenizer,
        tokenizer.bos_id if add_bos else None,
        tokenizer.eos_id if add_eos else None,
    )


def tokenize_corpus(
    corpus: Corpus, policy: TokenPolicy, output: Path, num_workers: int | None = None
) -> TokenFile:
    """Write the tokens of `corpus` into the folder `output` and open them.

    They are written to a hidden folder next to `output`, which is renamed when it is complete. A
    call after a kill continues after the finished pieces. num_workers: processes; None: one for
    each core. Raises DataError, also if `output` exists with other content.
    """
    key = cache_key(corpus, policy)
    if output.exists():
        return _open(output, key)
    building = output.with_name(f".{output.name}.building")
    building.mkdir(parents=True, exist_ok=True)
    with _folder_lock(building, output):
        tokens = cached_tokens(
            corpus,
            policy,
            entry_of(corpus, "corpus", policy),
            CacheFolders(str(building), str(building)),
            num_workers=num_workers,
        )
        publish(tokens.folder, output)
        shutil.rmtree(building)  # also pieces of other inputs or settings
    return _open(output, key)


def summary(file: TokenFile, seconds: float) -> str:
    """Format the number of documents and tokens, and the lines of a config that read them."""
    meta = file.meta
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", file.folder.name)
    path = json.dumps(str(file.folder), ensure_ascii=False)
    bad = f"{meta.num_bad:,} bad records skipped, " if meta.num_bad else ""
    return (
        f"{file.folder} is complete: {meta.num_documents:,} documents, {bad}"
        f"{meta.num_tokens:,} tokens, {meta.text_bytes / 2**20:,.1f} MiB of text; {seconds:,.1f} s"
        f'\n\n[data.sources.{name}]\npath = {path}\nformat = "tokens"'
    )


def _open(output: Path, key: dict[str, object]) -> TokenFile:
    try:
        file = open_token_file(output, key)
    except DataError as error:
        raise DataError(f"--output {output}: {error}. Or give another name") from error
    if file is None:
        raise DataError(
            f"--output {output} exists already and has no {META}. Expected a new folder: give "
            "another name"
        )
    return file


@contextmanager
def _folder_lock(building: Path, output: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises DataError if another process holds it, or without locks."""
    descriptor = os.open(building, os.O_RDONLY)
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            stack.enter_context(file_lock(descriptor, wait=False))
        except BlockingIOError as error:
            raise DataError(
                f"another process is writing {output}. Wait until it ends, or give another name"
            ) from error
        except OSError as error:
            with suppress(OSError):  # it has pieces of an earlier build
                building.rmdir()
            raise DataError(
                f"{output.parent}: {error.strerror}. Expected file locks: give a folder on a local "
                "disk, and move it afterwards"
            ) from error
        yield
