"""`titan eval`: score a checkpoint on tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torchtitan_like.cli.common import (
    FAILED,
    add_import_flag,
    add_json_flag,
    launched_ranks,
    positive_int,
    print_json,
    run_checked,
)
from torchtitan_like.cli.generate import add_loading_flags
from torchtitan_like.util.output import show_error


def configure_eval(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("step", type=Path, metavar="STEP", help="a published step-N, or an export")
    parser.add_argument(
        "--tasks", required=True, metavar="NAMES", help="tasks, groups or tags, with commas between"
    )
    parser.add_argument(
        "--include-path", type=Path, metavar="DIR", help="folder of YAML files with more tasks"
    )
    parser.add_argument(
        "--limit", type=positive_int, metavar="N", help="samples of each task (default: all)"
    )
    parser.add_argument(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="solved examples before each question (default: as the task defines)",
    )
    parser.add_argument(
        "--context",
        type=positive_int,
        metavar="N",
        help="maximum number of tokens of the model's input (default: the model's)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="append the results to this file (default: eval.jsonl of the run that contains STEP)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        default=8,
        metavar="N",
        help="texts that are computed together (default: 8)",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="export STEP to this folder and keep it (default: a temporary folder)",
    )
    add_loading_flags(parser)
    add_json_flag(parser)
    add_import_flag(parser)
    parser.epilog = (
        "Needs the packages lm_eval, transformers and accelerate. Exports STEP (see titan ckpt\n"
        "export) and runs lm-eval's backend `hf` on the folder. The temporary folder is in $TMPDIR.\n"
        "Prints a table and appends a row for each task and metric to eval.jsonl. For a model that\n"
        "needs several GPUs: titan ckpt export, then lm_eval with its backend `vllm`.\n\n"
        "example: titan eval outputs/checkpoint/step-100 --tasks next_word --include-path tasks"
    )


def run_eval(arguments: argparse.Namespace) -> int:
    """Print the results. Returns the exit code."""
    if launched_ranks() > 1:
        show_error(
            "titan eval runs in one process. Expected to be started without torchrun: for a model "
            "that needs several GPUs, use titan ckpt export, then lm_eval with its backend vllm"
        )
        return FAILED
    return run_checked(lambda: _evaluate(arguments), damage_code=FAILED)


def _evaluate(arguments: argparse.Namespace) -> int:
    from torchtitan_like.inference import evaluation
    from torchtitan_like.inference.loading import read_checkpoint

    step: Path = arguments.step
    output = evaluation.output_file(step, arguments.output)
    tasks = evaluation.Tasks(arguments.tasks.split(","), arguments.include_path)
    manifest = read_checkpoint(step, averaged=arguments.ema)
    if manifest["kind"] == "hf":
        if arguments.export is not None:
            raise evaluation.EvaluationError(
                f"{step} is an export. Expected a step-N with --export: remove the option"
            )
        folder: AbstractContextManager[Path] = nullcontext(step)
    else:
        folder = evaluation.exported(
            step, arguments.export, custom_import=arguments.custom_import, averaged=arguments.ema
        )
    with folder as model:
        results = tasks.evaluate(
            model,
            dtype=arguments.dtype,
            tokenizer=arguments.assets,
            context=arguments.context,
            batch_size=arguments.batch_size,
            limit=arguments.limit,
            num_fewshot=arguments.num_fewshot,
        )
    of_step = {"step": manifest["step"], **({"weights": "ema"} if arguments.ema else {})}
    rows = [{**of_step, **row} for row in results]
    evaluation.append_rows(output, rows)
    if arguments.json:
        print_json(rows)
    else:
        print(evaluation.table_of(rows))
        print(f"\nWritten to {output}")
    return 0
