"""`titan data tiny`: make a small tokenizer, dataset or model from a large one."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import FAILED, catch_value_errors, positive_int, run_checked
from torchtitan_like.cli.data.tokenize import FORMATS
from torchtitan_like.util.output import show_error


def configure_tiny(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.usage = "%(prog)s tokenizer|dataset|model SOURCE OUT [OPTIONS]"
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
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
    parser.add_argument("--seed", type=int, default=0, help="selects the documents (default: 0)")
    parser.add_argument(
        "--format", choices=[*FORMATS, "tokens"], default="auto", help="as in [data.sources]"
    )
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field or column with the text (default: text)",
    )
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
        return FAILED

    def action() -> int:
        if arguments.out.exists():
            raise ValueError(
                f"{arguments.out} exists already. Expected a new path: give another name"
            )
        print(_make(arguments))
        return 0

    return catch_value_errors(lambda: run_checked(action, damage_code=FAILED))


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
