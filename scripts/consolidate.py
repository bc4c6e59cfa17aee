"""Merge the safetensors shards of a distributed save into whole files that every program reads.

    python scripts/consolidate.py outputs/sharded outputs/model
    torchrun --nproc_per_node 4 scripts/consolidate.py outputs/sharded outputs/model --mapping model.safetensors.index.json

The shards are those of torch's HuggingFaceStorageWriter(save_distributed=True). No GPU is used; under torchrun all ranks
share the work by bytes, and must all see both folders. What was written is read back before anything is removed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.hf.consolidate import consolidate
from torchtitan_like.checkpoint.hf.folder import read_weight_map
from torchtitan_like.resilience.end import end_process


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="folder with the shards")
    parser.add_argument("output", type=Path, help="folder for the whole files; it holds no model yet")
    parser.add_argument("--num-threads", type=int, default=5, help="copying at a time on each rank (default: 5)")
    parser.add_argument("--mapping", type=Path, help="a model.safetensors.index.json: which tensors share a file")
    parser.add_argument("--remove-shards", action="store_true", help="delete the shards when all is written")
    arguments = parser.parse_args(argv)
    rank = int(os.environ.get("RANK", 0))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    try:
        mapping = None
        if arguments.mapping is not None:
            files = read_weight_map(arguments.mapping)
            numbers = {file: number for number, file in enumerate(sorted(set(files.values())), start=1)}
            mapping = {name: numbers[file] for name, file in files.items()}
        if arguments.remove_shards and arguments.input.resolve() == arguments.output.resolve():
            raise CheckpointError(
                f"{arguments.output} is the folder of the shards too, of which --remove-shards would leave nothing: choose "
                "another output"
            )
        records = consolidate(arguments.input, arguments.output, mapping, arguments.num_threads)
        if rank == 0 and arguments.remove_shards:
            for path in arguments.input.glob("*.safetensors"):
                path.unlink()
    except (CheckpointError, OSError) as error:
        if rank == 0:
            print(error, file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank == 0:
        print(f"{arguments.output}: {len(records)} files, {sum(record.size for record in records.values()):,} bytes")
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
