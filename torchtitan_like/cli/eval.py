"""`titan eval`: score a checkpoint on tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import (
    FAILED,
    add_import_flag,
    add_json_flag,
    end_rank,
    positive_int,
    print_json,
    run_checked,
)
from torchtitan_like.cli.generate import add_batch_size_flag, add_loading_flags

EXAMPLE = "titan eval outputs/checkpoint/step-100 --tasks next_word --include-path tasks"


def configure(parser: argparse.ArgumentParser) -> None:
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
    add_batch_size_flag(parser)
    add_loading_flags(parser)
    add_json_flag(parser)
    add_import_flag(parser)
    parser.epilog = (
        "Needs the package lm_eval. Gives the numbers of lm-eval's backend `hf` on\n"
        "an export with weights of the same dtype. Prints a table and appends a row for each task\n"
        "and metric to eval.jsonl. To shard the model over 2 processes by tensor parallelism:\n"
        "  torchrun --nproc_per_node=2 --no-python titan eval STEP --tasks NAMES\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the results. Returns the exit code."""
    return end_rank(_evaluate(arguments))


def _evaluate(arguments: argparse.Namespace) -> int:
    from torchtitan_like.distributed.world import launched_as
    from torchtitan_like.inference import evaluation
    from torchtitan_like.inference.loading import inference_world, load_checkpoint
    from torchtitan_like.inference.scoring import Scorer

    with inference_world(launched_as()) as world:

        def evaluate() -> int:
            output = evaluation.output_file(arguments.step, arguments.output)
            tasks = evaluation.Tasks(arguments.tasks.split(","), arguments.include_path)
            loaded = load_checkpoint(
                arguments.step,
                world,
                assets=arguments.assets,
                custom_import=arguments.custom_import,
                dtype=arguments.dtype,
                averaged=arguments.ema,
            )
            scorer = Scorer(loaded, arguments.batch_size, arguments.context)
            results = tasks.evaluate(
                scorer, limit=arguments.limit, num_fewshot=arguments.num_fewshot
            )
            of_step = {"step": loaded.step, **({"weights": "ema"} if arguments.ema else {})}
            rows = [{**of_step, **row} for row in results]
            world.step_group.run_on_leader(lambda: evaluation.append_rows(output, rows))
            if world.rank == 0:
                if arguments.json:
                    print_json(rows)
                else:
                    print(evaluation.table_of(rows))
                    print(f"\nWritten to {output}")
            return 0

        return run_checked(evaluate, damage_code=FAILED, is_leader=world.rank == 0)
