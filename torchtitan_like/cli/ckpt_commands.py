"""`titan ckpt`: list, verify, compare and export checkpoints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.cli.common import (
    DAMAGED,
    add_json_flag,
    add_model_flags,
    end_rank,
    positive_int,
    positive_number,
    run_checked,
    step_path,
    steps_path,
)
from torchtitan_like.util.exit_codes import WRONG_INPUT
from torchtitan_like.util.run_directory import MANIFEST

if TYPE_CHECKING:
    import torch

    from torchtitan_like.checkpoint.identity import Identity
    from torchtitan_like.config import JobConfig
    from torchtitan_like.distributed.world import HostGroup

DTYPES = ("bfloat16", "float16", "float32", "float64")
TORCHTITAN = "torchtitan"
FORMATS = ("hf", "native", "dcp", "pt", TORCHTITAN)


# ---- titan ckpt ls


def configure_ls(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=steps_path, help="a run, or its checkpoint folder")
    add_json_flag(parser)
    parser.epilog = (
        "Shows name, kind, size, age and notes of every checkpoint and Hugging Face export, also\n"
        "of unfinished, superseded and damaged ones. Sizes are compared with the manifest.\n"
        "titan ckpt verify reads every byte.\n\n"
        "example: titan ckpt ls outputs/checkpoint"
    )


def run_ls(arguments: argparse.Namespace) -> int:
    """Print the list. Returns the exit code."""
    from dataclasses import asdict

    from torchtitan_like.checkpoint.tools.listing import format_entries, list_checkpoints

    folder: Path = arguments.folder
    if (folder / MANIFEST).exists():
        folder = folder.parent

    def action() -> int:
        entries = list_checkpoints(folder)
        if arguments.json:
            print(json.dumps([asdict(entry) for entry in entries], indent=2))
        else:
            print("\n".join(format_entries(entries)))
        return 0

    return run_checked(action)


# ---- titan ckpt show


def configure_show(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "checkpoint",
        type=step_path,
        metavar="STEP",
        help="a step-N, a run (its newest step), a folder of safetensors or DCP, or a .pt file",
    )
    add_json_flag(parser)
    parser.epilog = (
        "Lists name, dtype and shape of every tensor.\n\n"
        "example: titan ckpt show outputs/checkpoint/step-100"
    )


def run_show(arguments: argparse.Namespace) -> int:
    """Print the contents. Returns the exit code."""
    from torchtitan_like.checkpoint.tools.listing import format_summary, summarize

    def action() -> int:
        summary = summarize(arguments.checkpoint)
        text = (
            json.dumps(summary, indent=2) if arguments.json else "\n".join(format_summary(summary))
        )
        print(text)
        return 0

    return run_checked(action)


# ---- titan ckpt verify


def configure_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("path", type=steps_path, help="a step-N, a folder with several, or a run")
    add_json_flag(parser)
    parser.epilog = (
        "Progress goes to stderr. Exit codes: 0 everything is intact, 1 damage was detected,\n"
        "2 nothing could be verified.\n\n"
        "example: titan ckpt verify outputs/checkpoint"
    )


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify one step or all steps of a folder. Returns the exit code."""
    from torchtitan_like.checkpoint.tools.verify import find_steps, verify

    def action() -> int:
        results = []
        for step in find_steps(arguments.path):
            results.append(verify(step))
            if not arguments.json:
                print("\n".join(results[-1].lines()), flush=True)
        if arguments.json:
            print(json.dumps([result.as_json() for result in results], indent=2))
        return DAMAGED if any(result.damage for result in results) else 0

    return run_checked(action)


# ---- titan ckpt diff


def configure_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("a", type=step_path, metavar="A", help="a checkpoint of any format")
    parser.add_argument("b", type=step_path, metavar="B", help="another one")
    add_model_flags(parser)
    parser.epilog = (
        "Lists different settings, names, shapes, dtypes, numbers and objects. Of checkpoints in\n"
        "formats with different names it compares the weights.\n"
        "Exit codes: 0 they are equal, 1 they differ, 2 they could not be compared.\n\n"
        "example: titan ckpt diff outputs/checkpoint/step-50 outputs/checkpoint/step-100"
    )


def run_diff(arguments: argparse.Namespace) -> int:
    """Print the differences. Returns the exit code."""
    from torchtitan_like.checkpoint.tools.diff import compare_checkpoints
    from torchtitan_like.stored_config import identify_checkpoint

    def action() -> int:
        lines, summary = compare_checkpoints(
            arguments.a,
            arguments.b,
            lambda path: identify_checkpoint(path, arguments.config, arguments.custom_import),
        )
        print("\n".join([*lines, summary]))
        return 1 if lines else 0

    return run_checked(action, damage_code=WRONG_INPUT)


# ---- titan ckpt export


def configure_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "source",
        type=step_path,
        metavar="SRC",
        help="a published step-N, a run (its newest step), or a checkpoint of any format",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the file or folder to create")
    parser.add_argument(
        "--to", choices=FORMATS, default="hf", help="the format of OUT (default: hf)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of floating-point weights (default: keep)")
    parser.add_argument(
        "--shard-gb",
        type=positive_number,
        metavar="GB",
        help="of a step to hf: maximum GB of weights per file (default: as in the index of the "
        "model's assets, else 5)",
    )
    parser.add_argument(
        "--ema", action="store_true", help="of a step to hf: the averaged weights of [ema]"
    )
    parser.add_argument(
        "--num-threads",
        type=positive_int,
        metavar="N",
        help="of shards: threads that copy on each rank (default: 5)",
    )
    parser.add_argument(
        "--mapping",
        type=Path,
        metavar="INDEX",
        help="of shards: a model.safetensors.index.json, which assigns tensors to files",
    )
    parser.add_argument(
        "--data-ranks",
        type=positive_int,
        metavar="N",
        help="to torchtitan: data-parallel ranks of the run that loads OUT, which counts the tokens "
        "of one of them (default: 1)",
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="unpickle any class that SRC names. This RUNS CODE of its author. The copy contains "
        "only tensors and plain values. Not allowed for a --to format with other names",
    )
    add_model_flags(parser)
    parser.epilog = (
        "Formats:\n"
        "  hf          Hugging Face safetensors. Of a step: with config and tokenizer\n"
        "  native      a step with only the weights, for checkpoint.initial_load_path\n"
        "  dcp         torch.distributed.checkpoint, names and row order of TorchTitan and Meta\n"
        "  pt          torch.save, names and row order of TorchTitan and Meta\n"
        "  torchtitan  a full checkpoint that TorchTitan 0.2 resumes: weights, Adam moments,\n"
        "              schedule position and step. SRC must be a full step. Load it with\n"
        "              --checkpoint.exclude_from_loading dataloader.\n"
        "SRC may also be a folder of the shards that torch's\n"
        "HuggingFaceStorageWriter(save_distributed=True) writes. Then OUT gets whole files.\n\n"
        "Uses no GPU. To share the work on a step or on shards over 4 processes:\n"
        "  torchrun --nproc_per_node=4 --no-python titan ckpt export SRC OUT\n"
        "Exit codes: 0 OUT is complete, 1 SRC is damaged, 2 another error.\n\n"
        "example: titan ckpt export outputs/checkpoint/step-100 outputs/model --dtype bfloat16"
    )


def run_export(arguments: argparse.Namespace) -> int:
    """Write the checkpoint in another format. Returns the exit code."""
    from torchtitan_like.checkpoint.tools.export_step import launched_group

    with launched_group() as group:

        def action() -> int:
            _export(arguments, group)
            if group.rank == 0:
                print(f"{arguments.out} is complete")
            return 0

        code = run_checked(action, is_leader=group.rank == 0)
    return end_rank(code)


def _export(arguments: argparse.Namespace, group: HostGroup) -> None:
    from torchtitan_like.checkpoint.errors import CheckpointError
    from torchtitan_like.checkpoint.hf.safetensors_source import has_shards
    from torchtitan_like.checkpoint.step_folders import read_manifest

    source: Path = arguments.source
    manifest = read_manifest(source)
    of_model = {"config", "custom_import"}
    is_shared = False  # whether all ranks work together
    write: Callable[[argparse.Namespace, HostGroup], None]
    if arguments.to == TORCHTITAN:
        write, options = _write_run, {"data_ranks", *of_model}
    elif arguments.to == "hf" and manifest is not None and manifest["kind"] != "hf":
        write, options, is_shared = _write_step, {"dtype", "shard_gb", "ema", *of_model}, True
    elif arguments.to == "hf" and has_shards(source):
        write, options, is_shared = _merge_shards, {"num_threads", "mapping"}, True
    else:
        write, options = _convert, {"dtype", "trust_pickle", *of_model}
    given = [key for key, value in vars(arguments).items() if value]
    if others := [key for key in given if key not in (*options, "source", "out", "to")]:
        raise CheckpointError(
            f"--{others[0].replace('_', '-')} does not apply to {source} with --to {arguments.to}. "
            "Expected options of this case only: remove it"
        )
    if group.size > 1 and not is_shared:
        raise CheckpointError(
            f"{source} with --to {arguments.to} is written by one process. Expected no torchrun, "
            "except for a step or shards with --to hf: start it without"
        )
    write(arguments, group)


def _write_step(arguments: argparse.Namespace, group: HostGroup) -> None:
    from torchtitan_like.checkpoint.errors import with_checkpoint_errors
    from torchtitan_like.checkpoint.tools.export_step import export_step

    export_step(
        arguments.source,
        arguments.out.absolute(),
        with_checkpoint_errors(group),
        identify=partial(_identify, arguments),
        dtype=_dtype(arguments),
        shard_gb=arguments.shard_gb,
        averaged=arguments.ema,
    )


def _merge_shards(arguments: argparse.Namespace, _group: HostGroup) -> None:
    from torchtitan_like.checkpoint.hf.consolidate import NUM_THREADS, consolidate, file_numbers

    mapping = None if arguments.mapping is None else file_numbers(arguments.mapping)
    consolidate(arguments.source, arguments.out, mapping, arguments.num_threads or NUM_THREADS)


def _convert(arguments: argparse.Namespace, _group: HostGroup) -> None:
    from torchtitan_like.checkpoint.tools.convert import convert_checkpoint

    dropped = convert_checkpoint(
        arguments.source,
        arguments.out,
        arguments.to,
        dtype=_dtype(arguments),
        trust_pickle=arguments.trust_pickle,
        identify=partial(_identify, arguments),
    )
    for name in dropped:
        print(f"dropped {name}: it is neither a tensor nor a plain Python value")


def _write_run(arguments: argparse.Namespace, _group: HostGroup) -> None:
    from torchtitan_like.checkpoint.tools.write_torchtitan import convert_to_torchtitan
    from torchtitan_like.stored_config import adam_settings

    convert_to_torchtitan(
        arguments.source,
        arguments.out,
        num_data_ranks=arguments.data_ranks or 1,
        identify=partial(_identify, arguments),
        read_settings=adam_settings,
    )


def _identify(arguments: argparse.Namespace, path: Path) -> tuple[Identity, JobConfig]:
    from torchtitan_like.stored_config import identify_checkpoint

    return identify_checkpoint(path, arguments.config, arguments.custom_import)


def _dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    import torch

    return getattr(torch, arguments.dtype) if arguments.dtype else None
