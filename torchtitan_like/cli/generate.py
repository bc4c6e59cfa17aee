"""`titan generate`: continue prompts with the weights of a checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.cli.common import (
    FAILED,
    add_import_flag,
    add_json_flag,
    launched_ranks,
    positive_int,
    print_json,
    run_checked,
)
from torchtitan_like.util.output import show_error

if TYPE_CHECKING:
    from torchtitan_like.inference.generation import Completion

DTYPES = ("bfloat16", "float16", "float32", "float64")


def configure_generate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("step", type=Path, metavar="STEP", help="a published step-N, or an export")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated"
    )
    add_loading_flags(parser)
    parser.add_argument(
        "--num-tokens",
        type=positive_int,
        default=128,
        metavar="N",
        help="maximum number of tokens to add (default: 128)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 always takes the most likely token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=positive_int,
        default=50,
        metavar="K",
        help="sample among the K most likely tokens (default: 50)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="of these, among the fewest that have probability P together (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    add_json_flag(parser)
    add_import_flag(parser)
    parser.epilog = (
        "For a look at what a run has learned. The config.toml in STEP defines the model and the\n"
        "tokenizer. Reads checkpoints of any layout. Runs in one process, on the GPU if there is\n"
        "one, one text after the other, without a cache of keys and values. Prints tokens per\n"
        "second to stderr. A text ends at the tokenizer's end-of-text token, N new tokens, or the\n"
        "end of the model's context. For speed, chats and models that need several GPUs:\n"
        "titan ckpt export, then vLLM or transformers.\n\n"
        'example: titan generate outputs/checkpoint/step-100 --prompt "To be" --num-tokens 16'
    )


def add_loading_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--assets`, `--dtype` and `--ema`, which `inference.loading` uses."""
    parser.add_argument(
        "--assets", metavar="PATH", help="the tokenizer's folder (default: as in the run's config)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as stored)")
    parser.add_argument(
        "--ema", action="store_true", help="use the averaged weights of [ema] in a step-N"
    )


def run_generate(arguments: argparse.Namespace) -> int:
    """Print the prompts and their continuations. Returns the exit code."""
    problem = _problem(arguments)
    if problem is not None:
        show_error(problem)
        return FAILED
    return run_checked(lambda: _generate(arguments), damage_code=FAILED)


def _problem(arguments: argparse.Namespace) -> str | None:
    if launched_ranks() > 1:
        return (
            "titan generate runs in one process. Expected to be started without torchrun: for a "
            "model that needs several GPUs, use titan ckpt export, then vLLM or transformers"
        )
    if not arguments.temperature >= 0:
        return f"--temperature is {arguments.temperature:g}. Expected 0 or a number above 0: correct it"
    if not 0 < arguments.top_p <= 1:
        return f"--top-p is {arguments.top_p:g}. Expected a number above 0, at most 1: correct it"
    return None


def _generate(arguments: argparse.Namespace) -> int:
    import torch

    from torchtitan_like.inference.generation import Sampling, complete
    from torchtitan_like.inference.loading import EXPORT_REMEDY, load_checkpoint

    prompts = arguments.prompt or [""]
    try:
        loaded = load_checkpoint(
            arguments.step,
            assets=arguments.assets,
            custom_import=arguments.custom_import,
            dtype=arguments.dtype,
            averaged=arguments.ema,
        )
        start = time.perf_counter()
        completions = []
        for number, prompt in enumerate(prompts):
            # Equal prompts get different texts.
            sampling = Sampling(
                arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed + number
            )
            completions.append(
                complete(loaded, prompt, num_tokens=arguments.num_tokens, sampling=sampling)
            )
        seconds = time.perf_counter() - start
    except torch.OutOfMemoryError as error:
        show_error(
            f"the GPU's memory is too small: {error}. Expected memory for the model and its "
            f"activations: give a shorter --prompt, --dtype bfloat16, or use {EXPORT_REMEDY}"
        )
        return FAILED
    _print(prompts, completions, seconds, as_json=arguments.json)
    return 0


def _print(
    prompts: Sequence[str], completions: Sequence[Completion], seconds: float, *, as_json: bool
) -> None:
    """Print texts, or JSON, to stdout, and the speed to stderr."""
    num_tokens = sum(completion.num_tokens for completion in completions)
    each = list(zip(prompts, completions, strict=True))
    if as_json:
        print_json(
            {
                "completions": [
                    {"prompt": prompt, **completion._asdict()} for prompt, completion in each
                ],
                "num_tokens": num_tokens,
                "seconds": seconds,
                "tokens_per_second": num_tokens / seconds,
            }
        )
    else:
        text = "\n\n".join(prompt + completion.text for prompt, completion in each)
        # A file or a pipe gets the text itself, a terminal no control characters.
        is_terminal = sys.stdout.isatty()
        print(
            text, file=sys.stdout if is_terminal else getattr(sys.stdout, "unescaped", sys.stdout)
        )
    show_error(
        f"{num_tokens:,} tokens in {seconds:.2f} s: {num_tokens / seconds:,.1f} tokens per second"
    )
