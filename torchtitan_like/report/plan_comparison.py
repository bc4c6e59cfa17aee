"""Compare the memory and step time of a run with the plan of its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_like.report.recorded import measured_modules, measured_steps, read_run
from torchtitan_like.util.plan_file import (
    TOLERANCE,
    Deviation,
    Measured,
    PlanFile,
    check_modules,
    describe_differences,
    deviations,
    differences,
    event_fields,
    module_table,
    read_plan,
    settings_of,
)
from torchtitan_like.util.run_directory import read_config


@dataclass(frozen=True)
class PlanComparison:
    """A plan, read from `path`, and the measurements of a run.

    modules: bytes that each module keeps in memory, as measured.
    """

    plan: PlanFile
    path: Path
    measured: Measured
    modules: Any
    deviations: list[Deviation]

    @property
    def is_within_tolerance(self) -> bool:
        """Whether all measurements are close to the plan."""
        return not any(abs(each.share) > TOLERANCE for each in self.deviations)

    def as_json(self) -> dict[str, Any]:
        """Return what `titan run compare --json` prints."""
        both = {"planned_modules": self.plan.modules, "modules": self.modules}
        return {**event_fields(self.plan, self.measured), **both}

    def lines(self) -> list[str]:
        """Return what `titan run compare` prints."""
        lines = [f"Plan for {self.plan.gpu} ({self.path})", *map(str, self.deviations)]
        if self.measured.reserved is None:
            lines.append("Memory is not compared: the run did not measure a GPU's allocator")
        return [*lines, *module_table(self.plan.modules, self.modules)]


def compare_with_plan(run: Path, path: Path) -> PlanComparison:
    """Compare the newest attempt of a run with a plan file.

    Raises ValueError if there is no plan of this configuration, or nothing to compare.
    """
    recorded = read_run(run)
    if not recorded.attempts:
        raise ValueError(f"{run} has no attempts. Expected a run that has trained: name another")
    num_ranks = recorded.attempts[-1].num_ranks or 1
    if not path.exists():
        raise ValueError(
            f"there is no plan {path}. Expected a plan file: write it with `titan plan "
            f"{run}/config.toml --world-size {num_ranks} -o {path}`"
        )
    plan = read_plan(path)
    if found := differences(plan, settings_of(read_config(run), num_ranks)):
        raise ValueError(describe_differences(path, found))
    modules = measured_modules(recorded)
    check_modules(modules)
    measured = measured_steps(recorded)
    compared = deviations(plan, measured)
    if not compared:
        raise ValueError(
            f"{run} has no measurement to compare. Expected a log line after step 10 of the "
            "newest attempt: train for longer, or lower metrics.log_freq"
        )
    return PlanComparison(plan, path, measured, modules, compared)
