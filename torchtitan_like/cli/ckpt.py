"""`titan ckpt`: list, verify, compare, convert and export checkpoints."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.cli.common import (
    DAMAGED,
    add_import_flag,
    add_json_flag,
    add_model_flags,
    catch_value_errors,
    end_rank,
    positive_int,
    positive_number,
    run_checked,
    run_path,
    step_path,
    steps_path,
)
from torchtitan_like.util.exit_codes import WRONG_INPUT
from torchtitan_like.util.run_directory import MANIFEST

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.identity import Identity
    from torchtitan_like.checkpoint.tools.convert import Identify

DTYPES = ("bfloat16", "float16", "float32")
EXPORT_DTYPES = (*DTYPES, "float64")
TORCHTITAN = "torchtitan"
FORMATS = ("native", "hf", "dcp", "pt", TORCHTITAN)


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
    from torchtitan_like.checkpoint.tools.summary import format_summary, summarize

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
    from torchtitan_like.checkpoint.tools.compare import compare_checkpoints
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
        "step",
        type=step_path,
        metavar="STEP",
        help="a published step-N, or a run (its newest step)",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to create")
    parser.add_argument(
        "--dtype", choices=EXPORT_DTYPES, help="of floating-point weights (default: keep)"
    )
    parser.add_argument(
        "--shard-gb",
        type=positive_number,
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

    from torchtitan_like.checkpoint.rank_errors import with_checkpoint_errors
    from torchtitan_like.checkpoint.tools.export import export_step
    from torchtitan_like.checkpoint.tools.launched import launched_group
    from torchtitan_like.stored_config import identify_step

    with launched_group() as group:

        def action() -> int:
            export_step(
                arguments.step,
                arguments.out.absolute(),
                with_checkpoint_errors(group),
                identify=lambda path: identify_step(path, arguments.custom_import),
                dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
                shard_gb=arguments.shard_gb,
                averaged=arguments.ema,
            )
            if group.rank == 0:
                print(f"{arguments.out} is complete")
            return 0

        return run_checked(action, damage_code=WRONG_INPUT, is_leader=group.rank == 0)


# ---- titan ckpt convert


def configure_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("source", type=step_path, metavar="SRC", help="a checkpoint of any format")
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


# ---- titan ckpt consolidate


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
        type=positive_int,
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
    from torchtitan_like.checkpoint.tools.launched import launched_group
    from torchtitan_like.checkpoint.tools.merge import merge_shards

    with launched_group() as group:

        def action() -> int:
            records = merge_shards(
                arguments.shards,
                arguments.out,
                num_threads=arguments.num_threads,
                index=arguments.mapping,
                removes_shards=arguments.remove_shards,
            )
            if group.rank == 0:
                num_bytes = sum(record.size for record in records.values())
                print(f"{arguments.out}: {len(records)} files, {num_bytes:,} bytes")
            return 0

        return run_checked(action, damage_code=WRONG_INPUT, is_leader=group.rank == 0)


# ---- titan ckpt interval


def configure_interval(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--run", type=run_path, metavar="FOLDER", help="a run's folder, to measure both times in"
    )
    parser.add_argument(
        "--save-seconds", type=positive_number, metavar="S", help="of writing a checkpoint"
    )
    parser.add_argument(
        "--step-seconds", type=positive_number, metavar="S", help="of a training step"
    )
    parser.add_argument(
        "--mtbf-hours",
        type=positive_number,
        required=True,
        metavar="H",
        help="mean time between failures",
    )
    parser.add_argument(
        "--interval", type=positive_int, metavar="N", help="steps, to compare with the best"
    )
    parser.epilog = (
        "Prints what checkpoints and failures cost for several intervals. The best one is\n"
        "sqrt(2 C M) seconds, with C seconds a checkpoint and M seconds between failures: Young,\n"
        "CACM 17(9), 1974; Daly, FGCS 22(3), 2006. A failure loses half an interval on average.\n"
        "With --run both times are medians of that run's newest checkpoints and steps. An async\n"
        "checkpoint is timed until it is published; training waits for only a part of that time.\n\n"
        "example: titan ckpt interval --save-seconds 40 --step-seconds 2.5 --mtbf-hours 12"
    )


def run_interval(arguments: argparse.Namespace) -> int:
    """Print the table. Returns the exit code."""
    from torchtitan_like.report.interval import interval_table, measure_times

    def action() -> int:
        save, step = arguments.save_seconds, arguments.step_seconds
        if arguments.run:
            times = measure_times(arguments.run)
            save, step = save or times.save_seconds, step or times.step_seconds
            print(
                f"{save:.3g} s per checkpoint, {step:.3g} s per step, from "
                f"{times.num_checkpoints:,} checkpoints and {times.num_steps:,} steps of "
                f"{arguments.run}"
            )
        if not (save and step):
            raise ValueError(
                "The times of a checkpoint and of a step are unknown. Expected --save-seconds and "
                "--step-seconds, or --run: add them"
            )
        lines = interval_table(save, step, 3600 * arguments.mtbf_hours, arguments.interval)
        print("\n".join(lines))
        return 0

    return catch_value_errors(action)
