"""`titan data`: tokenize, show and shrink data, and train a tokenizer."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

from torchtitan_like.cli.common import (
    add_json_flag,
    non_negative_int,
    parse_value,
    positive_int,
    run_checked,
    step_path,
)
from torchtitan_like.util.exit_codes import WRONG_INPUT, ExitCode
from torchtitan_like.util.files import refuse_existing
from torchtitan_like.util.output import show_error

FORMATS = ("auto", "text", "jsonl", "parquet", "arrow")
MIN_VOCAB_SIZE = 258  # the single bytes, BOS and EOS
DIFFERENT = 1
WIDTH = 100  # characters of a sample that are printed


def _add_text_field(parser: argparse.ArgumentParser) -> None:
    """Add `--text-field`."""
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field or column with the text (default: text)",
    )


# ---- titan data tokenize


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
    _add_text_field(parser)
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
    from torchtitan_like.data.tokens.tokenizing import (
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
        return int(ExitCode.INTERRUPTED)


# ---- titan data train-tokenizer


def configure_train_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    from torchtitan_like.config.dataset_names import DATASETS

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
        type=_vocab_size,
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


def _vocab_size(text: str) -> int:
    """Parse a number of tokens. Raises argparse.ArgumentTypeError."""
    expected = f"an integer of at least {MIN_VOCAB_SIZE}"
    return parse_value(text, int, lambda n: MIN_VOCAB_SIZE <= n < 2**31, expected)


def run_train_tokenizer(arguments: argparse.Namespace) -> int:
    """Train the tokenizer. Returns the exit code."""
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
        return WRONG_INPUT

    def action() -> int:
        arguments.output.mkdir(parents=True, exist_ok=True)  # an error before the training
        save_tokenizer(train_tokenizer(texts, arguments.vocab_size), arguments.output)
        for name in ("tokenizer.json", "tokenizer.model"):
            print(load_tokenizer(arguments.output / name))
        return 0

    return run_checked(action)


# ---- titan data tiny


def configure_tiny(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.usage = "%(prog)s tokenizer|dataset|model SOURCE OUT [OPTIONS]"
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND", prog=parser.prog)
    _configure_tokenizer(kinds.add_parser("tokenizer", help="a tokenizer with few entries"))
    _configure_dataset(kinds.add_parser("dataset", help="a few documents of a large dataset"))
    _configure_model(kinds.add_parser("model", help="random weights of a model family"))
    parser.epilog = (
        "tokenizer  keeps special tokens, single bytes and the first of the other entries\n"
        "dataset    draws documents from all parts of a source by a seed, as JSON lines\n"
        "model      in OUT for transformers, in OUT/step-0 as a checkpoint; OUT/make.sh makes it again;\n"
        "           accepts settings of the config (--model.args.dim 128)\n\n"
        "OUT appears when it is complete. Uses no GPU. Returns 0, or 2 after an error.\n"
        "titan data tiny KIND --help lists the options of one kind.\n\n"
        "example: titan data tiny tokenizer assets/hf/Llama-3.1-8B tiny/tokenizer --keep 400"
    )


def _configure_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="tokenizer.json, or a folder with one"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to create")
    parser.add_argument(
        "--keep",
        type=positive_int,
        default=4000,
        metavar="N",
        help="entries, special ones included (default: 4000)",
    )


def _configure_dataset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="file, folder or (in quotes) glob")
    parser.add_argument("out", type=Path, metavar="OUT", help="the .jsonl file to create")
    parser.add_argument(
        "--n", type=positive_int, default=10_000, metavar="N", help="documents (default: 10000)"
    )
    parser.add_argument(
        "--seed", type=non_negative_int, default=0, help="selects the documents (default: 0)"
    )
    parser.add_argument(
        "--format", choices=[*FORMATS, "tokens"], default="auto", help="as in [data.sources]"
    )
    _add_text_field(parser)
    parser.add_argument(
        "--on-bad-record",
        choices=["error", "skip"],
        default="error",
        help="as data.on_bad_record (default: error)",
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="of files of tokens: the tokenizer that made them"
    )
    parser.add_argument(
        "--token-dtype",
        choices=["auto", "uint16", "uint32"],
        default="auto",
        help="of flat .bin files",
    )


def _configure_model(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s CONFIG OUT [--dtype DTYPE] [--section.key VALUE ...]"
    parser.add_argument("source", metavar="CONFIG", help="a training config")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to create")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the weights (default: float32)",
    )


def run_tiny(arguments: argparse.Namespace) -> int:
    """Make the tokenizer, dataset or model. Returns the exit code."""
    if arguments.settings and arguments.kind != "model":
        unknown = " ".join(arguments.settings)
        show_error(
            f"titan data tiny {arguments.kind} does not know {unknown}. Expected the options in "
            "its --help: remove the others"
        )
        return WRONG_INPUT

    def action() -> int:
        refuse_existing(arguments.out)
        print(_make(arguments))
        return 0

    return run_checked(action, ValueError, damage_code=WRONG_INPUT)


def _make(arguments: argparse.Namespace) -> str:
    """Make what `arguments.kind` names. Returns a description of it."""
    if arguments.kind == "tokenizer":
        from torchtitan_like.data.text.tiny_tokenizer import make_tiny_tokenizer

        return make_tiny_tokenizer(arguments.source, arguments.out, arguments.keep)
    if arguments.kind == "dataset":
        from torchtitan_like.data.tokens.tiny_dataset import make_tiny_dataset

        return make_tiny_dataset(
            arguments.source,
            arguments.out,
            num_documents=arguments.n,
            seed=arguments.seed,
            format_name=arguments.format,
            text_field=arguments.text_field,
            on_bad_record=arguments.on_bad_record,
            tokenizer=arguments.tokenizer,
            token_dtype=arguments.token_dtype,
        )
    from torchtitan_like.tiny_model import make_tiny_model

    return make_tiny_model(arguments.source, arguments.out, arguments.settings, arguments.dtype)


# ---- titan data show


def configure_show(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.usage = "%(prog)s CHECKPOINT --step N [--whole] [--json] [--section.key VALUE ...]"
    parser.add_argument(
        "checkpoint",
        type=step_path,
        metavar="CHECKPOINT",
        help="the run, or a published step-N of it, before or after the step to print",
    )
    parser.add_argument(
        "--step", type=positive_int, required=True, metavar="N", help="the step to print, from 1"
    )
    parser.add_argument("--whole", action="store_true", help="print the whole text of each sample")
    add_json_flag(parser)
    parser.epilog = (
        "Prints one line for each sample: its position in the run's stream of samples, source,\n"
        "epoch, index in the source and first words. The config.toml in CHECKPOINT defines data\n"
        "and tokenizer; settings such as --data.sources.wiki.path change their paths. Does not\n"
        "train, and writes only a missing token cache.\n"
        "Compares the digest with the run's metrics.jsonl, if it exists: returns 0 if they are\n"
        "equal, 1 if not, 2 after an error.\n\n"
        "example: titan data show outputs/checkpoint/step-100 --step 3"
    )


def run_show(arguments: argparse.Namespace) -> int:
    """Print the samples. Returns the exit code."""
    return run_checked(lambda: _show(arguments), damage_code=WRONG_INPUT)


def _show(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from torchtitan_like.checkpoint.errors import CheckpointError
    from torchtitan_like.checkpoint.step_folders import read_manifest, suggest_step
    from torchtitan_like.data.step_samples import read_step, recorded_digest
    from torchtitan_like.data.text.tokenizer import load_tokenizer
    from torchtitan_like.stored_config import custom_import_in, find_run_assets, load_trusted
    from torchtitan_like.util.run_directory import CONFIG

    checkpoint = arguments.checkpoint
    manifest = read_manifest(checkpoint)
    if manifest is None or "data" not in manifest:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of a run. Expected a step-N with a "
            f"manifest.json that has a data position: {suggest_step(checkpoint)}"
        )
    module = custom_import_in(arguments.settings)
    config = load_trusted(checkpoint / CONFIG, module, arguments.settings)
    tokenizer = load_tokenizer(find_run_assets(config.model.tokenizer_folder, checkpoint))
    content = read_step(config, manifest, tokenizer, arguments.step)
    recorded = recorded_digest(checkpoint.parent.parent, arguments.step)
    code = 0 if recorded in (None, content.digest) else DIFFERENT
    if arguments.json:
        print(json.dumps({**asdict(content), "recorded_digest": recorded}, indent=2))
        return code
    for sample in content.samples:
        print(sample.line(None if arguments.whole else WIDTH))
    print(
        f"step {content.step}: {content.num_samples} samples, {content.num_valid_tokens:,} labels, "
        f"digest {content.digest}"
    )
    if recorded is not None:
        verdict = "DIFFERENT: the run has read other samples" if code else "the same"
        print(f"metrics.jsonl of the run: {recorded}, {verdict}")
    return code
