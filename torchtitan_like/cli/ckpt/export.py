"""`titan ckpt export`: write a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import FAILED, add_import_flag, end_rank, show_problem

DTYPES = ("bfloat16", "float16", "float32", "float64")


def configure_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("step", type=Path, metavar="STEP", help="a published step-N")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to create")
    parser.add_argument("--dtype", choices=DTYPES, help="of floating-point weights (default: keep)")
    parser.add_argument(
        "--shard-gb",
        type=float,
        metavar="GB",
        help="maximum GB of weights per file (default: as in the index of the model's assets, "
        "else 5)",
    )
    parser.add_argument("--ema", action="store_true", help="export the averaged weights of [ema]")
    add_import_flag(parser)
    parser.epilog = (
        "Writes weights, config and tokenizer. Uses no GPU. To share the work over 4 processes:\n"
        "  torchrun --nproc_per_node=4 --no-python titan ckpt export STEP OUT\n\n"
        "example: titan ckpt export outputs/checkpoint/step-100 outputs/model --dtype bfloat16"
    )


def run_export(arguments: argparse.Namespace) -> int:
    """Export the step. Returns the exit code."""
    return end_rank(_export(arguments))


def _export(arguments: argparse.Namespace) -> int:
    import torch

    from torchtitan_like.checkpoint.errors import CheckpointError
    from torchtitan_like.checkpoint.tools.export import export_step
    from torchtitan_like.checkpoint.tools.launched import launched_group
    from torchtitan_like.checkpoint.votes import Votes
    from torchtitan_like.config import ConfigError
    from torchtitan_like.data.errors import TokenizerError
    from torchtitan_like.stored_config import identify_step

    with launched_group() as group:
        try:
            export_step(
                arguments.step,
                arguments.out.absolute(),
                Votes(group),
                identify=lambda path: identify_step(path, arguments.custom_import),
                dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
                shard_gb=arguments.shard_gb,
                averaged=arguments.ema,
            )
        except (CheckpointError, ConfigError, TokenizerError, OSError) as error:
            if group.rank == 0:
                show_problem(error)
            return FAILED
        if group.rank == 0:
            print(f"{arguments.out} is complete")
    return 0
