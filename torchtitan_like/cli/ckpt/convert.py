"""`titan ckpt convert`: convert a checkpoint into another format."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import add_model_flags, run_checked

EXAMPLE = "titan ckpt convert outputs/checkpoint/step-100 model.pt --to pt --dtype bfloat16"
FORMATS = ("native", "hf", "dcp", "pt")
DTYPES = ("bfloat16", "float16", "float32")


def configure(parser: argparse.ArgumentParser) -> None:
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
    add_model_flags(parser)
    parser.epilog = (
        "Formats:\n"
        "  native  a step with only the weights, for checkpoint.initial_load_path\n"
        "  hf      Hugging Face safetensors\n"
        "  dcp     torch.distributed.checkpoint, names and row order of TorchTitan and Meta\n"
        "  pt      torch.save, names and row order of TorchTitan and Meta\n\n"
        "Exit codes: 0 DST is complete, 1 SRC is damaged, 2 another error.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Convert the checkpoint. Returns the exit code."""
    import torch

    from torchtitan_like.checkpoint.tools.convert import convert_checkpoint
    from torchtitan_like.stored_config import identify_checkpoint

    def action() -> int:
        dropped = convert_checkpoint(
            arguments.source,
            arguments.out,
            arguments.to,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            trust_pickle=arguments.trust_pickle,
            identify=lambda path: identify_checkpoint(
                path, arguments.config, arguments.custom_import
            ),
        )
        for name in dropped:
            print(f"dropped {name}: it is neither a tensor nor a plain Python value")
        print(f"{arguments.out} is complete")
        return 0

    return run_checked(action)
