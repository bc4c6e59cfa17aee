"""The degrees of parallelism against the ranks, and the stages and micro-batches of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torchtitan_like.check.context import RunContext
from torchtitan_like.check.rules.keys import DEGREES, PIPELINE_KEYS
from torchtitan_like.config.problems import Problem
from torchtitan_like.distributed.stages import find_problems


def check_degrees(run: RunContext) -> Iterator[Problem]:
    """Check that the product of the degrees is the number of ranks."""
    for error in run.degree_errors:
        yield Problem(
            "parallelism",
            None,
            f"degrees whose product is the number of ranks: {error}",
            "change a degree or the number of ranks (NGPU); "
            "data_parallel_shard_degree = -1 uses all remaining ranks",
            involves=DEGREES,
        )


def check_pipeline(run: RunContext) -> Iterator[Problem]:
    """Check layers, schedule and micro-batches against the stages."""
    if run.spec is None:
        return
    local_batch_size = run.config.training.local_batch_size
    stage_problems = [
        problem
        for num_accumulation in run.accumulations
        for problem in find_problems(
            run.spec,
            run.args,
            run.parallelism,
            local_batch_size=local_batch_size,
            num_accumulation=num_accumulation,
        )
    ]
    for problem in dict.fromkeys(stage_problems):
        yield replace(problem, involves=PIPELINE_KEYS)
