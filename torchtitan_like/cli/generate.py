"""`titan generate`: continue prompts with the weights of a checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.cli.common import (
    FAILED,
    add_import_flag,
    add_json_flag,
    end_rank,
    positive_int,
    print_json,
    run_checked,
)
from torchtitan_like.util.output import show_error

if TYPE_CHECKING:
    from torchtitan_like.inference.completion import Completions, Prompt

EXAMPLE = 'titan generate outputs/checkpoint/step-100 --prompt "To be" --num-tokens 16'
DTYPES = ("bfloat16", "float16", "float32", "float64")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("step", type=Path, metavar="STEP", help="a published step-N, or an export")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='JSON lines of {"prompt": "text"} or {"messages": [...]}; -: read them from stdin',
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send each prompt as a user's message, through the tokenizer's chat template",
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
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a text before this string; may be repeated",
    )
    add_batch_size_flag(parser)
    add_json_flag(parser)
    add_import_flag(parser)
    parser.epilog = (
        "The config.toml in STEP defines the model and the tokenizer. Runs on the GPU if there is\n"
        "one. Reads checkpoints of any layout. Prints tokens per second to stderr. A text ends at\n"
        "the tokenizer's end-of-text token, a stop string, N new tokens, or the end of the model's\n"
        "context. The same seed gives the same tokens for any batch size. To shard the model over\n"
        "2 processes by tensor parallelism:\n"
        "  torchrun --nproc_per_node=2 --no-python titan generate STEP --prompt TEXT\n\n"
        f"example: {EXAMPLE}"
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


def add_batch_size_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--batch-size`."""
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        default=8,
        metavar="N",
        help="texts that are computed together (default: 8)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the prompts and their continuations. Returns the exit code."""
    problem = _problem(arguments)
    if problem is not None:
        show_error(problem)
        return FAILED
    return end_rank(_generate(arguments))


def _problem(arguments: argparse.Namespace) -> str | None:
    if not arguments.temperature >= 0:
        return f"--temperature is {arguments.temperature:g}. Expected 0 or a number above 0: correct it"
    if not 0 < arguments.top_p <= 1:
        return f"--top-p is {arguments.top_p:g}. Expected a number above 0, at most 1: correct it"
    if arguments.prompt and arguments.prompts:
        return "--prompt and --prompts are both given. Expected one of them: remove the other"
    if "" in arguments.stop:
        return "--stop is an empty string. Expected text that ends a continuation: correct it"
    return None


def _generate(arguments: argparse.Namespace) -> int:
    from torchtitan_like.distributed.world import launched_as
    from torchtitan_like.inference.completion import complete, encode_prompts
    from torchtitan_like.inference.generation import Sampling
    from torchtitan_like.inference.loading import inference_world, load_checkpoint

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    with inference_world(launched_as()) as world:

        def generate() -> int:
            prompts = world.step_group.run_on_leader(lambda: _read_prompts(arguments))
            loaded = load_checkpoint(
                arguments.step,
                world,
                assets=arguments.assets,
                custom_import=arguments.custom_import,
                dtype=arguments.dtype,
                averaged=arguments.ema,
            )
            completions = complete(
                loaded,
                encode_prompts(loaded, prompts),
                num_tokens=arguments.num_tokens,
                sampling=sampling,
                stop=arguments.stop,
                batch_size=arguments.batch_size,
            )
            if world.rank == 0:
                _print(prompts, completions, as_json=arguments.json)
            return 0

        return run_checked(generate, damage_code=FAILED, is_leader=world.rank == 0)


def _read_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """Read the prompts of the command line, a file, or stdin. Raises DataError, OSError."""
    from torchtitan_like.inference.completion import Prompt, read_prompts
    from torchtitan_like.util.reading import read_text

    if arguments.prompts is None:
        prompts = [Prompt(text) for text in arguments.prompt or [""]]
    elif arguments.prompts == "-":
        prompts = read_prompts(sys.stdin.readlines(), "stdin")
    else:
        path = Path(arguments.prompts)
        prompts = read_prompts(read_text(path).splitlines(), str(path))
    return [prompt.as_message() for prompt in prompts] if arguments.chat else prompts


def _print(prompts: list[Prompt], completions: Completions, *, as_json: bool) -> None:
    """Print texts, or JSON, to stdout, and the speed to stderr."""
    each = list(zip(prompts, completions.completions, strict=True))
    if as_json:
        print_json(
            {
                "completions": [
                    {"prompt": list(prompt.messages) or prompt.text, **completion._asdict()}
                    for prompt, completion in each
                ],
                "num_tokens": completions.num_tokens,
                "seconds": completions.seconds,
                "tokens_per_second": completions.tokens_per_second,
            }
        )
    else:
        text = "\n\n".join(prompt.text + completion.text for prompt, completion in each)
        # A file or a pipe gets the text itself, a terminal no control characters.
        is_terminal = sys.stdout.isatty()
        print(
            text, file=sys.stdout if is_terminal else getattr(sys.stdout, "unescaped", sys.stdout)
        )
    show_error(
        f"{completions.num_tokens:,} tokens in {completions.seconds:.2f} s: "
        f"{completions.tokens_per_second:,.1f} tokens per second"
    )
