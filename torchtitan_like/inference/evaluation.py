"""Run tasks of lm-evaluation-harness on an export, and write their results to eval.jsonl.

The harness is the package lm_eval. Its backend `hf` loads the export with transformers.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchtitan_like.checkpoint.errors import with_checkpoint_errors
from torchtitan_like.checkpoint.tools.export_step import export_step
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.distributed.world import HostGroup, pick_device
from torchtitan_like.stored_config import identify_step
from torchtitan_like.util.jsonl import JsonlFile
from torchtitan_like.util.modules import pip_install
from torchtitan_like.util.run_directory import EVALUATION, find_run

PACKAGES = ("lm_eval", "transformers", "accelerate")


class EvaluationError(DataError):
    """An evaluation that cannot start: a missing package, an unknown task, no place for results."""


def output_file(checkpoint: Path, output: Path | None) -> Path:
    """Return the file of the results: `output`, or eval.jsonl of the run with the checkpoint.

    Raises EvaluationError if there is neither.
    """
    if output is not None:
        return output
    run = find_run(checkpoint)
    if run is None:
        raise EvaluationError(
            f"{checkpoint} is in no run directory. Expected one, for its {EVALUATION}: give a file "
            "for the results with -o"
        )
    return run / EVALUATION


@contextmanager
def exported(
    step: Path, folder: Path | None, *, custom_import: str, averaged: bool
) -> Iterator[Path]:
    """Export a published step for the block, and yield the folder.

    folder: it is created and kept; None: a temporary folder (in TMPDIR), removed after the block.
    custom_import: see `stored_config.load_trusted`. averaged: export the weights of `[ema]`.
    Raises CheckpointError, ConfigError, TokenizerError.
    """
    with tempfile.TemporaryDirectory(prefix="titan-eval-") as temporary:
        out = folder.absolute() if folder is not None else Path(temporary, step.name)
        export_step(
            step,
            out,
            with_checkpoint_errors(HostGroup.alone()),
            identify=lambda path: identify_step(path, custom_import),
            averaged=averaged,
        )
        yield out


class Tasks:
    """Tasks of the harness by name. Raises EvaluationError for a missing package or a wrong name.

    names: tasks, groups or tags. include_path: a folder with more tasks as YAML files.
    """

    def __init__(self, names: Sequence[str], include_path: Path | None) -> None:
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise EvaluationError(
                f"{missing[0]} is not installed. Expected {', '.join(PACKAGES)} for evaluation: "
                f"{pip_install(*missing)}"
            )
        if include_path is not None and not include_path.is_dir():
            raise EvaluationError(
                f"--include-path {include_path} is not a folder. Expected a folder with the YAML "
                "files of tasks: correct the path"
            )
        from lm_eval.tasks import TaskManager

        self.names = list(names)
        self.manager = TaskManager(include_path=str(include_path) if include_path else None)
        unknown = [name for name in names if not self.manager.match_tasks([name])]
        if unknown:
            raise EvaluationError(
                f"there is no task {', '.join(unknown)}. Expected names that `lm_eval ls tasks` "
                "lists, or of YAML files in --include-path: correct --tasks"
            )

    def evaluate(
        self,
        model: Path,
        *,
        dtype: str | None,
        tokenizer: str | None,
        context: int | None,
        batch_size: int,
        limit: int | None,
        num_fewshot: int | None,
    ) -> list[dict[str, Any]]:
        """Return one row for each task and metric: see `rows_of`.

        model: a folder of Hugging Face's format.
        dtype: of the weights; None: as in the folder's config.json.
        tokenizer: its folder; None: the model's.
        context: maximum number of tokens of the model's input; None: of the model.
        limit: number of samples of each task; None: all.
        num_fewshot: solved examples before each question; None: as the task defines.
        """
        from lm_eval import simple_evaluate

        model_args: dict[str, Any] = {"pretrained": str(model), "dtype": dtype or "auto"}
        if tokenizer is not None:
            model_args["tokenizer"] = tokenizer
        if context is not None:
            model_args["max_length"] = context
        results = simple_evaluate(
            model="hf",
            model_args=model_args,
            batch_size=batch_size,
            device=str(pick_device(0)),
            tasks=self.names,
            limit=limit,
            num_fewshot=num_fewshot,
            task_manager=self.manager,
            log_samples=False,
        )
        return rows_of(results)


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of eval.jsonl, without `step`: one for each task and metric.

    results: of `lm_eval.simple_evaluate`. It names a metric "acc,none": the metric, and the filter
    of the model's answers.
    """
    now = time.time()
    harness_version = version("lm_eval")
    rows = []
    for task, metrics in results["results"].items():
        samples = results.get("n-samples", {}).get(task, {})
        for name, value in metrics.items():
            metric, comma, answers_filter = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = metrics.get(f"{metric}_stderr,{answers_filter}")
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "filter": answers_filter,
                    "value": float(value),
                    "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                    "num_samples": samples.get("effective"),
                    "lm_eval": harness_version,
                    "time": now,
                }
            )
    return rows


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to an eval.jsonl and write them to disk. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = JsonlFile(path)
    try:
        file.append(rows)
        file.sync()
    finally:
        file.close()


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table of text."""
    lines = [("task", "metric", "filter", "value", "stderr", "samples")]
    for row in rows:
        stderr = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        texts = (row["task"], row["metric"], row["filter"], f"{row['value']:.4f}", stderr)
        lines.append((*texts, str(row["num_samples"] or "")))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
