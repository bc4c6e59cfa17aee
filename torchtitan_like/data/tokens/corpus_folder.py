"""Tokenize a corpus once, into a folder that any number of runs can train on.

The folder holds tokens.bin, offsets.bin and meta.json, as the token cache of a run does. Its
content does not depend on the number of workers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torchtitan_like.data.errors import DataError
from torchtitan_like.data.text.documents import Corpus, OnBadRecord, find_corpus
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens.encoding import TokenPolicy
from torchtitan_like.data.tokens.token_cache import (
    CacheFolders,
    cache_key,
    cached_tokens,
    entry_of,
)
from torchtitan_like.data.tokens.token_file import META, TokenFile, open_token_file
from torchtitan_like.util.locks import file_lock


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
        os.rename(tokens.folder, output)
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
                f"the file system of {output.parent} has no file locks ({error.strerror}). "
                "Expected file locks: give a folder on a local disk, and move it afterwards"
            ) from error
        yield
