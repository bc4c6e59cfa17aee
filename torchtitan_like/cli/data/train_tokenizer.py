"""`titan data train-tokenizer`: train a byte-level BPE tokenizer."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import FAILED, run_checked
from torchtitan_like.config.datasets import DATASETS
from torchtitan_like.util.output import show_error

MIN_VOCAB_SIZE = 258  # the single bytes, BOS and EOS


def configure_train_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="folder of the three files"
    )
    parser.add_argument(
        "--input",
        type=Path,
        default=DATASETS["shakespeare"].file,
        metavar="FILE",
        help="JSON lines with a field `text` (default: the text of the debug models)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=2048,
        metavar="N",
        help="tokens, BOS and EOS included (default: 2048)",
    )
    parser.epilog = (
        "Writes tokenizer.json, tokenizer_config.json (names BOS and EOS) and tokenizer.model (a\n"
        "tiktoken file with the same ids). With the defaults, these are the files of the debug\n"
        "models. The same text gives the same bytes.\n\n"
        "example: titan data train-tokenizer --input corpus.jsonl --vocab-size 1000 "
        "--output tokenizer"
    )


def run_train_tokenizer(arguments: argparse.Namespace) -> int:
    """Train the tokenizer. Returns the exit code."""
    if arguments.vocab_size < MIN_VOCAB_SIZE:
        show_error(
            f"--vocab-size is {arguments.vocab_size}. Expected at least {MIN_VOCAB_SIZE}: raise it"
        )
        return FAILED

    from torchtitan_like.data.text.tokenizer import load_tokenizer
    from torchtitan_like.data.text.train_tokenizer import (
        read_texts,
        save_tokenizer,
        train_tokenizer,
    )

    try:
        texts = read_texts(arguments.input)
    except (OSError, ValueError, KeyError, TypeError) as error:
        show_error(
            f"Cannot read {arguments.input}: {type(error).__name__}: {error}. Expected JSON lines "
            "with a field `text`: correct the file, or --input"
        )
        return FAILED

    def action() -> int:
        arguments.output.mkdir(parents=True, exist_ok=True)  # an error before the training
        save_tokenizer(train_tokenizer(texts, arguments.vocab_size), arguments.output)
        for name in ("tokenizer.json", "tokenizer.model"):
            print(load_tokenizer(arguments.output / name))
        return 0

    return run_checked(action)
