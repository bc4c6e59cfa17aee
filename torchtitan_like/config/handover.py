"""Hand a checked configuration from the launcher to its ranks, in an environment variable.

Only processes of the same user can read it, and a killed launcher leaves no file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from torchtitan_like.config.fields import find
from torchtitan_like.config.layers import leaves
from torchtitan_like.config.loader import CUSTOM_IMPORT_KEY, CommandLine, import_module
from torchtitan_like.config.problems import ConfigError, Problem, show
from torchtitan_like.config.schema import JobConfig, job_config

# ---- from the launcher to its ranks


VARIABLE = "TORCHTITAN_LIKE_CONFIG"
MAX_LENGTH = 120_000  # Linux refuses a variable of 131,072 bytes


def encode(config: JobConfig, warnings: Iterable[Problem]) -> dict[str, str]:
    """Return `VARIABLE` with its value: every setting with its origin, and the warnings.

    The value is "" if it would be too long, which takes thousands of datasets, or if a free table
    has a date. Then each rank reads the files itself.
    """
    content = {
        "settings": config.model_dump(),
        "origins": config._origins,
        "layers": config._layers,
        "warnings": [asdict(warning) for warning in warnings],
    }
    try:
        packed = zlib.compress(json.dumps(content).encode())
    except TypeError:
        return {VARIABLE: ""}
    text = base64.b64encode(packed).decode()
    return {VARIABLE: text if len(text) <= MAX_LENGTH else ""}


def take_command_line(argv: list[str]) -> CommandLine:
    """Return the command line of this rank, with what its launcher has handed over.

    Removes `VARIABLE`, which must not reach programs that the rank starts.
    """
    text = os.environ.pop(VARIABLE, "")
    return CheckedCommandLine(argv, text) if text else CommandLine(argv)


class CheckedCommandLine(CommandLine):
    """A command line that the launcher has parsed, with the files that it has read and checked.

    text: see `encode`.
    """

    is_checked = True

    def __init__(self, argv: list[str], text: str) -> None:
        super().__init__([])
        self.argv = argv
        content = json.loads(zlib.decompress(base64.b64decode(text)))
        self._settings = content["settings"]
        self._origins = content["origins"]
        self._layers = tuple(content["layers"])
        self._warnings = tuple(
            Problem(**{**warning, "involves": tuple(warning["involves"])})
            for warning in content["warnings"]
        )

    def _import_extensions(self) -> list[Problem]:
        name = self._settings["experimental"]["custom_import"]
        problem = import_module(name, self._origins.get(CUSTOM_IMPORT_KEY, "default"))
        self._loaded = None
        return [] if problem is None else [problem]

    def _load(self) -> JobConfig:
        """Before the user's sections exist, raises ConfigError with only [job] and [checkpoint]."""
        try:
            config = job_config().model_validate_json(json.dumps(self._settings))
        except ValidationError as error:
            known = {name: self._settings[name] for name in ("job", "checkpoint")}
            partial = JobConfig.model_validate_json(json.dumps(known))
            expected = "a module that registers the sections of this configuration"
            problem = Problem(CUSTOM_IMPORT_KEY, None, expected, involves=(CUSTOM_IMPORT_KEY,))
            raise ConfigError([problem], partial=partial) from error
        config._origins = self._origins
        config._layers = self._layers
        config._notices = self._warnings
        return config


# ---- agreement of the ranks


def check_agreement(config: JobConfig, gather: Callable[[Any], list[Any]]) -> None:
    """Compare the settings of all ranks. Each has read its own files and arguments. A collective.

    gather: returns the values of all ranks, in the order of ranks.
    Raises ConfigError on all ranks if two of them have different settings.
    """
    settings = shared_settings(config)
    text = json.dumps(settings, default=str, sort_keys=True)
    # Thousands of ranks would send megabytes of settings, so they compare digests first.
    if len(set(gather(hashlib.sha256(text.encode()).digest()))) == 1:
        return
    first, *others = gather(settings)
    problems: dict[str, Problem] = {}
    for rank, other in enumerate(others, start=1):
        for key in {**first, **other}:
            if first.get(key) != other.get(key):
                expected = f"the same on every rank; rank {rank} has {show(other.get(key))}"
                remedy = "start all nodes with one config file and the same arguments"
                problem = Problem(key, first.get(key), expected, remedy, "rank 0")
                problems.setdefault(key, problem)
    if problems:  # none if the digests differ by 1 and 1.0
        raise ConfigError(problems.values())


def shared_settings(config: JobConfig) -> dict[str, Any]:
    """Return the settings that must be the same on all ranks, by dotted key.

    The order of the sources is one of them: mixtures depend on it.
    """
    shared = {}
    for path, value in leaves(config.model_dump()):
        setting = find(path)
        if value != {} and not (setting is not None and setting.ranks_may_differ):
            shared[".".join(path)] = value
    for name in ("data", "validation"):
        shared[f"{name}.sources"] = list(getattr(config, name).sources)
    return shared
