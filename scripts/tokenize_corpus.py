"""Tokenize a corpus once, into a folder that any number of runs can train on.

    python scripts/tokenize_corpus.py corpus/*.jsonl --tokenizer assets/hf/Llama-3.1-8B --output corpus_tokens

INPUT is a file, a folder or a glob of text, JSON lines, parquet or arrow; several are read in the order given. The folder
holds tokens.bin, offsets.bin and meta.json, as the token cache of a run does, and appears under its name when it is
complete. After a kill the same command goes on where it was. The files do not depend on the number of workers.

No GPU is used. Exit codes: 0 the folder is complete, 2 it could not be done.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from torchtitan_like.data.errors import DataError
from torchtitan_like.data.text.documents import ENDINGS, Corpus, OnBadRecord, find_corpus
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer
from torchtitan_like.data.tokens.encoding import TokenPolicy
from torchtitan_like.data.tokens.token_cache import cache_key, cached_tokens, entry_of
from torchtitan_like.data.tokens.token_file import META, TokenFile, open_token_file


def find_inputs(paths: list[str], format_name: str, text_field: str, on_bad_record: OnBadRecord = "error") -> Corpus:
    """The files that all ``paths`` mean, as one corpus. Raises DataError for mixed formats and for a file given twice."""
    found = [find_corpus(path, format_name, text_field) for path in paths]
    formats = {corpus.format: path for corpus, path in zip(found, paths, strict=True)}
    if len(formats) > 1:
        examples = ", ".join(f"{name} ({path})" for name, path in formats.items())
        raise DataError(
            f"inputs of several formats: {examples}; tokenize each into a folder of its own, or give --format"
        )
    files = [file for corpus in found for file in corpus.files]
    twice = sorted({str(file) for file in files if files.count(file) > 1}) if len(set(files)) < len(files) else []
    if twice:
        raise DataError(f"{twice[0]} is given twice: expected every file once (a run sets how often it reads a source)")
    folder = Path(os.path.commonpath([corpus.folder for corpus in found]))
    return Corpus(folder, tuple(files), found[0].format, text_field, on_bad_record)


def policy_of(tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool) -> TokenPolicy:
    """Raises DataError where the tokenizer has no such token."""
    for wanted, token_id, name in ((add_bos, tokenizer.bos_id, "bos"), (add_eos, tokenizer.eos_id, "eos")):
        if wanted and token_id is None:
            raise DataError(
                f"the tokenizer {tokenizer.path} has no {name.upper()} token: give --no-{name}, or name one in "
                "tokenizer_config.json"
            )
    return TokenPolicy(tokenizer, tokenizer.bos_id if add_bos else None, tokenizer.eos_id if add_eos else None)


def tokenize(corpus: Corpus, policy: TokenPolicy, output: Path, num_workers: int | None) -> TokenFile:
    """The token file of ``corpus`` as the folder ``output``. Raises DataError.

    It is built as a token cache in a hidden folder beside ``output``, and then moved.
    """
    key = cache_key(corpus, policy)
    if output.exists():
        return _existing(output, key)
    building = output.with_name(f".{output.name}.building")
    building.mkdir(parents=True, exist_ok=True)
    with _alone(building, output):
        built = cached_tokens(
            corpus,
            policy,
            entry_of(corpus, "corpus", policy),
            cache_folder=str(building),
            dump_folder=str(building),
            num_workers=num_workers,
        )
        os.rename(built.folder, output)
        shutil.rmtree(building)  # with what other inputs or settings may have left there
    return _existing(output, key)


def _existing(output: Path, key: dict[str, object]) -> TokenFile:
    try:
        found = open_token_file(output, key)
    except DataError as error:
        raise DataError(f"--output {output}: {error}; or give another name") from error
    if found is None:
        raise DataError(f"--output {output} exists already and has no {META}: give the name of a folder to be made")
    return found


@contextmanager
def _alone(building: Path, output: Path) -> Iterator[None]:
    """Two processes must not make the same folder; the system frees the lock when its holder ends, however it ends."""
    descriptor = os.open(building, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise DataError(f"another process is making {output}: wait for it, or give another name") from error
    finally:
        os.close(descriptor)


def summary(file: TokenFile, seconds: float) -> str:
    """What was made, how long it took, and the lines of a config that read it."""
    meta, name = file.meta, re.sub(r"[^A-Za-z0-9_-]+", "-", file.folder.name)
    bad = f"{meta.num_bad:,} bad records left out, " if meta.num_bad else ""
    return (
        f"{file.folder} is complete: {meta.num_documents:,} documents, {bad}{meta.num_tokens:,} tokens, "
        f"{meta.text_bytes / 2**20:,.1f} MiB of text; {seconds:,.1f} s\n\n"
        f'[data.sources.{name}]\npath = {json.dumps(str(file.folder), ensure_ascii=False)}\nformat = "tokens"'
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="+", metavar="INPUT", help="file, folder or glob")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json or tiktoken file, or a folder with one")
    parser.add_argument("--output", type=Path, required=True, help="the folder to make")
    parser.add_argument("--text-field", default="text", help="field or column with the text (default: text)")
    parser.add_argument("--format", choices=["auto", *ENDINGS], default="auto", help="default: by the files' endings")
    parser.add_argument(
        "--on-bad-record",
        choices=["error", "skip"],
        default="error",
        help="a line or row without readable text: end with its place (default), or leave it out and count it",
    )
    parser.add_argument("--workers", type=int, help="processes that tokenize (default: one for each core)")
    parser.add_argument("--no-bos", action="store_true", help="no BOS before each document")
    parser.add_argument("--no-eos", action="store_true", help="no EOS behind each document")
    arguments = parser.parse_args(argv)
    if arguments.workers is not None and arguments.workers < 1:
        print(f"--workers {arguments.workers}: expected at least 1", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    begin = time.monotonic()
    try:
        policy = policy_of(
            load_tokenizer(arguments.tokenizer), add_bos=not arguments.no_bos, add_eos=not arguments.no_eos
        )
        corpus = find_inputs(arguments.input, arguments.format, arguments.text_field, arguments.on_bad_record)
        file = tokenize(corpus, policy, arguments.output.absolute(), arguments.workers)
    except (DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(summary(file, time.monotonic() - begin))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
