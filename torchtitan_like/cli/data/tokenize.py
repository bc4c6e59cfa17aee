"""`titan data tokenize`: tokenize a corpus once, into a folder that runs train on."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

from torchtitan_like.cli.common import positive_int, run_checked
from torchtitan_like.util.output import show_error

FORMATS = ("auto", "text", "jsonl", "parquet", "arrow")
INTERRUPTED = 130


def configure_tokenize(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "input", nargs="+", metavar="INPUT", help="file, folder or glob; read in the order given"
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="tokenizer.json or tiktoken file, or a folder with one",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="the folder to create"
    )
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field or column with the text (default: text)",
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="auto", help="default: by the names of the files"
    )
    parser.add_argument(
        "--on-bad-record",
        choices=["error", "skip"],
        default="error",
        help="a line or row without readable text: stop and report it (default), or skip it",
    )
    parser.add_argument(
        "--workers",
        type=positive_int,
        metavar="N",
        help="tokenizing processes (default: one for each core)",
    )
    parser.add_argument("--no-bos", action="store_true", help="no BOS before each document")
    parser.add_argument("--no-eos", action="store_true", help="no EOS after each document")
    parser.epilog = (
        "The folder contains tokens.bin, offsets.bin and meta.json, like the token cache of a\n"
        "run. It appears under its name when it is complete. After a kill, the same command\n"
        "continues. The files do not depend on the number of workers. Uses no GPU. Returns 0,\n"
        "or 2 after an error.\n\n"
        "example: titan data tokenize corpus.jsonl --tokenizer assets/hf/Llama-3.1-8B "
        "--output tokens"
    )


def run_tokenize(arguments: argparse.Namespace) -> int:
    """Tokenize the corpus. Returns the exit code."""
    from torchtitan_like.data.text.tokenizer import load_tokenizer
    from torchtitan_like.data.tokens.corpus_folder import (
        document_policy,
        join_inputs,
        summary,
        tokenize_corpus,
    )

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    start = time.monotonic()

    def action() -> int:
        policy = document_policy(
            load_tokenizer(arguments.tokenizer),
            add_bos=not arguments.no_bos,
            add_eos=not arguments.no_eos,
        )
        corpus = join_inputs(
            arguments.input, arguments.format, arguments.text_field, arguments.on_bad_record
        )
        file = tokenize_corpus(corpus, policy, arguments.output.absolute(), arguments.workers)
        print(summary(file, time.monotonic() - start))
        return 0

    try:
        return run_checked(action)
    except KeyboardInterrupt:
        show_error("Interrupted, the finished part is kept. Run the same command to continue.")
        return INTERRUPTED
