"""The runs of a bench: parse `--vary`, check each configuration, and find out what was run."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from torchtitan_like.check import DeviceType, load_for_command
from torchtitan_like.config import ConfigError, JobConfig, dump_toml
from torchtitan_like.config.arguments import ORIGIN, parse_arguments
from torchtitan_like.config.layers import by_key, parse_toml
from torchtitan_like.config.problems import Problem, show
from torchtitan_like.report.history import diff_settings
from torchtitan_like.report.state import is_run
from torchtitan_like.report.tolerant import read_run_config
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.output import show_error
from torchtitan_like.util.run_directory import CONFIG, read_exit

BASE = "base"  # name of the configuration without overrides
SEED = "debug.seed"
FOLDER = "job.dump_folder"
OWN_KEYS = {SEED: "--repeat changes it", FOLDER: "each run has a folder of its own"}
MAX_NAME = 100  # characters of the folder of a run, before its seed

Overrides = dict[str, str]  # dotted key -> value as text


class Vary(NamedTuple):
    """The values of one `--vary`, as text."""

    key: str
    values: list[str]


@dataclass(frozen=True)
class BenchRun:
    """One run of a bench. name: of its folder. variant: its name without the seed.

    argv: the config file and settings with which `titan train` starts it.
    """

    index: int
    variant: str
    seed: int
    config: JobConfig
    argv: list[str]

    @property
    def folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def is_done(self) -> bool:
        """True if the run had trained its last step, or all data, when this was first asked."""
        return is_done(self.folder)


def is_done(run: Path) -> bool:
    """Return True if a run has trained its last step, or all data."""
    with suppress(OSError, ValueError):
        return read_exit(run).code == ExitCode.DONE
    return False


def parse_vary(text: str) -> Vary:
    """Parse `key=a,b,c`. Raises ConfigError.

    Commas in brackets are a part of a value, and all commas if a semicolon separates the values.
    """
    key, equals_sign, values = text.partition("=")
    if not (key and equals_sign):
        raise ConfigError([Problem("--vary", text, "KEY=VALUE,VALUE", origin=ORIGIN)])
    layer, _ = parse_arguments([f"--{key.removeprefix('--')}=x"])
    ((path, _),) = layer.leaves
    separator = ";" if ";" in values else r",(?![^\[]*\])"
    return Vary(".".join(path), re.split(separator, values))


def list_overrides(varied: Sequence[Vary], *, is_grid: bool) -> list[Overrides]:
    """Return the overrides of each run: one at a time after the base, or all combinations."""
    if is_grid:
        keys = [vary.key for vary in varied]
        combinations = itertools.product(*(vary.values for vary in varied))
        return [dict(zip(keys, values, strict=True)) for values in combinations]
    return [{}, *({vary.key: value} for vary in varied for value in vary.values)]


def run_name(overrides: Mapping[str, str], keys: Sequence[str]) -> str:
    """Return the name of a variant, which is a valid name of a folder. keys: all varied ones."""
    short = {key: key.rsplit(".", 1)[-1] for key in keys}
    if len(set(short.values())) < len(keys):
        short = {key: key for key in keys}
    text = ",".join(f"{short[key]}={value}" for key, value in overrides.items()) or BASE
    name = re.sub(r"[^\w.,=+-]", "-", text)
    if name == text and len(name) <= MAX_NAME:
        return name
    return f"{name[:MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def list_runs_of_bench(
    settings: Sequence[str],
    vary: Sequence[str],
    num_repeats: int,
    num_ranks: int,
    device_type: DeviceType | None,
    *,
    is_grid: bool,
) -> tuple[list[BenchRun], list[str]]:
    """Check the configuration of each run. Returns the runs in their order, and the varied keys.

    settings: the config file and settings of all runs. vary: the texts of `--vary`.
    num_repeats and the others: see `check_runs`.

    Raises ConfigError with the problems of all of them.
    """
    varied = _parse_all(vary)
    keys = [each.key for each in varied]
    variants = {run_name(each, keys): each for each in list_overrides(varied, is_grid=is_grid)}
    return check_runs(settings, variants, num_repeats, num_ranks, device_type), keys


def check_runs(
    settings: Sequence[str],
    variants: Mapping[str, Overrides],
    num_repeats: int,
    num_ranks: int,
    device_type: DeviceType | None,
) -> list[BenchRun]:
    """Check the configuration of each run, and return the runs in their order.

    variants: by name, with what overrides `settings`. All variants come before their next repeat. A
    variant that equals an earlier one is left out, with a message.

    Raises ConfigError with the problems of all of them.
    """
    loaded = _load_variants(settings, variants, num_ranks, device_type)
    bench = Path(loaded[0].config.job.dump_folder)
    runs = [
        _repeat(index * len(loaded) + number, variant, index, bench)
        for index in range(num_repeats)
        for number, variant in enumerate(loaded)
    ]
    if problems := list(_folder_problems(bench, runs)):
        raise ConfigError(problems)
    return runs


def _parse_all(vary: Sequence[str]) -> list[Vary]:
    varied: list[Vary] = []
    problems: list[Problem] = []
    for text in vary:
        try:
            varied.append(parse_vary(text))
        except ConfigError as error:
            problems += error.problems
    keys = [each.key for each in varied]
    for key in dict.fromkeys(keys):
        if key in OWN_KEYS:
            expected = f"another key, because {OWN_KEYS[key]}"
            problems.append(Problem(key, None, expected, "remove its --vary", ORIGIN))
        if keys.count(key) > 1:
            expected = "one --vary of this key"
            problems.append(Problem(key, None, expected, "write all values into one", ORIGIN))
    if problems:
        raise ConfigError(problems)
    return varied


def _load_variants(
    settings: Sequence[str],
    variants: Mapping[str, Overrides],
    num_ranks: int,
    device_type: DeviceType | None,
) -> list[BenchRun]:
    """Return one run of each variant, with the settings of the base for folder and seed."""
    loaded: dict[str, BenchRun] = {}
    problems: dict[str, Problem] = {}
    names_with: dict[str, list[str]] = {}
    for name, overrides in variants.items():
        changes = {**overrides, "job.show_results": "false"}  # the bench shows those of all runs
        argv = [*settings, *(f"--{key}={value}" for key, value in changes.items())]
        try:
            config, _ = load_for_command(argv, num_ranks, training=True, device_type=device_type)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(str(problem), problem)
                names_with.setdefault(str(problem), []).append(name)
            continue
        variant = BenchRun(0, name, config.debug.seed or 0, config, argv)
        equal = loaded.setdefault(dump_toml(config), variant)
        if equal is not variant:
            show_error(f"{name} is left out: its settings are those of {equal.variant}")
    if problems:
        raise ConfigError(
            # Of a problem that not all variants have, name the first one that has it.
            problem
            if len(names_with[text]) == len(variants)
            else replace(problem, origin=f"{problem.origin}, in {names_with[text][0]}")
            for text, problem in problems.items()
        )
    return list(loaded.values())


def _repeat(index: int, variant: BenchRun, repeat: int, bench: Path) -> BenchRun:
    """Return a repeat of a variant, with its seed and folder."""
    config, seed = variant.config, variant.seed + repeat
    folder = str(bench / f"{variant.variant},seed={seed}")
    job = config.job.model_copy(update={"dump_folder": folder})
    debug = config.debug.model_copy(update={"seed": seed})
    config = config.model_copy(update={"job": job, "debug": debug})
    argv = [*variant.argv, f"--{SEED}={seed}", f"--{FOLDER}={folder}"]
    return BenchRun(index, variant.variant, seed, config, argv)


def _folder_problems(bench: Path, runs: Sequence[BenchRun]) -> Iterator[Problem]:
    """Yield a problem for each folder that the runs share, or that has another run."""
    if is_run(bench):
        yield Problem(FOLDER, str(bench), "a folder that is no run", "choose another", ORIGIN)
    if runs[0].config.fault_tolerance.enable:
        expected = "false: a bench starts each run on its own, without other replica groups"
        yield Problem("fault_tolerance.enable", True, expected, "disable it")
    checkpoints = runs[0].config.checkpoint.folder
    if len(runs) > 1 and Path(checkpoints).is_absolute():
        expected = "a folder below that of each run: else a run continues from another one"
        yield Problem("checkpoint.folder", checkpoints, expected, "give a relative path", ORIGIN)
    for run in runs:
        if not (run.folder / CONFIG).exists():
            continue
        try:
            stored = by_key(read_run_config(run.folder))
        except ValueError as error:
            yield Problem(FOLDER, str(run.folder), f"a run that can be read; {error}", "", ORIGIN)
            continue
        changes = diff_settings(stored, by_key(parse_toml(dump_toml(run.config))))
        if changes:
            texts = (
                f"{key} was {show(old)}, is {show(new)}" for key, (old, new) in changes.items()
            )
            expected = f"a run with the same settings; {'; '.join(texts)}"
            remedy = "choose another folder, or delete this one"
            yield Problem(FOLDER, str(run.folder), expected, remedy, ORIGIN)
