"""Compare a run with the plan file of its configuration, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchtitan_like.monitor.attempt import Attempt
from torchtitan_like.monitor.log import logger
from torchtitan_like.monitor.rows import Row
from torchtitan_like.util.files import WriteFailures
from torchtitan_like.util.plan_file import (
    EVENT,
    MEMORY_STEP,
    PLAN,
    TIME_STEP,
    TOLERANCE,
    Measured,
    PlanFile,
    beside,
    describe_differences,
    deviations,
    differences,
    event_fields,
    read_plan,
    write_plan,
)


class PlanCheck:
    """Writes the event `plan` at the first log line after enough steps of this attempt.

    measures_memory: whether rows have the memory of a GPU's allocator.
    """

    def __init__(
        self,
        plan: PlanFile,
        write_event: Callable[..., None],
        *,
        measures_memory: bool,
    ) -> None:
        self._plan = plan
        self._write_event = write_event
        self._first_step: int | None = None  # of the attempt
        self._measures_memory = measures_memory
        self._memory: float | None = None
        self._is_done = False

    def observe(self, rows: Sequence[Row]) -> None:
        """Read the rows of the attempt. Only those of log steps have a time."""
        for row in rows:
            if self._first_step is None:
                self._first_step = row["step"]
            if self._is_done or "step_s" not in row:
                continue
            step = row["step"] - self._first_step + 1
            if step >= MEMORY_STEP and self._memory is None and self._measures_memory:
                self._memory = row["memory_gib"]
            if step >= TIME_STEP:
                self._is_done = True
                self._report(row["step"], Measured(self._memory, row["step_s"]))

    def _report(self, step: int, measured: Measured) -> None:
        self._write_event(EVENT, step=step, **event_fields(self._plan, measured))
        compared = deviations(self._plan, measured)
        if any(abs(each.share) > TOLERANCE for each in compared):
            logger.warning(
                f"This run is not as planned for {self._plan.gpu}: "
                f"{'; '.join(map(str, compared))}. `titan run compare` shows both"
            )


def observe_plan(
    attempt: Attempt, config_file: str | None, settings: dict[str, Any], *, measures_memory: bool
) -> Callable[[list[Row]], None] | None:
    """Return an observer that compares a run with its plan; None if it has no plan.

    settings: of the run, see `plan_file.settings_of`. measures_memory: see `PlanCheck`.
    """
    plan = find_plan(attempt.run, config_file, settings, attempt.failures)
    if plan is None:
        return None
    return PlanCheck(plan, attempt.event, measures_memory=measures_memory).observe


def find_plan(
    run: Path, config_file: str | None, settings: dict[str, Any], failures: WriteFailures
) -> PlanFile | None:
    """Return the plan of this configuration; None without one.

    A plan next to the TOML file is copied into the run directory. A plan of another configuration,
    or a file that is no plan, is logged as a warning.
    """
    candidates = [run / PLAN]
    if config_file:
        candidates.append(beside(Path(config_file)))
    messages = []
    for path in candidates:
        try:
            plan = read_plan(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            messages.append(f"The plan {path} cannot be read: {error}")
            continue
        if found := differences(plan, settings):
            messages.append(describe_differences(path, found))
            continue
        if path != run / PLAN:
            with failures.recording(run / PLAN):
                write_plan(run / PLAN, plan)
        return plan
    for message in messages:
        logger.warning(message)
    return None
