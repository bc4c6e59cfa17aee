"""`titan ckpt convert`: convert a checkpoint into another format."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.cli.common import add_model_flags, positive_int, run_checked

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.identity import Identity
    from torchtitan_like.checkpoint.tools.convert import Identify

TORCHTITAN = "torchtitan"
FORMATS = ("native", "hf", "dcp", "pt", TORCHTITAN)
DTYPES = ("bfloat16", "float16", "float32")


def configure_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("source", type=Path, metavar="SRC", help="a checkpoint of any format")
    parser.add_argument("out", type=Path, metavar="DST", help="the file or folder to create")
    parser.add_argument("--to", choices=FORMATS, required=True, help="the format of DST")
    parser.add_argument("--dtype", choices=DTYPES, help="of floating-point tensors (default: keep)")
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="unpickle any class that SRC names. This RUNS CODE of its author. The copy contains "
        "only tensors and plain values. Not allowed for a --to format with other names",
    )
    parser.add_argument(
        "--data-ranks",
        type=positive_int,
        default=1,
        metavar="N",
        help="with --to torchtitan: data-parallel ranks of the run that loads DST, which counts the "
        "tokens of one of them; default: %(default)s",
    )
    add_model_flags(parser)
    parser.epilog = (
        "Formats:\n"
        "  native      a step with only the weights, for checkpoint.initial_load_path\n"
        "  hf          Hugging Face safetensors\n"
        "  dcp         torch.distributed.checkpoint, names and row order of TorchTitan and Meta\n"
        "  pt          torch.save, names and row order of TorchTitan and Meta\n"
        "  torchtitan  a full checkpoint that TorchTitan 0.2 resumes: weights, Adam moments,\n"
        "              schedule position and step. SRC must be a full step. Load it with\n"
        "              --checkpoint.exclude_from_loading dataloader.\n\n"
        "Exit codes: 0 DST is complete, 1 SRC is damaged, 2 another error.\n\n"
        "example: titan ckpt convert outputs/checkpoint/step-100 model.pt --to pt --dtype bfloat16"
    )


def run_convert(arguments: argparse.Namespace) -> int:
    """Convert the checkpoint. Returns the exit code."""
    from torchtitan_like.stored_config import identify_checkpoint

    def identify(path: Path) -> tuple[Identity, str]:
        return identify_checkpoint(path, arguments.config, arguments.custom_import)

    def action() -> int:
        convert = _convert_run if arguments.to == TORCHTITAN else _convert_weights
        convert(arguments, identify)
        print(f"{arguments.out} is complete")
        return 0

    return run_checked(action)


def _convert_weights(arguments: argparse.Namespace, identify: Identify) -> None:
    import torch

    from torchtitan_like.checkpoint.tools.convert import convert_checkpoint

    dropped = convert_checkpoint(
        arguments.source,
        arguments.out,
        arguments.to,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        trust_pickle=arguments.trust_pickle,
        identify=identify,
    )
    for name in dropped:
        print(f"dropped {name}: it is neither a tensor nor a plain Python value")


def _convert_run(arguments: argparse.Namespace, identify: Identify) -> None:
    from torchtitan_like.checkpoint.errors import CheckpointError
    from torchtitan_like.checkpoint.tools.torchtitan import convert_to_torchtitan
    from torchtitan_like.stored_config import adam_settings

    if arguments.dtype or arguments.trust_pickle:
        raise CheckpointError(
            f"--to {TORCHTITAN} with --dtype or --trust-pickle. Expected neither, because all states "
            "of a run keep their dtypes: remove it"
        )
    convert_to_torchtitan(
        arguments.source,
        arguments.out,
        num_data_ranks=arguments.data_ranks,
        identify=identify,
        read_settings=partial(adam_settings, arguments.source, arguments.config),
    )
