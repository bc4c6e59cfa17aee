"""The plan file of a configuration: predicted memory and step time, to compare with a run.

`titan plan -o X.plan.json` writes it next to X.toml. A run reads it from there, or from `plan.json`
in its own folder. This module never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.reading import FINITE, INTEGER, NUMBER, TEXT, check_kinds, read_json
from torchtitan_like.util.units import MIB

PLAN = "plan.json"  # in the run directory
SUFFIX = ".plan.json"  # next to the TOML file
EVENT = "plan"  # kind of the event in events.jsonl
MODULES_EVENT = "memory"  # kind of the event with the measured bytes of each module
VERSION = 1
MAX_LISTED = 5  # settings in a message

# Steps of an attempt from which its memory and its step time are measured.
MEMORY_STEP = 3
TIME_STEP = 10
TOLERANCE = 0.1  # a larger difference is logged

# Settings that memory and step time depend on: (section, keys; None for all of them).
SETTINGS: tuple[tuple[str, tuple[str, ...] | None], ...] = (
    ("model", ("name", "flavor", "args", "converters")),
    (
        "training",
        (
            "seq_len",
            "local_batch_size",
            "global_batch_size",
            "dtype",
            "mixed_precision_param",
            "mixed_precision_reduce",
            "enable_cpu_offload",
        ),
    ),
    (
        "optimizer",
        (
            "name",
            "implementation",
            "early_step_in_backward",
            "state_dtype",
            "bf16_rounding",
            "adamw8bit_block_size",
            "groups",
        ),
    ),
    ("ema", ("enable",)),
    ("loss", ("name", "chunk_mib")),
    ("parallelism", None),
    ("activation_checkpoint", None),
    ("compile", None),
    ("quantize", None),
)


# Bytes on rank 0 between two steps: module -> kind of tensor -> bytes. The kinds are weights, state
# (of the optimizer) and average.
ModuleBytes: TypeAlias = dict[str, dict[str, int]]


@dataclass(frozen=True)
class PlanFile:
    """A prediction. Sizes are GiB, except `modules`.

    settings: those of `SETTINGS`, by dotted key, and world_size. gpu, cluster: keys of descriptions.
    reserved, active: of the allocator on rank 0. fullest: what the fullest rank takes of its GPU.
    step_seconds: None if the time was not predicted. error_percent: of it.
    modules: what stays in memory between steps.
    """

    settings: dict[str, Any]
    gpu: str
    cluster: str
    reserved: float
    active: float
    fullest: float
    step_seconds: float | None
    error_percent: float | None
    modules: ModuleBytes


KINDS = {
    "version": INTEGER,
    "gpu": TEXT,
    "cluster": TEXT,
    "reserved": FINITE,
    "active": FINITE,
    "fullest": FINITE,
    "step_seconds": FINITE,
    "error_percent": NUMBER,
}


def settings_of(config: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return the settings of a plan, by dotted key. config: tables of all settings."""
    settings: dict[str, Any] = {"world_size": world_size}
    for section, keys in SETTINGS:
        for key, value in _leaves(config.get(section, {})):
            if keys is None or key.partition(".")[0] in keys:
                settings[f"{section}.{key}"] = value
    return settings


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def write_plan(path: Path, plan: PlanFile) -> None:
    """Write a plan file. Raises OSError."""
    write_atomically(path, json.dumps({"version": VERSION, **asdict(plan)}, indent=2) + "\n")


def read_plan(path: Path) -> PlanFile:
    """Read a plan file. Raises OSError, and ValueError if it is none."""
    try:
        content = read_json(path)
        if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
            raise ValueError("it has no settings")
        check_kinds(content, KINDS)
        if content.pop("version", None) != VERSION:
            raise ValueError(f"its version is not {VERSION}")
        check_modules(content.get("modules"))
        plan = PlanFile(**content)
        for name in ("reserved", "active", "fullest"):
            value = getattr(plan, name)
            if value is None or not value > 0:
                raise ValueError(f"{name} is {value!r}")
        if plan.step_seconds is not None and not plan.step_seconds > 0:
            raise ValueError(f"step_seconds is {plan.step_seconds!r}")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no plan file: {error}. Expected the output of `titan plan CONFIG "
            "--world-size N -o FILE`: write it again"
        ) from None
    return plan


def check_modules(modules: Any) -> None:
    """Raise ValueError unless a parsed value is `ModuleBytes`."""
    if not isinstance(modules, dict):
        raise ValueError("modules is no table")
    for module, kinds in modules.items():
        if not isinstance(kinds, dict) or any(type(size) is not int for size in kinds.values()):
            raise ValueError(f"modules.{module} is {kinds!r}")


def beside(config_file: Path) -> Path:
    """Return the path of the plan file next to a TOML file."""
    return config_file.with_name(f"{config_file.stem}{SUFFIX}")


def differences(plan: PlanFile, settings: Mapping[str, Any]) -> list[str]:
    """Return one text for each setting of the plan that the run has with another value."""
    return [
        f"{key}: planned {_text(plan.settings, key)}, run with {_text(settings, key)}"
        for key in sorted({*plan.settings, *settings})
        if plan.settings.get(key) != settings.get(key)
    ]


def _text(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "nothing"


def describe_differences(path: Path, found: list[str]) -> str:
    """Return a message that the plan is of another configuration."""
    more = f", and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return (
        f"The plan {path} is of another configuration ({'; '.join(found[:MAX_LISTED])}{more}). "
        "Nothing is compared with it. Plan this configuration: titan plan CONFIG -o FILE"
    )


# ---- comparison


@dataclass(frozen=True)
class Measured:
    """What a run measured on rank 0. None: not measured.

    reserved: GiB of the allocator at its peak. step_seconds: of the steps before a log line.
    """

    reserved: float | None = None
    step_seconds: float | None = None


@dataclass(frozen=True)
class Deviation:
    """A prediction and its measurement. name: of the quantity. unit: of both."""

    name: str
    unit: str
    planned: float
    measured: float

    @property
    def share(self) -> float:
        """How far the measurement is above the prediction, as a fraction of the prediction."""
        return self.measured / self.planned - 1

    def __str__(self) -> str:
        return (
            f"{self.name}: planned {self.planned:.4g} {self.unit}, measured "
            f"{self.measured:.4g} {self.unit} ({100 * self.share:+.1f} %)"
        )


def deviations(plan: PlanFile, measured: Measured) -> list[Deviation]:
    """Return what can be compared."""
    pairs = (
        ("reserved memory", "GiB", plan.reserved, measured.reserved),
        ("step time", "s", plan.step_seconds, measured.step_seconds),
    )
    return [
        Deviation(name, unit, planned, value)
        for name, unit, planned, value in pairs
        if planned is not None and value is not None
    ]


def module_table(planned: ModuleBytes, measured: ModuleBytes) -> list[str]:
    """Return the lines of a table: what each module keeps in memory, as planned and as measured."""
    names = sorted({*planned, *measured})
    width = max(len(name) for name in [*names, "module"])
    lines = [f"{'module':<{width}}  {'kind':<9}  {'planned MiB':>12}  {'measured MiB':>12}"]
    for name in names:
        plan, run = planned.get(name, {}), measured.get(name, {})
        for kind in sorted({*plan, *run}):
            sizes = (f"{kinds.get(kind, 0) / MIB:12,.2f}" for kinds in (plan, run))
            lines.append(f"{name:<{width}}  {kind:<9}  {'  '.join(sizes)}")
    return lines


def event_fields(plan: PlanFile, measured: Measured) -> dict[str, Any]:
    """Return the fields of the event `plan` in events.jsonl."""
    return {
        "gpu": plan.gpu,
        "cluster": plan.cluster,
        "planned_reserved_gib": plan.reserved,
        "planned_active_gib": plan.active,
        "planned_step_s": plan.step_seconds,
        "reserved_gib": measured.reserved,
        "step_s": measured.step_seconds,
        "off_percent": {
            each.name: round(100 * each.share, 2) for each in deviations(plan, measured)
        },
    }
