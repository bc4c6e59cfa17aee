"""`titan generate`: continue a prompt with the weights of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import FAILED, add_import_flag, positive_int, run_checked
from torchtitan_like.util.output import show_error

EXAMPLE = 'titan generate outputs/checkpoint/step-100 --prompt "To be" --num-tokens 16'


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("step", type=Path, metavar="STEP", help="a published step-N")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument(
        "--assets", metavar="PATH", help="the tokenizer's folder (default: as in the run's config)"
    )
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
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    add_import_flag(parser)
    parser.epilog = (
        "The config.toml in STEP defines the model and the tokenizer. Runs in one process, on the\n"
        "GPU if there is one. Reads checkpoints of any layout.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and its continuation. Returns the exit code."""
    if not arguments.temperature >= 0:
        show_error(
            f"--temperature is {arguments.temperature:g}. Expected 0 or a number above 0: correct it"
        )
        return FAILED

    from torchtitan_like.generate import continue_prompt

    def action() -> int:
        text = continue_prompt(
            arguments.step,
            arguments.prompt,
            assets=arguments.assets,
            custom_import=arguments.custom_import,
            num_tokens=arguments.num_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            seed=arguments.seed,
        )
        print(text)
        return 0

    return run_checked(action, damage_code=FAILED)
