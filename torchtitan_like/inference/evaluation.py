"""Run tasks of lm-evaluation-harness on a model, and write their results to eval.jsonl.

The harness is the package lm_eval.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchtitan_like.data.errors import DataError
from torchtitan_like.inference.scoring import Scorer
from torchtitan_like.util.jsonl import JsonlFile
from torchtitan_like.util.modules import pip_install
from torchtitan_like.util.run_directory import EVALUATION, find_run


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


class Tasks:
    """Tasks of the harness by name. Raises EvaluationError for a missing package or a wrong name.

    names: tasks, groups or tags. include_path: a folder with more tasks as YAML files.
    """

    def __init__(self, names: Sequence[str], include_path: Path | None) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise EvaluationError(
                f"lm_eval is not installed. Expected it for evaluation: {pip_install('lm_eval')}"
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
        self, scorer: Scorer, *, limit: int | None, num_fewshot: int | None
    ) -> list[dict[str, Any]]:
        """Return one row for each task and metric: see `rows_of`.

        limit: number of samples of each task; None: all. num_fewshot: solved examples before each
        question; None: as the task defines. Raises TokenizerError, DataError.
        """
        from lm_eval import simple_evaluate

        results = simple_evaluate(
            model=harness_model(scorer),
            tasks=self.names,
            limit=limit,
            num_fewshot=num_fewshot,
            task_manager=self.manager,
            log_samples=False,
        )
        return rows_of(results)


def harness_model(scorer: Scorer) -> Any:
    """Return the harness's interface to a model (`lm_eval.api.model.LM`) with this scorer."""
    from lm_eval.api.model import LM

    class Model(LM):  # type: ignore[misc]  # the package is optional and has no types
        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            scores = scorer.log_likelihoods([request.args for request in requests])
            return [(score.log_likelihood, score.is_greedy) for score in scores]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return scorer.rolling_log_likelihoods([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return scorer.generate_until([request.args for request in requests])

    return Model()


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
