"""Write a checkpoint as a Hugging Face directory: weights, config, tokenizer.

    python scripts/export.py outputs/checkpoint/step-1000 outputs/model --dtype bfloat16
    torchrun --nproc_per_node 4 scripts/export.py outputs/checkpoint/step-1000 outputs/model

STEP_DIR is a published step; the model and the tokenizer are those of the `config.toml` inside it. On several ranks each
holds some of the tensors only. No GPU is used. The directory appears under its name when it is complete.
"""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from scripts.named_in_config import add_import_flag, import_custom, with_assets
from torchtitan_like.checkpoint.dcp_storage import ExtentReader
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.extents import write_file
from torchtitan_like.checkpoint.hf.folder import write_model
from torchtitan_like.checkpoint.loading import load_states
from torchtitan_like.checkpoint.probes import check_space
from torchtitan_like.checkpoint.publishing import StagedOutput, verify_together
from torchtitan_like.checkpoint.start import Start
from torchtitan_like.checkpoint.step_folders import CONFIG, file_records, read_manifest
from torchtitan_like.checkpoint.stored_weights import StoredWeights
from torchtitan_like.checkpoint.unpickle import CheckedReader
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.config import ConfigError, load_stored_config
from torchtitan_like.data.formats.tokenizer import TokenizerError
from torchtitan_like.distributed.data_parallel import DTYPES
from torchtitan_like.distributed.world import HostGroup, launched_as
from torchtitan_like.launch import identify
from torchtitan_like.resilience.end import end_process

TIMEOUT = timedelta(hours=2)  # for the slowest rank's disk


def export(step: Path, out: Path, arguments: argparse.Namespace, votes: Votes) -> None:
    """All ranks together. Raises CheckpointError, ConfigError or TokenizerError."""
    manifest = read_manifest(step)
    if manifest is None or manifest["kind"] == "hf":
        raise CheckpointError(f"{step} is no step to export: give a published step-N, full or weights alone")
    config = load_stored_config(step / "config.toml")
    import_custom(config, arguments.custom_import)
    identity = identify(with_assets(config.model, step))
    output = StagedOutput(out)
    with ExitStack() as stack:

        def stage() -> Path:
            stack.enter_context(output)
            output.refuse_existing()
            output.path.mkdir()
            return output.path

        staged = votes.leader_does(stage)
        records = file_records(manifest)
        reader: Any = ExtentReader(step, records) if records else CheckedReader(step)
        stored = reader.read_metadata().state_dict_metadata
        weights = StoredWeights(stored, votes.group.rank, votes.group.size)
        start = Start("warm", 0, step, "named on the command line", manifest=manifest)
        load_states(start, {"model": weights}, votes, identity)
        votes.leader_does(lambda: check_space(staged, weights.num_bytes))
        files = write_model(
            staged,
            weights.state_dict(),
            identity,
            votes,
            dtype=DTYPES[arguments.dtype] if arguments.dtype else None,
            executor=arguments.executor,
            shard_bytes=round((arguments.shard_gb or 5) * 1e9),
            by_index=not arguments.shard_gb,
        )
        stored = (step / CONFIG).read_bytes()
        files[CONFIG] = votes.leader_does(lambda: write_file(staged / CONFIG, stored))
        verify_together(staged, files, votes)
        content = {"kind": "hf", "step": manifest["step"], "files": files}
        votes.leader_does(lambda: output.publish(content))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step_dir", type=Path, help="a published checkpoint, such as outputs/checkpoint/step-300")
    parser.add_argument("out", type=Path, help="the directory to make")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="of floating-point weights; default: as they are stored"
    )
    parser.add_argument("--executor", choices=["direct", "consolidate"], default="direct", help="both write the same")
    parser.add_argument(
        "--shard-gb", type=float, help="most GB of weights in a file; default: as the index of the assets says, else 5"
    )
    add_import_flag(parser)
    arguments = parser.parse_args(argv)
    launched = launched_as()
    logging.basicConfig(level=logging.INFO if launched.rank == 0 else logging.WARNING, format="%(message)s")
    if launched.world_size > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    group = HostGroup(list(range(launched.world_size)), TIMEOUT)
    try:
        export(arguments.step_dir, arguments.out.absolute(), arguments, Votes(group))
    except (CheckpointError, ConfigError, TokenizerError) as error:
        if launched.rank == 0:
            print(error, file=sys.stderr)
        return 2
    finally:
        group.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()
    if launched.rank == 0:
        print(f"{arguments.out} is complete")
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
