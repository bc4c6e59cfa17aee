"""`titan ckpt consolidate`: merge safetensors shards into whole files."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import FAILED, end_rank, show_problem


def configure_consolidate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("shards", type=Path, metavar="SHARDS", help="folder with the shards")
    parser.add_argument(
        "out",
        type=Path,
        metavar="OUT",
        help="folder for the whole files; it must not contain a model",
    )
    parser.add_argument(
        "--num-threads",
        type=int,
        default=5,
        metavar="N",
        help="threads that copy on each rank (default: 5)",
    )
    parser.add_argument(
        "--mapping",
        type=Path,
        metavar="INDEX",
        help="a model.safetensors.index.json, which assigns tensors to files",
    )
    parser.add_argument(
        "--remove-shards", action="store_true", help="delete the shards after the output is written"
    )
    parser.epilog = (
        "Torch's HuggingFaceStorageWriter(save_distributed=True) writes such shards. Uses no\n"
        "GPU. The output is read back before anything is removed. To share the work over 4\n"
        "processes that all see both folders:\n"
        "  torchrun --nproc_per_node=4 --no-python titan ckpt consolidate SHARDS OUT\n\n"
        "example: titan ckpt consolidate outputs/sharded outputs/model"
    )


def run_consolidate(arguments: argparse.Namespace) -> int:
    """Merge the shards. Returns the exit code."""
    return end_rank(_consolidate(arguments))


def _consolidate(arguments: argparse.Namespace) -> int:
    from torchtitan_like.checkpoint.errors import CheckpointError
    from torchtitan_like.checkpoint.tools.launched import launched_group
    from torchtitan_like.checkpoint.tools.merge import merge_shards

    with launched_group() as group:
        try:
            records = merge_shards(
                arguments.shards,
                arguments.out,
                num_threads=arguments.num_threads,
                index=arguments.mapping,
                removes_shards=arguments.remove_shards,
            )
        except (CheckpointError, OSError) as error:
            if group.rank == 0:
                show_problem(error)
            return FAILED
        if group.rank == 0:
            num_bytes = sum(record.size for record in records.values())
            print(f"{arguments.out}: {len(records)} files, {num_bytes:,} bytes")
    return 0
